"""Charts as SVG: lines, steps and points with intervals, and a gauge.

A chart is data. `figure` draws it, with a title, a description for screen readers, and the numbers
that are drawn as a table, from which the page's script reads the values under the pointer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from fedveil.pages.html import Content, Markup, concatenate, table, tag, value_text

WIDTH, HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 466, 26, 226
_COLOURS = 8
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_SAME = 1e-12
"""Numbers that differ by less, as a share of them, are one number."""

MAX_STRETCHES = 200
"""Stretches that a long series is cut into: about as many as a chart has places for."""

Point = tuple[float, float]
Interval = tuple[float, float, float]
"""(x, low, high)"""


@dataclass(frozen=True)
class Line:
    """A series of a chart, in the order of x.

    Attributes:
        name: The name in the legend.
        points: Pairs (x, y).
        style: A "step" rises at the previous x, as a charge comes before its round.
        halves: Half the width of each point's interval, NaN where unknown, empty without intervals.
    """

    name: str
    points: Sequence[Point]
    style: Literal["line", "step", "points"] = "line"
    halves: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart to draw.

    Attributes:
        id: The HTML id, which also begins the ids of its parts.
        title: The title.
        x_label, y_label: The names of the axes with their units.
        lines: The series.
        levels: Dashed horizontal lines, as pairs (name, y).
        note: A text below the chart.
        from_zero: Whether the y axis includes 0.
        log_x, log_y: Whether an axis is logarithmic.
        x_names: Labels of the x axis, if x is an index and not a number.
        max_stretches: The number of stretches that a long series is cut into (`thin`).
    """

    id: str
    title: str
    y_label: str
    lines: Sequence[Line]
    x_label: str = "round"
    levels: Sequence[tuple[str, float]] = ()
    note: str = ""
    from_zero: bool = False
    log_x: bool = False
    log_y: bool = False
    x_names: Sequence[str] = ()
    max_stretches: int = MAX_STRETCHES


def chart_rows(figures: Sequence[Markup], beside: Content = None) -> Markup:
    """Return figures in rows of two or three that they fill. Small screens show one per row.

    A single figure shares its row with `beside`, which otherwise comes first.
    """
    if len(figures) == 1:
        return tag("div", *figures, tag("div", beside), class_="pair")
    rows, rest = [], list(figures)
    while rest:
        count = 3 if len(rest) not in (2, 4) else 2
        rows.append(tag("div", *rest[:count], class_="pair three" if count == 3 else "pair"))
        rest = rest[count:]
    return concatenate([beside, *rows])


def figure(chart: Chart) -> Markup:
    """Return a chart as a `<figure>`: legend, SVG picture, note, and its numbers as a table.

    Long series without intervals are thinned first. The legend is there for two lines or more.
    Without points the figure has no picture, and "There is nothing to draw.".
    """
    drawn: list[tuple[Line, list[Interval]]] = []
    for line in chart.lines:
        intervals = [
            (x, y - half, y + half)
            for (x, y), half in zip(line.points, line.halves, strict=False)
            if math.isfinite(half)
        ]
        if line.points and not line.halves:
            line = replace(line, points=thin(line.points, chart.max_stretches))
        if line.points:
            drawn.append((line, intervals))
    legend = None
    if len(drawn) > 1:
        legend = tag("ul", [tag("li", _swatch(k), line.name) for k, (line, _) in enumerate(drawn)])
    caption = tag("figcaption", tag("strong", chart.title), legend)
    note = tag("p", chart.note, class_="note") if chart.note else None
    if not drawn:
        return tag("figure", caption, tag("p", "There is nothing to draw."), note)
    across, up, parts = _axes(chart, drawn)
    for name, value in chart.levels:
        y = up.position(value)
        below = y + (14 if y - _TOP < 14 else -5)
        parts.append(tag("line", class_="mark", x1=_LEFT, x2=_RIGHT, y1=y, y2=y))
        parts.append(tag("text", name, class_="name", x=_LEFT + 6, y=below))
    series = []
    for k, (line, intervals) in enumerate(drawn):
        parts += _line_parts(line, intervals, k, across, up)
        ys = [y for _, y in line.points]
        first, last, least, most = map(value_text, (ys[0], ys[-1], min(ys), max(ys)))
        values = f"from {first} to {last}, between {least} and {most}, {len(ys)} points"
        series.append(f"{line.name}: {values}")
    parts.append(tag("line", class_="cursor", x1=0, x2=0, y1=_TOP, y2=_BOTTOM))
    picture = svg_picture(
        chart.id,
        chart.title,
        f"{chart.y_label} over {chart.x_label}. {', '.join(series)}.",
        *parts,
        tabindex="0",
        data_low=repr(across.smallest),
        data_high=repr(across.largest),
        data_start=repr(across.first_position),
        data_end=repr(across.last_position),
        data_log="1" if across.log else None,
    )
    readout = tag("output", class_="readout", aria_live="polite")
    return tag("figure", caption, picture, readout, note, _numbers_table(chart, drawn), id=chart.id)


def thin(points: Sequence[Point], stretches: int = MAX_STRETCHES) -> list[Point]:
    """Return at most four points from each of `stretches` equal parts of a series in order of x.

    Guarantee: the result has the first, lowest, highest and last point of every part, so that the
    line through it reaches every extreme. A series of at most 4 * `stretches` points is unchanged.

    >>> thin([(x, 9.0 if x == 5 else 0.0) for x in range(9)], stretches=1)
    [(0, 0.0), (5, 9.0), (8, 0.0)]
    """
    if len(points) <= 4 * stretches:
        return list(points)
    short: list[Point] = []
    for k in range(stretches):
        part = points[k * len(points) // stretches : (k + 1) * len(points) // stretches]
        low = min(range(len(part)), key=lambda i: part[i][1])
        high = max(range(len(part)), key=lambda i: part[i][1])
        short += [part[i] for i in sorted({0, low, high, len(part) - 1})]
    return short


def svg_picture(
    id: str,
    title: str,
    description: str,
    *content: Content,
    width: float = WIDTH,
    height: float = HEIGHT,
    **attributes: str | None,
) -> Markup:
    """Return an `<svg>` with a title and a description for screen readers.

    Args:
        id: Begins the ids of title and description. The element itself has no id.
        title: The title.
        description: The description.
        content: The SVG elements.
        width, height: The size of its coordinates.
        attributes: Further attributes of the element, as for `tag`.
    """
    return tag(
        "svg",
        tag("title", title, id=f"{id}-title"),
        tag("desc", description, id=f"{id}-said"),
        *content,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_labelledby=f"{id}-title",
        aria_describedby=f"{id}-said",
        **attributes,
    )


_GAUGE_SIZE, _RADIUS, _GAUGE_X, _GAUGE_Y = (200, 118), 84.0, 100.0, 104.0


def gauge(
    id: str, title: str, description: str, share: float, value: str, *below: Content
) -> Markup:
    """Return a `<figure>` of half a ring, of which `share` (0 to 1) is filled.

    A share that is NaN or infinite leaves the ring empty.

    Args:
        id: The HTML id, which also begins the ids of its parts.
        title: The title for screen readers.
        description: The description for screen readers.
        share: The part of the ring to fill. Values outside 0 to 1 are clamped.
        value: The text inside the ring.
        below: The caption below the ring.
    """
    filled = min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    parts = [tag("path", class_="ring", d=_arc(1.0))]
    if filled > 0:
        parts.append(tag("path", class_="filled", d=_arc(filled)))
    parts.append(tag("text", value, class_="middle value", x=_GAUGE_X, y=_GAUGE_Y - 14))
    width, height = _GAUGE_SIZE
    picture = svg_picture(
        id, title, description, *parts, width=width, height=height, class_="gauge"
    )
    return tag("figure", picture, tag("figcaption", *below), id=id, class_="gauge")


def _arc(share: float) -> str:
    """Return the `d` attribute of the gauge's half ring, from its left end to `share` of it."""
    angle, r = math.pi * (1 - share), _RADIUS
    x, y = _GAUGE_X + r * math.cos(angle), _GAUGE_Y - r * math.sin(angle)
    return f"M{_GAUGE_X - r:.1f} {_GAUGE_Y:.1f}A{r:.0f} {r:.0f} 0 0 1 {x:.1f} {y:.1f}"


@dataclass(frozen=True)
class AxisScale:
    """A linear or logarithmic axis.

    Attributes:
        smallest, largest: The numbers at its two ends.
        first_position, last_position: The SVG coordinates of its two ends.
        log: Whether it is logarithmic.
    """

    smallest: float
    largest: float
    first_position: float
    last_position: float
    log: bool = False

    @classmethod
    def from_values(
        cls,
        values: Sequence[float],
        start: float,
        end: float,
        *,
        zero: bool = False,
        log: bool = False,
    ) -> "AxisScale":
        """Return a scale from `start` to `end` that includes all finite `values` and a margin.

        Args:
            values: The numbers to show.
            start: The SVG coordinate of the smallest number.
            end: The SVG coordinate of the largest number.
            zero: Includes 0.
            log: Makes the scale logarithmic.

        | edge | behaviour |
        |---|---|
        | no finite value | 0 to 1 |
        | one value, or all the same | a margin on both sides; all 0 with `zero`: 0 to 1 |
        | `log` and a value of zero or less | the scale is linear |
        """
        finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        if log and low > 0:
            low, high = (low, high) if high - low > _SAME * high else (low / 2, high * 2)
            edge = (high / low) ** 0.04
            return cls(low / edge, high * edge, start, end, log=True)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if zero and low == high:
            high = 1.0
        if high - low <= _SAME * max(abs(low), abs(high)):
            low, high = low - (abs(low) / 2 or 1.0), high + (abs(high) / 2 or 1.0)
        margin = 0.04 * (high - low)
        return cls(low if zero and low == 0 else low - margin, high + margin, start, end)

    def position(self, value: float) -> float:
        """Return the SVG coordinate of a number, rounded to one decimal.

        Numbers off the scale go to its ends.
        """
        low, high, value = self.smallest, self.largest, min(max(value, self.smallest), self.largest)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        length = self.last_position - self.first_position
        return round(self.first_position + length * (value - low) / (high - low), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Return pairs (number, label): about five round numbers on the scale, or powers of ten.

        >>> AxisScale(0.0, 3e4, 0.0, 1.0).ticks()[:3]
        [(0.0, '0'), (10000.0, '10k'), (20000.0, '20k')]
        """
        low, high = self.smallest, self.largest
        if self.log:
            first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
            values = [10.0**k for k in range(first, last + 1)]
            if last - first <= 2:
                values = [factor * power for power in values for factor in (1, 2, 5)]
            elif last - first > 8:
                values = values[:: -(-(last - first) // 6)]
            values = [value for value in values if low <= value <= high]
        else:
            raw = (high - low) / 5
            power = 10.0 ** math.floor(math.log10(raw))
            step = min(factor * power for factor in _STEPS if factor * power >= raw * (1 - 1e-9))
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            values = [k * step for k in range(first, last + 1)]
            if step > 1e-9:
                values = [round(value, 12) for value in values]
        ticks = []
        for value in values:
            mantissa, e, exponent = f"{value:.6g}".partition("e")
            label = f"{mantissa}e{int(exponent)}" if e else mantissa
            ticks.append((value, f"{value / 1e3:g}k" if 1e4 <= abs(value) < 1e6 else label))
        return ticks


def _axes(
    chart: Chart, drawn: Sequence[tuple[Line, list[Interval]]]
) -> tuple[AxisScale, AxisScale, list[Content]]:
    """Return (scale of x, scale of y, SVG elements of both axes).

    `drawn` are pairs (line of the chart, its intervals).
    """
    xs = [x for line, _ in drawn for x, _ in line.points]
    ys = [value for _, value in chart.levels]
    ys += [y for line, _ in drawn for _, y in line.points]
    least = 0.0 if min(ys) >= 0 else -math.inf  # intervals do not make a loss negative
    for _, intervals in drawn:
        for _, low, high in intervals:
            ys += [max(least, low), max(least, high)]
    if chart.log_y:
        ys = [y for y in ys if y > 0] or ys
    up = AxisScale.from_values(ys, _BOTTOM, _TOP, zero=chart.from_zero, log=chart.log_y)
    if chart.x_names:
        across = AxisScale(-0.5, len(chart.x_names) - 0.5, _LEFT, _RIGHT)
    elif chart.log_x or any(line.style == "points" or line.halves for line, _ in drawn):
        across = AxisScale.from_values(xs, _LEFT, _RIGHT, log=chart.log_x)
    else:
        across = AxisScale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1.0, _LEFT, _RIGHT)
    parts: list[Content] = []
    for value, text in up.ticks():
        y = up.position(value)
        parts.append(tag("line", class_="grid", x1=_LEFT, x2=_RIGHT, y1=y, y2=y))
        parts.append(tag("text", text, class_="end", x=_LEFT - 6, y=y + 4))
    labels = [(float(k), name) for k, name in enumerate(chart.x_names)]
    labels = labels or across.ticks()
    longest = max([len(text) for _, text in labels], default=1)
    for value, text in labels[:: max(1, -(-len(labels) * longest // 55))]:
        x = across.position(value)
        parts.append(tag("line", class_="axis", x1=x, x2=x, y1=_BOTTOM, y2=_BOTTOM + 4))
        parts.append(tag("text", text, class_="middle", x=x, y=_BOTTOM + 18))
    parts.append(tag("line", class_="axis", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM))
    middle = (_LEFT + _RIGHT) / 2
    x_label = f"{chart.x_label}, log scale" if across.log else chart.x_label
    y_label = f"{chart.y_label}, log scale" if up.log else chart.y_label
    parts.append(tag("text", x_label, class_="middle name", x=middle, y=_BOTTOM + 38))
    parts.append(tag("text", y_label, class_="name", x=4, y=14))
    return across, up, parts


def _line_parts(
    line: Line, intervals: Sequence[Interval], number: int, across: AxisScale, up: AxisScale
) -> list[Content]:
    """Return the SVG elements of a line: its path, intervals and markers.

    `number` is its place in the chart, from which its colour and the shape of its markers follow.
    """
    colour = f"s{number % _COLOURS}"
    parts: list[Content] = []
    places = [(across.position(x), up.position(y)) for x, y in line.points]
    corners = places
    if line.style == "step":  # up at the x before, then along
        corners = places[:1]
        for (x0, _), (x1, y1) in pairwise(places):
            corners += [(x0, y1), (x1, y1)]
    if line.style != "points":
        path = "L".join(f"{x:g} {y:g}" for x, y in corners)
        parts.append(tag("path", class_=f"line {colour}", d=f"M{path}"))
    for center, low, high in intervals:
        x, bottom, top = across.position(center), up.position(low), up.position(high)
        path = f"M{x:g} {bottom:g}V{top:g}"
        for value, y in ((low, bottom), (high, top)):
            if up.smallest <= value <= up.largest:  # an end that is off the axis has no cap
                path += f"M{x - 4:g} {y:g}h8"
        parts.append(tag("path", class_=f"interval {colour}", d=path))
    if line.style == "points" or len(places) <= 40:
        parts += [_marker(x, y, number) for x, y in places]
    return parts


def _marker(x: float, y: float, number: int) -> Markup:
    """Return the marker at (x, y) of a chart's line with that number, in its colour and shape."""
    colour = f"point s{number % _COLOURS}"
    match number % 4:
        case 0:
            return tag("circle", class_=colour, cx=x, cy=y, r=3)
        case 1:
            path = f"M{x - 3:g} {y - 3:g}h6v6h-6Z"
        case 2:
            path = f"M{x:g} {y - 4:g}l4 7h-8Z"
        case _:
            path = f"M{x:g} {y - 4:g}l4 4l-4 4l-4 -4Z"
    return tag("path", class_=colour, d=path)


def _swatch(number: int) -> Markup:
    """Return the small picture in the legend of a chart's line with that number."""
    line = tag("path", class_=f"line s{number % _COLOURS}", d="M0 6H24")
    return tag("svg", line, _marker(12, 6, number), viewBox="0 0 24 12", aria_hidden="true")


def _numbers_table(chart: Chart, drawn: Sequence[tuple[Line, list[Interval]]]) -> Markup:
    """Return a folded table of the numbers that are drawn: a row per x, a column per line.

    Lines of the same name get a number after it.
    """
    names = [line.name for line, _ in drawn]
    columns = [n if names.count(n) == 1 else f"{n} ({k + 1})" for k, n in enumerate(names)]
    by_x: dict[float, dict[str, str]] = {}
    for column, (line, intervals) in zip(columns, drawn, strict=True):
        halves = {x: (high - low) / 2 for x, low, high in reversed(intervals)}
        for x, y in line.points:
            half = f" +- {halves[x]:.2g}" if x in halves else ""
            by_x.setdefault(x, dict.fromkeys(columns, "-"))[column] = value_text(y) + half
    rows: list[dict[str, Content]] = []
    for x in sorted(by_x):
        label = chart.x_names[int(x)] if chart.x_names else value_text(x)
        rows.append({chart.x_label: tag("data", label, value=repr(float(x))), **by_x[x]})
    numbers = table(rows, f"{chart.title}: numbers", numbers=True)
    return tag("details", tag("summary", "Numbers"), numbers)
