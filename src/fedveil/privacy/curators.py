"""Curators of adaptive clips under local DP, and what they add to a budget line.

The server sees clients' reports and the clip, which a curator's noisy sums move: the line against
it is the composition of both. Neither part stands alone, since the clip that shapes later reports
depends on what was watched, and what is watched on earlier reports.
"""

import math
from dataclasses import dataclass, replace

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.calibration import MOST_NOISE
from fedveil.privacy.accounting.claims import Relation, Trust
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, GaussianWithCurator
from fedveil.privacy.watching import Watched

_SEEN = (
    "a trusted curator (or an enclave) sees {what} and publishes them with noise; the server sees "
    "that and the reports, and learns from both"
)


@dataclass(frozen=True)
class Curator:
    """A Gaussian release about a client in at most `most` of its turns. `key` sets its noise."""

    release: Gaussian
    most: int
    watched: str
    seen: str
    key: str
    setting: float
    remedy: str

    def beside(self, report: Gaussian) -> GaussianWithCurator:
        """A client's turn: its own report, and its part in what the curator publishes."""
        return GaussianWithCurator(report, self.release, self.most)

    def on(self, line: BudgetLine) -> BudgetLine:
        """The line of the reports, extended to what the curator publishes, against the server."""
        first, *others = line.assumptions
        return replace(
            line,
            trust=Trust.CURATOR,
            covers=line.covers.replace("updates", f"updates and {self.watched}", 1),
            assumptions=(first, _SEEN.format(what=self.seen), *others),
        )

    def check(self, base: BudgetLine, count: int) -> None:
        """Refuse a curator that leaves nothing of the line's budget for `count` reports."""
        budget, turns = base.budget, min(count, self.most)
        if math.isinf(budget.epsilon):
            return
        least = self.beside(Gaussian(MOST_NOISE))
        if epsilon(least, count, budget.delta, Relation.REPLACE) < budget.epsilon:
            return
        alone = epsilon(self.release, turns, budget.delta, Relation.REPLACE)
        alone_line = replace(self.on(base), event=self.release, covers=self.watched)
        raise BadInput(
            f"{self.key} {self.setting:g} leaves nothing of budget.epsilon {budget.epsilon:g} for "
            f"the updates: its {turns} releases alone cost {alone_line.claim(alone).short}; "
            f"{self.remedy}, or raise budget.epsilon"
        )


def curator_of(watched: Watched | None, base: BudgetLine, rounds: int) -> Curator | None:
    """The curator that publishes a schedule's statistic, None if clients flip bits themselves."""
    if watched is None or not watched.noise:
        return None
    return Curator(
        Gaussian(watched.noise / watched.sensitivity(Relation.REPLACE)),
        replace(base, every=watched.every).participations(rounds),
        watched.word,
        watched.seen,
        watched.key,
        watched.setting,
        watched.remedy,
    )
