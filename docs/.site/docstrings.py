"""Docstrings on the site: examples are shown as code, and pages that they name are linked."""

import re
from typing import Any

import griffe

_PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")


class Docstrings(griffe.Extension):
    """Make Markdown of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = linked(fenced(obj.docstring.value))


def fenced(text: str) -> str:
    """A docstring whose examples, which end at an empty line, stand between fences."""
    lines: list[str] = []
    inside = False
    for line in [*text.splitlines(), ""]:
        if inside and not line.strip():
            lines.append("```")
            inside = False
        elif not inside and line.startswith(">>> "):
            lines.append("```pycon")
            inside = True
        lines.append(line)
    return "\n".join(lines[:-1])


def linked(text: str) -> str:
    """A docstring in which "docs/proofs/central.md" leads there from a page of the site's root."""
    return _PAGE.sub(r"[docs/\1.md](\1.md)", text)
