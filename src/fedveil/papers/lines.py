"""Lines of a two-axis sweep: means by the first axis, drawn over the second; strict claims."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.tuning.figures import COLOURS, draw_line, png, promises
from fedveil.tuning.statistics import Mean, mean_of
from fedveil.tuning.sweep import Sweep


def mean_lines(sweep: Sweep, length: int, metric: str) -> list[list[Mean]]:
    """The cells' means, `length` of them to a line."""
    means = [sweep.mean(c, metric) for c in range(len(sweep.cells))]
    return [means[i : i + length] for i in range(0, len(means), length)]


def learning_curve(sweep: Sweep, cell: int, metric: str) -> tuple[list[int], list[Mean]]:
    """The rounds in which a cell was measured, and the means then."""
    curves = [outcome.curve for outcome in sweep.outcomes(cell)]
    rounds = [round for round, _ in curves[0]]
    return rounds, [mean_of([c[i][1][metric] for c in curves]) for i in range(len(rounds))]


_AXES = {"E": "E: local steps per round", "T": "T: local steps in all"}


def lines_png(
    places: Sequence[str],
    lines: Sequence[Sequence[Mean]],
    names: Sequence[str],
    *,
    across: str,
    up: str,
    claims: Sequence[PrivacyClaim],
    log: bool = False,
) -> bytes:
    """The lines with their names, over the same places, under what belongs to their epsilons."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    at = figure.subplots()
    for i, (line, name) in enumerate(zip(lines, names, strict=True)):
        draw_line(at, places, line, name, COLOURS[i])
    across = _AXES.get(across, across)
    at.set(xlabel=across, ylabel=up, yscale="log" if log else "linear")
    found = [mean.value for line in lines for mean in line if math.isfinite(mean.value)]
    if log and found:  # an interval that reaches zero ends at the frame
        at.set_ylim(bottom=min(found) / 3)
    at.set_title("\n".join([f"{up} over {across}", promises(claims)]), fontsize=8)
    at.legend(fontsize=8)
    at.grid(alpha=0.3)
    return png(figure)


def strict_claim(sweep: Sweep, cell: int) -> str:
    """What a cell's reports are worth strictly."""
    plan = sweep.prepared[cell].plan
    readings = [claim for claim in plan.claims(plan.permitted) if not claim.as_published]
    if not readings:
        return "nothing claimed"
    return readings[0].short


def claim_of(sweep: Sweep) -> PrivacyClaim:
    """The claim of the first cell that makes one: what belongs to the sweep's epsilons."""
    return next(prepared.claim for prepared in sweep.prepared if prepared.claim is not None)


def meaning(*claims: PrivacyClaim) -> str:
    """What a page's epsilons mean where no other words stand beside them."""
    return "Every epsilon here, unless it says otherwise: " + "; ".join(
        f"epsilon {told}" for told in dict.fromkeys(claim.words for claim in claims)
    )
