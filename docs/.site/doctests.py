"""Examples in docstrings are doctests: the site shows them as code."""

from typing import Any

import griffe


class FencedDoctests(griffe.Extension):
    """Put a fence around every doctest."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


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
