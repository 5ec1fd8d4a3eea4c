"""The words of claims and messages: `fedveil explain TERM`, reports and docs/glossary.md.

python -m fedveil.runs.glossary > docs/glossary.md
"""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from fedveil.base.checks import meant, nearest, shown
from fedveil.base.errors import BadInput
from fedveil.runs.explain import Part, find_part
from fedveil.runs.recipe import FORMS
from fedveil.runs.sections.section import is_key

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

    `also` are other names, `see` pages under docs, `claim` whether claims are printed with it.
    """

    name: str
    group: str
    means: str
    also: tuple[str, ...] = ()
    see: tuple[str, ...] = ()
    claim: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@cache
def terms() -> tuple[Term, ...]:
    """All of them, group by group."""
    written = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(
        Term(
            name=raw["name"],
            group=raw["group"],
            means=" ".join(raw["means"].split()),
            also=tuple(raw.get("also", ())),
            see=tuple(raw.get("see", ())),
            claim=raw.get("claim", False),
        )
        for raw in written["term"]
    )


def find_term(name: str) -> Term | None:
    """The term of that name, or None. Case, hyphens and spaces do not matter.

    >>> find_term("Zero out").name, find_term("central").name, find_term("no such word")
    ('zero-out', 'central trust', None)
    """
    return _by_name().get(_plain(name))


def looked_up(name: str) -> tuple[Term | None, Part | None]:
    """The term of that name, and the section or key. A name that is neither is refused."""
    term = find_term(name)
    if term is not None and not is_key(FORMS, name.split(".")):
        return term, None
    try:
        return term, find_part(name)
    except BadInput as e:
        near = dict.fromkeys(_by_name()[word].name for word in nearest(_plain(name), _by_name()))
        if near and "did you mean" not in str(e):
            raise BadInput(f"{shown(name)} is no term: {meant(list(near))}") from e
        raise


def terms_of(claims: Iterable[object]) -> list[Term]:
    """The terms with which these claims are printed, in the glossary's order.

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
    """A line with the terms of these claims and how to look them up, or "".

    >>> terms_line(["epsilon 2 at delta 0 per client"])
    'terms: epsilon, delta, client (fedveil explain TERM tells what one means)'
    """
    names = ", ".join(term.name for term in terms_of(claims))
    return f"terms: {names} (fedveil explain TERM tells what one means)" if names else ""


def page() -> str:
    """docs/glossary.md."""
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
    return {_plain(name): term for term in terms() for name in (term.name, *term.also)}


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.strip().lower())


if __name__ == "__main__":
    print(page(), end="")
