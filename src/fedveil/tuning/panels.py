"""Panels of lines with their intervals: means over places, levels named at their lines.

Intervals end where the numbers cannot go on (0 and 100 percent) and at the frame; one that reaches
below a logarithmic axis has an arrow there, and a point that diverged a cross at the top. Figures
say so themselves, with the number of repetitions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWN
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Transform

from fedveil.tuning.figures import (
    DASHES,
    SMALL,
    SOFT,
    Stroke,
    aside,
    canvas,
    line_style,
    name_axes,
    stroke,
)
from fedveil.tuning.means import Mean

PERCENT, SHARE, ANYWHERE = (0.0, 100.0), (0.0, 1.0), (-math.inf, math.inf)
"""What numbers cannot leave."""

_LONG = 15
"""A line of more points has a band, not whiskers, and few markers."""
_APART = 0.07
"""Levels that are nearer, as a share of the height, have their names in one place."""


@dataclass(frozen=True)
class Series:
    """Means over places of an axis, under a name that has one stroke in all panels of a figure."""

    name: str
    places: Sequence[float]
    means: Sequence[Mean]
    look: Stroke

    @property
    def long(self) -> bool:
        """Whether there are too many points for whiskers."""
        return len(self.places) > _LONG


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `across` and `up` are their names, with units.

    `levels` are lines that belong to no place; `within` is what the numbers cannot leave.
    """

    series: Sequence[Series]
    across: str
    up: str
    title: str = ""
    levels: Mapping[str, float] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False
    within: tuple[float, float] = ANYWHERE

    @cached_property
    def places(self) -> list[float]:
        """Of all lines, each once, rising."""
        return sorted({place for line in self.series for place in line.places})

    def interval(self, mean: Mean) -> tuple[float, float]:
        """The ends of the interval, or twice the mean if nothing is known of the spread."""
        half = 0.0 if math.isnan(mean.half) else mean.half
        return max(self.within[0], mean.value - half), min(self.within[1], mean.value + half)

    @cached_property
    def heights(self) -> tuple[float, float]:
        """The ends of the y axis. A logarithmic axis ignores the low ends of intervals."""
        means = [m for line in self.series for m in line.means if math.isfinite(m.value)]
        shown = [*(m.value for m in means), *self.levels.values()] or [1.0]
        ends = [end for mean in means for end in self.interval(mean)]
        top = max([*shown, *ends])
        if self.log_y:
            return min(shown) / 2.5, top * 1.5
        bottom = min([*shown, *ends])
        margin = 0.05 * (top - bottom) or 0.05 * abs(top) or 1.0
        return bottom - margin, top + margin

    @property
    def widths(self) -> tuple[float, float]:
        """The ends of the x axis."""
        first, *_, last = [*self.places, *self.places] or [1.0, 1.0]
        if self.log_x:
            factor = (last / first) ** 0.07 if last > first else 2.0
            return first / factor, last * factor
        margin = 0.05 * (last - first) or 1.0
        return first - margin, last + margin


def numbered(lines: Mapping[str, Sequence[Mean]], places: Sequence[float]) -> list[Series]:
    """Lines by name over the same places, each with a stroke of its own."""
    return [Series(name, places, means, stroke(i)) for i, (name, means) in enumerate(lines.items())]


def draw(title: str, said: Sequence[str], panels: Sequence[Panel], columns: int = 1) -> Figure:
    """The panels in rows of `columns`, under a title, the setting, and what the marks are."""
    rows = -(-len(panels) // columns)
    size = (6.4, 3.4 * rows) if columns == 1 else (8.6, 2.8 * rows)
    looks = {line.name: line.look for panel in panels for line in panel.series}
    figure = canvas(title, [*said, _marks(panels)], size, looks)
    axes = figure.subplots(rows, columns, squeeze=False)
    for at, panel in zip(axes.flat, panels, strict=True):
        _fill(at, panel, figure)
    return figure


def _marks(panels: Sequence[Panel]) -> str:
    """What points, intervals, arrows and crosses are."""
    every = [(panel, line, m) for panel in panels for line in panel.series for m in line.means]
    counts = {mean.count for _, _, mean in every}
    if counts <= {1}:
        said = "One run each: nothing is known of the spread."
    else:
        repeats = " or ".join(map(str, sorted(counts)))
        kinds = sorted({"band" if line.long else "whiskers" for _, line, _ in every})
        said = f"Means of {repeats} repetitions; {' or '.join(kinds)}: 95 % interval."
    if any(panel.interval(mean)[0] < panel.heights[0] for panel, _, mean in every):
        said += " Arrow: the interval goes on below the axis."
    if any(not math.isfinite(mean.value) for _, _, mean in every):
        said += " Cross at the top: diverged."
    return said


def _fill(at: Axes, panel: Panel, figure: Figure) -> None:
    name_axes(at, panel.across, panel.up, panel.title)
    at.set(xscale="log" if panel.log_x else "linear", yscale="log" if panel.log_y else "linear")
    at.set(xlim=panel.widths, ylim=panel.heights)
    if len(panel.places) <= _LONG:
        at.xaxis.set_major_locator(FixedLocator(panel.places))
        at.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:g}"))
        at.xaxis.set_minor_locator(NullLocator())
    else:
        at.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for i, line in enumerate(panel.series):
        moved = at.transData if line.long else aside(at, figure, i, len(panel.series))
        _trace(at, panel, line, moved)
    _name_levels(at, panel.levels)


def _trace(at: Axes, panel: Panel, line: Series, moved: Transform) -> None:
    """A line with its intervals, at the places that `moved` has for it."""
    bottom, top = panel.heights
    points = list(zip(line.places, line.means, strict=True))
    known = [(x, mean) for x, mean in points if math.isfinite(mean.value)]
    where = [x for x, _ in known]
    low = [max(bottom, panel.interval(mean)[0]) for _, mean in known]
    high = [panel.interval(mean)[1] for _, mean in known]
    values = [mean.value if math.isfinite(mean.value) else math.nan for mean in line.means]
    style = line_style(line.look)
    if line.long:
        style["markevery"] = len(points) // 8
        at.fill_between(where, low, high, color=line.look.colour, alpha=0.13, linewidth=0)
    else:
        at.vlines(where, low, high, color=line.look.colour, linewidth=1.1, transform=moved)
    at.plot(line.places, values, label=line.name, transform=moved, **style)
    style |= {"linestyle": "none", "clip_on": False, "transform": moved, "markevery": None}
    below = [x for x, mean in known if panel.interval(mean)[0] < bottom]
    at.plot(below, [bottom] * len(below), **style | {"marker": CARETDOWN})
    diverged = [x for x, mean in points if not math.isfinite(mean.value)]
    at.plot(diverged, [top] * len(diverged), **style | {"marker": "x"})
    for artist in (*at.lines, *at.collections):
        artist.set_in_layout(False)


def _name_levels(at: Axes, levels: Mapping[str, float]) -> None:
    """Draw each level with its name at the right. Levels that are near share a place."""
    groups: list[list[tuple[str, float]]] = []
    for i, (name, level) in enumerate(sorted(levels.items(), key=lambda pair: pair[1])):
        at.axhline(level, color=SOFT, linestyle=DASHES[1 + i % 3], linewidth=1.1)
        _, height = at.transAxes.inverted().transform(at.transData.transform((1.0, level)))
        if groups and height - groups[-1][-1][1] < _APART:
            groups[-1].append((name, float(height)))
        else:
            groups.append([(name, float(height))])
    for group in groups:
        at.annotate(
            ",\n".join(name for name, _ in reversed(group)),
            (1.0, sum(height for _, height in group) / len(group)),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            size=SMALL,
            color=SOFT,
        )
