"""The recipes that a planner chooses from: E x T, and optionally clips and learning rates."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.base.errors import BadInput
from fedveil.runs.recipe import Recipe
from fedveil.runs.sections.section import Section
from fedveil.tuning.axes import Axis, Cell, cells, recipe_of

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
