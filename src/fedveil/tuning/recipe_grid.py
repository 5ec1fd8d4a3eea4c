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
from fedveil.runs.recipe import Recipe, load_recipe

STEPS = (1, 2, 3, 4, 6, 12)
ITERATIONS = (12, 24, 36, 60, 120)
PER_ROUND, IN_ALL = "local steps per round (E)", "local steps in all (T)"

_MOST_CELLS = 100_000
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
    "sample.rate": "share of clients per round",
    "sample.size": "clients per round",
    "server.lr": "learning rate of the server",
}


@dataclass(frozen=True)
class Axis:
    """One key of the recipe, or several joined by ":", and the values it takes, as text."""

    key: str
    choices: tuple[str, ...]

    @property
    def joined_keys(self) -> list[str]:
        """The keys that move together."""
        return self.key.split(":")

    def assign(self, value: str) -> dict[str, str]:
        """The value of each key of the axis."""
        keys = self.joined_keys
        parts = value.split(":") if len(keys) > 1 else [value]
        if len(keys) != len(parts):
            raise BadInput(
                f"--grid {self.key}: {value} is {len(parts)} of the {len(keys)} values that go "
                "together: join them by ':'"
            )
        return dict(zip(keys, parts, strict=True))


@dataclass(frozen=True)
class Cell:
    """One recipe of the grid, with the value chosen for each key of the axes."""

    choice: dict[str, str]
    recipe: Recipe

    @property
    def name(self) -> str:
        """The choices on one line, or "recipe" for a grid without axes."""
        return ", ".join(f"{key}={value}" for key, value in self.choice.items()) or "recipe"

    @property
    def steps_and_rounds(self) -> tuple[int, int]:
        """(E, rounds)."""
        client = self.recipe.client
        steps = getattr(client, "epochs", None) or getattr(client, "steps", None) or 1
        return int(steps), self.recipe.total_rounds

    @property
    def digest(self) -> str:
        """A hash of everything that the result of the recipe depends on."""
        recipe = self.recipe.model_copy(update={"name": ""})
        return hashlib.sha256(recipe.model_dump_json(exclude_defaults=True).encode()).hexdigest()


def axis(text: str) -> Axis:
    """Read `section.key=value,value,...`.

    >>> axis("client.steps=1, 2,12")
    Axis(key='client.steps', choices=('1', '2', '12'))
    """
    key, equals, rest = text.partition("=")
    keys, values = [part.strip() for part in key.split(":")], _split(rest)
    if not equals or not all(keys):
        raise BadInput(f"--grid {text!r}: write it as section.key=value,value,...")
    if not all(values):
        raise BadInput(f"--grid {text!r} lacks a value: write it as section.key=value,value,...")
    repeated = {value for value in values if values.count(value) > 1}
    if repeated:
        raise BadInput(f"--grid {text!r} has {', '.join(sorted(repeated))} twice")
    return Axis(":".join(keys), tuple(values))


def cells(source: str, overrides: Sequence[str], axes: Sequence[Axis]) -> list[Cell]:
    """Every combination of the axes as a checked recipe, the last axis fastest.

    An infinite `budget.epsilon` from which noise is to be calibrated makes a run without noise and
    without a claim.
    """
    keys = [key for a in axes for key in a.joined_keys]
    for key in keys:
        if keys.count(key) > 1:
            raise BadInput(f"--grid {key} is given twice: give all its values at once")
    count = math.prod(len(a.choices) for a in axes)
    if count > _MOST_CELLS:
        raise BadInput(f"the grid has {count:,} cells: at most {_MOST_CELLS:,} are possible")
    grid = []
    for values in itertools.product(*(a.choices for a in axes)):
        choice: dict[str, str] = {}
        for a, value in zip(axes, values, strict=True):
            choice |= a.assign(value)
        settings = [f"{key}={value}" for key, value in choice.items()]
        try:
            grid.append(Cell(choice, recipe_of(source, [*overrides, *settings])))
        except BadInput as e:
            raise BadInput(f"cell {', '.join(settings)}: {e}" if settings else str(e)) from e
    return grid


def recipe_of(source: str, settings: Sequence[str]) -> Recipe:
    """The recipe of one cell."""
    recipe = load_recipe(source, settings)
    budget, calibrated = recipe.budget, getattr(recipe.noise, "multiplier", 0.0) is None
    if budget is None or budget.epsilons or budget.epsilon != math.inf or not calibrated:
        return recipe
    others = [s for s in settings if not s.strip().startswith(("noise.", "budget."))]
    return load_recipe(source, [*others, "noise.kind=none", "budget=none"])


def _split(text: str) -> list[str]:
    """Split at commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def axis_label(key: str) -> str:
    """The label of a key, or of several that move together. A key without a label stays.

    >>> axis_label("client.steps:rounds")
    'local steps per round : rounds'
    """
    return " : ".join(_LABELS.get(part, part) for part in key.split(":"))


@dataclass(frozen=True)
class Space:
    """The values that a planner tries.

    Attributes:
        steps_per_round: Local steps per round, E.
        steps_in_all: Local steps in all, T.
        clips: Clip norms. Empty: the recipe's own.
        rates: Learning rates. Empty: the recipe's own.
    """

    steps_per_round: tuple[int, ...] = STEPS
    steps_in_all: tuple[int, ...] = ITERATIONS
    clips: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        options = {"steps": self.steps_per_round, "iterations": self.steps_in_all}
        for name, values in options.items():
            if not values:
                raise BadInput(f"--{name} is empty: give at least one number")
            if min(values) < 1:
                raise BadInput(f"--{name} has {min(values)}: numbers from 1 on are needed")
        if max(self.steps_per_round) > max(self.steps_in_all):
            raise BadInput(
                f"--steps has E = {max(self.steps_per_round)}, more than the largest T of "
                f"--iterations, {max(self.steps_in_all)}: E local steps are part of T iterations"
            )

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(E, rounds), each once: max(1, round(T / E)) rounds for every T that E fits in."""
        every = itertools.product(self.steps_per_round, self.steps_in_all)
        return sorted({(e, max(1, round(t / e))) for e, t in every if e <= t})


def candidates(source: str, overrides: Sequence[str], space: Space) -> list[Cell]:
    """The cells of a recipe over the space."""
    client = recipe_of(source, overrides).client
    if client.kind == "gradient":
        raise BadInput("client.kind 'gradient' takes one step: use client.kind = 'sgd' to plan E")
    length = "epochs" if getattr(client, "epochs", None) is not None else "steps"
    pairs = tuple(f"{e}:{rounds}" for e, rounds in space.pairs)
    axes = [Axis(f"client.{length}:rounds", pairs)]
    for key, numbers in (("clip.value", space.clips), ("client.lr", space.rates)):
        if numbers:
            axes.append(Axis(key, tuple(map(_number, numbers))))
    return cells(source, [*overrides, "iterations=none"], axes)


def alike(base: Recipe, other: Recipe) -> list[str]:
    """The overrides that give another recipe the base's data, model and budget.

    And the base's cohorts, if both draw them in the same way.
    """
    budget = base.budget
    if budget is None:
        raise BadInput("--against compares recipes at one budget: the first recipe has none")
    shared = [f"seed={base.seed}", f"rounds={base.total_rounds}", "iterations=none"]
    sections = {"data": base.data, "model": base.model, "sample": base.sample}
    for name, section in sections.items():
        if name != "sample" or base.sample.kind == other.sample.kind:
            values = section.model_dump()
            shared += [f"{name}.{key}={_text(value)}" for key, value in values.items()]
    epsilon = budget.epsilon if budget.epsilons is None else None
    shared += [f"budget.epsilon={_text(epsilon)}", f"budget.epsilons={_text(budget.epsilons)}"]
    return [
        *(*shared, f"budget.delta={_text(budget.delta)}"),
        f"budget.as_published={_text(budget.as_published)}",
    ]


def _number(value: float) -> str:
    """All digits of a number, and none that it does not need."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
