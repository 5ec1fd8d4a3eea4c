"""The report of a planner: ranked options, why the first wins, a recipe to run, and their page."""

import math
from dataclasses import dataclass
from functools import cached_property

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
from fedveil.tuning.recipe_grid import IN_ALL, PER_ROUND, axis_label
from fedveil.tuning.trials import PreparedCell


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
        noise_std: Standard deviation on a coordinate of the first round's mean update.
        noise_text: `noise_std` for people.
        privacy: The claims, as text.
        remark: How often the option was tried, and whether it is clearly worse.
    """

    steps: int
    rounds: int
    choice: dict[str, str]
    value: float
    half: float
    value_text: str
    noise_std: float
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
        ranked_by: The name of the value that options are ranked by.
        options: Options, best first.
        reasons: Why the first option wins.
        warnings: Notes, such as what the search itself cost.
        recipe_toml: The first option as a TOML file.
    """

    title: str
    ranked_by: str
    options: list[PlanOption]
    reasons: list[str]
    warnings: list[str]
    recipe_toml: str

    @cached_property
    def least_values(self) -> dict[tuple[int, int], float]:
        """The least value by (E, T)."""
        least: dict[tuple[int, int], float] = {}
        for option in self.options:
            place = (option.steps, option.iterations)
            if not math.isnan(option.value):
                least[place] = min(least.get(place, math.inf), option.value)
        return least

    @property
    def axes(self) -> tuple[list[int], list[int]]:
        """(every E, every T) that was tried."""
        return sorted({e for e, _ in self.least_values}), sorted({t for _, t in self.least_values})


def option_of(
    prepared: PreparedCell, value: float, half: float, value_text: str, remark: str = ""
) -> PlanOption:
    """The option of a prepared cell."""
    steps, rounds = prepared.cell.steps_and_rounds
    planned = ("rounds", "client.steps", "client.epochs")
    choice = {k: v for k, v in prepared.cell.choice.items() if k not in planned}
    privacy = "; ".join(map(str, prepared.shown_claims)) or "nothing claimed"
    return PlanOption(
        steps=steps,
        rounds=rounds,
        choice=choice,
        value=value,
        half=half,
        value_text=value_text,
        noise_std=prepared.noise_std,
        noise_text=prepared.noise_text,
        privacy=privacy,
        remark=remark,
    )


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
    first = report.options[0]
    choice = "".join(f", {axis_label(key)} {value}" for key, value in first.choice.items())
    chosen = f"{first.rounds:,} rounds of {first.steps} local steps{choice}"
    charts = [_map(report), _curve(report)]
    return page(
        f"{name}: plan",
        tag("h1", f"{name}: {chosen}"),
        tag("p", report.title, class_="sub"),
        tag(
            "div",
            tag("p", f"Recommended: {chosen}, with {report.ranked_by} {first.value_text}."),
            tag("p", f"Its claim: {first.privacy}."),
            class_="claim",
        ),
        section("Why the first of all options is recommended", listed(report.reasons), id="why"),
        section("Notes", listed(report.warnings), id="notes") if report.warnings else None,
        section("Steps per round and in all", tag("div", *charts, class_="pair"), id="curves"),
        section("All options, best first", _table(report), id="options"),
        section("The recipe", text_block(report.recipe_toml, name), id="recipe"),
        FOOTER,
    )


def _map(report: PlanReport) -> Markup:
    steps, times = report.axes
    first = report.options[0]
    heat = HeatMap(
        id="map",
        title=f"Least {report.ranked_by} by steps per round (E) and in all (T)",
        x_label=IN_ALL,
        y_label=PER_ROUND,
        quantity=report.ranked_by,
        column_names=[str(t) for t in times],
        row_names=[str(e) for e in steps],
        cell_values=[[report.least_values.get((e, t), math.nan) for t in times] for e in steps],
        best_cell=(steps.index(first.steps), times.index(first.iterations)),
        note="The frame marks the recommended choice; what is blank was not tried.",
    )
    return heat_figure(heat)


def _curve(report: PlanReport) -> Markup:
    steps, times = report.axes
    lines = []
    for e in steps:
        best = []
        for t in times:
            tried = [o for o in report.options if (o.steps, o.iterations) == (e, t)]
            known = [o for o in tried if math.isfinite(o.value)]
            best += sorted(known, key=lambda option: option.value)[:1]
        points = [(float(row.iterations), row.value) for row in best]
        lines.append(Line(f"E = {e}", points, "line", [row.half for row in best]))
    positive = all(y > 0 for line in lines for _, y in line.points)
    intervals = any(math.isfinite(option.half) for option in report.options)
    chart = Chart(
        id="frontier",
        title=f"Least {report.ranked_by} by steps in all (T), a line for each E",
        x_label=IN_ALL,
        y_label=f"{report.ranked_by}{', 95 % interval' if intervals else ''}",
        lines=lines,
        log_y=positive,
        note="The least over all other choices. Lines end where nothing more was tried.",
    )
    return figure(chart)


def _table(report: PlanReport) -> Markup:
    rows: list[dict[str, Content]] = []
    for row in report.options[:_MOST_ROWS]:
        half = "" if math.isnan(row.half) else f" +- {row.half:.2g}"
        value = "not tried" if math.isnan(row.value) else number_text(row.value) + half
        rows.append(
            {
                PER_ROUND: row.steps,
                IN_ALL: row.iterations,
                "rounds": row.rounds,
                **{axis_label(key): text for key, text in row.choice.items()},
                report.ranked_by: value,
                "noise on a coordinate of the mean update": row.noise_text,
                "remark": row.remark,
                "claim": row.privacy,
            }
        )
    more = len(report.options) - len(rows)
    return table(rows, f"and {more} more" if more else "All options", wide=True)
