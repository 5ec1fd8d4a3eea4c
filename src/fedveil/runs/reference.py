"""docs/recipes.md, from the same data as `fedveil explain`.

python -m fedveil.runs.reference > docs/recipes.md
"""

from collections.abc import Sequence

from fedveil.runs.explain import Key, Part, parts, recipes_text, split_kind

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
    """Return the text of docs/recipes.md, in Markdown. Writes no file."""
    return "\n".join([_HEAD, *(line for part in parts() for line in _part_lines(part)), _TAIL])


def _part_lines(part: Part) -> list[str]:
    """Return the Markdown lines on a section: a heading, its meaning, and a table per kind."""
    heading = f"[{part.section}]" if part.section else "Before all sections"
    left_out = f" Default: {part.left_out}." if part.left_out else ""
    lines = [f"## {heading}", "", f"{part.meaning}{left_out}", ""]
    for keys in part.kinds.values():
        named, others = split_kind(keys)
        if named is not None:
            recipes = f" Recipes: {', '.join(named.recipes)}." if named.recipes else ""
            lines += [f"### {named.key} = {named.type}", "", f"{named.meaning}{recipes}", ""]
        lines += _table_lines(others)
    return lines


def _table_lines(keys: Sequence[Key]) -> list[str]:
    """Return the lines of a Markdown table with one row per key. [] without keys."""
    if not keys:
        return []
    rows = [("key", "value", "left out", "meaning", "in recipes"), ("---",) * 5]
    for key in keys:
        is_named = key.type in key.allowed  # "number" in "a number >= 0"
        value = key.allowed if is_named else "; ".join(filter(None, (key.type, key.allowed)))
        rows.append((f"`{key.key}`", value, key.left_out, key.meaning, recipes_text(key.recipes)))
    return [*(f"| {' | '.join(row)} |" for row in rows), ""]


if __name__ == "__main__":
    print(page(), end="")
