"""HTML by a builder whose default is escaping: whatever is not `Markup` is text.

Names, notes and numbers of a run directory may have been written by anybody. They become part of a
page through `tag` and `concatenate` and nothing else, so that there is one place where text turns
into markup. A page is one file with its own style and script, and a policy that permits nothing
else.
"""

import base64
import hashlib
import html
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*")
_VOID = frozenset({"meta", "br", "hr", "col", "input"})
_LOCAL_LINK = re.compile(r"#.*|\./(?!/)[a-z0-9?=&_-]*")
"""A place on the same page, or a page of the same folder: no scheme, no host, no folder above."""

_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069\ufeff]")
"""Characters that show nothing, or change the direction of the text after them."""

_STYLE = Path(__file__).with_name("page.css").read_text().strip()
_SCRIPT = Path(__file__).with_name("page.js").read_text().strip()

TEXTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("texts.toml").read_text("utf-8"))
"""Sentences and labels of the pages, by name."""


@dataclass(frozen=True)
class Markup:
    """Text that is HTML already, and is not escaped again.

    Make it with `tag` or `concatenate` only.
    """

    text: str

    def __str__(self) -> str:
        return self.text


Content = Markup | str | int | float | None | Iterable["Content"]


def tag(_name: str, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """Return an HTML element with that name, content and attributes.

    `class_` is written `class`, and `aria_label` `aria-label`. Attributes that are None or False
    are omitted.

    Guarantee: content and values of attributes are shown as text and run nothing.

    | edge | behaviour |
    |---|---|
    | a name that is not a plain word | ValueError |
    | an attribute that runs code (`onclick`, `style`, `srcdoc`) | ValueError |
    | a link, except to the same page ("#a") or a page beside it ("./a") | ValueError |
    | characters that show nothing or turn the direction of writing | "\\ufffd" |

    >>> str(tag("p", "1 < 2", class_="note"))
    '<p class="note">1 &lt; 2</p>'
    """
    if not _NAME.fullmatch(_name) or _name.lower() in ("script", "style", "iframe", "object"):
        raise ValueError(f"the element {_name!r} is not permitted")
    start = f"<{_name}"
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        runs_code = name.lower().startswith("on") or name in ("style", "srcdoc")
        if runs_code or not _NAME.fullmatch(name):
            raise ValueError(f"the attribute {name!r} is not permitted")
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if value is True:
            start += f" {name}"
        elif value is not None and value is not False:
            if name in ("href", "src", "action") and not _LOCAL_LINK.fullmatch(text):
                raise ValueError(f"{name} is {text!r}: a page links to places of its own only")
            start += f' {name}="{concatenate([text]).text}"'
    if _name in _VOID:
        return Markup(f"{start}>")
    return Markup(f"{start}>{concatenate(content).text}</{_name}>")


def concatenate(content: Iterable[Content]) -> Markup:
    """Return all parts of `content` as one piece of HTML, without an element around them.

    Strings are escaped, numbers are formatted by `value_text`, iterables are flattened, None is
    skipped. Characters that show nothing are replaced by "\\ufffd", and lone surrogates by "?".
    """
    text = ""
    for part in content:
        if isinstance(part, Markup):
            text += part.text
        elif isinstance(part, str):
            visible = _INVISIBLE.sub("\ufffd", part.encode("utf-8", "replace").decode())
            text += html.escape(visible)
        elif isinstance(part, int | float):
            text += value_text(part)
        elif part is not None:
            text += concatenate(part).text
    return Markup(text)


def value_text(value: object) -> str:
    """Return a JSON value as text for readers.

    Numbers are rounded to four significant digits, large ones to whole numbers. Null, NaN and
    infinity give "not finite", booleans "yes" or "no". Lists and objects are joined by commas.

    >>> [value_text(x) for x in (0.98765, 12345.6, 1e-7, 3, math.inf, True, {"a": 2.0})]
    ['0.9877', '12,346', '1e-07', '3', 'not finite', 'yes', 'a 2']
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        try:
            finite = math.isfinite(value)
        except OverflowError:  # a whole number of hundreds of digits
            finite = False
        if not finite:
            return "not finite"
        if value == int(value) and abs(value) < 1e15:
            return f"{int(value):,}"
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {value_text(inner)}" for key, inner in value.items())
    return "not finite" if value is None else str(value)


def page(
    title: str, *content: Content, style: str = "", script: str = "", served: bool = False
) -> bytes:
    """Return an HTML file, as bytes, that needs no other file and no network, and prints on A4.

    Guarantee: its Content-Security-Policy holds the hashes of its own script and style, so that a
    browser runs no other, whatever `content` holds, and loads nothing from elsewhere.

    Args:
        title: The title in the browser's tab.
        content: The parts of the body.
        style: CSS to add to that of every page.
        script: JavaScript to add to that of every page.
        served: Permits connections to the server that delivers the page.
    """
    style, script = f"{_STYLE}\n{style}".rstrip("\n"), f"{_SCRIPT}\n{script}".rstrip("\n")
    digests = [hashlib.sha256(text.encode()).digest() for text in (style, script)]
    hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    connections = "connect-src 'self'; " if served else ""
    policy = (
        f"default-src 'none'; style-src {hashes[0]}; script-src {hashes[1]}; "
        f"{connections}base-uri 'none'; form-action 'none'"
    )
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        Markup(f"<style>{style}</style>"),
    )
    body = tag("body", tag("main", *content), Markup(f"<script>{script}</script>"))
    text = f'<!doctype html>\n<html lang="en">{tag("head", head).text}{body.text}</html>\n'
    return text.encode()


def section(title: str, *content: Content, id: str | None = None) -> Markup:
    """Return a `<section>` with an `<h2>` heading above its content. `id` is its HTML id."""
    return tag("section", tag("h2", title), *content, id=id)


def table(
    rows: Sequence[Mapping[str, Content]],
    caption: str,
    *,
    numbers: bool = False,
    wide: bool = False,
) -> Markup:
    """Return an HTML table that scrolls sideways, or the paragraph "CAPTION: nothing" without rows.

    Args:
        rows: The cells of each row by column. The columns are the keys of the first row. Other keys
            of later rows are ignored, and missing ones are empty cells.
        caption: The caption, also read by screen readers.
        numbers: Aligns the cells as numbers.
        wide: Keeps columns readable on small screens, where the table then scrolls.
    """
    if not rows:
        return tag("p", f"{caption}: nothing")
    first, *others = rows[0]
    head = [tag("th", name, scope="col") for name in (first, *others)]
    body = []
    for row in rows:
        cells = [tag("td", row.get(name)) for name in others]
        body.append(tag("tr", tag("th", row.get(first), scope="row"), cells))
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", head)),
        tag("tbody", body),
        class_="numbers" if numbers else None,
    )
    classes = "scroll wide" if wide else "scroll"
    return tag("div", whole, class_=classes, role="region", aria_label=caption, tabindex=0)


def definition_list(values: Mapping[str, Content]) -> Markup:
    """Return a `<dl>` of names and their values."""
    return tag("dl", [[tag("dt", name), tag("dd", value)] for name, value in values.items()])


def bullet_list(items: Iterable[Content]) -> Markup:
    """Return a `<ul>` with one bullet for each item."""
    return tag("ul", [tag("li", item) for item in items])


def number_tiles(numbers: Iterable[tuple[Content, Content]]) -> Markup:
    """Return a row of large values, each above its label, from pairs (value, label)."""
    cells = [tag("div", tag("b", value), tag("span", label)) for value, label in numbers]
    return tag("div", *cells, class_="tiles")


FOOTER = tag("footer", "Written by fedveil. It needs no network and asks for nothing.")
"""The last line of every page that is written to a file."""


def capitalize_first(text: str) -> str:
    """Return `text` with its first letter in upper case and the others unchanged."""
    return text[:1].upper() + text[1:]
