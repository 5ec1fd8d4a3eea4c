"""What a planner reports: ranked options, why the first wins, and a recipe to run."""

import math
from dataclasses import dataclass

from fedveil.base.errors import BadInput
from fedveil.runs import toml
from fedveil.runs.recipe import Recipe
from fedveil.tuning.axes import Cell
from fedveil.tuning.prepared_cell import PreparedCell

_STEPS_KEYS = ("client.steps", "client.epochs")


@dataclass(frozen=True)
class PlanOption:
    """One option of a report.

    Attributes:
        steps: Local steps per round, E.
        rounds: Rounds.
        choice: Other keys and their values.
        value: Loss or bound, NaN if the option was not tried.
        half: Half the width of the loss's 95 % interval, NaN if there is none.
        value_text: `value` with its interval, for people.
        noise: Standard deviation on a coordinate of the first round's mean update.
        noise_text: `noise` for people.
        privacy: The claims, as text.
        remark: How often the option was tried, and whether it is clearly worse.
    """

    steps: int
    rounds: int
    choice: dict[str, str]
    value: float
    half: float
    value_text: str
    noise: float
    noise_text: str
    privacy: str
    remark: str = ""

    @property
    def iterations(self) -> int:
        return self.steps * self.rounds


@dataclass
class PlanReport:
    """The result of planning.

    Attributes:
        title: One line.
        measure: The name of the value that options are ranked by.
        rows: Options, best first.
        why: Reasons for the first option.
        warnings: Notes, such as what the search itself cost.
        recipe: The first option as a TOML file.
    """

    title: str
    measure: str
    rows: list[PlanOption]
    why: list[str]
    warnings: list[str]
    recipe: str

    @property
    def heat(self) -> dict[tuple[int, int], float]:
        """The least value by (E, T)."""
        found: dict[tuple[int, int], float] = {}
        for row in self.rows:
            at = (row.steps, row.iterations)
            if not math.isnan(row.value):
                found[at] = min(found.get(at, math.inf), row.value)
        return found


def row_of(
    prepared: PreparedCell, value: float, half: float, value_text: str, remark: str = ""
) -> PlanOption:
    """The option of a prepared cell."""
    steps, rounds = pair_of(prepared.cell)
    choice = {k: v for k, v in prepared.cell.choice if k not in ("rounds", *_STEPS_KEYS)}
    private = "; ".join(map(str, prepared.claims)) or "nothing claimed"
    return PlanOption(
        steps=steps,
        rounds=rounds,
        choice=choice,
        value=value,
        half=half,
        value_text=value_text,
        noise=prepared.noise,
        noise_text=prepared.noise_text,
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


def rounds_text(count: int) -> str:
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
