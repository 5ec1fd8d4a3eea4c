"""A heat map as SVG: a number in every cell, its size as a colour that prints in grey."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.web.chart import WIDTH, frame
from fedveil.web.html import Content, Markup, joined, tag
from fedveil.web.layout import folded, table

_LEFT, _TOP, _CELL = 92, 30, 34
_RAMP = ((253, 231, 163), (233, 176, 98), (196, 116, 90), (133, 68, 98), (66, 38, 88))
"""Light to dark, evenly in lightness: the same order for every kind of eye, and on paper."""

_DARK = 0.18
"""The luminance below which white is easier to read than black."""


@dataclass(frozen=True, kw_only=True)
class Heat:
    """Values by row and column.

    Attributes:
        x, y: The names of the axes with their units.
        value: What the numbers are.
        columns, rows: The labels of the cells.
        cells: One sequence per row, NaN where there is no value.
        best: The cell to point out.
    """

    id: str
    title: str
    x: str
    y: str
    value: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Sequence[Sequence[float]]
    best: tuple[int, int] | None = None
    note: str = ""


def heat_figure(heat: Heat) -> Markup:
    """The map with its title, what it shows in words, and its numbers as a table."""
    known = [v for row in heat.cells for v in row if math.isfinite(v)]
    if not known:
        return tag("figure", tag("figcaption", tag("strong", heat.title)), "Nothing was found.")
    shade = _shades(known)
    width = (WIDTH - _LEFT - 8) / len(heat.columns)
    parts: list[Content] = [
        tag("text", heat.x, class_="name middle", x=(_LEFT + WIDTH) / 2, y=12),
        tag("text", heat.y, class_="name", x=4, y=12),
    ]
    for j, name in enumerate(heat.columns):
        parts.append(tag("text", name, class_="middle", x=_LEFT + (j + 0.5) * width, y=_TOP - 4))
    for i, name in enumerate(heat.rows):
        y = _TOP + i * _CELL
        parts.append(tag("text", name, class_="end", x=_LEFT - 6, y=y + _CELL / 2 + 4))
        for j, value in enumerate(heat.cells[i]):
            at = (_LEFT + j * width, float(y), width)
            parts.append(_cell(value, at, shade, best=heat.best == (i, j)))
    height = _TOP + _CELL * len(heat.rows) + 8
    least, most = min(known), max(known)
    said = f"{heat.value} by {heat.y} and {heat.x}, from {least:.3g} to {most:.3g}."
    picture = frame(heat.id, heat.title, said, joined(parts), height=height)
    note = tag("p", heat.note, class_="note") if heat.note else None
    rows: list[dict[str, Content]] = [
        {heat.y: name, **dict(zip(heat.columns, map(_text, heat.cells[i]), strict=True))}
        for i, name in enumerate(heat.rows)
    ]
    numbers = folded("Numbers", table(rows, f"{heat.title}: {heat.value}", numbers=True))
    caption = tag("figcaption", tag("strong", heat.title))
    return tag("figure", caption, picture, note, numbers, id=heat.id)


def _cell(value: float, at: tuple[float, float, float], shade: "_Shades", *, best: bool) -> Markup:
    x, y, width = at
    box = {"x": f"{x + 1:.1f}", "y": f"{y + 1:.1f}", "width": f"{width - 2:.1f}"}
    if not math.isfinite(value):
        blank = tag("rect", class_="blank", height=_CELL - 2, **box)
        if math.isnan(value):
            return blank
        return joined([blank, _number("diverged", x + width / 2, y, "name middle small")])
    parts = shade.colour(value)
    tone = "bright" if _luminance(parts) < _DARK else "deep"
    colour = "#" + "".join(f"{part:02x}" for part in parts)
    classes = "best" if best else None
    cell = tag("rect", fill=colour, class_=classes, height=_CELL - 2, **box)
    return joined([cell, _number(_text(value), x + width / 2, y, f"middle {tone}")])


def _number(text: str, x: float, y: float, classes: str) -> Markup:
    return tag("text", text, class_=classes, x=f"{x:.1f}", y=f"{y + _CELL / 2 + 4:.1f}")


def _text(value: float) -> str:
    if math.isnan(value):
        return "not tried"
    return f"{value:.3g}" if math.isfinite(value) else "diverged"


@dataclass(frozen=True)
class _Shades:
    low: float
    high: float
    log: bool

    def share(self, value: float) -> float:
        """Where a value is between the least (0) and the most (1)."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return 0.0 if high <= low else (at - low) / (high - low)

    def colour(self, value: float) -> list[int]:
        """Red, green and blue from 0 to 255."""
        place = self.share(value) * (len(_RAMP) - 1)
        k = min(int(place), len(_RAMP) - 2)
        pairs = zip(_RAMP[k], _RAMP[k + 1], strict=True)
        return [round(a + (b - a) * (place - k)) for a, b in pairs]


def _luminance(colour: Sequence[int]) -> float:
    """As WCAG 2 has it, 0 for black and 1 for white."""
    parts = [part / 255 for part in colour]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _shades(values: Sequence[float]) -> _Shades:
    low, high = min(values), max(values)
    return _Shades(low, high, log=low > 0 and high / low > 20)
