"""`Participants`: who takes part in a round, on which records, and what they send.

By default, everybody who was drawn trains on its own records and reports as the round asks.
Subclasses simulate clients that do not (`fedveil.attacks`). Whatever they send is accepted like any
other report, and everybody who was drawn is charged.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fedveil.base.identity import Stated
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Ids
from fedveil.training.exchange import client_report
from fedveil.training.reports import ClientBatch, ClientReports
from fedveil.training.work import ClientWork

IDENTITY = "adversary"
"""The word for dishonest participants in a training's identity. Seeds follow from it."""


@dataclass(frozen=True, eq=False)
class Group:
    """Clients of a chunk that report in the same way.

    Attributes:
        ids: The clients.
        is_honest: Whether they report as the round asks.
        other_records: For each client, the index in `Participants.records` of the client on whose
            records it trains, -1 for its own. None if all train on their own.
    """

    ids: Ids
    is_honest: bool = True
    other_records: Ids | None = None


class Participants:
    """The clients of a training. By default all of them are honest.

    Attributes:
        records: Records on which dishonest clients may train instead of their own.
        remembers: Whether a subclass keeps something from one call to the next. Everything is then
            computed in one process.
    """

    records: FederatedData | None = None
    remembers = False

    @property
    def identity(self) -> Stated:
        """Identity pairs: (("adversary", "honest"),)."""
        return ((IDENTITY, "honest"),)

    def check_plan(self, plan: PrivacyPlan) -> None:
        """Raise BadInput if the plan does not suit these participants.

        Honest ones suit every plan.
        """

    def assumption(self, plan: PrivacyPlan) -> str:
        """The assumption to add to every claim about the training, as a clause. "" for none."""
        return ""

    def cohort(self, round: int, drawn: Ids) -> Ids:
        """The clients that take part in `round`, ascending: all of `drawn`, and uninvited ones."""
        return drawn

    def groups(self, round: int, ids: Ids) -> Iterator[Group]:
        """Yield the clients `ids` of `round` split into groups, each with one way to report."""
        yield Group(ids)

    def report(self, work: ClientWork, plan: PrivacyPlan, clients: ClientBatch) -> ClientReports:
        """The reports of dishonest clients. By default they report as the round asks."""
        return client_report(work, plan, clients)

    def notes(self, group: Group, lengths: torch.Tensor) -> dict[str, float]:
        """Numbers, by name, to add to the round's notes about clients of a group.

        `lengths` are the lengths of their reports as they arrived. {} for honest clients.
        """
        return {}

    def summary(self, notes: dict[str, float], clients: int) -> dict[str, float]:
        """The entries of a round's result made from its summed notes, for `clients` clients.

        {} for honest clients.
        """
        return {}

    def measure(self, task: Task, params: torch.Tensor) -> dict[str, float]:
        """Metrics of a model, by name, beyond those of the test split. {} for honest clients."""
        return {}

    def describe(self, claims: tuple[PrivacyClaim, ...]) -> dict[str, Any]:
        """The section about the participants in a run's result, {} for honest clients."""
        return {}
