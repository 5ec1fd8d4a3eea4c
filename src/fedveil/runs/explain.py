"""What every key of a recipe means and may be, and which shipped recipes set it: as data.

All of it is read off the sections and the recipes: nothing about a key is written here.
"""

import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from fedveil.base.checks import OneOf
from fedveil.base.errors import BadInput
from fedveil.runs.recipe import FORMS, Recipe, read_recipe, shipped_recipes
from fedveil.runs.sections.section import tabled, unknown

_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


@dataclass(frozen=True)
class Key:
    """A key of a recipe.

    Attributes:
        key: Its name with its section.
        kind: The kind of its section that has it, "" if the section has no kinds.
        type: The type of its value, in words.
        allowed: The range of its value, in words.
        left_out: The default, "" if the key is required.
        meaning: What it does.
        recipes: The value in each shipped recipe that sets it.
    """

    key: str
    kind: str
    type: str
    allowed: str
    left_out: str
    meaning: str
    recipes: dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A section and its keys. The section "" has the keys before all sections."""

    section: str
    meaning: str
    left_out: str
    keys: tuple[Key, ...]

    @property
    def kinds(self) -> dict[str, tuple[Key, ...]]:
        """The keys of each kind, "" where there are none."""
        kinds = dict.fromkeys(key.kind for key in self.keys)
        return {kind: tuple(k for k in self.keys if k.kind == kind) for kind in kinds}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def parts() -> tuple[Part, ...]:
    """All sections of a recipe."""
    fields, recipes = Recipe.model_fields, _recipes()
    alone = [_key(name, "", fields[name], _set(recipes, name)) for name in FORMS if not FORMS[name]]
    every = [Part("", "What a run is called, how long it is and what it draws.", "", tuple(alone))]
    for section, forms in FORMS.items():
        tables = {name: raw[section] for name, raw in recipes.items() if section in raw}
        keys = [
            key
            for kind, form in forms.items()
            for name, field in form.model_fields.items()
            for key in _keys(f"{section}.{name}", kind, field, _set(_of_kind(tables, kind), name))
        ]
        if forms:
            every.append(Part(section, *_meaning(fields[section]), tuple(keys)))
    return tuple(every)


def overview() -> list[dict[str, Any]]:
    """A row for every key before the sections, and for every section with its kinds."""
    alone, *sections = parts()
    keys = [{"key": k.key, "meaning": k.meaning, "left_out": k.left_out} for k in alone.keys]
    return keys + [
        {
            "section": part.section,
            "meaning": part.meaning,
            "left_out": part.left_out,
            "kinds": [kind for kind in part.kinds if kind],
        }
        for part in sections
    ]


def find_part(name: str) -> Part:
    """The section of that name, or as much of it as the key of that name is.

    >>> [key.kind for key in find_part("sample.size").keys]
    ['fixed', 'round-robin']
    """
    for part in parts():
        if part.section == name and name:
            return part
        keys = tuple(k for k in part.keys if k.key == name or k.key.startswith(f"{name}.NAME."))
        if keys:
            return replace(part, keys=keys)
    raise BadInput(unknown(FORMS, name.split(".", 1)))


def apart(keys: Sequence[Key]) -> tuple[Key | None, list[Key]]:
    """The key that names the kind, if it is among these, and the others."""
    named = [key for key in keys if key.kind and key.key.endswith(".kind")]
    return (named[0] if named else None), [key for key in keys if key not in named]


def recipes_text(recipes: dict[str, Any]) -> str:
    """The recipes that set a key, grouped by its value, or "" if none does.

    >>> recipes_text({"central": 1.0, "dp-sgd": 1.0, "ldp-sgd": 0.05})
    '1.0 in central, dp-sgd; 0.05 in ldp-sgd'
    """
    by_value: dict[str, list[str]] = {}
    for name, value in recipes.items():
        by_value.setdefault(_text(value), []).append(name)
    if len(recipes) == len(_recipes()):
        if len(by_value) == 1:
            return f"{next(iter(by_value))} in every recipe"
        if len(by_value) == len(recipes):
            return "every recipe has its own"
    return "; ".join(f"{value} in {', '.join(names)}" for value, names in by_value.items())


def _keys(path: str, kind: str, field: FieldInfo, recipes: dict[str, Any]) -> Iterator[Key]:
    """A key, and those of the tables that it holds."""
    yield _key(path, kind, field, recipes)
    inner = tabled(field.annotation)
    for name, one in (inner.model_fields if inner else {}).items():
        yield _key(f"{path}.NAME.{name}", kind, one, {})


def _key(path: str, kind: str, field: FieldInfo, recipes: dict[str, Any]) -> Key:
    meaning, left_out = _meaning(field)
    names = [name for one in field.metadata if isinstance(one, OneOf) for name in one.choices]
    type_ = f"one of {', '.join(map(_text, names))}" if names else _type(field.annotation)
    limits = ", ".join(limits.text for limits in field.metadata)
    return Key(path, kind, type_, limits, left_out, meaning, recipes)


def _meaning(field: FieldInfo) -> tuple[str, str]:
    """What a description says, and what holds if the key is left out."""
    meaning, _, left_out = (field.description or "").partition(" Left out: ")
    if not left_out and not field.is_required():
        left_out = _text(field.default)
    return meaning, left_out.removesuffix(".")


def _type(annotation: Any, many: bool = False) -> str:
    """A type in plain words."""
    if annotation in _WORDS:
        return f"{_WORDS[annotation]}{'s' if many else ''}"
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        texts = ", ".join(map(_text, inside))
        return texts if len(inside) == 1 else f"one of {texts}"
    if origin is list:
        return f"list of {_type(inside[0], many=True)}"
    if tabled(annotation) is not None:
        return "one table for each name"
    if origin is dict:
        several = typing.get_origin(inside[1]) in (typing.Union, types.UnionType)
        values = "values" if several else _type(inside[1], many=True)
        return f"table of {values}, each for {_type(inside[0])}"
    if origin in (typing.Union, types.UnionType):
        words = [_type(part, many) for part in inside if part is not types.NoneType]
        return " or ".join(dict.fromkeys(words))
    raise AssertionError(f"no words for {annotation}")


def _text(value: Any) -> str:
    """A value as a recipe has it."""
    match value:
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(_text, value))}]"
    return repr(value)


@cache
def _recipes() -> dict[str, dict[str, Any]]:
    """The shipped recipes as they were written."""
    return {recipe["name"]: read_recipe(recipe["name"]) for recipe in shipped_recipes()}


def _set(tables: dict[str, dict[str, Any]], key: str) -> dict[str, Any]:
    return {name: table[key] for name, table in tables.items() if key in table}


def _of_kind(tables: dict[str, dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {name: table for name, table in tables.items() if table.get("kind", "") == kind}
