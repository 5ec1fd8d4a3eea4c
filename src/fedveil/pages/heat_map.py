"""A heat map as SVG: a number in every cell, its size as a colour that prints in grey."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.pages.charts import WIDTH, svg_picture
from fedveil.pages.html import Content, Markup, concatenate, table, tag

_LEFT, _TOP, _CELL = 92, 30, 34
_RAMP = ((253, 231, 163), (233, 176, 98), (196, 116, 90), (133, 68, 98), (66, 38, 88))
"""Light to dark, evenly in lightness: the same order for every kind of eye, and on paper."""

_DARK = 0.18
"""The luminance below which white is easier to read than black."""


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Values by row and column.

    Attributes:
        id: The HTML id, which also begins the ids of its parts.
        title: The title.
        x_label, y_label: The names of the axes with their units.
        quantity: The name of the values.
        column_names, row_names: The labels of the cells.
        cell_values: One sequence per row, NaN where there is no value, infinity if it diverged.
        best_cell: (row, column) of the cell to frame, from 0. None frames none.
        note: A text below the map.
    """

    id: str
    title: str
    x_label: str
    y_label: str
    quantity: str
    column_names: Sequence[str]
    row_names: Sequence[str]
    cell_values: Sequence[Sequence[float]]
    best_cell: tuple[int, int] | None = None
    note: str = ""


def heat_figure(heat: HeatMap) -> Markup:
    """Return the map as a `<figure>`: title, SVG picture, note, and its numbers as a table.

    Without a finite value the figure has the title and "Nothing was found." only.
    """
    finite = [value for row in heat.cell_values for value in row if math.isfinite(value)]
    caption = tag("figcaption", tag("strong", heat.title))
    if not finite:
        return tag("figure", caption, "Nothing was found.")
    low, high = min(finite), max(finite)
    width = (WIDTH - _LEFT - 8) / len(heat.column_names)
    parts: list[Content] = [
        tag("text", heat.x_label, class_="name middle", x=(_LEFT + WIDTH) / 2, y=12),
        tag("text", heat.y_label, class_="name", x=4, y=12),
    ]
    for j, name in enumerate(heat.column_names):
        parts.append(tag("text", name, class_="middle", x=_LEFT + (j + 0.5) * width, y=_TOP - 4))
    rows: list[dict[str, Content]] = []
    for i, name in enumerate(heat.row_names):
        y = _TOP + i * _CELL
        parts.append(tag("text", name, class_="end", x=_LEFT - 6, y=y + _CELL / 2 + 4))
        row: dict[str, Content] = {heat.y_label: name}
        values = zip(heat.column_names, heat.cell_values[i], strict=True)
        for j, (column, value) in enumerate(values):
            x, best = _LEFT + j * width, heat.best_cell == (i, j)
            parts.append(_cell(value, low, high, x, y, width, best=best))
            row[column] = _value_text(value)
        rows.append(row)
    height = _TOP + _CELL * len(heat.row_names) + 8
    words = f"{heat.quantity} by {heat.y_label} and {heat.x_label}, from {low:.3g} to {high:.3g}."
    picture = svg_picture(heat.id, heat.title, words, *parts, height=height)
    note = tag("p", heat.note, class_="note") if heat.note else None
    numbers = table(rows, f"{heat.title}: {heat.quantity}", numbers=True)
    numbers = tag("details", tag("summary", "Numbers"), numbers)
    return tag("figure", caption, picture, note, numbers, id=heat.id)


def _cell(
    value: float, low: float, high: float, x: float, y: float, width: float, *, best: bool
) -> Markup:
    """Return the SVG elements of a cell: a rectangle and, unless the value is NaN, its value.

    Args:
        value: The value. Only a finite one has a colour.
        low, high: The smallest and largest value of the map, between which the colour lies.
        x, y: The upper left corner, in SVG coordinates.
        width: The width.
        best: Whether to frame it.
    """
    colour, classes, text_class = None, "blank", "name middle small"
    if math.isfinite(value):
        rgb = _colour(value, low, high)
        colour = "#" + "".join(f"{part:02x}" for part in rgb)
        classes = "best" if best else ""
        text_class = f"middle {'bright' if _luminance(rgb) < _DARK else 'deep'}"
    corner = {"x": f"{x + 1:.1f}", "y": f"{y + 1:.1f}", "width": f"{width - 2:.1f}"}
    box = tag("rect", fill=colour, class_=classes or None, height=_CELL - 2, **corner)
    if math.isnan(value):
        return box
    at = {"x": f"{x + width / 2:.1f}", "y": f"{y + _CELL / 2 + 4:.1f}"}
    return concatenate([box, tag("text", _value_text(value), class_=text_class, **at)])


def _value_text(value: float) -> str:
    """Return three significant digits, "not tried" for NaN, or "diverged" for infinity."""
    if math.isnan(value):
        return "not tried"
    return f"{value:.3g}" if math.isfinite(value) else "diverged"


def _colour(value: float, low: float, high: float) -> list[int]:
    """Return a colour as [red, green, blue], 0 to 255: light at `low`, dark at `high`.

    `value` is finite and between the two. If these are equal, the colour is the light one.
    The scale is logarithmic if `low` > 0 and `high` / `low` > 20, otherwise linear.
    """
    if low > 0 and high / low > 20:
        low, high, value = math.log(low), math.log(high), math.log(value)
    place = 0.0 if high <= low else (value - low) / (high - low) * (len(_RAMP) - 1)
    k = min(int(place), len(_RAMP) - 2)
    pairs = zip(_RAMP[k], _RAMP[k + 1], strict=True)
    return [round(a + (b - a) * (place - k)) for a, b in pairs]


def _luminance(colour: Sequence[int]) -> float:
    """Return the relative luminance of [red, green, blue] by WCAG 2: 0 for black, 1 for white."""
    parts = [part / 255 for part in colour]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
