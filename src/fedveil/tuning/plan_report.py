"""The report of a planner: ranked options, why the first wins, a recipe to run, and their page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.base.errors import BadInput
from fedveil.pages.charts import Chart, Line, figure
from fedveil.pages.heat_map import HeatMap, heat_figure
from fedveil.pages.html import (
    FOOTER,
    Content,
    Markup,
    listed,
    number_text,
    page,
    section,
    table,
    tag,
    text_block,
)
from fedveil.runs.recipe import Recipe
from fedveil.runs.recipe_file import to_toml
from fedveil.tuning.recipe_grid import IN_ALL, PER_ROUND, Cell, axis_label
from fedveil.tuning.trials import PreparedCell

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
    return f"# chosen by fedveil plan, from {how}\n" + to_toml(recipe.model_dump())


_MOST_ROWS = 100


def plan_page(report: PlanReport, name: str) -> bytes:
    """The page of a plan. `name` is the file name of the recommended recipe."""
    first = report.rows[0]
    choice = "".join(f", {axis_label(key)} {value}" for key, value in first.choice.items())
    chosen = f"{first.rounds:,} rounds of {first.steps} local steps{choice}"
    charts = [_map(report), _curve(report)]
    return page(
        f"{name}: plan",
        tag("h1", f"{name}: {chosen}"),
        tag("p", report.title, class_="sub"),
        tag(
            "div",
            tag("p", f"Recommended: {chosen}, with {report.measure} {first.value_text}."),
            tag("p", f"Its claim: {first.privacy}."),
            class_="claim",
        ),
        section("Why the first of all options is recommended", listed(report.why), id="why"),
        section("Notes", listed(report.warnings), id="notes") if report.warnings else None,
        section("Steps per round and in all", tag("div", *charts, class_="pair"), id="curves"),
        section("All options, best first", _table(report), id="options"),
        section("The recipe", text_block(report.recipe, name), id="recipe"),
        FOOTER,
    )


def _map(report: PlanReport) -> Markup:
    steps, times = axes_of(report)
    first = report.rows[0]
    heat = HeatMap(
        id="map",
        title=f"Least {report.measure} by steps per round (E) and in all (T)",
        x_label=IN_ALL,
        y_label=PER_ROUND,
        quantity=report.measure,
        column_names=[str(t) for t in times],
        row_names=[str(e) for e in steps],
        grid=[[report.heat.get((e, t), math.nan) for t in times] for e in steps],
        best=(steps.index(first.steps), times.index(first.iterations)),
        note="The frame marks the recommended choice; what is blank was not tried.",
    )
    return heat_figure(heat)


def _curve(report: PlanReport) -> Markup:
    steps, times = axes_of(report)
    lines = []
    for e in steps:
        best = [row for t in times if (row := _least(report.rows, e, t)) is not None]
        points = [(float(row.iterations), row.value) for row in best]
        lines.append(Line(f"E = {e}", points, "line", [row.half for row in best]))
    positive = all(y > 0 for line in lines for _, y in line.points)
    chart = Chart(
        id="frontier",
        title=f"Least {report.measure} by steps in all (T), a line for each E",
        x_label=IN_ALL,
        y_label=f"{report.measure}{', 95 % interval' if _intervals(report) else ''}",
        lines=lines,
        log_y=positive,
        note="The least over all other choices. Lines end where nothing more was tried.",
    )
    return figure(chart)


def axes_of(report: PlanReport) -> tuple[list[int], list[int]]:
    """E and T that were looked at."""
    return sorted({e for e, _ in report.heat}), sorted({t for _, t in report.heat})


def _least(rows: Sequence[PlanOption], steps: int, iterations: int) -> PlanOption | None:
    here = [r for r in rows if (r.steps, r.iterations) == (steps, iterations)]
    known = [row for row in here if math.isfinite(row.value)]
    return min(known, key=lambda row: row.value, default=None)


def _intervals(report: PlanReport) -> bool:
    return any(math.isfinite(row.half) for row in report.rows)


def _table(report: PlanReport) -> Markup:
    rows: list[dict[str, Content]] = []
    for row in report.rows[:_MOST_ROWS]:
        half = "" if math.isnan(row.half) else f" +- {row.half:.2g}"
        value = "not tried" if math.isnan(row.value) else number_text(row.value) + half
        rows.append(
            {
                PER_ROUND: row.steps,
                IN_ALL: row.iterations,
                "rounds": row.rounds,
                **{axis_label(key): text for key, text in row.choice.items()},
                report.measure: value,
                "noise on a coordinate of the mean update": row.noise_text,
                "remark": row.remark,
                "claim": row.privacy,
            }
        )
    more = len(report.rows) - len(rows)
    return table(rows, f"and {more} more" if more else "All options", wide=True)
