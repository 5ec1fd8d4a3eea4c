"""The words of claims and messages: `fedveil explain TERM`, reports and docs/glossary.md.

python -m fedveil.runs.glossary > docs/glossary.md
"""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

from fedveil.base.checks import meant, nearest, shown
from fedveil.base.errors import BadInput
from fedveil.runs.explain import Part, find_part
from fedveil.runs.recipe import Recipe
from fedveil.runs.sections.section import forms_of, is_key

_HEAD = """\
# Glossary

The words that claims, messages and pages use. `fedveil explain TERM` prints the same text:
`fedveil explain zero-out`, `fedveil explain noise multiplier`.
"""

_TAIL = """\
---

*This page is written by `python -m fedveil.runs.glossary > docs/glossary.md`, from
`src/fedveil/runs/glossary.toml`: change that.*
"""


@dataclass(frozen=True)
class Term:
    """A word and its meaning.

    Attributes:
        name: The word.
        group: The heading under which the glossary has it.
        means: Its meaning.
        also: Other names of it.
        see: Pages under docs.
        claim: Whether the word may be in a printed claim.
    """

    name: str
    group: str
    means: str
    also: tuple[str, ...] = ()
    see: tuple[str, ...] = ()
    claim: bool = False


@cache
def terms() -> tuple[Term, ...]:
    """Return all terms of glossary.toml, in its order."""
    written = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    every = []
    for raw in written["term"]:
        lists = {key: tuple(raw.get(key, ())) for key in ("also", "see")}
        every.append(Term(**{**raw, **lists, "means": " ".join(raw["means"].split())}))
    return tuple(every)


def find_term(name: str) -> Term | None:
    """Return the term with that name, or with that other name, or None.

    Case, hyphens and spaces do not matter.

    >>> find_term("Zero out").name, find_term("central").name, find_term("no such word")
    ('zero-out', 'central trust', None)
    """
    return _by_name().get(_plain(name))


def look_up(name: str) -> tuple[Term | None, Part | None]:
    """Return (the term of that name, the recipe's section or key of that name).

    Either may be None, not both. A term that is not also a key has no second part. Raises BadInput,
    with near names, if there is neither.
    """
    term = find_term(name)
    if term is not None and not is_key(forms_of(Recipe), name.split(".")):
        return term, None
    try:
        return term, find_part(name)
    except BadInput as e:
        near = dict.fromkeys(_by_name()[word].name for word in nearest(_plain(name), _by_name()))
        if near and "did you mean" not in str(e):
            raise BadInput(f"{shown(name)} is no term: {meant(list(near))}") from e
        raise


def terms_of(claims: Iterable[object]) -> list[Term]:
    """Return the terms that the texts of these claims contain, in the glossary's order.

    Only terms that are marked for claims are looked for.

    >>> [term.name for term in terms_of(["epsilon 2 at delta 1e-05 per client (zero-out)"])]
    ['epsilon', 'delta', 'client', 'zero-out']
    """
    text = " ".join(map(str, claims)).lower()
    return [
        term
        for term in terms()
        if term.claim and re.search(rf"(?<![\w-]){re.escape(term.name.lower())}(?![\w-])", text)
    ]


def terms_line(claims: Iterable[object]) -> str:
    """Return a line with the terms of these claims and how to look them up. "" without terms.

    >>> terms_line(["epsilon 2 at delta 0 per client"])
    'terms: epsilon, delta, client (fedveil explain TERM)'
    """
    names = ", ".join(term.name for term in terms_of(claims))
    return f"terms: {names} (fedveil explain TERM)" if names else ""


def page() -> str:
    """Return the text of docs/glossary.md, in Markdown. Writes no file."""
    lines = [_HEAD]
    for group, members in groupby(terms(), key=lambda term: term.group):
        lines += [f"## {group}", ""]
        for term in members:
            lines += [f"### {term.name}", "", term.means, ""]
            if term.see:
                lines += [f"See {', '.join(f'[{page}]({page})' for page in term.see)}.", ""]
    return "\n".join([*lines, _TAIL])


@cache
def _by_name() -> dict[str, Term]:
    """Return all terms by each of their names, as `_plain` writes them."""
    return {_plain(name): term for term in terms() for name in (term.name, *term.also)}


def _plain(name: str) -> str:
    """Return a name in lower case, with single spaces for spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]+", " ", name.strip().lower())


if __name__ == "__main__":
    print(page(), end="")
