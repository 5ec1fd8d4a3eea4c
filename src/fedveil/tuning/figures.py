"""How figures look: one style for everything that is drawn as a PNG.

A figure has a title, and below it the setting and what belongs to its epsilons; axes are named in
words with units; lines differ in colour, marker and dashes, so that grey print keeps them apart;
the legend is below the panels and covers nothing. PNGs are on white, in sizes that print well.
"""

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation, Transform

from fedveil.privacy.accounting.claims import PrivacyClaim

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
    """What a line looks like, in colour and in grey."""

    colour: str
    marker: str
    dashes: str


def stroke(number: int) -> Stroke:
    """One of 13 looks with different markers. The first eight have different colours too."""
    turn, place = divmod(number, len(COLOURS))
    return Stroke(
        COLOURS[place], MARKERS[number % len(MARKERS)], DASHES[(place + turn) % len(DASHES)]
    )


def canvas(
    title: str,
    said: Sequence[str],
    size: tuple[float, float],
    looks: Mapping[str, Stroke] | None = None,
) -> Figure:
    """A figure with `size` inches for what is drawn, text above it and a legend below.

    `looks` are the names and strokes of the legend; a single one needs none.
    """
    width, height = size
    inside, names = width - 2 * _EDGE, looks or {}
    head = textwrap.wrap(title, int(_TITLE_LETTERS * inside))
    lines = [part for text in said for part in textwrap.wrap(text, int(_SMALL_LETTERS * inside))]
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
    figure.text(left, top, "\n".join(head), va="top", size=_TITLE, weight="bold", color=INK)
    top -= len(head) * _TITLE_LINE / whole
    figure.text(left, top, "\n".join(lines), va="top", size=SMALL, linespacing=1.3, color=SOFT)
    if len(names) > 1:
        legend = figure.legend(
            handles=[handle(name, look) for name, look in names.items()],
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
    return figure


def handle(name: str, look: Stroke) -> Line2D:
    """What stands for a line in a legend."""
    return Line2D([], [], label=name, **line_style(look))


def line_style(look: Stroke) -> dict[str, Any]:
    """The keywords of a line in matplotlib."""
    return {
        "color": look.colour,
        "linestyle": look.dashes,
        "marker": look.marker,
        "markersize": 4.5,
        "linewidth": 1.4,
    }


def name_axes(at: Axes, across: str, up: str, title: str = "") -> None:
    """Name both axes, draw a light grid, and remove the frame where there is no axis."""
    at.set_xlabel(across, size=TEXT, color=INK)
    at.set_ylabel(up, size=TEXT, color=INK)
    at.set_title(title, loc="left", size=TEXT, weight="bold", color=INK)
    at.tick_params(labelsize=SMALL, labelcolor=INK)
    at.grid(color=GRID, linewidth=0.6)
    at.set_axisbelow(True)
    at.spines[["top", "right"]].set_visible(False)


def aside(at: Axes, figure: Figure, number: int, count: int) -> Transform:
    """The places of axes, moved for one of `count` lines, so that no whisker hides another."""
    points = min(_ASIDE, _SPREAD / count) * (number - (count - 1) / 2)
    return at.transData + ScaledTranslation(points / 72, 0, figure.dpi_scale_trans)


def png(figure: Figure) -> bytes:
    """The figure as a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def promises(claims: Sequence[PrivacyClaim]) -> list[str]:
    """What belongs to the epsilons in a figure, one text for each kind of claim."""
    return list(dict.fromkeys(f"Epsilon{_of(claim)} {claim.full_terms}." for claim in claims))


def _of(claim: PrivacyClaim) -> str:
    return "" if claim.covers == "updates" else f" of {claim.covers}"
