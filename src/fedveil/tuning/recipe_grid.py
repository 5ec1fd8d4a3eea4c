"""Grids of recipes: the axes of a sweep, and the E, T, clips and rates of a planner.

An axis is `section.key=value,value,...`, and there is one cell for each choice. Keys that move
together share an axis: `client.steps:rounds=1:120,2:60` are two cells.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.base.checks import COUNT, Each
from fedveil.base.errors import BadInput
from fedveil.pages.html import TEXTS
from fedveil.runs.recipe import Recipe, load_recipe, to_toml

STEPS = (1, 2, 3, 4, 6, 12)
ITERATIONS = (12, 24, 36, 60, 120)
PER_ROUND, IN_ALL = "local steps per round (E)", "local steps in all (T)"

_MOST_CELLS = 100_000


@dataclass(frozen=True)
class Axis:
    """A key of the recipe, or several joined by ":", and its values as text.

    Attributes:
        key: "section.key", or "section.key:section.key" for keys that change together.
        choices: The values. Those of several keys are joined by ":" in the same order.
    """

    key: str
    choices: tuple[str, ...]

    @property
    def joined_keys(self) -> list[str]:
        """Return the keys of the axis, which change together."""
        return self.key.split(":")

    def assign(self, value: str) -> dict[str, str]:
        """Return the value of each key of the axis, from a choice.

        Raise BadInput if `value` has another number of parts than there are keys.
        """
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
    """One recipe of a grid.

    Attributes:
        choice: The value of each key of the axes.
        recipe: The recipe with these values.
    """

    choice: dict[str, str]
    recipe: Recipe

    @property
    def name(self) -> str:
        """Return the choices as "key=value, key=value", or "recipe" for a grid without axes."""
        return ", ".join(f"{key}={value}" for key, value in self.choice.items()) or "recipe"

    @property
    def steps_and_rounds(self) -> tuple[int, int]:
        """Return (E, rounds). E is local epochs or steps per round, 1 if the client has neither."""
        client = self.recipe.client
        steps = getattr(client, "epochs", None) or getattr(client, "steps", None) or 1
        return int(steps), self.recipe.rounds

    @property
    def digest(self) -> str:
        """Return a SHA-256 hash of the recipe without its name, in hexadecimal."""
        recipe = self.recipe.model_copy(update={"name": ""})
        return hashlib.sha256(recipe.model_dump_json(exclude_defaults=True).encode()).hexdigest()


def axis(text: str) -> Axis:
    """Parse one axis of a grid, `section.key=value,value,...`.

    Keys joined by ":" change together. Commas in square brackets do not separate values. Raises
    BadInput if the text is malformed or repeats a value. Whether a recipe has the key is not
    checked.

    >>> axis("client.steps=1, 2,12")
    Axis(key='client.steps', choices=('1', '2', '12'))
    """
    key, equals, rest = text.partition("=")
    keys, values = [part.strip() for part in key.split(":")], _split_at_commas(rest)
    if not equals or not all(keys):
        raise BadInput(f"--grid {text!r}: write it as section.key=value,value,...")
    if not all(values):
        raise BadInput(f"--grid {text!r} lacks a value: write it as section.key=value,value,...")
    repeated = {value for value in values if values.count(value) > 1}
    if repeated:
        raise BadInput(f"--grid {text!r} has {', '.join(sorted(repeated))} twice")
    return Axis(":".join(keys), tuple(values))


def cells(source: str, overrides: Sequence[str], axes: Sequence[Axis]) -> list[Cell]:
    """Return every combination of the axes as a cell with a checked recipe, the last axis fastest.

    Without axes there is one cell. Raise BadInput if a key is on two axes, a recipe is refused, or
    there are more than 100,000 cells.

    Args:
        source: A shipped recipe or a .toml file.
        overrides: Settings "section.key=value" of every cell.
        axes: The axes of the grid. They come after the overrides.
    """
    keys = [key for a in axes for key in a.joined_keys]
    for key in keys:
        if keys.count(key) > 1:
            raise BadInput(f"--grid {key} is given twice: give all its values at once")
    count = math.prod(len(a.choices) for a in axes)
    if count > _MOST_CELLS:
        raise BadInput(f"the grid has {count:,} cells: at most {_MOST_CELLS:,} are allowed")
    grid = []
    for values in itertools.product(*(a.choices for a in axes)):
        choice: dict[str, str] = {}
        for a, value in zip(axes, values, strict=True):
            choice |= a.assign(value)
        settings = [f"{key}={value}" for key, value in choice.items()]
        try:
            grid.append(Cell(choice, load_cell_recipe(source, [*overrides, *settings])))
        except BadInput as e:
            raise BadInput(f"cell {', '.join(settings)}: {e}" if settings else str(e)) from e
    return grid


def load_cell_recipe(source: str, settings: Sequence[str]) -> Recipe:
    """Load a recipe with `settings`, each "section.key=value".

    If `budget.epsilon` is infinite and the noise would be calibrated from it, the recipe has no
    noise and no budget. Raise BadInput if the recipe is refused.
    """
    recipe = load_recipe(source, settings)
    budget, calibrated = recipe.budget, getattr(recipe.noise, "multiplier", 0.0) is None
    if budget is None or budget.epsilons or budget.epsilon != math.inf or not calibrated:
        return recipe
    others = [s for s in settings if not s.strip().startswith(("noise.", "budget."))]
    return load_recipe(source, [*others, "noise.kind=none", "budget=none"])


def _split_at_commas(text: str) -> list[str]:
    """Return the parts of `text` between commas outside square brackets, stripped."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def axis_label(key: str) -> str:
    """Return the label of a key, or of several joined by ":". Unknown keys are their own label.

    >>> axis_label("client.steps:rounds")
    'local steps per round : rounds'
    """
    return " : ".join(TEXTS["axis_labels"].get(part, part) for part in key.split(":"))


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
        Each(COUNT).check("--grid steps", list(self.steps_per_round))
        Each(COUNT).check("--grid iterations", list(self.steps_in_all))
        if max(self.steps_per_round) > max(self.steps_in_all):
            raise BadInput(
                f"--grid steps has E = {max(self.steps_per_round)}, more than the largest T of "
                f"iterations, {max(self.steps_in_all)}: E local steps are part of T iterations"
            )

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Return pairs (local steps per round, rounds), sorted, each once.

        They are (E, max(1, round(T / E))) for every E and T of the space with E <= T.
        """
        every = itertools.product(self.steps_per_round, self.steps_in_all)
        return sorted({(e, max(1, round(t / e))) for e, t in every if e <= t})


def candidates(source: str, overrides: Sequence[str], space: Space) -> list[Cell]:
    """Return one cell for each (E, rounds), clip norm and learning rate of the space.

    E are epochs if the recipe's clients count epochs, and otherwise steps. Raise BadInput if its
    clients take a single gradient step, or a recipe is refused.
    """
    client = load_cell_recipe(source, overrides).client
    if client.kind == "gradient":
        raise BadInput("client.kind 'gradient' takes one step: use client.kind = 'sgd' to plan E")
    length = "epochs" if getattr(client, "epochs", None) is not None else "steps"
    pairs = tuple(f"{e}:{rounds}" for e, rounds in space.pairs)
    axes = [Axis(f"client.{length}:rounds", pairs)]
    for key, numbers in (("clip.value", space.clips), ("client.lr", space.rates)):
        if numbers:
            axes.append(Axis(key, tuple(map(_number_text, numbers))))
    return cells(source, [*overrides, "iterations=none"], axes)


def shared_settings(base: Recipe, other: Recipe) -> list[str]:
    """Return settings "section.key=value" that make recipe `other` comparable with `base`.

    They have the data, model, budget, seed and rounds of `base`, and its sampling if both sample in
    the same way. Raise BadInput if `base` has no budget.
    """
    budget = base.budget
    if budget is None:
        raise BadInput("--against compares recipes at one budget: the first recipe has none")
    shared = [f"seed={base.seed}", f"rounds={base.rounds}", "iterations=none"]
    sections = {"data": base.data, "model": base.model, "sample": base.sample}
    for name, section in sections.items():
        if name != "sample" or base.sample.kind == other.sample.kind:
            values = section.model_dump()
            shared += [f"{name}.{key}={_toml_text(value)}" for key, value in values.items()]
    epsilon = budget.epsilon if budget.epsilons is None else None
    limits = {"epsilon": epsilon, "epsilons": budget.epsilons, "delta": budget.delta}
    limits["as_published"] = budget.as_published
    return shared + [f"budget.{key}={_toml_text(value)}" for key, value in limits.items()]


def _number_text(value: float) -> str:
    """Return a number as `%g`, or as `repr` if `%g` would lose digits."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _toml_text(value: object) -> str:
    """Return a value as `--set` reads it: "none", "true", "false", or its `str`."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def check_budget(recipe: Recipe) -> None:
    """Raise BadInput if the recipe has a budget and its noise is set directly.

    Options are compared at one claim, so that noise must follow from the budget.
    """
    given = [
        key for key in ("multiplier", "epsilon") if getattr(recipe.noise, key, None) is not None
    ]
    if recipe.budget is not None and given:
        raise BadInput(
            "options are compared at one claim, so their noise must follow from budget.epsilon: "
            f"leave noise.{given[0]} out, or use fedveil sweep (always so for noise.kind "
            "'two-point')"
        )


def recipe_text(recipe: Recipe, how: str) -> str:
    """Return a recipe as TOML, below a comment "chosen by fedveil plan, from HOW"."""
    return f"# chosen by fedveil plan, from {how}\n" + to_toml(recipe.model_dump())
