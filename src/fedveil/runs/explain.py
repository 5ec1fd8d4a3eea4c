"""What every key of a recipe means and may be, and which shipped recipes set it: as data.

All of it is read off the sections and the recipes: nothing about a key is written here.
"""

import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from fedveil.base.checks import OneOf
from fedveil.base.errors import BadInput
from fedveil.runs.recipe import Recipe, read_recipe, shipped_recipes
from fedveil.runs.sections.section import forms_of, table_section, unknown_key_text

_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


@dataclass(frozen=True)
class Key:
    """A key of a recipe.

    Attributes:
        key: Its name with its section, such as "sample.size".
        kind: The kind of its section that has it, "" if the section has no kinds.
        type: The type of its value, in words.
        allowed: The range of its value in words, "" if its type says all.
        left_out: The default in words, "" if the key is required.
        meaning: What it does.
        recipes: The value in each shipped recipe that sets it, by the recipe's name.
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
    """A section and its keys. The section "" has the keys before all sections.

    Attributes:
        section: Its name.
        meaning: What it is for.
        left_out: What happens without it, "" if it is required.
        keys: Its keys, one entry per kind that has the key.
    """

    section: str
    meaning: str
    left_out: str
    keys: tuple[Key, ...]

    @property
    def kinds(self) -> dict[str, tuple[Key, ...]]:
        """Return the keys grouped by the section's kind, "" if it has no kinds."""
        kinds = dict.fromkeys(key.kind for key in self.keys)
        return {kind: tuple(k for k in self.keys if k.kind == kind) for kind in kinds}


def parts() -> tuple[Part, ...]:
    """Return all sections of a recipe, first the keys before all sections as the section ""."""
    fields, recipes, alone, every = Recipe.model_fields, _recipes(), [], list[Part]()
    for section, forms in forms_of(Recipe).items():
        if not forms:
            alone.append(_key(section, "", fields[section], _values_by_recipe(recipes, section)))
            continue
        tables = {name: raw[section] for name, raw in recipes.items() if section in raw}
        keys = [
            key
            for kind, form in forms.items()
            for name, field in form.model_fields.items()
            for key in _keys(
                f"{section}.{name}", kind, field, _values_by_recipe(tables, name, kind)
            )
        ]
        every.append(Part(section, *_meaning(fields[section]), tuple(keys)))
    first = Part("", "What a run is called, how long it is and what it draws.", "", tuple(alone))
    return (first, *every)


def overview() -> list[dict[str, Any]]:
    """Return a row for every key before the sections, and for every section with its kinds.

    Rows of keys have "key", "meaning" and "left_out". Rows of sections have "section", "meaning",
    "left_out" and "kinds", a list of names.
    """
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
    """Return the section called `name`, or the section of the key called `name` with that key only.

    Raises BadInput, with near names, if there is neither.

    >>> [key.kind for key in find_part("sample.size").keys]
    ['fixed', 'round-robin']
    """
    for part in parts():
        if part.section == name and name:
            return part
        keys = tuple(k for k in part.keys if k.key == name or k.key.startswith(f"{name}.NAME."))
        if keys:
            return replace(part, keys=keys)
    raise BadInput(unknown_key_text(forms_of(Recipe), name.split(".", 1)))


@dataclass(frozen=True)
class ExplainedRecipe:
    """A shipped recipe, key by key.

    Attributes:
        name: Its name.
        protects: Whom it protects, and from whom.
        paper: The paper that it is from.
        key_values: (key, value) of each key that it sets.
    """

    name: str
    protects: str
    paper: str
    key_values: tuple[tuple[Key, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON values."""
        keys = [{"key": k.key, "value": v, "meaning": k.meaning} for k, v in self.key_values]
        return {"recipe": self.name, "protects": self.protects, "paper": self.paper, "keys": keys}


def find_recipe(name: str) -> ExplainedRecipe | None:
    """Return the shipped recipe of that name with the meaning of each of its keys, or None.

    >>> find_recipe("central").key_values[-1][0].key
    'server.lr'
    """
    for row in shipped_recipes():
        if row["name"] == name:
            keys = tuple(
                (key, key.recipes[name])
                for part in parts()
                for key in part.keys
                if name in key.recipes and key.key != "name"
            )
            return ExplainedRecipe(name, row["protects"], row["paper"], keys)
    return None


def split_kind(keys: Sequence[Key]) -> tuple[Key | None, list[Key]]:
    """Return the key called "kind", None if it is not among the keys, and a list of the others."""
    named = [key for key in keys if key.kind and key.key.endswith(".kind")]
    return (named[0] if named else None), [key for key in keys if key not in named]


def recipes_text(recipes: dict[str, Any]) -> str:
    """Return as text which recipes set a key, grouped by its value. "" if none does.

    `recipes` holds the value by the recipe's name. If all shipped recipes set the key, the text is
    "... in every recipe", or "every recipe has its own".

    >>> recipes_text({"central": 1.0, "dp-sgd": 1.0, "ldp-sgd": 0.05})
    '1.0 in central, dp-sgd; 0.05 in ldp-sgd'
    """
    by_value: dict[str, list[str]] = {}
    for name, value in recipes.items():
        by_value.setdefault(recipe_value(value), []).append(name)
    if len(recipes) == len(_recipes()):
        if len(by_value) == 1:
            return f"{next(iter(by_value))} in every recipe"
        if len(by_value) == len(recipes):
            return "every recipe has its own"
    return "; ".join(f"{value} in {', '.join(names)}" for value, names in by_value.items())


def _keys(path: str, kind: str, field: FieldInfo, recipes: dict[str, Any]) -> Iterator[Key]:
    """Yield a key and, if it holds tables by name as data.columns does, the keys of these.

    The latter are called "data.columns.NAME.low" and so on. Arguments are as in `_key`.
    """
    yield _key(path, kind, field, recipes)
    inner = table_section(field.annotation)
    for name, one in (inner.model_fields if inner else {}).items():
        yield _key(f"{path}.NAME.{name}", kind, one, {})


def _key(path: str, kind: str, field: FieldInfo, recipes: dict[str, Any]) -> Key:
    """Return one key with its type, range, default and meaning in words.

    Args:
        path: Its name with its section.
        kind: The kind of its section, or "".
        field: Its pydantic field.
        recipes: Its value in each shipped recipe that sets it.
    """
    meaning, left_out = _meaning(field)
    names = [name for one in field.metadata if isinstance(one, OneOf) for name in one.choices]
    words = _type_words(field.annotation)
    type_ = f"one of {', '.join(map(recipe_value, names))}" if names else words
    limits = ", ".join(limits.text for limits in field.metadata)
    return Key(path, kind, type_, limits, left_out, meaning, recipes)


def _meaning(field: FieldInfo) -> tuple[str, str]:
    """Return the meaning in a field's description, and its default in words.

    "" if it is required.
    """
    description = " ".join((field.description or "").split())
    meaning, _, left_out = description.partition(" Default: ")
    if not left_out and not field.is_required():
        left_out = recipe_value(field.default)
    return meaning, left_out.removesuffix(".")


def _type_words(annotation: Any, many: bool = False) -> str:
    """Return a type in plain words, such as "whole number" or "list of numbers".

    With `many` in the plural. AssertionError for a type that no key has.
    """
    if annotation in _WORDS:
        return f"{_WORDS[annotation]}{'s' if many else ''}"
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        texts = ", ".join(map(recipe_value, inside))
        return texts if len(inside) == 1 else f"one of {texts}"
    if origin is list:
        return f"list of {_type_words(inside[0], many=True)}"
    if table_section(annotation) is not None:
        return "one table for each name"
    if origin is dict:
        several = typing.get_origin(inside[1]) in (typing.Union, types.UnionType)
        values = "values" if several else _type_words(inside[1], many=True)
        return f"table of {values}, each for {_type_words(inside[0])}"
    if origin in (typing.Union, types.UnionType):
        words = [_type_words(part, many) for part in inside if part is not types.NoneType]
        return " or ".join(dict.fromkeys(words))
    raise AssertionError(f"no words for {annotation}")


def recipe_value(value: Any) -> str:
    """Return a value as a recipe has it: true, [1, 2], 'text'."""
    match value:
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(recipe_value, value))}]"
    return repr(value)


@cache
def _recipes() -> dict[str, dict[str, Any]]:
    """Return the shipped recipes as dicts, by name."""
    return {recipe["name"]: read_recipe(recipe["name"]) for recipe in shipped_recipes()}


def _values_by_recipe(
    tables: dict[str, dict[str, Any]], key: str, kind: str | None = None
) -> dict[str, Any]:
    """Return the value of `key` in each table that has it, by the recipe's name.

    `tables` are recipes, or one section of each, by the recipe's name. With `kind`, only tables of
    that kind count, "" for those without one.
    """
    return {
        name: table[key]
        for name, table in tables.items()
        if key in table and kind in (None, table.get("kind", ""))
    }
