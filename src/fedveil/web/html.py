"""HTML by a builder whose default is escaping: whatever is not `Markup` is text.

Names, notes and numbers of a run directory may have been written by anybody. They become part of a
page through `tag` and nothing else, so that there is one place where text turns into markup.
"""

import html
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*")
_VOID = frozenset({"meta", "br", "hr", "col", "input"})
_PLACE = re.compile(r"#.*|\./(?!/)[a-z0-9?=&_-]*")
"""On the same page, or a page beside it: no scheme, no host, no folder above."""

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069\ufeff]")
"""Characters that show nothing, or turn the direction of what comes after them."""


@dataclass(frozen=True)
class Markup:
    """Text that is HTML already. Only this package makes it, and only out of escaped parts."""

    text: str

    def __str__(self) -> str:
        return self.text


Content = Markup | str | int | float | None | Iterable["Content"]


def tag(_name: str, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """An element. `class_` is `class`, `aria_label` is `aria-label`; None and False are left out.

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
    said = "".join(_attribute(key, value) for key, value in attributes.items())
    if _name in _VOID:
        return Markup(f"<{_name}{said}>")
    return Markup(f"<{_name}{said}>{_inside(content)}</{_name}>")


def joined(content: Iterable[Content]) -> Markup:
    """Parts one after the other, without an element around them."""
    return Markup(_inside(content))


def escaped(text: str) -> str:
    """Text as a page has it."""
    whole = text.encode("utf-8", "replace").decode()
    return html.escape(_UNSEEN.sub("\ufffd", whole))


def number_text(value: float) -> str:
    """A number for people: four digits, and words where there is none.

    >>> [number_text(x) for x in (0.98765, 12345.6, 1e-7, 3, math.inf)]
    ['0.9877', '12,346', '1e-07', '3', 'not finite']
    """
    try:
        value = value if math.isfinite(value) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        value = math.nan
    if math.isnan(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _inside(content: Iterable[Content]) -> str:
    return "".join(map(_text, content))


def _text(content: Content) -> str:
    match content:
        case Markup():
            return content.text
        case None:
            return ""
        case str():
            return escaped(content)
        case bool():
            return "yes" if content else "no"
        case int() | float():
            return number_text(content)
    return _inside(content)


def _attribute(key: str, value: str | float | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if not _NAME.fullmatch(name) or name.lower().startswith("on") or name in ("style", "srcdoc"):
        raise ValueError(f"{name!r} is no attribute of a page")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if name in ("href", "src", "action") and not _PLACE.fullmatch(text):
        raise ValueError(f"{name} is {text!r}: a page links to places of its own only")
    return f' {name}="{escaped(text)}"'
