"""The page of a sweep, drawn from what it left: frontiers, heat maps, and the best cells."""

import csv
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    sentence,
    table,
    tag,
)
from fedveil.tuning.recipe_grid import Axis, axis_label

_MOST_LINES, _MOST_MAPS = 8, 6
_NOTHING = "nothing claimed"
_CHOICE = (
    "Among cells with the same claim, the one with the lowest mean test loss. Cells whose "
    "intervals overlap are not told apart by this sweep, and the best of several noisy numbers "
    "looks better than it is: repeat it with other seeds before you rely on it."
)


@dataclass(frozen=True)
class Swept:
    """A sweep as its directory tells it: axes, a row per cell, and what all of it cost."""

    folder: Path
    axes: tuple[Axis, ...]
    repeat: int
    rows: list[dict[str, str]]
    cost: list[str]

    @classmethod
    def at(cls, folder: Path) -> "Swept":
        """Read a sweep that has ended."""
        try:
            about = json.loads((folder / "sweep.json").read_text())
            with (folder / "summary.csv").open(newline="") as file:
                rows = list(csv.DictReader(file))
            axes = tuple(Axis(str(key), tuple(map(str, values))) for key, *values in about["axes"])
            cost = [str(note) for note in about["together"]["notes"]]
            page = cls(folder, axes, int(about["repeat"]), rows, cost)
            if len(rows) != math.prod(len(axis.values) for axis in axes) or not page.metrics:
                raise ValueError("its table is not as its axes say")
        except FileNotFoundError as e:
            raise BadInput(
                f"{e.filename} is missing: the sweep has not ended; the same command continues it"
            ) from e
        except (OSError, ValueError, LookupError, TypeError) as e:
            raise BadInput(f"{folder} holds a sweep that cannot be read: {e}") from e
        return page

    @property
    def metrics(self) -> list[str]:
        """What was measured, the task's own metric first."""
        return [name for name in self.rows[0] if f"{name}_half" in self.rows[0]]

    def value(self, cell: int, name: str) -> float:
        """A number of a cell, NaN if there is none."""
        return _number(self.rows[cell].get(name))

    def choice(self, cell: int) -> dict[str, str]:
        """What was chosen on the axes."""
        keys = [key for axis in self.axes for key in axis.key.split(":")]
        return {key: self.rows[cell][key] for key in keys}

    @property
    def best(self) -> dict[str, int]:
        """The cell with the lowest mean loss for each claim."""
        best: dict[str, int] = {}
        for k, row in enumerate(self.rows):
            loss, claim = self.value(k, "loss"), row.get("claims", "")
            if math.isfinite(loss) and (
                claim not in best or loss < self.value(best[claim], "loss")
            ):
                best[claim] = k
        return best


def sweep_page(folder: Path) -> bytes:
    """Everything about one sweep."""
    swept = Swept.at(folder)
    rows = [_row(swept, k) for k in range(len(swept.rows))]
    charts = [*_frontiers(swept), *_lines(swept)]
    maps = _maps(swept)
    return page(
        f"{folder.name}: sweep",
        tag("h1", f"{folder.name}: {len(swept.rows)} cells, {swept.repeat} repetitions each"),
        tag("p", "Means on the test split with their 95 % intervals.", class_="sub"),
        tag("div", *(tag("p", f"{sentence(s)}.") for s in swept.cost), class_="claim"),
        _recommended(swept),
        section("Over the grid", tag("div", *charts, class_="pair"), id="curves"),
        section("Heat maps", tag("div", *maps, class_="pair"), id="maps") if maps else None,
        section("All cells", table(rows, "All cells", wide=True), id="cells"),
        FOOTER,
    )


def _recommended(swept: Swept) -> Markup:
    best = swept.best
    rows = [_row(swept, k) for k in best.values()]
    if not rows:
        return section("The recommended cell", tag("p", "Every cell diverged."), id="best")
    title = "The recommended cell" if len(rows) == 1 else "The recommended cell for each claim"
    settings = [
        "fedveil run RECIPE "
        + " ".join(f"--set {key}={value}" for key, value in swept.choice(k).items())
        for k in best.values()
    ]
    return section(
        title,
        table(rows, "The lowest mean test loss among cells of one claim", wide=True),
        listed(settings),
        tag("p", _CHOICE),
        id="best",
    )


def _row(swept: Swept, cell: int) -> dict[str, Content]:
    row: dict[str, Content] = {}
    for key, value in swept.choice(cell).items():
        row[axis_label(key)] = value
    for metric in swept.metrics:
        half = swept.value(cell, f"{metric}_half")
        text = number_text(swept.value(cell, metric))
        row[f"test {metric}"] = text if math.isnan(half) else f"{text} +- {half:.2g}"
    row["claim"] = swept.rows[cell].get("claims") or _NOTHING
    return row


def _frontiers(swept: Swept) -> list[Markup]:
    """Metric over epsilon, where cells differ in it and promise the same otherwise."""
    charts = []
    for number, (terms, cells) in enumerate(_kinds(swept).items()):
        if len({swept.value(k, "epsilon") for k in cells}) < 2:
            continue
        metric = swept.metrics[0]
        best = [
            min(same, key=lambda k: swept.value(k, "loss")) for same in _by_epsilon(swept, cells)
        ]
        placed = [(swept.value(k, "epsilon"), k) for k in best]
        chart = Chart(
            id=f"frontier-{number}",
            title=f"Test {metric} over epsilon {terms}",
            x_label="epsilon spent",
            y_label=f"mean {metric} on the test split, 95 % interval",
            lines=[_line(swept, f"best cell, {metric}", placed, metric)],
            note="For each epsilon the cell with the lowest mean loss.",
            log_x=True,
        )
        charts.append(figure(chart))
    return charts


def _kinds(swept: Swept) -> dict[str, list[int]]:
    """The cells that claim something, by what belongs to their epsilons."""
    kinds: dict[str, list[int]] = {}
    for k, row in enumerate(swept.rows):
        if math.isfinite(swept.value(k, "epsilon")):
            label = ", as published, not a guarantee" if row["as_published"] == "True" else ""
            terms = (
                f"at delta {swept.value(k, 'delta'):g} per {row['unit']} "
                f"({row['neighbours']}, {row['trust']} trust{label})"
            )
            kinds.setdefault(terms, []).append(k)
    return kinds


def _promise(swept: Swept) -> str:
    """What belongs to the epsilons of the grid."""
    kinds = _kinds(swept)
    return f"Claims are epsilon {'; or epsilon '.join(kinds)}." if kinds else ""


def _by_epsilon(swept: Swept, cells: Sequence[int]) -> list[list[int]]:
    ordered = sorted(cells, key=lambda k: swept.value(k, "epsilon"))
    groups = itertools.groupby(ordered, key=lambda k: swept.value(k, "epsilon"))
    return [list(same) for _, same in groups]


def _line(swept: Swept, name: str, placed: Sequence[tuple[float, int]], metric: str) -> Line:
    """Means of cells at their places, with intervals, without those that diverged."""
    kept = [(x, k) for x, k in placed if math.isfinite(swept.value(k, metric))]
    points = [(x, swept.value(k, metric)) for x, k in kept]
    return Line(name, points, "line", [swept.value(k, f"{metric}_half") for _, k in kept])


def _lines(swept: Swept) -> list[Markup]:
    """Every metric along the longest axis, a line for every choice on the others."""
    if not swept.axes:
        return []
    along = max(range(len(swept.axes)), key=lambda i: len(swept.axes[i].values))
    axis, others = swept.axes[along], _others(swept, (along,))
    if len(others) > _MOST_LINES:
        return []
    places = _places(axis)
    xs = places or [float(k) for k in range(len(axis.values))]
    charts = []
    for m, metric in enumerate(swept.metrics):
        lines = []
        for name, fixed in others:
            cells = [_index(swept, {**fixed, along: p}) for p in range(len(xs))]
            placed = sorted(zip(xs, cells, strict=True))
            lines.append(_line(swept, name or metric, placed, metric))
        spread = places is not None and min(xs) > 0 and max(xs) / min(xs) >= 10
        chart = Chart(
            id=f"along-{m}",
            title=f"Test {metric} by {axis_label(axis.key)}",
            x_label=axis_label(axis.key),
            y_label=f"mean {metric} on the test split, 95 % interval",
            lines=lines,
            x_names=() if places else axis.values,
            note=_promise(swept),
            log_x=spread,
            log_y=_wide([y for line in lines for _, y in line.points]),
        )
        charts.append(figure(chart))
    return charts


def _maps(swept: Swept) -> list[Markup]:
    """Heat maps over the two longest axes, one for every choice on the others."""
    longest = sorted(range(len(swept.axes)), key=lambda i: -len(swept.axes[i].values))[:2]
    if len(longest) < 2 or any(len(swept.axes[i].values) < 2 for i in longest):
        return []
    across, down = sorted(longest, reverse=True)
    best = set(swept.best.values())
    figures = []
    for number, (name, fixed) in enumerate(_others(swept, (across, down))[:_MOST_MAPS]):
        grid = [
            [
                _index(swept, {**fixed, down: i, across: j})
                for j in range(len(swept.axes[across].values))
            ]
            for i in range(len(swept.axes[down].values))
        ]
        marked = [(i, j) for i, row in enumerate(grid) for j, k in enumerate(row) if k in best]
        metric = swept.metrics[0]
        frame = "The frame marks the recommended cell. " if len(marked) == 1 else ""
        heat = HeatMap(
            id=f"map-{number}",
            title=f"Mean test {metric}{f', {name}' if name else ''}",
            x_label=axis_label(swept.axes[across].key),
            y_label=axis_label(swept.axes[down].key),
            quantity=f"mean test {metric}",
            column_names=swept.axes[across].values,
            row_names=swept.axes[down].values,
            grid=[[_heat(swept.value(k, metric)) for k in row] for row in grid],
            best=marked[0] if len(marked) == 1 else None,
            note=f"{frame}{_promise(swept)}",
        )
        figures.append(heat_figure(heat))
    return figures


def _others(swept: Swept, but: Sequence[int]) -> list[tuple[str, dict[int, int]]]:
    """Every choice on the other axes: in words, and as places by axis."""
    rest = [i for i in range(len(swept.axes)) if i not in but]
    slices = []
    for places in itertools.product(*(range(len(swept.axes[i].values)) for i in rest)):
        fixed = dict(zip(rest, places, strict=True))
        choices = [
            f"{axis_label(swept.axes[i].key)} {swept.axes[i].values[p]}" for i, p in fixed.items()
        ]
        slices.append((", ".join(choices), fixed))
    return slices


def _index(swept: Swept, places: dict[int, int]) -> int:
    """The row of a cell: the last axis is the fastest."""
    place = 0
    for i, axis in enumerate(swept.axes):
        place = place * len(axis.values) + places[i]
    return place


def _places(axis: Axis) -> list[float] | None:
    """Places of values on an axis of numbers, or None if one is not a number."""
    numbers = [_number(value) for value in axis.values]
    return numbers if all(map(math.isfinite, numbers)) else None


def _wide(values: Sequence[float]) -> bool:
    """Whether values are told apart in powers of ten only."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= 30


def _heat(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan
