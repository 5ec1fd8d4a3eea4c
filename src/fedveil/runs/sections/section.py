"""What all sections of a recipe share: keys, their ranges, and messages about unknown keys.

A key is `key: type = setting(RANGE, default)`, with a docstring that says what it means and when it
has an effect. Where the key may be left out and its default does not speak for itself, "Default:
..." ends it. `fedveil explain` and docs/recipes.md are made of these.

A section builds its own part of a training. What that takes is imported when it is built, so that
recipes can be read without it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from fedveil.base.checks import FRACTION, WARMUP, Each, Limits, OneOf, Rule, meant, nearest
from fedveil.base.errors import BadArgument, BadInput

if TYPE_CHECKING:
    from fedveil.training.server import RateSchedule

_LONGEST = 100


Range = Limits | Each | OneOf | Rule
"""What a value may be by itself: `text` says it in words, `check(name, value)` raises BadInput."""


def setting(allowed: Range | None = None, default: Any = ..., *, description: str = "") -> Any:
    """Declare a key of a section, as a pydantic field.

    Args:
        allowed: What its values may be. None leaves that to the key's type.
        default: Its value if it is left out. A key without one is required.
        description: What it means, for keys that several sections share. Otherwise it is the
            docstring after the key.
    """
    field = Field(default, description=description or None)
    field.metadata += [] if allowed is None else [allowed]
    return field


@contextmanager
def in_keys(section: str = "", recipe: "Section | None" = None, **keys: str) -> Iterator[None]:
    """Context manager or decorator: turn a BadArgument into a BadInput that names recipe keys.

    An argument without a key keeps its name. Errors that an inner `in_keys` has turned stay.

    Args:
        section: The section whose keys are called like the arguments; "" for none.
        recipe: The recipe that is built. If given, only keys that its sections have are named:
            `noise` is clip.bit_noise for a clip with that key, and nothing else.
        keys: The recipe's keys of all other arguments.
    """
    try:
        yield
    except BadArgument as e:
        names = {}
        for argument in e.args[1:]:
            if argument in keys:
                part, _, key = keys[argument].partition(".")
                form = type(getattr(recipe, part, None))
                if recipe is None or key in getattr(form, "model_fields", ()):
                    names[argument] = keys[argument]
            elif section and "." not in argument:
                names[argument] = f"{section}.{argument}"
        raise BadInput(e.with_names(lambda argument: names.get(argument, argument))) from e


class Section(BaseModel):
    """A section of a recipe: a pydantic model, frozen, and strict about keys and types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=True, use_attribute_docstrings=True
    )

    def check_values(self, where: str = "") -> None:
        """Raise BadInput for values out of range, in inner sections too.

        A section with keys that may contradict each other overrides this to check them as well.
        Keys that are None are not checked.

        Args:
            where: The section's own name, which messages put before each key. "" for a whole
                recipe.
        """
        for key, field in type(self).model_fields.items():
            value = getattr(self, key)
            path = f"{where}.{key}" if where else key
            if isinstance(value, Section):
                value.check_values(path)
            elif value is not None:
                for limits in field.metadata:
                    limits.check(path, value)

    def present_values(self, *keys: str) -> dict[str, Any]:
        """Return the values of those `keys` that are not None, by key."""
        return {key: value for key in keys if (value := getattr(self, key)) is not None}


class RateKeys(Section):
    """The keys of a section whose learning rate, `lr`, may change over the rounds.

    A section that inherits from it and from a class with its first keys has these after those: of
    several bases, the keys of the last come first.
    """

    schedule: Literal["constant", "linear", "cosine", "step"] | None = None
    """How lr changes over the rounds: 'linear' and 'cosine' fall to lr_floor of it, in a line or
    along half a cosine; 'step' falls to a tenth after half of the rounds, to a hundredth after
    three quarters. Default: 'constant'."""
    warmup: int | None = setting(WARMUP, None)
    """Rounds in which the learning rate first grows to lr, in equal steps; the schedule is for the
    rounds after them. Default: 0."""
    lr_floor: float | None = setting(FRACTION, None)
    """Share of lr that the schedule does not fall below. For schedule 'linear', 'cosine' and
    'step'. Default: 0.0."""

    def build_rates(self, section: str, rounds: int) -> "RateSchedule | None":
        """Build the schedule of the learning rate over `rounds` rounds. None if it is constant.

        `section` is "client" or "server", for messages. Raises BadInput for a warmup that is too
        long, or a floor under a constant rate.
        """
        from fedveil.training.server import RateSchedule, RateShape

        shape = RateShape(self.schedule or "constant")
        if shape is RateShape.CONSTANT and not self.warmup and not self.lr_floor:
            return None
        with in_keys(section, shape=f"{section}.schedule", floor=f"{section}.lr_floor"):
            return RateSchedule(shape, rounds, self.warmup or 0, self.lr_floor or 0.0)


Forms = dict[str, dict[str, type[Section]]]
"""By section, then by kind, "" where a section has none; a key before all sections has no forms."""


@cache
def forms_of(recipe: type[Section]) -> Forms:
    """Return the section classes of a recipe, by key and then by kind ("" without kinds).

    A key that holds no section, such as "seed", has {}. The result is shared: do not change it.
    """
    forms: Forms = {}
    for name, field in recipe.model_fields.items():
        forms[name] = {}
        types = [field.annotation]  # a section, or a union in which there may be unions
        while types:
            annotation = types.pop(0)
            if not isinstance(annotation, type):
                types = [*get_args(annotation), *types]
            elif issubclass(annotation, Section):
                kind = annotation.model_fields.get("kind")
                kinds = get_args(kind.annotation) if kind else ()
                forms[name][kinds[0] if len(kinds) == 1 else ""] = annotation
    return forms


def is_key(forms: Forms, path: Sequence[str]) -> bool:
    """Return whether `path` is a section, a key of any of its kinds, or a key of a table in it.

    `path` are the parts of a dotted name, such as ["data", "columns", "age", "low"].

    >>> is_key({"data": {"": Section}}, ["data"])
    True
    """
    section, *rest = path
    if not rest:
        return section in forms
    known = [form.model_fields.get(rest[0]) for form in forms.get(section, {}).values()]
    fields = [field for field in known if field is not None]
    if len(rest) == 1:
        return bool(fields)
    tables = [table_section(field.annotation) for field in fields]
    return len(rest) == 3 and any(t is not None and rest[2] in t.model_fields for t in tables)


def table_section(annotation: Any) -> type[Section] | None:
    """Return the class S of a key of type dict[str, S], as `data.columns` is.

    None for other types.
    """
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is dict:
            inner = get_args(part)[1]
            if isinstance(inner, type) and issubclass(inner, Section):
                return inner
    return None


def unknown_key_text(forms: Forms, path: Sequence[str], kind: str | None = None) -> str:
    """Return the message about an unknown key: which was perhaps meant, or which kinds have it.

    `path` is a section and a key, or one word. `kind` is the section's kind, None if it is unknown.
    """
    section, key = path[0], path[-1]
    if len(path) == 1 or section not in forms:
        near = [*paths_of_key(forms, section, similar=False), *nearest(section, forms)]
        near = near or paths_of_key(forms, section)
        way = meant(near) if near else "fedveil explain lists all sections"
        return f"unknown key {_short_line(section)}: {way}"
    if not forms[section]:
        return f"unknown key {_short_line('.'.join(path))}: {section} has none"
    having = [repr(name) for name, form in forms[section].items() if key in form.model_fields]
    if kind and having:
        way = f"it belongs to kind {' and '.join(having)}"
    else:
        known = [form for name, form in forms[section].items() if kind in (None, name)]
        names = dict.fromkeys(name for form in known for name in form.model_fields)
        near = nearest(key, names) or [name for name in names if key and name.startswith(key)]
        near = [f"{section}.{name}" for name in near]
        way = meant(near) if near else f"fedveil explain {section} lists its keys"
    return f"unknown key {_short_line('.'.join(path))}{f' of kind {kind!r}' if kind else ''}: {way}"


def paths_of_key(forms: Forms, word: str, *, similar: bool = True) -> list[str]:
    """Return "section.key" for every key called `word`, or else for keys of a similar name.

    [] if there are none either. Without `similar` only the same name counts.
    """
    paths: dict[str, dict[str, None]] = {}
    for section, kinds in forms.items():
        for form in kinds.values():
            for name in form.model_fields:
                paths.setdefault(name, {})[f"{section}.{name}"] = None
    names = [word] if word in paths else nearest(word, paths) if similar else []
    return [path for name in names for path in paths[name]]


def _short_line(text: str) -> str:
    """Return a text on one line, cut to 100 characters and "...". An empty text becomes "''"."""
    line = " ".join(text.split()) or "''"
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
