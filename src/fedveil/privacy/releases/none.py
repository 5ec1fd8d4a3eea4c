"""No noise and no claim: what plain federated averaging releases."""

from fedveil.base.errors import BadInput
from fedveil.privacy.clip_schedules import ClipSchedule
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.sampling import Sampler


def unprotected(
    sampler: Sampler, population: int, *, rounds: int, schedule: ClipSchedule | None = None
) -> PrivacyPlan:
    """No claim; a clip, if given, only limits what a client can do."""
    if schedule is not None and schedule.watched is not None:
        raise BadInput("an adaptive clip watches clients, which needs a claim: use a fixed one")
    return PrivacyPlan(sampler, population, rounds, schedule=schedule)
