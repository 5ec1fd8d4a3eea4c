"""The one style of everything that is drawn as a PNG: figures, and panels of lines in them.

A figure has a title, and below it the setting and what belongs to its epsilons. Axes are named in
words with units. Lines differ in colour, marker and dashes, so that grey print keeps them apart.
The legend is below the panels and covers nothing. PNGs are on white, in sizes that print well.

Panels have means over places with their intervals, and levels named at their lines. Intervals end
where the numbers cannot go on (0 and 100 percent) and at the frame. One that reaches below a
logarithmic axis has an arrow there, and a point that diverged a cross at the top. Figures say so
themselves, with the number of repetitions.
"""

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.markers import CARETDOWN
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation, Transform

from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.tuning.repetitions import Mean

matplotlib.use("Agg")


COLOURS = ("#0b5c97", "#c14b00", "#00724f", "#8a3d80", "#7a5a00", "#b0003a", "#4b5563", "#007a8a")
"""Those of the reports: dark enough for thin lines on white."""
INK, SOFT, GRID = "#1b1f24", "#444b55", "#d3d8de"

MARKERS = "os^DvPX*<>phd"
DASHES = ("-", "--", "-.", ":")

TEXT, SMALL = 9.0, 8.5
_TITLE = 11.0
_EDGE, _TITLE_LINE, _SMALL_LINE, _LEGEND_LINE = 0.1, 0.22, 0.165, 0.2
"""Margin and heights of lines, in inches."""
_TITLE_LETTERS, _SMALL_LETTERS = 11.0, 16.2
"""Letters to the inch, at most."""
_HANDLE = 8
"""How many letters fit in what a legend has beside a name."""
_ASIDE, _SPREAD = 2.5, 16.0
"""How far the whiskers of two lines, and those of all, are apart at most, in points."""
_DPI = 130


@dataclass(frozen=True)
class Stroke:
    """The colour, marker and dashes of a line."""

    colour: str
    marker: str
    dashes: str


def stroke(number: int) -> Stroke:
    """Return stroke `number`, counted from 0. The first eight differ in colour, 13 in marker.

    Larger numbers start again.
    """
    turn, place = divmod(number, len(COLOURS))
    return Stroke(
        COLOURS[place], MARKERS[number % len(MARKERS)], DASHES[(place + turn) % len(DASHES)]
    )


def canvas(
    title: str,
    notes: Sequence[str],
    size: tuple[float, float],
    looks: Mapping[str, Stroke] | None = None,
) -> Figure:
    """Return a matplotlib figure without axes: title and notes at the top, legend at the bottom.

    Axes that the caller adds with `figure.subplots` are laid out in the space between.

    Args:
        title: The title.
        notes: Paragraphs under the title, wrapped to the width.
        size: (width, height) in inches, the height without title, notes and legend.
        looks: Names and strokes of the legend, which is omitted for fewer than two.
    """
    width, height = size
    inside, names = width - 2 * _EDGE, looks or {}
    head = textwrap.wrap(title, int(_TITLE_LETTERS * inside))
    lines = [part for text in notes for part in textwrap.wrap(text, int(_SMALL_LETTERS * inside))]
    above = 1.5 * _EDGE + len(head) * _TITLE_LINE + len(lines) * _SMALL_LINE
    columns = int(_SMALL_LETTERS * inside) // (max(map(len, names), default=0) + _HANDLE)
    columns = min(max(1, columns), max(1, len(names)))
    below = _EDGE + _LEGEND_LINE * -(-len(names) // columns) if len(names) > 1 else 0.0
    whole = above + height + below
    between = ConstrainedLayoutEngine(
        rect=(0, below / whole, 1, height / whole), h_pad=0.06, w_pad=0.06
    )
    figure = Figure(figsize=(width, whole), layout=between, facecolor="white")
    left, top = _EDGE / width, 1 - _EDGE / whole
    figure.text(
        left,
        top,
        "\n".join(head),
        va="top",
        size=_TITLE,
        weight="bold",
        color=INK,
        parse_math=False,
    )
    top -= len(head) * _TITLE_LINE / whole
    figure.text(
        left,
        top,
        "\n".join(lines),
        va="top",
        size=SMALL,
        linespacing=1.3,
        color=SOFT,
        parse_math=False,
    )
    if len(names) > 1:
        legend = figure.legend(
            handles=[
                Line2D([], [], label=name, **line_style(look)) for name, look in names.items()
            ],
            loc="lower left",
            bbox_to_anchor=(0, 0),
            ncols=columns,
            fontsize=SMALL,
            labelcolor=INK,
            frameon=False,
            handlelength=3,
            borderaxespad=0.3,
        )
        legend.set_in_layout(False)
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def line_style(look: Stroke) -> dict[str, Any]:
    """Return keyword arguments of `Axes.plot` for a line with that stroke."""
    drawn = {"color": look.colour, "linestyle": look.dashes, "marker": look.marker}
    return {**drawn, "markersize": 4.5, "linewidth": 1.4}


def name_axes(at: Axes, across: str, up: str, title: str = "") -> None:
    """Label the axes `at`, set their title, draw a light grid, and hide the top and right frame."""
    at.set_xlabel(across, size=TEXT, color=INK, parse_math=False)
    at.set_ylabel(up, size=TEXT, color=INK, parse_math=False)
    at.set_title(title, loc="left", size=TEXT, weight="bold", color=INK, parse_math=False)
    at.tick_params(labelsize=SMALL, labelcolor=INK)
    at.grid(color=GRID, linewidth=0.6)
    at.set_axisbelow(True)
    at.spines[["top", "right"]].set_visible(False)


def offset_transform(at: Axes, figure: Figure, number: int, count: int) -> Transform:
    """Return the data transform of the axes `at`, shifted sideways for line `number` of `count`.

    Numbers start at 0. The shift, a few points, keeps the intervals of different lines apart.
    """
    points = min(_ASIDE, _SPREAD / count) * (number - (count - 1) / 2)
    return at.transData + ScaledTranslation(points / 72, 0, figure.dpi_scale_trans)


def png(figure: Figure) -> bytes:
    """Return the figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def claim_terms(claims: Sequence[PrivacyClaim]) -> list[str]:
    """Return the terms of the claims' epsilons as sentences "Epsilon ...", each once."""
    covered = ["" if claim.covers == "updates" else f" of {claim.covers}" for claim in claims]
    pairs = zip(covered, claims, strict=True)
    return list(dict.fromkeys(f"Epsilon{of} {claim.full_terms}." for of, claim in pairs))


PERCENT, SHARE, ANYWHERE = (0.0, 100.0), (0.0, 1.0), (-math.inf, math.inf)
"""What numbers cannot leave."""

_LONG = 15
"""A line of more points has a band, not whiskers, and few markers."""
_APART = 0.07
"""Levels that are nearer, as a share of the height, have their names in one place."""


@dataclass(frozen=True)
class Series:
    """Means at places on the x axis.

    Attributes:
        name: The name in the legend, the same stroke in all panels of a figure.
        places: The x of each mean.
        means: The means.
        look: The stroke.
    """

    name: str
    places: Sequence[float]
    means: Sequence[Mean]
    look: Stroke

    @property
    def is_long(self) -> bool:
        """Return whether there are more than 15 points: then a band is drawn, not whiskers."""
        return len(self.places) > _LONG


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        series: The lines.
        across, up: Labels of the x axis and the y axis, with units.
        title: The title.
        levels: Horizontal lines by name.
        log_x, log_y: Whether an axis is logarithmic.
        within: The range that the numbers cannot leave, at which intervals are cut.
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
        """Return the x of all lines, sorted, each once."""
        return sorted({place for line in self.series for place in line.places})

    def interval(self, mean: Mean) -> tuple[float, float]:
        """Return (low, high) of a mean's interval, cut to `within`.

        Both are the mean if its interval is unknown.
        """
        half = 0.0 if math.isnan(mean.half) else mean.half
        return max(self.within[0], mean.value - half), min(self.within[1], mean.value + half)

    @cached_property
    def heights(self) -> tuple[float, float]:
        """Return (low, high) of the y axis, with a margin.

        A logarithmic axis ignores the low ends of intervals.
        """
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
        """Return (low, high) of the x axis, with a margin."""
        first, *_, last = [*self.places, *self.places] or [1.0, 1.0]
        if self.log_x:
            factor = (last / first) ** 0.07 if last > first else 2.0
            return first / factor, last * factor
        margin = 0.05 * (last - first) or 1.0
        return first - margin, last + margin


def series_of_means(lines: Mapping[str, Sequence[Mean]], places: Sequence[float]) -> list[Series]:
    """Return a series for each name, with different strokes. The x of each mean is in `places`."""
    return [Series(name, places, means, stroke(i)) for i, (name, means) in enumerate(lines.items())]


def draw(title: str, notes: Sequence[str], panels: Sequence[Panel], columns: int = 1) -> Figure:
    """Return a figure of panels with a legend and an explanation of its marks.

    No file is written.

    Args:
        title: The title.
        notes: Texts below the title, such as the setting.
        panels: The panels, row by row. Their number must be a multiple of `columns`.
        columns: Panels per row.
    """
    rows = -(-len(panels) // columns)
    size = (6.4, 3.4 * rows) if columns == 1 else (8.6, 2.8 * rows)
    looks = {line.name: line.look for panel in panels for line in panel.series}
    figure = canvas(title, [*notes, _marks_text(panels)], size, looks)
    axes = figure.subplots(rows, columns, squeeze=False)
    for at, panel in zip(axes.flat, panels, strict=True):
        _draw_panel(at, panel, figure)
    return figure


def _marks_text(panels: Sequence[Panel]) -> str:
    """Return sentences that explain the points, intervals, arrows and crosses of the panels."""
    every = [(panel, line, m) for panel in panels for line in panel.series for m in line.means]
    counts = {mean.count for _, _, mean in every}
    if counts <= {1}:
        notes = "One run each: nothing is known of the spread."
    else:
        repeats = " or ".join(map(str, sorted(counts)))
        kinds = sorted({"band" if line.is_long else "whiskers" for _, line, _ in every})
        notes = f"Means of {repeats} repetitions; {' or '.join(kinds)}: 95 % interval."
    if any(panel.interval(mean)[0] < panel.heights[0] for panel, _, mean in every):
        notes += " Arrow: the interval goes on below the axis."
    if any(not math.isfinite(mean.value) for _, _, mean in every):
        notes += " Cross at the top: diverged."
    return notes


def _draw_panel(at: Axes, panel: Panel, figure: Figure) -> None:
    """Draw a panel on the axes `at`: labels, scales, ticks, lines and levels."""
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
        moved = at.transData if line.is_long else offset_transform(at, figure, i, len(panel.series))
        _draw_line(at, panel, line, moved)
    _draw_levels(at, panel.levels)


def _draw_line(at: Axes, panel: Panel, line: Series, moved: Transform) -> None:
    """Draw a series on the axes `at`: its means, with their intervals.

    An arrow at the bottom stands for an interval that goes below the panel, a cross at the top for
    a mean that is not finite. `moved` is the transform of everything but the band of intervals that
    a long series has.
    """
    bottom, top = panel.heights
    points = list(zip(line.places, line.means, strict=True))
    known = [(x, mean) for x, mean in points if math.isfinite(mean.value)]
    where = [x for x, _ in known]
    low = [max(bottom, panel.interval(mean)[0]) for _, mean in known]
    high = [panel.interval(mean)[1] for _, mean in known]
    values = [mean.value if math.isfinite(mean.value) else math.nan for mean in line.means]
    style = line_style(line.look)
    if line.is_long:
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


def _draw_levels(at: Axes, levels: Mapping[str, float]) -> None:
    """Draw each level with its name at the right. Levels that are near share a label."""
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
            parse_math=False,
        )
