"""No noise and no claim: what plain federated averaging releases."""

from fedveil.errors import BadInput
from fedveil.privacy.clip_schedules import Rule
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.sampling import Sampler


def unprotected(
    sampler: Sampler, population: int, *, rounds: int, rule: Rule | None = None
) -> PrivacyPlan:
    """No claim; a clip, if given, only limits what a client can do."""
    if rule is not None and rule.watched is not None:
        raise BadInput("an adaptive bound watches clients, which needs a claim: use a fixed one")
    return PrivacyPlan(sampler, population, rounds, rule=rule)
