"""What all sections of a recipe share: keys, their ranges, and the words about unknown keys.

A key is `key: type = setting(RANGE, default)`, with a docstring that says what it means and when it
has an effect. Where the key may be left out and its default does not speak for itself, "Left out:
..." ends it. `fedveil explain` and docs/recipes.md are made of these.

A section builds its own part of a training. What that takes is imported when it is built, so that
recipes can be read without it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from fedveil.base.checks import FRACTION, WARMUP, meant, nearest
from fedveil.base.errors import BadArgument, BadInput

if TYPE_CHECKING:
    from fedveil.training.server import RateSchedule

_LONGEST = 100


class Range(Protocol):
    """What a value may be by itself."""

    @property
    def text(self) -> str: ...

    def check(self, name: str, value: Any, /) -> None: ...


def setting(allowed: Range | None = None, default: Any = ..., *, description: str = "") -> Any:
    """A key of a section.

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
def in_keys(section: str = "", **keys: str) -> Iterator[None]:
    """Name the recipe's key where a part that is built refuses an argument.

    Args:
        section: The section whose keys are called like the arguments; "" for none.
        keys: The recipe's keys of all other arguments.
    """
    try:
        yield
    except BadArgument as e:
        prefix = f"{section}." if section else ""
        raise BadInput(e.with_names(lambda argument: keys.get(argument, prefix + argument))) from e


class Section(BaseModel):
    """Frozen, and strict about keys and types."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Put the description of each key on one line."""
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())

    def check_values(self, where: str = "") -> None:
        """Refuse values that are out of range and keys that do not go together.

        Args:
            where: The section's own name, which messages put before each key.
        """
        for key, field in type(self).model_fields.items():
            value = getattr(self, key)
            path = f"{where}.{key}" if where else key
            if isinstance(value, Section):
                value.check_values(path)
            elif value is not None:
                for limits in field.metadata:
                    limits.check(path, value)
        self.check_together()

    def check_together(self) -> None:
        """Refuse keys of this section that contradict each other."""

    def given(self, *keys: str) -> dict[str, Any]:
        """Those of the keys that were not left out, with their values."""
        return {key: value for key in keys if (value := getattr(self, key)) is not None}


RateKind = Literal["constant", "linear", "cosine", "step"]
SCHEDULE = setting(
    default=None,
    description="How lr changes over the rounds: 'linear' and 'cosine' fall to lr_floor of it, "
    "in a line or along half a cosine; 'step' falls to a tenth after half of the rounds, to a "
    "hundredth after three quarters. Left out: 'constant'.",
)
WARMUP_ROUNDS = setting(
    WARMUP,
    None,
    description="Rounds in which the learning rate first grows to lr, in equal steps; the "
    "schedule is for the rounds after them. Left out: 0.",
)
LR_FLOOR = setting(
    FRACTION,
    None,
    description="Share of lr that the schedule does not fall below. For schedule 'linear', "
    "'cosine' and 'step'. Left out: 0.0.",
)


def build_rates(
    section: str, schedule: str | None, warmup: int | None, floor: float | None, rounds: int
) -> "RateSchedule | None":
    """How the learning rate of a section changes over the rounds. None if it does not."""
    from fedveil.training.server import RateSchedule, RateShape

    shape = RateShape(schedule or "constant")
    if shape is RateShape.CONSTANT and not warmup and not floor:
        return None
    with in_keys(section, shape=f"{section}.schedule", floor=f"{section}.lr_floor"):
        return RateSchedule(shape, rounds, warmup or 0, floor or 0.0)


Forms = dict[str, dict[str, type[Section]]]
"""By section, then by kind, "" where a section has none; a key before all sections has no forms."""


def forms_of(recipe: type[Section]) -> Forms:
    """All forms of a recipe's sections."""
    return {name: _forms(field.annotation) for name, field in recipe.model_fields.items()}


def is_key(forms: Forms, path: Sequence[str]) -> bool:
    """Whether there is such a section, or such a key in any kind of it, or of a table in it."""
    section, *rest = path
    if not rest:
        return section in forms
    known = [form.model_fields.get(rest[0]) for form in forms.get(section, {}).values()]
    fields = [field for field in known if field is not None]
    if len(rest) == 1:
        return bool(fields)
    tables = [tabled(field.annotation) for field in fields]
    return len(rest) == 3 and any(t is not None and rest[2] in t.model_fields for t in tables)


def tabled(annotation: Any) -> type[Section] | None:
    """The section of which a key holds one for each name, as `data.columns` does, or None."""
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is dict:
            inner = get_args(part)[1]
            if isinstance(inner, type) and issubclass(inner, Section):
                return inner
    return None


def unknown(forms: Forms, path: Sequence[str], kind: str | None = None) -> str:
    """What is said of a key that there is not: which was meant, or which kinds have it.

    `path` is a section and a key, or one word; `kind` is the section's, where that is known.
    """
    section, key = path[0], path[-1]
    if len(path) == 1 or section not in forms:
        near = nearest(section, forms) or _without_section(forms, section)
        return f"{_line(section)} is no key: {_way(near, 'fedveil explain lists all sections')}"
    if not forms[section]:
        return f"{_line('.'.join(path))} is no key: {section} has none"
    having = [repr(name) for name, form in forms[section].items() if key in form.model_fields]
    if kind and having:
        way = f"it belongs to kind {' and '.join(having)}"
    else:
        known = [form for name, form in forms[section].items() if kind in (None, name)]
        near = nearest(key, dict.fromkeys(name for form in known for name in form.model_fields))
        near = [f"{section}.{name}" for name in near]
        way = _way(near, f"fedveil explain {section} lists its keys")
    return f"{_line('.'.join(path))} is no key{f' of kind {kind!r}' if kind else ''}: {way}"


def _forms(annotation: Any) -> dict[str, type[Section]]:
    if isinstance(annotation, type):
        if not issubclass(annotation, Section):
            return {}
        kind = annotation.model_fields.get("kind")
        names = get_args(kind.annotation) if kind else ()
        return {names[0] if len(names) == 1 else "": annotation}
    return {kind: form for part in get_args(annotation) for kind, form in _forms(part).items()}


def _without_section(forms: Forms, word: str) -> list[str]:
    """The keys that are called so, or nearly so, with the sections that the word lacks."""
    paths: dict[str, dict[str, None]] = {}
    for section, kinds in forms.items():
        for form in kinds.values():
            for name in form.model_fields:
                paths.setdefault(name, {})[f"{section}.{name}"] = None
    names = [word] if word in paths else nearest(word, paths)
    return [path for name in names for path in paths[name]]


def _way(near: list[str], otherwise: str) -> str:
    return meant(near) if near else otherwise


def _line(text: str) -> str:
    line = " ".join(text.split()) or "''"
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
