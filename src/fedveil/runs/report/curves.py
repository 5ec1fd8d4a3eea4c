"""The charts of a run: what it learnt, what it spent, and how clip and noise fared."""

import math
from collections.abc import Sequence
from dataclasses import replace

from fedveil.privacy.accounting.claims import PrivacyClaim, Trust, measured_on
from fedveil.privacy.accounting.meaning import budgeted
from fedveil.runs.report.run_contents import RunContents
from fedveil.web.chart import Chart, Line, Mark, Point, figure, finite
from fedveil.web.html import Markup

_EVERY_ROUND = (
    "Each round is charged before it begins, to everybody. The line joins the rounds at which "
    "epsilon was computed; between them it is in the shaded band, whose top is what was shown."
)
_TURNS = (
    "A round is charged before it begins, to the clients that take part in it. Shown is the client "
    "that was charged most: where the line is level, others had their turn. No round is free."
)

_SPENT = (
    "What was spent after a round holds only if what was released did not decide how many rounds "
    "were done; the claim that counts is larger, and holds whoever ended the run and why."
)

_SHARES = ("accuracy", "top-", "f1", "auroc", "backdoor")
"""How metrics between 0 and 1 begin."""


def drawn(charts: Sequence[Chart | None]) -> list[Markup]:
    """Charts as figures."""
    return [figure(chart) for chart in charts if chart is not None]


def learning(contents: RunContents) -> list[Chart]:
    """One chart for each thing that was measured."""
    return [
        Chart(
            id=f"metric-{number}",
            title=f"{'Noisy' if contents.widths(name) else 'Test'} {name} over rounds",
            x="round",
            y=axis_of(name, measured_on(contents.claims)),
            lines=[_measured(contents, name)],
            note=_NOISY if contents.widths(name) else "",
        )
        for number, name in enumerate(contents.measured)
    ]


def _measured(contents: RunContents, name: str) -> Line:
    """A metric, with its intervals as a band and at its points where it has a price."""
    points, widths = finite(contents.series(name)), contents.widths(name)
    if not widths:
        return Line(name, points)
    halves = [widths.get(round, math.nan) for round, _ in points]
    return Line(name, points, "points", halves)


_NOISY = (
    "Measured with noise that pays for privacy: 95 % of the numbers are within their bars of the "
    "true one."
)


def axis_of(name: str, on: str = "the test split") -> str:
    """The name of an axis, with what its numbers are where that is known.

    >>> axis_of("accuracy"), axis_of("loss", "held-out owners")
    ('accuracy on the test split, 0 to 1', 'loss on held-out owners')
    """
    return f"{name} on {on}" + (", 0 to 1" if name.startswith(_SHARES) else "")


def spending(contents: RunContents) -> Chart | None:
    """Epsilon spent and the budget, with what belongs to an epsilon as the chart's title."""
    spent = finite(contents.series("epsilon"))
    claim = budgeted(contents.claims)
    if claim is None or not spent:
        return None
    every_round = claim.trust is Trust.CENTRAL
    name = f"epsilon spent {claim.terms}"
    line = _along(name, spent) if every_round else Line(name, spent, "step")
    limit = contents.limit
    note = _EVERY_ROUND if every_round else _TURNS
    if any(one.condition for one in contents.claims):
        note = f"{note} {_SPENT}"
    return Chart(
        id="spent",
        title=f"Epsilon over rounds {claim.terms}",
        x="round",
        y="epsilon spent",
        lines=[line],
        marks=[] if limit is None else [Mark(limit, _budget(claim, limit))],
        note=note if limit is None else f"{note} Left: {claim.left_of(limit)}.",
        zero=True,
    )


def clipping(contents: RunContents) -> list[Chart]:
    """Clip, share clipped and signal to noise, as far as the run recorded them."""
    asked: Sequence[tuple[str, str, str, str]] = (
        ("clip", "Clip norm over rounds", "clip norm of an update", ""),
        (
            "clipped",
            "Share of updates that were clipped",
            "share of the cohort, 0 to 1",
            "Near 1 throughout, the clip norm is small; near 0 it is larger than it need be.",
        ),
        (
            "snr",
            "Signal to noise of the sum of updates",
            "length of signal / length of noise",
            "Below 1 the noise of a round is longer than what is learnt in it.",
        ),
    )
    charts = []
    for column, title, y, note in asked:
        points = finite(contents.series(column))
        if points:
            lines = [Line(y, points)]
            level = [Mark(1.0, "signal = noise")] if column == "snr" else []
            one = Chart(id=column, title=title, x="round", y=y, lines=lines, marks=level, note=note)
            charts.append(replace(one, zero=True))
    return charts


def _along(name: str, spent: Sequence[Point]) -> Line:
    """The curve of epsilon where every round is charged to everybody.

    The recorded values are upper bounds, computed at some rounds and held until the next of them,
    so they are exact at the end of a level stretch. A charge comes before its round, so a value
    belongs to the beginning of the round.
    """
    levels: list[tuple[float, float, float]] = []
    for round, value in spent[1:]:
        first = levels.pop()[0] if levels and levels[-1][2] == value else round
        levels.append((first, round, value))
    if all(first == last for first, last, _ in levels):
        return Line(name, spent, "step")
    (start, before), points, band = spent[0], [spent[0]], []
    for first, last, value in levels:
        points.append((last - 1, value))
        band += [(first - 1, before, value), (last - 1, before, value), (last - 1, value, value)]
        before = value
    end = (levels[-1][1], before)
    return Line(name, [*points, end], "line", (), [(start, spent[0][1], spent[0][1]), *band])


def _budget(claim: PrivacyClaim, limit: float) -> str:
    return f"budget: {replace(claim, epsilon=limit, vouched=True).value}"
