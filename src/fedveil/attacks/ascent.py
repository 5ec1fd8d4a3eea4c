"""The active client of Nasr et al. (2019): it sends steps uphill on records that it asks about.

Where somebody trains on such a record, the next rounds bring its loss back.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedveil.attacks.traces import ascended
from fedveil.data.federated import Array, FederatedData
from fedveil.identity import Stated
from fedveil.inputs import Inputs, taken
from fedveil.models.task import Task
from fedveil.privacy.plan import PrivacyPlan
from fedveil.training.adversary import Adversary, Chance, Ids
from fedveil.training.exchange import Sent

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ascending(Adversary):
    """Client `client` sends, in the rounds that `aims` names, a step uphill on those records.

    `aims` are rows of `asked`. The step is `boost` times as long as raises their mean loss by one,
    so that it survives the mean over the cohort; without noise, if the server takes that. In other
    rounds the client is honest.
    """

    task: Task
    asked: FederatedData
    client: int
    aims: Mapping[int, Rows]
    boost: float

    @property
    def identity(self) -> Stated:
        return (
            ("adversary", "ascent"),
            ("task", self.task),
            ("asked", self.asked),
            ("client", self.client),
            ("aims", dict(self.aims)),
            ("boost", self.boost),
        )

    def cohort(self, round: int, ids: Ids) -> Ids:
        return np.union1d(ids, [self.client]).astype(np.int64) if round in self.aims else ids

    def cheats(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        return np.asarray((ids == self.client) & (round in self.aims))

    def report(self, chance: Chance) -> Sent:
        turn = chance.turn
        step = ascended(self.task, turn.start, *self.aimed_at(turn.number)) - turn.start
        return chance.sent(chance.skipping(self.boost * step[None]))

    def aimed_at(self, round: int) -> tuple[Inputs[Array], Array]:
        """What is asked about in a round."""
        rows = self.aims[round]
        return taken(self.asked.x, rows), self.asked.y[rows]

    def assumption(self, plan: PrivacyPlan) -> str:
        return "one client attacks membership in this simulation: the claim is about the others"
