"""HTML by a builder whose default is escaping: whatever is not `Markup` is text.

Names, notes and numbers of a run directory may have been written by anybody. They become part of a
page through `tag` and `joined` and nothing else, so that there is one place where text turns into
markup. A page is one file with its own style and script, and a policy that permits nothing else.
"""

import base64
import hashlib
import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*")
_VOID = frozenset({"meta", "br", "hr", "col", "input"})
_LOCAL_LINK = re.compile(r"#.*|\./(?!/)[a-z0-9?=&_-]*")
"""A place on the same page, or a page of the same folder: no scheme, no host, no folder above."""

_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069\ufeff]")
"""Characters that show nothing, or change the direction of the text after them."""

SERVED = "connect-src 'self'; "
"""The additional permission in the policy of a page that a server of fedveil's delivers."""


@dataclass(frozen=True)
class Markup:
    """Text that is HTML already. Only this package makes it, and only out of escaped parts."""

    text: str

    def __str__(self) -> str:
        return self.text


Content = Markup | str | int | float | None | Iterable["Content"]


def tag(_name: str, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """An element. `class_` is `class`, `aria_label` is `aria-label`. None and False are left out.

    Guarantee: content and values of attributes are shown as text and run nothing.

    | edge | behaviour |
    |---|---|
    | a name that is not a plain word | ValueError |
    | an attribute that runs code (`onclick`, `style`, `srcdoc`) | ValueError |
    | a link but to a place on the same page ("#a") or a page beside it ("./a") | ValueError |
    | characters that show nothing or turn the direction of writing, lone surrogates | "\\ufffd" |

    >>> str(tag("p", "1 < 2", class_="note"))
    '<p class="note">1 &lt; 2</p>'
    """
    if not _NAME.fullmatch(_name) or _name.lower() in ("script", "style", "iframe", "object"):
        raise ValueError(f"{_name!r} is no element of a page")
    start = f"<{_name}"
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        runs_code = name.lower().startswith("on") or name in ("style", "srcdoc")
        if runs_code or not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no attribute of a page")
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if value is True:
            start += f" {name}"
        elif value is not None and value is not False:
            if name in ("href", "src", "action") and not _LOCAL_LINK.fullmatch(text):
                raise ValueError(f"{name} is {text!r}: a page links to places of its own only")
            start += f' {name}="{escaped(text)}"'
    if _name in _VOID:
        return Markup(f"{start}>")
    return Markup(f"{start}>{joined(content).text}</{_name}>")


def joined(content: Iterable[Content]) -> Markup:
    """Parts one after the other, without an element around them."""
    text = ""
    for part in content:
        if isinstance(part, Markup):
            text += part.text
        elif isinstance(part, str):
            text += escaped(part)
        elif isinstance(part, bool):
            text += "yes" if part else "no"
        elif isinstance(part, int | float):
            text += number_text(part)
        elif part is not None:
            text += joined(part).text
    return Markup(text)


def escaped(text: str) -> str:
    """Text as a page has it."""
    whole = text.encode("utf-8", "replace").decode()
    return html.escape(_INVISIBLE.sub("\ufffd", whole))


def number_text(value: float) -> str:
    """A number for people: four digits, and words where there is none.

    >>> [number_text(x) for x in (0.98765, 12345.6, 1e-7, 3, math.inf)]
    ['0.9877', '12,346', '1e-07', '3', 'not finite']
    """
    try:
        if not math.isfinite(value):
            return "not finite"
    except OverflowError:  # a whole number of hundreds of digits
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def value_text(value: object) -> str:
    """Any JSON value as a page shows it: numbers short, everything else as its text."""
    if value is None:
        return "not finite"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number_text(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {value_text(inner)}" for key, inner in value.items())
    return str(value)


def page(
    title: str, *content: Content, style: str = "", script: str = "", served: bool = False
) -> bytes:
    """A page that opens from disk, asks for nothing over the network and prints on A4.

    Guarantee: its policy has the hashes of its own script and style, so that a browser runs no
    other, whatever `content` holds, and loads nothing from elsewhere. A page that is `served` may
    connect to its own server only. `style` and `script` are added to those that every page has.
    """
    folder = Path(__file__).parent
    style = "\n".join(filter(None, (file_text(folder / "page.css"), style)))
    script = "\n".join(filter(None, (file_text(folder / "page.js"), script)))
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        f"{SERVED if served else ''}base-uri 'none'; form-action 'none'"
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


@cache
def file_text(path: Path) -> str:
    """The content of a style or script that comes with the package."""
    return path.read_text().strip()


@cache
def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


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
    head, body = [], []
    for name in names:
        head.append(tag("th", name, scope="col"))
    for row in rows:
        cells = [tag("th", row.get(names[0]), scope="row")]
        for name in names[1:]:
            cells.append(tag("td", row.get(name)))
        body.append(tag("tr", cells))
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", head)),
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


def tiles(numbers: Iterable[tuple[Content, Content]]) -> Markup:
    """Large numbers, each with its label below."""
    cells = [tag("div", tag("b", value), tag("span", label)) for value, label in numbers]
    return tag("div", *cells, class_="tiles")


def text_block(text: str, label: str) -> Markup:
    """Text as it is in a file."""
    return tag("pre", text, tabindex=0, role="region", aria_label=label)


def folded(summary: str, *content: Content) -> Markup:
    """Content that is hidden until its summary is clicked."""
    return tag("details", tag("summary", summary), *content)


FOOTER = tag("footer", "Written by fedveil. It needs no network and asks for nothing.")
"""The last line of every page that is written to a file."""


def sentence(text: str) -> str:
    """Text that begins with a capital letter."""
    return text[:1].upper() + text[1:]
