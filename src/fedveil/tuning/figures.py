"""What figures are drawn with: means with intervals, and the claims they belong to."""

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
from fedveil.tuning.statistics import Mean

_TITLE = 110
"""The characters of a title's line, at the size of its letters."""

COLOURS = ("#0b5c97", "#c14b00", "#00724f", "#8a3d80", "#7a5a00", "#b0003a", "#4b5563", "#007a8a")


def png(figure: Figure) -> bytes:
    """The figure as a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


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


def _places(values: Sequence[str]) -> tuple[list[float], bool]:
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return [float(i) for i in range(len(values))], False
    if not all(map(math.isfinite, numbers)):
        return [float(i) for i in range(len(values))], False
    return numbers, True
