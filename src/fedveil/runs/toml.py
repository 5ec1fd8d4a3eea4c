"""Writing TOML: the few value types a recipe has."""

import math
import string
from typing import Any

_BARE = {*string.ascii_letters, *string.digits, "_", "-"}


def dumps(document: dict[str, Any]) -> str:
    """Write top-level scalars first, then one table per section, without None.

    >>> print(dumps({"name": "x", "data": {"clients": 3, "alpha": None}}), end="")
    name = "x"
    <BLANKLINE>
    [data]
    clients = 3
    """
    scalars = {k: v for k, v in document.items() if not isinstance(v, dict)}
    lines = _pairs(scalars)
    for name, section in document.items():
        if isinstance(section, dict):
            lines += ["", f"[{name}]", *_pairs(section)]
    return "\n".join(lines) + "\n"


def _pairs(section: dict[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in section.items() if value is not None]


def _key(name: str) -> str:
    """A key, in quotes unless TOML can do without."""
    return name if name and not set(name) - _BARE else _value(name)


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float():
            return str(value) if not math.isfinite(value) else repr(value)
        case str():
            return '"' + "".join(_escaped(c) for c in value) + '"'
        case list() | tuple():
            return "[" + ", ".join(_value(v) for v in value) + "]"
        case dict():
            return "{ " + ", ".join(_pairs(value)) + " }"
    raise AssertionError(f"no TOML for {type(value).__name__}")


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08x}"
