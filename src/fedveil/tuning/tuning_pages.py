"""The report of a planner and its page, and the page of a sweep, drawn from what it left."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import BadInput
from fedveil.pages.charts import Chart, Line, chart_rows, figure
from fedveil.pages.heat_map import HeatMap, heat_figure
from fedveil.pages.html import (
    FOOTER,
    TEXTS,
    Content,
    Markup,
    bullet_list,
    capitalize_first,
    page,
    section,
    table,
    tag,
    value_text,
)
from fedveil.tuning.recipe_grid import IN_ALL, PER_ROUND, Axis, axis_label
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
        """Return T, the local steps in all rounds."""
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
        """Return the least value by (E, T), over all other choices. Pairs not tried are missing."""
        least: dict[tuple[int, int], float] = {}
        for option in self.options:
            place = (option.steps, option.iterations)
            if not math.isnan(option.value):
                least[place] = min(least.get(place, math.inf), option.value)
        return least

    @property
    def axes(self) -> tuple[list[int], list[int]]:
        """Return (every E, every T) that was tried, both ascending."""
        return sorted({e for e, _ in self.least_values}), sorted({t for _, t in self.least_values})


def option_of(
    prepared: PreparedCell, value: float, half: float, value_text: str, remark: str = ""
) -> PlanOption:
    """Return the option of a prepared cell.

    Args:
        prepared: The cell.
        value: Loss or bound, NaN if it was not tried.
        half: Half the width of the 95 % interval, NaN if there is none.
        value_text: `value` with its interval.
        remark: How often the option was tried, and whether it is clearly worse.
    """
    steps, rounds = prepared.cell.steps_and_rounds
    planned = ("rounds", "client.steps", "client.epochs")
    choice = {k: v for k, v in prepared.cell.choice.items() if k not in planned}
    privacy = "; ".join(map(str, prepared.shown_claims)) or "nothing claimed"
    noise = prepared.noise_std, prepared.noise_text
    return PlanOption(steps, rounds, choice, value, half, value_text, *noise, privacy, remark)


def rounds_text(count: int) -> str:
    """Return "1 round", or "n rounds"."""
    return "1 round" if count == 1 else f"{count} rounds"


_MOST_ROWS = 100


def plan_page(report: PlanReport, name: str) -> bytes:
    """Return the HTML page of a plan, as bytes.

    `name` is the file name of the recommended recipe.
    """
    first = report.options[0]
    choice = "".join(f", {axis_label(key)} {value}" for key, value in first.choice.items())
    chosen = f"{first.rounds:,} rounds of {first.steps} local steps{choice}"
    recommended = f"Recommended: {chosen}, with {report.ranked_by} {first.value_text}."
    reasons = bullet_list(report.reasons)
    charts = [_plan_heat_map(report), _plan_chart(report)]
    recipe = tag("pre", report.recipe_toml, tabindex=0, role="region", aria_label=name)
    return page(
        f"{name}: plan",
        tag("h1", f"{name}: {chosen}"),
        tag("p", report.title, class_="sub"),
        tag("div", tag("p", recommended), tag("p", f"Its claim: {first.privacy}."), class_="claim"),
        section("Why the first of all options is recommended", reasons, id="why"),
        section("Notes", bullet_list(report.warnings), id="notes") if report.warnings else None,
        section("Steps per round and in all", chart_rows(charts), id="curves"),
        section("All options, best first", _options_table(report), id="options"),
        section("The recipe", recipe, id="recipe"),
        FOOTER,
    )


def _plan_heat_map(report: PlanReport) -> Markup:
    """Return a heat map of the least value by E and T, with a frame on the recommended choice."""
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


def _plan_chart(report: PlanReport) -> Markup:
    """Return a chart of the least value over T, with a line for each E."""
    lines = []
    finite = sorted((o for o in report.options if math.isfinite(o.value)), key=lambda o: o.value)
    for e in report.axes[0]:
        # by T, the first of the sorted options is the best
        by_total = {o.iterations: o for o in reversed(finite) if o.steps == e}
        best = [by_total[t] for t in sorted(by_total)]
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


def _options_table(report: PlanReport) -> Markup:
    """Return a table of the best 100 options, with the number of further ones."""
    rows: list[dict[str, Content]] = []
    for row in report.options[:_MOST_ROWS]:
        half = "" if math.isnan(row.half) else f" +- {row.half:.2g}"
        value = "not tried" if math.isnan(row.value) else value_text(row.value) + half
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


Cells = npt.NDArray[np.int64]

_MOST_LINES, _MOST_MAPS = 8, 6


@dataclass(frozen=True)
class SweepResults:
    """The results of a sweep that has ended, read from its directory.

    Attributes:
        axes: The axes of the grid.
        repeat: Repetitions of every cell.
        cell_rows: A row of summary.csv for each cell.
        cost_notes: What all trainings cost together, in sentences.
    """

    axes: tuple[Axis, ...]
    repeat: int
    cell_rows: list[dict[str, str]]
    cost_notes: list[str]

    @classmethod
    def from_folder(cls, folder: Path) -> "SweepResults":
        """Read the results of a sweep from sweep.json and summary.csv.

        Raise BadInput if it has not ended or cannot be read.
        """
        try:
            about = json.loads((folder / "sweep.json").read_text())
            with (folder / "summary.csv").open(newline="") as file:
                cells = list(csv.DictReader(file))
            axes = tuple(Axis(str(key), tuple(map(str, values))) for key, *values in about["axes"])
            notes = [str(note) for note in about["together"]["notes"]]
            results = cls(axes, int(about["repeat"]), cells, notes)
            if len(cells) != math.prod(results.grid_shape) or not results.metric_names:
                raise ValueError("its table is not as its axes say")
        except FileNotFoundError as e:
            raise BadInput(
                f"{e.filename} is missing: the sweep has not ended; the same command continues it"
            ) from e
        except (OSError, ValueError, LookupError, TypeError) as e:
            raise BadInput(f"{folder} holds a sweep that cannot be read: {e}") from e
        return results

    @property
    def grid_shape(self) -> list[int]:
        """Return the number of values on each axis, [] without axes."""
        return [len(axis.choices) for axis in self.axes]

    @property
    def metric_names(self) -> list[str]:
        """Return the names of the test metrics, the loss last."""
        return [name for name in self.cell_rows[0] if f"{name}_half" in self.cell_rows[0]]

    def cell_number(self, cell: int, name: str) -> float:
        """Return the number in column `name` of the row of a cell, NaN if there is none."""
        return _parse_number(self.cell_rows[cell].get(name))

    def choice_of(self, cell: int) -> dict[str, str]:
        """Return the value, as text, of each key of the axes in the cell number `cell`."""
        return {key: self.cell_rows[cell][key] for axis in self.axes for key in axis.joined_keys}

    @cached_property
    def best_cells(self) -> list[int]:
        """Return, for each claim, the number of the cell with the lowest mean loss.

        A claim whose cells all diverged has none.
        """
        best: dict[str, int] = {}
        for k, cell in enumerate(self.cell_rows):
            loss, claim = self.cell_number(k, "loss"), cell.get("claims", "")
            least = self.cell_number(best[claim], "loss") if claim in best else math.inf
            if loss < least:
                best[claim] = k
        return list(best.values())

    @cached_property
    def by_terms(self) -> dict[str, list[int]]:
        """Group the cells that have an epsilon by its terms: delta, unit, neighbours and trust.

        Returns the indices of the cells for each text of terms.
        """
        by_terms: dict[str, list[int]] = {}
        for k, cell in enumerate(self.cell_rows):
            if math.isfinite(self.cell_number(k, "epsilon")):
                label = ", as published, not a guarantee" if cell["as_published"] == "True" else ""
                terms = (
                    f"at delta {self.cell_number(k, 'delta'):g} per {cell['unit']} "
                    f"({cell['neighbours']}, {cell['trust']} trust{label})"
                )
                by_terms.setdefault(terms, []).append(k)
        return by_terms

    @property
    def claims_note(self) -> str:
        """Return a sentence with the terms of all epsilons of the grid, "" if there are none."""
        return f"Claims are epsilon {'; or epsilon '.join(self.by_terms)}." if self.by_terms else ""

    def slices(self, *along: int) -> list[tuple[str, Cells]]:
        """Return pairs (other choices in words, cells along the axes `along`).

        There is one pair for each choice on all other axes. `along` are numbers of axes. The cells
        are an array of cell numbers with one dimension for each of these axes. The words are "" if
        there are no other axes.
        """
        grid = np.arange(len(self.cell_rows)).reshape(self.grid_shape)
        grid = np.moveaxis(grid, along, range(-len(along), 0))
        slices = []
        for cells in grid.reshape(-1, *(self.grid_shape[i] for i in along)):
            places = np.unravel_index(cells.flat[0], self.grid_shape)
            others = [
                f"{axis_label(axis.key)} {axis.choices[place]}"
                for i, (axis, place) in enumerate(zip(self.axes, places, strict=True))
                if i not in along
            ]
            slices.append((", ".join(others), cells))
        return slices


def sweep_page(folder: Path) -> bytes:
    """Return the HTML page of the sweep in `folder`, as bytes.

    Raise BadInput if it is unreadable.
    """
    results = SweepResults.from_folder(folder)
    rows = [_cell_row(results, k) for k in range(len(results.cell_rows))]
    charts = [*_frontier_charts(results), *_axis_charts(results)]
    maps = _heat_maps(results)
    costs = [tag("p", f"{capitalize_first(note)}.") for note in results.cost_notes]
    return page(
        f"{folder.name}: sweep",
        tag("h1", f"{folder.name}: {len(rows)} cells, {results.repeat} repetitions each"),
        tag("p", "Means on the test split with their 95 % intervals.", class_="sub"),
        tag("div", *costs, class_="claim"),
        _recommended_section(results),
        section("Over the grid", chart_rows(charts), id="curves"),
        section("Heat maps", chart_rows(maps), id="maps") if maps else None,
        section("All cells", table(rows, "All cells", wide=True), id="cells"),
        FOOTER,
    )


def _recommended_section(results: SweepResults) -> Markup:
    """Return the section on the best cell for each claim, with the commands that train them."""
    title = "The recommended cell"
    if not results.best_cells:
        return section(title, tag("p", "Every cell diverged."), id="best")
    title += " for each claim" if len(results.best_cells) > 1 else ""
    commands = []
    for k in results.best_cells:
        settings = [f"--set {key}={value}" for key, value in results.choice_of(k).items()]
        commands.append(" ".join(["fedveil run RECIPE", *settings]))
    rows = [_cell_row(results, k) for k in results.best_cells]
    best = table(rows, "The lowest mean test loss among cells of one claim", wide=True)
    return section(title, best, bullet_list(commands), tag("p", TEXTS["best_cell"]), id="best")


def _cell_row(results: SweepResults, cell: int) -> dict[str, Content]:
    """Return cells by heading for the table row of a cell: choices, means with intervals, claim."""
    row: dict[str, Content] = {axis_label(k): v for k, v in results.choice_of(cell).items()}
    for metric in results.metric_names:
        half = results.cell_number(cell, f"{metric}_half")
        text = value_text(results.cell_number(cell, metric))
        row[f"test {metric}"] = text if math.isnan(half) else f"{text} +- {half:.2g}"
    row["claim"] = results.cell_rows[cell].get("claims") or "nothing claimed"
    return row


def _frontier_charts(results: SweepResults) -> list[Markup]:
    """Return charts of the first metric over epsilon, one per group of cells with the same terms.

    Terms are delta, unit, neighbours and trust. For each epsilon the cell with the lowest mean loss
    is drawn. Terms with a single epsilon have no chart.
    """
    charts, metric = [], results.metric_names[0]
    for number, (terms, cells) in enumerate(results.by_terms.items()):
        best: dict[float, int] = {}
        # the first of equal losses stays, as the sort is stable
        for k in sorted(cells, key=lambda k: results.cell_number(k, "loss")):
            best.setdefault(results.cell_number(k, "epsilon"), k)
        if len(best) < 2:
            continue
        chart = Chart(
            id=f"frontier-{number}",
            title=f"Test {metric} over epsilon {terms}",
            x_label="epsilon spent",
            y_label=f"mean {metric} on the test split, 95 % interval",
            lines=[_mean_line(results, f"best cell, {metric}", sorted(best.items()), metric)],
            note="For each epsilon the cell with the lowest mean loss.",
            log_x=True,
        )
        charts.append(figure(chart))
    return charts


def _mean_line(
    results: SweepResults, name: str, placed: Sequence[tuple[float, int]], metric: str
) -> Line:
    """Return a line of cells' means with intervals, without cells that diverged.

    `placed` are pairs (x, number of the cell).
    """
    finite = [(x, k) for x, k in placed if math.isfinite(results.cell_number(k, metric))]
    points = [(x, results.cell_number(k, metric)) for x, k in finite]
    return Line(name, points, "line", [results.cell_number(k, f"{metric}_half") for _, k in finite])


def _axis_charts(results: SweepResults) -> list[Markup]:
    """Return a chart of each metric along the longest axis, with a line for each other choice.

    [] without axes, or if there would be more than eight lines.
    """
    if not results.axes:
        return []
    along = results.grid_shape.index(max(results.grid_shape))
    axis, slices = results.axes[along], results.slices(along)
    if len(slices) > _MOST_LINES:
        return []
    xs = [_parse_number(value) for value in axis.choices]
    numeric = all(map(math.isfinite, xs))
    if not numeric:
        xs = [float(k) for k in range(len(xs))]
    charts = []
    for m, metric in enumerate(results.metric_names):
        lines = [
            _mean_line(
                results, name or metric, sorted(zip(xs, cells.tolist(), strict=True)), metric
            )
            for name, cells in slices
        ]
        chart = Chart(
            id=f"along-{m}",
            title=f"Test {metric} by {axis_label(axis.key)}",
            x_label=axis_label(axis.key),
            y_label=f"mean {metric} on the test split, 95 % interval",
            lines=lines,
            x_names=() if numeric else axis.choices,
            note=results.claims_note,
            log_x=numeric and _ratio(xs) >= 10,
            log_y=_ratio([y for line in lines for _, y in line.points]) >= 30,
        )
        charts.append(figure(chart))
    return charts


def _heat_maps(results: SweepResults) -> list[Markup]:
    """Return heat maps of the first metric over the two longest axes, at most six.

    There is one for each choice on the other axes. [] unless two axes have at least two values.
    """
    shape, metric = results.grid_shape, results.metric_names[0]
    longest = sorted(range(len(shape)), key=lambda i: -shape[i])[:2]
    if len(longest) < 2 or any(shape[i] < 2 for i in longest):
        return []
    down, across = sorted(longest)
    figures = []
    for number, (name, cells) in enumerate(results.slices(down, across)[:_MOST_MAPS]):
        means = [[results.cell_number(k, metric) for k in row] for row in cells.tolist()]
        marked = np.argwhere(np.isin(cells, results.best_cells)).tolist()
        frame = "The frame marks the recommended cell. " if len(marked) == 1 else ""
        heat = HeatMap(
            id=f"map-{number}",
            title=f"Mean test {metric}{f', {name}' if name else ''}",
            x_label=axis_label(results.axes[across].key),
            y_label=axis_label(results.axes[down].key),
            quantity=f"mean test {metric}",
            column_names=results.axes[across].choices,
            row_names=results.axes[down].choices,
            cell_values=[[v if math.isfinite(v) else math.inf for v in row] for row in means],
            best_cell=(marked[0][0], marked[0][1]) if len(marked) == 1 else None,
            note=f"{frame}{results.claims_note}",
        )
        figures.append(heat_figure(heat))
    return figures


def _ratio(values: Sequence[float]) -> float:
    """Return the largest value over the smallest, 0 without values or if one is not positive."""
    return max(values) / min(values) if values and min(values) > 0 else 0.0


def _parse_number(text: Any) -> float:
    """Return `text` as a number, NaN if it is not one."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan
