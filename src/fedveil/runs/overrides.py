"""Overrides of a recipe's keys: `section.key=value` texts, or a dict of section.key to value."""

import reprlib
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from fedveil.base.errors import BadInput

Overrides = Iterable[str] | Mapping[str, Any]
Settings = list[tuple[list[str], Any]]
"""Where each value goes."""

_COLUMNS, _OPTIONS = ["data", "columns"], ["model", "options"]
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 100


def settings_of(overrides: Overrides) -> Settings:
    """Where each override goes, and its value."""
    if isinstance(overrides, str):
        raise BadInput(f"set is {_SHOWN.repr(overrides)}: use a dict, or a list of texts")
    settings: Settings = []
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            settings.append((_place(str(key), f"set {_SHOWN.repr(key)}"), _untuple(value)))
        return settings
    for override in overrides:
        key, equals, text = override.partition("=")
        option = f"--set {_SHOWN.repr(override)}"
        if not equals:
            raise BadInput(f"{option}: write it as section.key=value")
        path = _place(key, option)
        if any("\ud800" <= character <= "\udfff" for character in override):
            raise BadInput(f"{option}: it is not UTF-8")
        settings.append((path, _value(text.strip())))
    return settings


def _place(key: str, option: str) -> list[str]:
    """Split a key into its parts. The name of a table's column may contain dots."""
    path = key.strip().split(".")
    if path[:2] == _COLUMNS and len(path) > 4:
        path = [*_COLUMNS, ".".join(path[2:-1]), path[-1]]
    if not all(path) or (len(path) > 2 and not _in_table(path)):
        raise BadInput(f"{option}: write it as section.key=value")
    return path


def _in_table(path: list[str]) -> bool:
    """Whether the key is inside a table of a section."""
    return path[:2] == _COLUMNS or (path[:2] == _OPTIONS and len(path) == 3)


def _untuple(value: Any) -> Any:
    """The value as in a recipe's file, where "none" removes a key."""
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def _value(text: str) -> Any:
    """Parse a TOML value. Text that is not TOML is a string."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return document["value"] if len(document) == 1 else text
