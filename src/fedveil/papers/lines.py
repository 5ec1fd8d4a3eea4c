"""Lines of a two-axis sweep: means by the first axis, over the second; strict claims."""

from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import budgeted
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


def named(epsilon: str) -> str:
    """How a line is named after its epsilon.

    >>> named("3"), named("inf")
    ('epsilon 3', 'no noise')
    """
    return "no noise" if epsilon == "inf" else f"epsilon {epsilon}"


def strict_claim(sweep: Sweep, cell: int) -> str:
    """What a cell's reports are worth strictly."""
    plan = sweep.prepared[cell].plan
    readings = [claim for claim in plan.claims(plan.permitted) if not claim.as_published]
    if not readings:
        return "nothing claimed"
    return readings[0].short


def claim_of(sweep: Sweep) -> PrivacyClaim:
    """The claim of the first cell that makes one: what belongs to the epsilons of its budgets."""
    found = (budgeted(prepared.claims) for prepared in sweep.prepared)
    return next(claim for claim in found if claim is not None)


def meaning(*claims: PrivacyClaim) -> str:
    """What a page's epsilons mean where no other words stand beside them."""
    return "Every epsilon here, unless it says otherwise: " + "; ".join(
        f"epsilon {told}" for told in dict.fromkeys(claim.full_terms for claim in claims)
    )
