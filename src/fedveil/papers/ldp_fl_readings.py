"""LDP-FL: how its runs are read.

Accuracies in percent; what a client's reports are worth together, in three readings: behind an
ideal shuffler, without one, and by adding epsilons; and whether what the paper says is seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedveil.papers.ldp_fl_settings import PublishedTable
from fedveil.papers.paper_page import PaperStatement
from fedveil.privacy.accounting.claims import Accountant, PrivacyClaim, Trust
from fedveil.privacy.plan import PrivacyPlan
from fedveil.tuning.repetitions import Mean, mean_of, worse
from fedveil.tuning.sweep import Sweep

PUBLISHED = "at delta 0 per weight (replace, local trust, as published, not a guarantee)"
"""What belongs to the paper's epsilons."""

READINGS = (
    "epsilon at delta 1e-05 per client (replace, shuffled trust), behind an ideal shuffler",
    "epsilon at delta 1e-05 per client (replace, local trust), without a shuffler",
    "epsilon at delta 0 per client (replace, local trust), epsilons added up",
)

HIGH, COLLAPSED = 5.0, 10.0
"""At most so many points below noise-free is high; more below the largest epsilon, collapsed."""
SIGNIFICANT = 0.05


def percents(sweep: Sweep, cell: int) -> list[float]:
    """The accuracy of each repetition of a cell."""
    return [100 * outcome.test_metrics["accuracy"] for outcome in sweep.outcomes(cell)]


def percent(sweep: Sweep, cell: int) -> Mean:
    """The mean accuracy of a cell."""
    return mean_of(percents(sweep, cell))


def after_rounds(sweep: Sweep) -> dict[int, Mean]:
    """The mean accuracy after each round of the sweep's only cell."""
    curves = [outcome.test_curve for outcome in sweep.outcomes(0)]
    return {
        done: mean_of([100 * curve[i][1]["accuracy"] for curve in curves])
        for i, (done, _) in enumerate(curves[0])
    }


def readings(plan: PrivacyPlan, rounds: int) -> tuple[PrivacyClaim, PrivacyClaim, PrivacyClaim]:
    """A client's claims of `rounds` planned rounds: with a shuffler, without one, by addition."""
    shorter = replace(plan, rounds=rounds)
    claims = [claim for claim in shorter.claims(rounds) if not claim.as_published]
    shuffled = next(c for c in claims if c.trust is Trust.SHUFFLED)
    exact = next(c for c in claims if c.accountant is Accountant.BINOMIAL)
    added = next(c for c in claims if c.accountant is Accountant.PURE)
    return shuffled, exact, added


def worth(sweep: Sweep, cell: int, rounds: int | None = None) -> tuple[str, ...]:
    """The readings as text after `rounds`, None all of them."""
    plan = sweep.prepared[cell].plan
    every = readings(plan, plan.permitted if rounds is None else rounds)
    return tuple(claim.value for claim in every)


def stays_high(
    paper: PublishedTable, free: float, accuracies: Mapping[str, float]
) -> PaperStatement:
    """Whether every epsilon above the paper's threshold is within `HIGH` points of noise-free."""
    above = {e: a for e, a in accuracies.items() if float(e) > paper.high}
    return PaperStatement(
        f"{paper.title}: accuracy stays high for epsilon > {paper.high:g}.",
        all(free - a <= HIGH for a in above.values()),
        f"Rule: within {HIGH:g} points of the noise-free run, {free:.2f}. Here {_listed(above)}.",
    )


def collapses(paper: PublishedTable, accuracies: Mapping[str, float]) -> PaperStatement:
    """Whether every epsilon below the threshold is `COLLAPSED` points below the largest."""
    best = accuracies[max(accuracies, key=float)]
    under = {e: a for e, a in accuracies.items() if float(e) < paper.low}
    return PaperStatement(
        f"{paper.title}: accuracy collapses for epsilon < {paper.low:g}.",
        bool(under) and all(best - a > COLLAPSED for a in under.values()),
        f"Rule: more than {COLLAPSED:g} points below the largest epsilon, {best:.2f}. Here "
        f"{_listed(under)}.",
    )


def one_budget(title: str, published: str, composed: PrivacyClaim) -> PaperStatement:
    """Whether a client's reports behind the shuffler are worth no more than one of them."""
    return PaperStatement(
        f"{title}: with parameter shuffling a client's budget is epsilon, whatever the number of "
        "weights and rounds.",
        composed.epsilon <= float(published),
        f"PublishedTable: epsilon {published} {PUBLISHED}; composed: {composed.short}.",
    )


def reports_help(
    title: str, what: tuple[str, str], fewest: Sequence[float], most: Sequence[float]
) -> PaperStatement:
    """Whether accuracy is higher with most reports than with fewest, paired by repetition."""
    p, low, high = worse(most, fewest), mean_of(fewest), mean_of(most)
    return PaperStatement(
        f"{title}: the variance of a mean of n reports falls as 1/n (lemma 3), so accuracy rises "
        "with n.",
        high.value > low.value and p < SIGNIFICANT,
        f"Here {low} with {what[0]}, {high} with {what[1]} (paired, one-sided p = {p:.2g}).",
    )


def same_order(
    title: str,
    epsilon: str,
    published: tuple[float, float],
    fixed: Sequence[float],
    adaptive: Sequence[float],
) -> PaperStatement:
    """Whether the range that does better in the paper does so here, paired by repetition."""
    lower, higher = (adaptive, fixed) if published[0] > published[1] else (fixed, adaptive)
    name = "fixed" if published[0] > published[1] else "adaptive"
    p = worse(higher, lower)
    return PaperStatement(
        f"{title}, epsilon {epsilon}: the {name} range does better (by "
        f"{abs(published[0] - published[1]):.2f} points).",
        mean_of(higher).value > mean_of(lower).value and p < SIGNIFICANT,
        f"Here by {mean_of(higher).value - mean_of(lower).value:.2f} points (paired, one-sided "
        f"p = {p:.2g}).",
    )


def _listed(accuracies: Mapping[str, float]) -> str:
    return ", ".join(f"{a:.2f} at epsilon {e}" for e, a in accuracies.items()) or "nothing"
