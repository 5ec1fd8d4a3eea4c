"""docs/recipes.md, from the same data as `fedveil explain`.

python -m fedveil.runs.reference > docs/recipes.md
"""

from collections.abc import Sequence

from fedveil.runs.explain import Key, Part, apart, parts, recipes_text

_HEAD = """\
# Recipes: every section and key

A recipe is one TOML file. `fedveil explain [SECTION[.KEY]]` prints what is here, `fedveil recipes`
lists the shipped recipes, `--set section.key=value` overrides a key. A key with nothing under
*left out* is needed.
"""

_TAIL = """\
---

*This page is written by `python -m fedveil.runs.reference > docs/recipes.md`, from the sections
in `src/fedveil/runs/sections`: change those.*
"""


def page() -> str:
    """The whole page, in Markdown."""
    return "\n".join([_HEAD, *(line for part in parts() for line in _part(part)), _TAIL])


def _part(part: Part) -> list[str]:
    heading = f"[{part.section}]" if part.section else "Before all sections"
    left_out = f" Left out: {part.left_out}." if part.left_out else ""
    lines = [f"## {heading}", "", f"{part.meaning}{left_out}", ""]
    for keys in part.kinds.values():
        named, others = apart(keys)
        if named is not None:
            recipes = f" Recipes: {', '.join(named.recipes)}." if named.recipes else ""
            lines += [f"### {named.key} = {named.type}", "", f"{named.meaning}{recipes}", ""]
        lines += _table(others)
    return lines


def _table(keys: Sequence[Key]) -> list[str]:
    if not keys:
        return []
    rows = [("key", "value", "left out", "meaning", "in recipes"), ("---",) * 5]
    for key in keys:
        value = "; ".join(filter(None, (key.type, key.allowed)))
        rows.append((f"`{key.key}`", value, key.left_out, key.meaning, recipes_text(key.recipes)))
    return [*(f"| {' | '.join(row)} |" for row in rows), ""]


if __name__ == "__main__":
    print(page(), end="")
