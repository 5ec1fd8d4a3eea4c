"""Numbers and claims of a finished sweep, as the pages of papers show them."""

from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import budgeted
from fedveil.tuning.repetitions import Mean, mean_of
from fedveil.tuning.sweep import Sweep


def percents(sweep: Sweep, cell: int, metric: str = "accuracy") -> list[float]:
    """Return a test metric in percent, one number per repetition of the cell number `cell`."""
    return [100 * outcome.test_metrics[metric] for outcome in sweep.outcomes(cell)]


def percent(sweep: Sweep, cell: int, metric: str = "accuracy") -> Mean:
    """Return the mean in percent of a test metric over the repetitions of the cell `cell`."""
    return mean_of(percents(sweep, cell, metric))


def learning_curve(
    sweep: Sweep, cell: int, metric: str, times: float = 1
) -> tuple[list[int], list[Mean]]:
    """Return (measured rounds, mean of `metric` in each) of the cell number `cell`.

    The sweep must have kept curves. Metrics are multiplied by `times`: 100 gives percent.
    """
    curves = [outcome.test_curve for outcome in sweep.outcomes(cell)]
    rounds = [round for round, _ in curves[0]]
    return rounds, [mean_of([times * c[i][1][metric] for c in curves]) for i in range(len(rounds))]


def strict_claim(sweep: Sweep, cell: int) -> str:
    """Return the first guarantee of the cell number `cell`, in short, or "nothing claimed".

    Claims as published are not guarantees.
    """
    plan = sweep.prepared[cell].plan
    strict = [claim for claim in plan.claims(plan.permitted) if not claim.as_published]
    return strict[0].short if strict else "nothing claimed"


def claim_of(sweep: Sweep) -> PrivacyClaim:
    """Return the claim of the first cell that makes one. StopIteration if no cell does.

    Its terms are taken for those of all cells.
    """
    claims = (budgeted(prepared.shown_claims) for prepared in sweep.prepared)
    return next(claim for claim in claims if claim is not None)


def meaning(*claims: PrivacyClaim) -> str:
    """Return a text with the terms of these claims, for epsilons without terms of their own.

    It has no full stop at its end. Equal terms are named once.
    """
    return "Every epsilon here, unless it says otherwise: " + "; ".join(
        f"epsilon {words}" for words in dict.fromkeys(claim.full_terms for claim in claims)
    )
