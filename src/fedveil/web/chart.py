"""Charts as SVG: lines, steps, bands and points with intervals, with their axes and a legend.

A chart is data; `figure` draws it, with a title, a description for screen readers, and the numbers
that are drawn as a table, from which the page's script reads what the pointer is at.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from fedveil.web.html import Content, Markup, joined, number_text, tag
from fedveil.web.layout import folded, table
from fedveil.web.scales import AxisScale, exact, fitted, tick_text

WIDTH, HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 466, 26, 226
_COLOURS = 8

Shape = Literal["line", "step", "points"]
Point = tuple[float, float]

MOST = 200
"""Stretches that a long series is cut into: about as many as a chart has places for."""


@dataclass(frozen=True)
class Line:
    """A series in the order of x.

    Attributes:
        name: Its name in the legend.
        points: Pairs (x, y).
        shape: A "step" changes at the x before, as a charge comes before its round.
        halves: Half the widths of the points' intervals, NaN or absent where unknown.
        band: Triples (x, low, high) along the line.
    """

    name: str
    points: Sequence[Point]
    shape: Shape = "line"
    halves: Sequence[float] = ()
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Mark:
    """A level that a chart should be read against, with its name."""

    value: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a chart shows.

    Attributes:
        x, y: The names of the axes with their units.
        marks: Levels to compare the series with.
        note: What a reader has to know.
        zero: Whether the y axis includes 0.
        places: Labels of the x axis, if x is an index and not a number.
        most: The number of stretches that a long series is cut into (`thinned`).
    """

    id: str
    title: str
    x: str
    y: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    note: str = ""
    zero: bool = False
    log_x: bool = False
    log_y: bool = False
    places: Sequence[str] = ()
    most: int = MOST


def figure(chart: Chart) -> Markup:
    """Draw the chart with its caption, note and numbers, or say that there is nothing to draw."""
    drawn = [line for line in chart.lines if line.points]
    caption = tag("figcaption", tag("strong", chart.title), _legend(drawn))
    note = tag("p", chart.note, class_="note") if chart.note else None
    if not drawn:
        return tag("figure", caption, tag("p", "There is nothing to draw."), note)
    lines = [_short(line, chart.most) for line in drawn]
    across, up = _scales(chart, lines)
    picture = _svg(chart, lines, across, up)
    readout = tag("output", class_="readout", aria_live="polite")
    return tag("figure", caption, picture, readout, note, _numbers(chart, lines), id=chart.id)


def finite(points: Sequence[tuple[float, float | None]]) -> list[Point]:
    """The points that can be drawn."""
    return [(x, y) for x, y in points if y is not None and math.isfinite(y) and math.isfinite(x)]


def thinned(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """At most four points from each of `most` stretches of a series in the order of x.

    Guarantee: the result has the first, lowest, highest and last point of every stretch, so that
    the line through it reaches every extreme.

    >>> thinned([(x, 9.0 if x == 5 else 0.0) for x in range(9)], most=1)
    [(0, 0.0), (5, 9.0), (8, 0.0)]
    """
    if len(points) <= 4 * most:
        return list(points)
    short: list[Point] = []
    for k in range(most):
        part = points[k * len(points) // most : (k + 1) * len(points) // most]
        low = min(range(len(part)), key=lambda i: part[i][1])
        high = max(range(len(part)), key=lambda i: part[i][1])
        short += [part[i] for i in sorted({0, low, high, len(part) - 1})]
    return short


def frame(
    id: str,
    title: str,
    said: str,
    *content: Content,
    width: float = WIDTH,
    height: float = HEIGHT,
    **more: str | None,
) -> Markup:
    """The picture itself, named and described for those who do not see it."""
    return tag(
        "svg",
        tag("title", title, id=f"{id}-title"),
        tag("desc", said, id=f"{id}-said"),
        *content,
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        role="img",
        aria_labelledby=f"{id}-title",
        aria_describedby=f"{id}-said",
        **more,
    )


def _svg(chart: Chart, lines: Sequence[Line], across: AxisScale, up: AxisScale) -> Markup:
    named = ", ".join(f"{line.name}: {_said(line)}" for line in lines)
    content = joined(
        [
            _axes(chart, across, up),
            [_mark(mark, up) for mark in chart.marks],
            [_drawn(line, k, across, up) for k, line in enumerate(lines)],
            tag("line", class_="cursor", x1=0, x2=0, y1=_TOP, y2=_BOTTOM),
        ]
    )
    return frame(
        chart.id,
        chart.title,
        f"{chart.y} over {chart.x}. {named}.",
        content,
        tabindex="0",
        data_low=repr(across.low),
        data_high=repr(across.high),
        data_start=repr(across.start),
        data_end=repr(across.end),
        data_log="1" if across.log else None,
    )


def _scales(chart: Chart, lines: Sequence[Line]) -> tuple[AxisScale, AxisScale]:
    xs = [x for line in lines for x, _ in line.points]
    ys = [mark.value for mark in chart.marks]
    ys += [y for line in lines for _, y in line.points]
    least = 0.0 if min(ys) >= 0 else -math.inf  # intervals do not make a loss negative
    for line in lines:
        ys += [edge for _, low, high in line.band for edge in (low, high)]
        ys += [max(least, edge) for _, low, high in _intervals(line) for edge in (low, high)]
    if chart.log_y:
        ys = [y for y in ys if y > 0] or ys
    up = fitted(ys, _BOTTOM, _TOP, zero=chart.zero, log=chart.log_y)
    if chart.places:
        return exact(-0.5, len(chart.places) - 0.5, _LEFT, _RIGHT), up
    if any(line.shape == "points" or line.halves for line in lines) or chart.log_x:
        return fitted(xs, _LEFT, _RIGHT, log=chart.log_x), up
    return exact(min(xs), max(xs), _LEFT, _RIGHT), up


def _axes(chart: Chart, across: AxisScale, up: AxisScale) -> Markup:
    parts: list[Content] = []
    for value in up.ticks():
        y = _number(up(value))
        parts.append(tag("line", class_="grid", x1=_LEFT, x2=_RIGHT, y1=y, y2=y))
        parts.append(tag("text", tick_text(value), class_="end", x=_LEFT - 6, y=up(value) + 4))
    labels = [(float(k), name) for k, name in enumerate(chart.places)]
    labels = labels or [(value, tick_text(value)) for value in across.ticks()]
    every = max(1, -(-len(labels) * max(map(len, (t for _, t in labels)), default=1) // 55))
    for value, text in labels[::every]:
        x = _number(across(value))
        parts.append(tag("line", class_="axis", x1=x, x2=x, y1=_BOTTOM, y2=_BOTTOM + 4))
        parts.append(tag("text", text, class_="middle", x=x, y=_BOTTOM + 18))
    parts.append(tag("line", class_="axis", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM))
    middle = (_LEFT + _RIGHT) / 2
    x, y = _axis_name(chart.x, across), _axis_name(chart.y, up)
    parts.append(tag("text", x, class_="middle name", x=middle, y=_BOTTOM + 38))
    parts.append(tag("text", y, class_="name", x=4, y=14))
    return joined(parts)


def _axis_name(name: str, scale: AxisScale) -> str:
    return f"{name}, log scale" if scale.log else name


def _mark(mark: Mark, up: AxisScale) -> Markup:
    y = up(mark.value)
    level = tag("line", class_="mark", x1=_LEFT, x2=_RIGHT, y1=_number(y), y2=_number(y))
    below = y - _TOP < 14
    text = tag("text", mark.name, class_="name", x=_LEFT + 6, y=_number(y + (14 if below else -5)))
    return joined([level, text])


def _drawn(line: Line, number: int, across: AxisScale, up: AxisScale) -> Markup:
    colour = f"s{number % _COLOURS}"
    parts: list[Content] = []
    if line.band:
        upper = [(across(x), up(high)) for x, _, high in line.band]
        lower = [(across(x), up(low)) for x, low, _ in reversed(line.band)]
        parts.append(tag("path", class_=f"band {colour}", d=_path([*upper, *lower]) + "Z"))
    places = [(across(x), up(y)) for x, y in line.points]
    if line.shape != "points":
        whole = _steps(places) if line.shape == "step" else places
        parts.append(tag("path", class_=f"line {colour}", d=_path(whole)))
    for x, low, high in _intervals(line):
        at, bottom, top = _number(across(x)), up(low), up(high)
        ends = f"M{at} {_number(bottom)}V{_number(top)}"
        for value, place in ((low, bottom), (high, top)):
            if up.low <= value <= up.high:  # an end that is off the axis has no cap
                ends += f"M{_number(across(x) - 4)} {_number(place)}h8"
        parts.append(tag("path", class_=f"interval {colour}", d=ends))
    if line.shape == "points" or len(places) <= 40:
        parts += [_point(x, y, number) for x, y in places]
    return joined(parts)


def _point(x: float, y: float, number: int) -> Markup:
    """The marker of a series, whose shape differs as well as its colour."""
    colour = f"point s{number % _COLOURS}"
    a, b = _number(x), _number(y)
    match number % 4:
        case 0:
            return tag("circle", class_=colour, cx=a, cy=b, r=3)
        case 1:
            return tag("path", class_=colour, d=f"M{_number(x - 3)} {_number(y - 3)}h6v6h-6Z")
        case 2:
            return tag("path", class_=colour, d=f"M{a} {_number(y - 4)}l4 7h-8Z")
    return tag("path", class_=colour, d=f"M{a} {_number(y - 4)}l4 4l-4 4l-4 -4Z")


def _legend(lines: Sequence[Line]) -> Markup | None:
    if len(lines) < 2:
        return None
    return tag("ul", [tag("li", _swatch(k), line.name) for k, line in enumerate(lines)])


def _swatch(number: int) -> Markup:
    line = tag("path", class_=f"line s{number % _COLOURS}", d="M0 6H24")
    return tag("svg", line, _point(12, 6, number), viewBox="0 0 24 12", aria_hidden="true")


def _numbers(chart: Chart, lines: Sequence[Line]) -> Markup:
    """The numbers that are drawn, a row for each x."""
    by_x: dict[float, dict[int, float]] = {}
    for k, line in enumerate(lines):
        for x, y in line.points:
            by_x.setdefault(x, {})[k] = y
    names = _apart([line.name for line in lines])
    rows: list[dict[str, Content]] = []
    for x in sorted(by_x):
        place = chart.places[int(x)] if chart.places else number_text(x)
        values = {name: _value(by_x[x].get(k), lines[k], x) for k, name in enumerate(names)}
        rows.append({chart.x: tag("data", place, value=repr(float(x))), **values})
    return folded("Numbers", table(rows, f"{chart.title}: numbers", numbers=True))


def _value(value: float | None, line: Line, x: float) -> str:
    if value is None:
        return "-"
    interval = next((i for i in _intervals(line) if i[0] == x), None)
    if interval is None:
        return number_text(value)
    return f"{number_text(value)} +- {(interval[2] - interval[1]) / 2:.2g}"


def _short(line: Line, most: int) -> Line:
    if line.halves:
        return line
    return Line(line.name, thinned(line.points, most), line.shape, (), line.band)


def _intervals(line: Line) -> list[tuple[float, float, float]]:
    pairs = zip(line.points, line.halves, strict=False)
    return [(x, y - half, y + half) for (x, y), half in pairs if math.isfinite(half)]


def _said(line: Line) -> str:
    """A series in words."""
    ys = [y for _, y in line.points]
    first, last = number_text(ys[0]), number_text(ys[-1])
    least, most = number_text(min(ys)), number_text(max(ys))
    return f"from {first} to {last}, between {least} and {most}, {len(ys)} points"


def _steps(places: Sequence[Point]) -> list[Point]:
    """Up at the x before, then along: what is charged for a round is spent when it begins."""
    whole = [places[0]]
    for (x0, _), (x1, y1) in pairwise(places):
        whole += [(x0, y1), (x1, y1)]
    return whole


def _path(places: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in places)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _apart(names: Sequence[str]) -> list[str]:
    """Names of columns, each once."""
    return [name if names.count(name) == 1 else f"{name} ({k + 1})" for k, name in enumerate(names)]
