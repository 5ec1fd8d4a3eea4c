"""A cell that was built, and what one training of it came to."""

import math
from dataclasses import dataclass
from functools import cached_property

from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting
from fedveil.privacy.plan import PrivacyPlan
from fedveil.training.gradients.choice import Mode
from fedveil.training.work import ClientWork
from fedveil.tuning.axes import Cell


@dataclass(frozen=True)
class TrialOutcome:
    """Where one training ended: the test metrics, and those along the way as (round, metrics).

    A metric that is not finite is NaN: the training diverged.
    """

    rounds: int
    metrics: dict[str, float]
    curve: tuple[tuple[int, dict[str, float]], ...] = ()


@dataclass(frozen=True, eq=False)
class PreparedCell:
    """A cell that was built once: its plan and execution mode serve every repetition.

    `noise` is the standard deviation of the noise on one coordinate of the first round's mean
    update, 0 without noise and NaN where it is part of training. `together` is how many repetitions
    are one computation.
    """

    cell: Cell
    plan: PrivacyPlan
    mode: Mode
    work: ClientWork
    noise: float
    together: int = 1

    def blocks(self, first: int, last: int) -> list[tuple[int, ...]]:
        """Repetitions first .. last - 1, those together that are one computation."""
        return [
            tuple(range(r, min(r + self.together, last))) for r in range(first, last, self.together)
        ]

    @property
    def told_noise(self) -> str:
        """The noise for people."""
        return "in training" if math.isnan(self.noise) else f"{self.noise:.3g}"

    @property
    def claim(self) -> PrivacyClaim | None:
        """What the cell's rounds guarantee, if anything: the claim that counts."""
        return counting(self.claims)

    @cached_property
    def claims(self) -> list[PrivacyClaim]:
        """The claims that have to be told: the tightest for each thing that is released and trust.

        The strict reading comes after one as published, the one without a shuffler after its own.
        """
        every = self.plan.claims(self.plan.permitted)
        told = list(every[:1])
        for claim in every[1:]:
            if not claim.as_published and all(
                (claim.covers, claim.trust) != (other.covers, other.trust) or other.as_published
                for other in told
            ):
                told.append(claim)
        return told
