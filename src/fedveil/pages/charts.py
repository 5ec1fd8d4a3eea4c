"""Charts as SVG: lines, steps, bands and points with intervals, and a gauge.

A chart is data. `figure` draws it, with a title, a description for screen readers, and the numbers
that are drawn as a table, from which the page's script reads the values under the pointer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from fedveil.pages.html import Content, Markup, folded, number_text, table, tag

WIDTH, HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 466, 26, 226
_COLOURS = 8
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_SAME = 1e-12
"""Numbers that differ by less, as a share of them, are one number."""

MAX_STRETCHES = 200
"""Stretches that a long series is cut into: about as many as a chart has places for."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A series in the order of x.

    Attributes:
        name: Its name in the legend.
        points: Pairs (x, y).
        style: A "step" changes at the x before, as a charge comes before its round.
        halves: Half the widths of the points' intervals, NaN or absent where unknown.
        band: Triples (x, low, high) along the line.
    """

    name: str
    points: Sequence[Point]
    style: Literal["line", "step", "points"] = "line"
    halves: Sequence[float] = ()
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart to draw.

    Attributes:
        id: Its name in the page, which begins the ids of its parts.
        title: Its title.
        x_label, y_label: The names of the axes with their units.
        lines: The series.
        levels: Levels to compare the series with, by name.
        note: What a reader has to know.
        from_zero: Whether the y axis includes 0.
        log_x, log_y: Whether an axis is logarithmic.
        x_names: Labels of the x axis, if x is an index and not a number.
        max_stretches: The number of stretches that a long series is cut into (`thinned`).
    """

    id: str
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    levels: Sequence[tuple[str, float]] = ()
    note: str = ""
    from_zero: bool = False
    log_x: bool = False
    log_y: bool = False
    x_names: Sequence[str] = ()
    max_stretches: int = MAX_STRETCHES


def figure(chart: Chart) -> Markup:
    """Draw the chart with its caption, note and numbers, or say that there is nothing to draw."""
    lines = []
    for line in chart.lines:
        if line.points and not line.halves:
            points = thinned(line.points, chart.max_stretches)
            line = Line(line.name, points, line.style, (), line.band)
        if line.points:
            lines.append(line)
    legend = None
    if len(lines) > 1:
        legend = tag("ul", [tag("li", _swatch(k), line.name) for k, line in enumerate(lines)])
    caption = tag("figcaption", tag("strong", chart.title), legend)
    note = tag("p", chart.note, class_="note") if chart.note else None
    if not lines:
        return tag("figure", caption, tag("p", "There is nothing to draw."), note)
    across, up = _scales(chart, lines)
    parts = _axes(chart, across, up)
    for name, value in chart.levels:
        y = up(value)
        level = tag("line", class_="mark", x1=_LEFT, x2=_RIGHT, y1=_number(y), y2=_number(y))
        below = _number(y + (14 if y - _TOP < 14 else -5))
        parts += [level, tag("text", name, class_="name", x=_LEFT + 6, y=below)]
    series = []
    for k, line in enumerate(lines):
        parts += _line_parts(line, k, across, up)
        ys = [y for _, y in line.points]
        first, last, least, most = map(number_text, (ys[0], ys[-1], min(ys), max(ys)))
        values = f"from {first} to {last}, between {least} and {most}, {len(ys)} points"
        series.append(f"{line.name}: {values}")
    parts.append(tag("line", class_="cursor", x1=0, x2=0, y1=_TOP, y2=_BOTTOM))
    picture = frame(
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
    return tag("figure", caption, picture, readout, note, _numbers(chart, lines), id=chart.id)


def finite(points: Sequence[tuple[float, float | None]]) -> list[Point]:
    """The points that can be drawn."""
    return [(x, y) for x, y in points if y is not None and math.isfinite(y) and math.isfinite(x)]


def thinned(points: Sequence[Point], stretches: int = MAX_STRETCHES) -> list[Point]:
    """At most four points from each of `stretches` parts of a series in the order of x.

    Guarantee: the result has the first, lowest, highest and last point of every stretch, so that
    the line through it reaches every extreme.

    >>> thinned([(x, 9.0 if x == 5 else 0.0) for x in range(9)], stretches=1)
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


def frame(
    id: str,
    title: str,
    description: str,
    *content: Content,
    width: float = WIDTH,
    height: float = HEIGHT,
    **attributes: str | None,
) -> Markup:
    """An SVG picture, named and described for those who do not see it."""
    return tag(
        "svg",
        tag("title", title, id=f"{id}-title"),
        tag("desc", description, id=f"{id}-said"),
        *content,
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        role="img",
        aria_labelledby=f"{id}-title",
        aria_describedby=f"{id}-said",
        **attributes,
    )


_GAUGE_WIDTH, _GAUGE_HEIGHT, _RADIUS, _GAUGE_X, _GAUGE_Y = 200, 118, 84.0, 100.0, 104.0
_LOW = 0.1
"""The share below which a gauge is drawn as a warning."""


def gauge(
    id: str, title: str, description: str, share: float, value: str, *below: Content
) -> Markup:
    """Half a ring, full at a `share` of 1 and empty at 0, with `value` in it and words below.

    A share that is no number is drawn as empty.
    """
    left = min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    parts = [tag("path", class_="ring", d=_arc(1.0))]
    if left > 0:
        parts.append(tag("path", class_="left low" if left < _LOW else "left", d=_arc(left)))
    parts.append(tag("text", value, class_="middle value", x=_GAUGE_X, y=_GAUGE_Y - 14))
    width, height = _GAUGE_WIDTH, _GAUGE_HEIGHT
    picture = frame(id, title, description, *parts, width=width, height=height, class_="gauge")
    return tag("figure", picture, tag("figcaption", *below), id=id, class_="gauge")


def _arc(share: float) -> str:
    """The ring's path from its left end over the top, as far as the share goes."""
    angle, r = math.pi * (1 - share), _RADIUS
    x, y = _GAUGE_X + r * math.cos(angle), _GAUGE_Y - r * math.sin(angle)
    return f"M{_GAUGE_X - r:.1f} {_GAUGE_Y:.1f}A{r:.0f} {r:.0f} 0 0 1 {x:.1f} {y:.1f}"


@dataclass(frozen=True)
class AxisScale:
    """Maps the numbers of an axis to positions on the page, on a linear or `log` scale."""

    smallest: float
    largest: float
    first_position: float
    last_position: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The position of a number, clamped to the scale."""
        low, high, value = self.smallest, self.largest, min(max(value, self.smallest), self.largest)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.first_position + (self.last_position - self.first_position) * (value - low) / (
            high - low
        )

    def ticks(self) -> list[float]:
        """About five round numbers within the scale, or powers of ten."""
        low, high = self.smallest, self.largest
        if self.log:
            first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
            decades = [10.0**k for k in range(first, last + 1)]
            if last - first <= 2:
                decades = [factor * power for power in decades for factor in (1, 2, 5)]
            elif last - first > 8:
                decades = decades[:: -(-(last - first) // 6)]
            return [value for value in decades if low <= value <= high]
        raw = (high - low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = min(factor * power for factor in _STEPS if factor * power >= raw * (1 - 1e-9))
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [round(k * step, 12) if step > 1e-9 else k * step for k in range(first, last + 1)]


def fitted(
    values: Sequence[float], start: float, end: float, *, zero: bool = False, log: bool = False
) -> AxisScale:
    """A scale that includes all finite `values`, `zero` if required, and a margin.

    | edge | behaviour |
    |---|---|
    | no finite value | 0 to 1 |
    | one value, or all the same | a margin on both sides; all 0 with `zero`: 0 to 1 |
    | `log` and a value of zero or less | the scale is not in powers of ten |
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if log and low > 0:
        low, high = (low, high) if high - low > _SAME * high else (low / 2, high * 2)
        edge = (high / low) ** 0.04
        return AxisScale(low / edge, high * edge, start, end, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if zero and low == high:
        high = 1.0
    if high - low <= _SAME * max(abs(low), abs(high)):
        low, high = low - (abs(low) / 2 or 1.0), high + (abs(high) / 2 or 1.0)
    margin = 0.04 * (high - low)
    return AxisScale(low if zero and low == 0 else low - margin, high + margin, start, end)


def tick_text(value: float) -> str:
    """A label: short, and without noise of floating point.

    >>> [tick_text(x) for x in (0.30000000000000004, 20000.0, 1e-7, 0.0)]
    ['0.3', '20k', '1e-7', '0']
    """
    if 1e4 <= abs(value) < 1e6:
        return f"{value / 1e3:g}k"
    text = f"{value:.6g}"
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


def _scales(chart: Chart, lines: Sequence[Line]) -> tuple[AxisScale, AxisScale]:
    """The scales of the x axis and of the y axis."""
    xs: list[float] = []
    ys = [value for _, value in chart.levels]
    for line in lines:
        xs += [x for x, _ in line.points]
        ys += [y for _, y in line.points]
    least = 0.0 if min(ys) >= 0 else -math.inf  # intervals do not make a loss negative
    for line in lines:
        for _, low, high in line.band:
            ys += [low, high]
        for _, low, high in _intervals(line):
            ys += [max(least, low), max(least, high)]
    if chart.log_y:
        ys = [y for y in ys if y > 0] or ys
    up = fitted(ys, _BOTTOM, _TOP, zero=chart.from_zero, log=chart.log_y)
    if chart.x_names:
        return AxisScale(-0.5, len(chart.x_names) - 0.5, _LEFT, _RIGHT), up
    if any(line.style == "points" or line.halves for line in lines) or chart.log_x:
        return fitted(xs, _LEFT, _RIGHT, log=chart.log_x), up
    first, last = min(xs), max(xs)
    return AxisScale(first, last if last > first else first + 1.0, _LEFT, _RIGHT), up


def _axes(chart: Chart, across: AxisScale, up: AxisScale) -> list[Content]:
    parts: list[Content] = []
    for value in up.ticks():
        y = _number(up(value))
        parts.append(tag("line", class_="grid", x1=_LEFT, x2=_RIGHT, y1=y, y2=y))
        parts.append(tag("text", tick_text(value), class_="end", x=_LEFT - 6, y=up(value) + 4))
    labels = [(float(k), name) for k, name in enumerate(chart.x_names)]
    labels = labels or [(value, tick_text(value)) for value in across.ticks()]
    longest = max([len(text) for _, text in labels], default=1)
    for value, text in labels[:: max(1, -(-len(labels) * longest // 55))]:
        x = _number(across(value))
        parts.append(tag("line", class_="axis", x1=x, x2=x, y1=_BOTTOM, y2=_BOTTOM + 4))
        parts.append(tag("text", text, class_="middle", x=x, y=_BOTTOM + 18))
    parts.append(tag("line", class_="axis", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM))
    middle = (_LEFT + _RIGHT) / 2
    x_label = f"{chart.x_label}, log scale" if across.log else chart.x_label
    y_label = f"{chart.y_label}, log scale" if up.log else chart.y_label
    parts.append(tag("text", x_label, class_="middle name", x=middle, y=_BOTTOM + 38))
    parts.append(tag("text", y_label, class_="name", x=4, y=14))
    return parts


def _line_parts(line: Line, number: int, across: AxisScale, up: AxisScale) -> list[Content]:
    """The band, path, intervals and points of the line with that number."""
    colour = f"s{number % _COLOURS}"
    parts: list[Content] = []
    if line.band:
        corners = [(across(x), up(high)) for x, _, high in line.band]
        corners += [(across(x), up(low)) for x, low, _ in reversed(line.band)]
        parts.append(tag("path", class_=f"band {colour}", d=_path(corners) + "Z"))
    places = [(across(x), up(y)) for x, y in line.points]
    if line.style != "points":
        corners = places
        if line.style == "step":  # up at the x before, then along
            corners = places[:1]
            for (x0, _), (x1, y1) in pairwise(places):
                corners += [(x0, y1), (x1, y1)]
        parts.append(tag("path", class_=f"line {colour}", d=_path(corners)))
    for x, low, high in _intervals(line):
        bottom, top = up(low), up(high)
        ends = f"M{_number(across(x))} {_number(bottom)}V{_number(top)}"
        for value, place in ((low, bottom), (high, top)):
            if up.smallest <= value <= up.largest:  # an end that is off the axis has no cap
                ends += f"M{_number(across(x) - 4)} {_number(place)}h8"
        parts.append(tag("path", class_=f"interval {colour}", d=ends))
    if line.style == "points" or len(places) <= 40:
        for x, y in places:
            parts.append(_point(x, y, number))
    return parts


def _point(x: float, y: float, number: int) -> Markup:
    """The marker of a series, whose shape differs as well as its colour."""
    colour = f"point s{number % _COLOURS}"
    match number % 4:
        case 0:
            return tag("circle", class_=colour, cx=_number(x), cy=_number(y), r=3)
        case 1:
            path = f"M{_number(x - 3)} {_number(y - 3)}h6v6h-6Z"
        case 2:
            path = f"M{_number(x)} {_number(y - 4)}l4 7h-8Z"
        case _:
            path = f"M{_number(x)} {_number(y - 4)}l4 4l-4 4l-4 -4Z"
    return tag("path", class_=colour, d=path)


def _swatch(number: int) -> Markup:
    line = tag("path", class_=f"line s{number % _COLOURS}", d="M0 6H24")
    return tag("svg", line, _point(12, 6, number), viewBox="0 0 24 12", aria_hidden="true")


def _numbers(chart: Chart, lines: Sequence[Line]) -> Markup:
    """The numbers that are drawn, a row for each x. Lines of one name are told apart by number."""
    names = [line.name for line in lines]
    columns = [n if names.count(n) == 1 else f"{n} ({k + 1})" for k, n in enumerate(names)]
    by_x: dict[float, dict[str, str]] = {}
    for column, line in zip(columns, lines, strict=True):
        halves = {x: (high - low) / 2 for x, low, high in reversed(_intervals(line))}
        for x, y in line.points:
            half = f" +- {halves[x]:.2g}" if x in halves else ""
            by_x.setdefault(x, dict.fromkeys(columns, "-"))[column] = number_text(y) + half
    rows: list[dict[str, Content]] = []
    for x in sorted(by_x):
        label = chart.x_names[int(x)] if chart.x_names else number_text(x)
        rows.append({chart.x_label: tag("data", label, value=repr(float(x))), **by_x[x]})
    return folded("Numbers", table(rows, f"{chart.title}: numbers", numbers=True))


def _intervals(line: Line) -> list[tuple[float, float, float]]:
    pairs = zip(line.points, line.halves, strict=False)
    return [(x, y - half, y + half) for (x, y), half in pairs if math.isfinite(half)]


def _path(places: Sequence[Point]) -> str:
    path = ""
    for x, y in places:
        path += f"{'L' if path else 'M'}{_number(x)} {_number(y)}"
    return path


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
