"""Grids of recipes: the axes of a sweep, and the E, T, clips and rates of a planner.

An axis is `section.key=value,value,...`, and there is one cell for each choice. Keys that move
together share an axis: `client.steps:rounds=1:120,2:60` are two cells.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.base.errors import BadInput
from fedveil.runs.recipe import Recipe
from fedveil.runs.recipe_file import load_recipe
from fedveil.runs.sections.section import Section

_MOST_CELLS = 100_000


@dataclass(frozen=True)
class Axis:
    """One key of the recipe, or several joined by ":", and the values it takes, as text."""

    key: str
    values: tuple[str, ...]

    def choice(self, value: str) -> list[tuple[str, str]]:
        """(key, value) for each key of the axis."""
        keys = self.key.split(":")
        parts = value.split(":") if len(keys) > 1 else [value]
        if len(keys) != len(parts):
            raise BadInput(
                f"--grid {self.key}: {value} is {len(parts)} of the {len(keys)} values that go "
                "together: join them by ':'"
            )
        return list(zip(keys, parts, strict=True))


@dataclass(frozen=True)
class Cell:
    """One recipe of the grid, with the value chosen on each axis."""

    choice: tuple[tuple[str, str], ...]
    recipe: Recipe

    @property
    def name(self) -> str:
        """The choices on one line, or "recipe" for a grid without axes."""
        return ", ".join(f"{key}={value}" for key, value in self.choice) or "recipe"

    @property
    def digest(self) -> str:
        """A hash of everything that the result of the recipe depends on."""
        recipe = self.recipe.model_copy(update={"name": ""})
        return hashlib.sha256(recipe.model_dump_json(exclude_defaults=True).encode()).hexdigest()


def axis(text: str) -> Axis:
    """Read `section.key=value,value,...`.

    >>> axis("client.steps=1, 2,12")
    Axis(key='client.steps', values=('1', '2', '12'))
    """
    key, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in _split(rest))
    if not equals or not all(part.strip() for part in key.split(":")):
        raise BadInput(f"--grid {text!r}: write it as section.key=value,value,...")
    if not all(values):
        raise BadInput(f"--grid {text!r} lacks a value: write it as section.key=value,value,...")
    repeated = {value for value in values if values.count(value) > 1}
    if repeated:
        raise BadInput(f"--grid {text!r} has {', '.join(sorted(repeated))} twice")
    return Axis(":".join(part.strip() for part in key.split(":")), values)


def cells(source: str, overrides: Sequence[str], axes: Sequence[Axis]) -> list[Cell]:
    """Every combination of the axes as a checked recipe, the last axis fastest.

    An infinite `budget.epsilon` from which noise is to be calibrated makes a run without noise and
    without a claim.
    """
    keys = [key for a in axes for key in a.key.split(":")]
    for key in keys:
        if keys.count(key) > 1:
            raise BadInput(f"--grid {key} is given twice: give all its values at once")
    count = math.prod(len(a.values) for a in axes)
    if count > _MOST_CELLS:
        raise BadInput(f"the grid has {count:,} cells: at most {_MOST_CELLS:,} are possible")
    found = []
    for values in itertools.product(*(a.values for a in axes)):
        choice = tuple(c for a, value in zip(axes, values, strict=True) for c in a.choice(value))
        settings = [*overrides, *(f"{key}={value}" for key, value in choice)]
        try:
            found.append(Cell(choice, recipe_of(source, settings)))
        except BadInput as e:
            where = ", ".join(f"{key}={value}" for key, value in choice)
            raise BadInput(f"cell {where}: {e}" if where else str(e)) from e
    return found


def recipe_of(source: str, settings: Sequence[str]) -> Recipe:
    """The recipe of one cell."""
    recipe = load_recipe(source, settings)
    budget, calibrated = recipe.budget, getattr(recipe.noise, "multiplier", 0.0) is None
    if budget is None or budget.epsilons or budget.epsilon != math.inf or not calibrated:
        return recipe
    others = [s for s in settings if not s.strip().startswith(("noise.", "budget."))]
    return load_recipe(source, [*others, "noise.kind=none", "budget=none"])


def _split(text: str) -> list[str]:
    """At commas that are not inside brackets."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


PER_ROUND, IN_ALL = "local steps per round (E)", "local steps in all (T)"

_LABELS = {
    "budget.delta": "delta of the budget",
    "budget.epsilon": "epsilon of the budget",
    "client.batch": "records per batch",
    "client.epochs": "local epochs per round",
    "client.lr": "learning rate of clients",
    "client.steps": "local steps per round",
    "clip.value": "clip norm",
    "data.alpha": "alpha of the partition, smaller is less alike",
    "data.clients": "clients",
    "noise.epsilon": "epsilon of one report",
    "noise.multiplier": "noise multiplier, std / clip norm",
    "rounds": "rounds",
    "sample.rate": "share of clients per round",
    "sample.size": "clients per round",
    "seed": "seed",
    "server.lr": "learning rate of the server",
}


def axis_label(key: str) -> str:
    """The label of a key, or of several that move together. A key without a label stays.

    >>> axis_label("client.steps:rounds")
    'local steps per round : rounds'
    """
    return " : ".join(_LABELS.get(part, part) for part in key.split(":"))


STEPS = (1, 2, 3, 4, 6, 12)
ITERATIONS = (12, 24, 36, 60, 120)


@dataclass(frozen=True)
class Space:
    """The values that a planner tries.

    Attributes:
        steps: Local steps per round, E.
        iterations: Local steps in all, T.
        clips: Clip norms. Empty: the recipe's own.
        rates: Learning rates. Empty: the recipe's own.
    """

    steps: tuple[int, ...] = STEPS
    iterations: tuple[int, ...] = ITERATIONS
    clips: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, values in (("steps", self.steps), ("iterations", self.iterations)):
            if not values:
                raise BadInput(f"--{name} is empty: give at least one number")
            if min(values) < 1:
                raise BadInput(f"--{name} has {min(values)}: numbers from 1 on are needed")
        if max(self.steps) > max(self.iterations):
            raise BadInput(
                f"--steps has E = {max(self.steps)}, more than the largest T of --iterations, "
                f"{max(self.iterations)}: E local steps are part of T iterations"
            )

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(E, rounds), each once: max(1, round(T / E)) rounds for every T that E fits in."""
        found = {(e, max(1, round(t / e))) for e in self.steps for t in self.iterations if e <= t}
        return sorted(found)


def candidates(source: str, overrides: Sequence[str], space: Space) -> list[Cell]:
    """The cells of a recipe over the space."""
    pairs = tuple(f"{e}:{rounds}" for e, rounds in space.pairs)
    axes = [Axis(f"{steps_key(source, overrides)}:rounds", pairs)]
    if space.clips:
        axes.append(Axis("clip.value", tuple(map(_number, space.clips))))
    if space.rates:
        axes.append(Axis("client.lr", tuple(map(_number, space.rates))))
    return cells(source, [*overrides, "iterations=none"], axes)


def steps_key(source: str, overrides: Sequence[str]) -> str:
    """The key that sets how long clients work: client.steps or client.epochs."""
    client = recipe_of(source, overrides).client
    if client.kind == "gradient":
        raise BadInput("client.kind 'gradient' takes one step: use client.kind = 'sgd' to plan E")
    return "client.epochs" if getattr(client, "epochs", None) is not None else "client.steps"


def alike(base: Recipe, other: Recipe) -> list[str]:
    """The overrides that give another recipe the base's data, model and budget.

    And the base's cohorts, if both draw them in the same way.
    """
    budget = base.budget
    if budget is None:
        raise BadInput("--against compares recipes at one budget: the first recipe has none")
    shared = [f"seed={base.seed}", f"rounds={base.total_rounds}", "iterations=none"]
    sections: list[tuple[str, Section]] = [("data", base.data), ("model", base.model)]
    if base.sample.kind == other.sample.kind:
        sections.append(("sample", base.sample))
    for name, section in sections:
        for key, value in section.model_dump().items():
            shared.append(f"{name}.{key}={_text(value)}")
    limits = (
        f"budget.epsilon={budget.epsilon!r}" if budget.epsilons is None else "budget.epsilon=none",
        f"budget.epsilons={_text(budget.epsilons)}",
        f"budget.delta={budget.delta!r}",
        f"budget.as_published={_text(budget.as_published)}",
    )
    return [*shared, *limits]


def _number(value: float) -> str:
    """All digits of a number, and none that it does not need."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
