"""A whole page in one file: its own style and script, and a policy that permits nothing else."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from fedveil.web.html import Content, Markup, joined, tag

_HERE = Path(__file__).parent

SERVED = "connect-src 'self'; "
"""What a page's policy permits beyond its own file when a server of fedveil's gave it."""


def page(
    title: str, *content: Content, style: str = "", script: str = "", served: bool = False
) -> bytes:
    """A page that opens from disk, asks for nothing over the network and prints on A4.

    Guarantee: its policy has the hashes of its own script and style, so that a browser runs no
    other, whatever `content` holds, and loads nothing from elsewhere. A page that is `served` may
    connect to its own server only. `style` and `script` are added to those that every page has.
    """
    style = "\n".join(part for part in (text_of(_HERE / "page.css"), style) if part)
    script = "\n".join(part for part in (text_of(_HERE / "page.js"), script) if part)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        f"{SERVED if served else ''}base-uri 'none'; form-action 'none'"
    )
    head = joined(
        [
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("title", title),
            Markup(f"<style>{style}</style>"),
        ]
    )
    body = tag("body", tag("main", *content), Markup(f"<script>{script}</script>"))
    text = f'<!doctype html>\n<html lang="en"><head>{head}</head>{body}</html>\n'
    return text.encode()


@cache
def text_of(path: Path) -> str:
    """A style or script that comes with a package."""
    return path.read_text().strip()


def section(title: str, *content: Content, id: str | None = None) -> Markup:
    """A part of a page under its heading."""
    return tag("section", tag("h2", title), *content, id=id)


def table(
    rows: Sequence[Mapping[str, Content]],
    caption: str,
    *,
    numbers: bool = False,
    wide: bool = False,
) -> Markup:
    """A table with one column per key of the first row. It scrolls if it is too wide."""
    if not rows:
        return tag("p", f"{caption}: nothing")
    names = list(rows[0])
    head = tag("tr", [tag("th", name, scope="col") for name in names])
    body = [
        tag(
            "tr",
            tag("th", row.get(names[0]), scope="row"),
            [tag("td", row.get(name)) for name in names[1:]],
        )
        for row in rows
    ]
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", head),
        tag("tbody", body),
        class_="numbers" if numbers else None,
    )
    classes = "scroll wide" if wide else "scroll"
    return tag("div", whole, class_=classes, role="region", aria_label=caption, tabindex=0)


def facts(pairs: Mapping[str, Content]) -> Markup:
    """A list of names and their values."""
    return tag("dl", [[tag("dt", name), tag("dd", value)] for name, value in pairs.items()])


def listed(items: Sequence[str]) -> Markup:
    """A list of sentences."""
    return tag("ul", [tag("li", item) for item in items])


def text_block(text: str, label: str) -> Markup:
    """Text as it is in a file."""
    return tag("pre", text, tabindex=0, role="region", aria_label=label)


def folded(summary: str, *content: Content) -> Markup:
    """Content that is hidden until its summary is clicked."""
    return tag("details", tag("summary", summary), *content)


@cache
def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
