"""`Participants`: who takes part in a round, on which records, and what they send.

By default, everybody who was drawn trains on its own records and reports as the round asks.
Subclasses simulate clients that do not (`fedveil.attacks`). Whatever they send is accepted like any
other report, and everybody who was drawn is charged.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedveil.base.errors import BadInput
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
        honest: Whether they report as the round asks.
        other_records: The client of `Participants.records` on whose records each of them trains,
            -1 for its own; None if all train on their own.
    """

    ids: Ids
    honest: bool = True
    other_records: Ids | None = None


class Participants:
    """The clients of a training. By default all of them are honest.

    Attributes:
        records: Records on which dishonest clients may train instead of their own.
        remembers: Whether something stays from one call to the next. Everything is then computed
            in one process.
    """

    records: FederatedData | None = None
    remembers = False

    @property
    def identity(self) -> Stated:
        return ((IDENTITY, "honest"),)

    def check_plan(self, plan: PrivacyPlan) -> None:
        """Refuse a plan that these participants make no sense with."""

    def assumption(self, plan: PrivacyPlan) -> str:
        """The assumption that every claim about the training must add, empty if none."""
        return ""

    def cohort(self, round: int, drawn: Ids) -> Ids:
        """The clients that take part in `round`, ascending: those drawn, and uninvited ones."""
        return drawn

    def groups(self, round: int, ids: Ids) -> Iterator[Group]:
        """The clients `ids` in the groups in which they are computed."""
        yield Group(ids)

    def report(self, work: ClientWork, plan: PrivacyPlan, clients: ClientBatch) -> ClientReports:
        """What dishonest clients send."""
        return client_report(work, plan, clients)

    def notes(self, group: Group, lengths: torch.Tensor) -> dict[str, float]:
        """Numbers to record about some clients of a group and the lengths of their reports."""
        return {}

    def summary(self, notes: dict[str, float], clients: int) -> dict[str, float]:
        """The notes of a round with `clients` clients, as its result shows them."""
        return {}

    def measure(self, task: Task, params: torch.Tensor) -> dict[str, float]:
        """Metrics of a model beside those of the test split."""
        return {}

    def describe(self, claims: tuple[PrivacyClaim, ...]) -> dict[str, Any]:
        """The section about the participants in a run's result, possibly empty."""
        return {}


def checked_cohort(participants: Participants, round: int, drawn: Ids, population: int) -> Ids:
    """The cohort of a round. One that names a client twice is refused: its rows would add up.

    Guarantee: all clients that were drawn are in it, and all others are dishonest. So an honest
    client takes part exactly when the sampler says so, which is what it is charged for.
    """
    ids = participants.cohort(round, drawn)
    if len(ids) and (ids[0] < 0 or ids[-1] >= population or not (ids[1:] > ids[:-1]).all()):
        raise BadInput(
            f"the sampler drew a cohort that is not {len(ids)} different clients of {population} "
            "in ascending order: nothing was released; draw each client once"
        )
    if ids is drawn:
        return drawn
    uninvited = np.setdiff1d(ids, drawn)
    honest = any(g.honest and len(g.ids) for g in participants.groups(round, uninvited))
    if not np.isin(drawn, ids).all() or honest:
        raise BadInput(
            f"{type(participants).__name__} leaves clients out of round {round}, or brings in "
            "honest ones that were not drawn: others would not be sampled as they are charged for"
        )
    return ids
