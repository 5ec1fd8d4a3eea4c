"""Figures of a grid: lines over one or two axes, a heat map of two."""

import io
import math
import textwrap
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.tuning.axes import Axis
from fedveil.tuning.statistics import Mean

_BRIGHT = 0.6
_TITLE = 110
"""The characters of a title's line, at the size of its letters."""

COLOURS = ("#1f5a8a", "#a83232", "#3a7d44", "#8a5a1f", "#5a3a8a", "#2b8a8a", "#666666", "#c2699d")


def png(figure: Figure) -> bytes:
    """The figure as a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def grid_png(
    axes: Sequence[Axis], means: Sequence[Mean], metric: str, claims: Sequence[PrivacyClaim]
) -> bytes:
    """`metric` over the longest axis, a line for every choice on the others.

    Its title says what belongs to the epsilons of the cells' claims.
    """
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    at = figure.subplots()
    if not axes:
        axes = [Axis("recipe", ("",))]
    along = max(range(len(axes)), key=lambda i: len(axes[i].values))
    shape = [len(axis.values) for axis in axes]
    table = np.empty(len(means), dtype=object)
    table[:] = means
    lines = np.moveaxis(table.reshape(shape), along, -1).reshape(-1, shape[along])
    names = _names([axis for i, axis in enumerate(axes) if i != along])
    for i, (line, name) in enumerate(zip(lines, names, strict=True)):
        draw_line(at, axes[along].values, list(line), name, COLOURS[i % len(COLOURS)])
    at.set(xlabel=axes[along].key, ylabel=f"test {metric}")
    at.set_title(promises(claims), fontsize=7)
    if len(lines) > 1:
        at.legend(fontsize=7)
    at.grid(alpha=0.3)
    return png(figure)


def promises(claims: Sequence[PrivacyClaim]) -> str:
    """What belongs to the epsilons in a figure, one line for each kind of claim."""
    kinds = dict.fromkeys(f"epsilon {claim.told}" for claim in claims)
    return "\n".join(textwrap.fill(kind, _TITLE) for kind in kinds)


def draw_line(
    at: Axes, places: Sequence[str], means: Sequence[Mean], name: str, colour: str
) -> None:
    """Means with their intervals; what diverged is left out."""
    x, numeric = _places(places)
    values = np.array([m.value if math.isfinite(m.value) else np.nan for m in means])
    halves = np.array([0.0 if math.isnan(m.half) else m.half for m in means])
    at.errorbar(
        x, values, yerr=halves, label=name or None, color=colour, marker="o", ms=3, capsize=2
    )
    if not numeric:
        at.set_xticks(x, places)


def heat_png(rows: Axis, columns: Axis, values: Sequence[Sequence[float]], metric: str) -> bytes:
    """A heat map: darker is lower; what diverged or was not tried is blank."""
    figure = Figure(figsize=(1.6 + 0.62 * len(columns.values), 1.3 + 0.42 * len(rows.values)))
    figure.set_layout_engine("constrained")
    at = figure.subplots()
    found = np.array(values, dtype=np.float64)
    found[~np.isfinite(found)] = np.nan
    positive = bool(np.nanmin(found) > 0) if not np.isnan(found).all() else False
    shown = np.log10(found) if positive else found
    image = at.imshow(shown, cmap="viridis", aspect="auto")
    low, high = image.get_clim()
    for i, j in np.ndindex(found.shape):
        if not np.isnan(found[i, j]):
            bright = shown[i, j] > low + _BRIGHT * (high - low)
            text, colour = f"{found[i, j]:.3g}", "black" if bright else "white"
            at.text(j, i, text, ha="center", va="center", fontsize=7, color=colour)
    at.set_xticks(range(len(columns.values)), columns.values)
    at.set_yticks(range(len(rows.values)), rows.values)
    at.set(xlabel=columns.key, ylabel=rows.key)
    figure.colorbar(image, ax=at, label=f"log10 of {metric}" if positive else metric)
    return png(figure)


def _places(values: Sequence[str]) -> tuple[list[float], bool]:
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return [float(i) for i in range(len(values))], False
    if not all(map(math.isfinite, numbers)):
        return [float(i) for i in range(len(values))], False
    return numbers, True


def _names(axes: Sequence[Axis]) -> list[str]:
    names = [""]
    for axis in axes:
        key = axis.key.split(".")[-1]
        names = [f"{n}, {key} {v}".removeprefix(", ") for n in names for v in axis.values]
    return names
