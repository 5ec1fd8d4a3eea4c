"""Lines of a two-axis sweep: means by the first axis, drawn over the second; strict claims."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from fedveil.planning.figures import COLOURS, draw_line, png
from fedveil.planning.statistics import Mean, mean_of
from fedveil.planning.sweep import Sweep


def lines_of(sweep: Sweep, length: int, metric: str) -> list[list[Mean]]:
    """The cells' means, `length` of them to a line."""
    means = [sweep.mean(c, metric) for c in range(len(sweep.cells))]
    return [means[i : i + length] for i in range(0, len(means), length)]


def curve_of(sweep: Sweep, cell: int, metric: str) -> tuple[list[int], list[Mean]]:
    """The rounds in which a cell was measured, and the means then."""
    curves = [outcome.curve for outcome in sweep.outcomes(cell)]
    rounds = [round for round, _ in curves[0]]
    return rounds, [mean_of([c[i][1][metric] for c in curves]) for i in range(len(rounds))]


def lines_png(
    places: Sequence[str],
    lines: Sequence[Sequence[Mean]],
    names: Sequence[str],
    *,
    across: str,
    up: str,
    log: bool = False,
) -> bytes:
    """The lines with their names, over the same places."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    at = figure.subplots()
    for i, (line, name) in enumerate(zip(lines, names, strict=True)):
        draw_line(at, places, line, name, COLOURS[i])
    at.set(xlabel=across, ylabel=up, yscale="log" if log else "linear")
    at.legend(fontsize=8)
    at.grid(alpha=0.3)
    return png(figure)


def strictly(sweep: Sweep, cell: int) -> str:
    """What a cell's reports are worth strictly."""
    plan = sweep.prepared[cell].plan
    readings = [claim for claim in plan.claims(plan.permitted) if not claim.as_published]
    if not readings:
        return "nothing claimed"
    claim = readings[0]
    at = f" at delta {claim.delta:g}" if claim.delta else ""
    return f"{claim.epsilon:,.4g} per {claim.unit}{at}"
