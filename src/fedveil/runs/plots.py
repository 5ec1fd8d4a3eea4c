"""The picture of a run: what was learnt and what it cost, over rounds.

What draws it is imported when it is drawn, at the end of a run, and not before its first round.
"""

import io
import textwrap
from typing import Any

from fedveil.privacy.accounting.claims import PrivacyClaim


def progress_png(
    history: list[dict[str, Any]],
    metric: str,
    budget: float | None,
    promise: PrivacyClaim | None,
) -> bytes:
    """`metric` and, where something is claimed, epsilon and what belongs to it against rounds."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    measured = [line for line in history if metric in line]
    charged = [line for line in history if line.get("epsilon") is not None]
    figure = Figure(figsize=(9 if charged else 5, 3.2), layout="constrained")
    axes = figure.subplots(1, 2 if charged else 1, squeeze=False)[0]
    axes[0].plot([m["round"] for m in measured], [m[metric] for m in measured], color="#1f5a8a")
    axes[0].set(xlabel="round", ylabel=f"test {metric}")
    if charged:
        axes[1].plot(
            [c["round"] for c in charged], [c["epsilon"] for c in charged], color="#a83232"
        )
        if budget is not None:
            axes[1].axhline(budget, color="grey", linestyle="--", linewidth=1)
        axes[1].set(xlabel="round", ylabel="epsilon spent", ylim=(0, None))
        words = "" if promise is None else f"epsilon {promise.told}"
        axes[1].set_title(textwrap.fill(words, 62), fontsize=7)
    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
