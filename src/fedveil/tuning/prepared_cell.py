"""`PreparedCell`: a cell with its plan, and `TrialOutcome`: the result of one training."""

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
    """The result of one training. A metric is NaN if the training diverged.

    Attributes:
        rounds: The rounds that ran.
        metrics: Test metrics at the end.
        curve: (round, metrics) along the way.
    """

    rounds: int
    metrics: dict[str, float]
    curve: tuple[tuple[int, dict[str, float]], ...] = ()


@dataclass(frozen=True, eq=False)
class PreparedCell:
    """A cell that was built once. Its plan and mode serve every repetition.

    Attributes:
        cell: The recipe and its choices.
        plan: The privacy plan.
        mode: The execution mode.
        work: What clients do.
        noise: Standard deviation of the noise on one coordinate of the first round's mean update, 0
            without noise, NaN if noise is part of local training.
        together: The number of repetitions that are one computation.
    """

    cell: Cell
    plan: PrivacyPlan
    mode: Mode
    work: ClientWork
    noise: float
    together: int = 1

    def blocks(self, first: int, last: int) -> list[tuple[int, ...]]:
        """Repetitions first .. last - 1 in blocks that are one computation each."""
        return [
            tuple(range(r, min(r + self.together, last))) for r in range(first, last, self.together)
        ]

    @property
    def noise_text(self) -> str:
        """`noise` for people."""
        return "in training" if math.isnan(self.noise) else f"{self.noise:.3g}"

    @property
    def claim(self) -> PrivacyClaim | None:
        """The headline claim of the cell's rounds, if any."""
        return counting(self.claims)

    @cached_property
    def claims(self) -> list[PrivacyClaim]:
        """The claims to show: the tightest for each kind of release and trust.

        The strict reading comes after one as published, the one without a shuffler after its own.
        """
        every = self.plan.claims(self.plan.permitted)
        shown = list(every[:1])
        for claim in every[1:]:
            if not claim.as_published and all(
                (claim.covers, claim.trust) != (other.covers, other.trust) or other.as_published
                for other in shown
            ):
                shown.append(claim)
        return shown
