"""What a planner reports: ranked options, why the first wins, and a recipe to run."""

import math
from dataclasses import dataclass

from fedveil.errors import BadInput
from fedveil.runs import toml
from fedveil.runs.recipe import Recipe
from fedveil.tuning.axes import Cell
from fedveil.tuning.prepared_cell import PreparedCell

_STEPS_KEYS = ("client.steps", "client.epochs")


@dataclass(frozen=True)
class PlanOption:
    """One option of a report, best first: `value` is its loss or bound, `told` the same for people.

    `value` is NaN for an option that was not tried; `half` is half the width of the loss's 95 %
    interval, NaN where there is none.
    """

    steps: int
    rounds: int
    choice: dict[str, str]
    value: float
    half: float
    told: str
    noise: float
    told_noise: str
    privacy: str
    remark: str = ""

    @property
    def iterations(self) -> int:
        return self.steps * self.rounds


@dataclass
class PlanReport:
    """What a planner found: ranked options, why the first wins, and what the search cost.

    `measure` is what options are ranked by, `recipe` the winner as a file that `fedveil run` takes,
    `heat` the least of the measure by (E, T).
    """

    title: str
    measure: str
    rows: list[PlanOption]
    why: list[str]
    warnings: list[str]
    recipe: str

    @property
    def heat(self) -> dict[tuple[int, int], float]:
        found: dict[tuple[int, int], float] = {}
        for row in self.rows:
            at = (row.steps, row.iterations)
            if not math.isnan(row.value):
                found[at] = min(found.get(at, math.inf), row.value)
        return found


def row_of(
    prepared: PreparedCell, value: float, half: float, told: str, remark: str = ""
) -> PlanOption:
    """An option with its value, as number and for people."""
    steps, rounds = pair_of(prepared.cell)
    choice = {k: v for k, v in prepared.cell.choice if k not in ("rounds", *_STEPS_KEYS)}
    private = "; ".join(map(str, prepared.claims)) or "nothing claimed"
    return PlanOption(
        steps=steps,
        rounds=rounds,
        choice=choice,
        value=value,
        half=half,
        told=told,
        noise=prepared.noise,
        told_noise=prepared.told_noise,
        privacy=private,
        remark=remark,
    )


def pair_of(cell: Cell) -> tuple[int, int]:
    """(E, rounds)."""
    client = cell.recipe.client
    steps = getattr(client, "epochs", None) or getattr(client, "steps", None) or 1
    return int(steps), cell.recipe.total_rounds


def place_of(cell: Cell) -> tuple[int, int]:
    """(E, T)."""
    steps, rounds = pair_of(cell)
    return steps, steps * rounds


def rounds_told(count: int) -> str:
    """A number of rounds in words."""
    return "1 round" if count == 1 else f"{count} rounds"


def check_budget(recipe: Recipe) -> None:
    """Options are compared at one claim: their noise must follow from it."""
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
    """A recipe as `fedveil run` takes it, with where it comes from."""
    return f"# chosen by fedveil plan, from {how}\n" + toml.dumps(recipe.model_dump())
