"""`Adversary`: some clients are malicious, train on other records, and send other reports.

A malicious client is a client of the cohort like any other. What it sends goes through the same
acceptance as every report.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.identity import Stated
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.channel import Ids
from fedveil.privacy.clip import Clip, row_norms
from fedveil.privacy.clip_schedules import Lengths
from fedveil.privacy.plan import PrivacyPlan
from fedveil.training.exchange import client_report, forked_updates
from fedveil.training.participants import Group, Participants
from fedveil.training.reports import ClientBatch, ClientReports, Rows, accept
from fedveil.training.work import ClientWork


@dataclass(frozen=True, eq=False)
class AttackContext:
    """What malicious clients have at hand in a round: the honest work, and the protocol.

    Attributes:
        work: The local work that is asked of them.
        plan: The privacy plan.
        clients: The malicious clients, their records, and the round.
    """

    work: ClientWork
    plan: PrivacyPlan
    clients: ClientBatch

    @property
    def size(self) -> int:
        """The number of parameters."""
        return self.clients.round.start.shape[-1]

    def honest_reports(self) -> ClientReports:
        """What the clients would send if they were honest."""
        return client_report(self.work, self.plan, self.clients)

    def train(self, work: ClientWork | None = None, clip: Clip | None = None) -> torch.Tensor:
        """Updates from local work on the clients' records, [K, P], without the protocol's noise.

        Args:
            work: The work to do, by default the honest one.
            clip: The clip that they keep to.
        """
        batch = replace(self.clients, round=replace(self.clients.round, clip=clip), only_sum=False)
        work = work or self.work
        done = forked_updates(work, batch) if batch.gradients.forks else work.updates(batch)
        return Rows.of(done.rows, self.size).rows  # type: ignore[union-attr]

    def complying(self, rows: torch.Tensor, ids: Ids | None = None) -> torch.Tensor:
        """`rows` clipped and randomised as the protocol asks, with the noise of clients `ids`."""
        round = self.clients.round
        own = Rows.of(rows.clone(), self.size)
        accept(own, round.clip)
        if self.plan.release.adds_noise:
            noise_round = round if ids is None else replace(round, ids=ids)
            self.plan.release.randomise_(own.rows, noise_round)
        return own.rows

    def skipping(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` without noise, in a form that the server does not refuse."""
        own = rows.clone()
        self.plan.release.channel.encode_(own, self.clients.round)
        return own

    def sent(self, rows: torch.Tensor | Sequence[torch.Tensor]) -> ClientReports:
        """Reports of these rows. An adaptive clip gets the truth about their lengths."""
        reports = Rows.of(rows, self.size)
        nobody = torch.zeros(len(self.clients.cohort), dtype=torch.bool)
        lengths = Lengths(row_norms(reports.rows), nobody)
        statistic = self.plan.client_statistic(lengths, self.clients.round)
        return ClientReports(reports, statistic, nobody, nobody)


class Adversary(Participants):
    """Decides who is malicious in which round, and what they send. By default nobody is.

    A malicious client may train on records of `records` instead of its own.
    """

    @property
    def identity(self) -> Stated:
        return (("adversary", "nobody"),)

    def malicious(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of the clients `ids` are malicious in `round`."""
        return np.zeros(len(ids), dtype=np.bool_)

    def other_records(self, round: int, ids: Ids) -> Ids:
        """The client of `records` on whose records each malicious client trains; -1: its own."""
        return np.full(len(ids), -1, dtype=np.int64)

    def send(self, context: AttackContext) -> ClientReports:
        """What the malicious clients of a block send."""
        return context.honest_reports()

    def assumption(self, plan: PrivacyPlan) -> str:
        return "some clients cheat in this simulation: the claim is about the others"

    def groups(self, round: int, ids: Ids) -> Iterator[Group]:
        """Honest clients first, so that they are computed as fast as without an attack."""
        malicious = self.malicious(round, ids)
        yield Group(ids[~malicious])
        others, bad = None, ids[malicious]
        if self.records is not None:
            others = self.other_records(round, bad)
        yield Group(bad, honest=False, other_records=others)

    def report(self, work: ClientWork, plan: PrivacyPlan, clients: ClientBatch) -> ClientReports:
        return self.send(AttackContext(work, plan, clients))

    def notes(self, group: Group, lengths: torch.Tensor) -> dict[str, float]:
        who = "honest" if group.honest else "malicious"
        return {who: len(lengths), f"{who} length": float(lengths.sum())}

    def summary(self, notes: dict[str, float], clients: int) -> dict[str, float]:
        """How many clients were malicious, their share, and the mean lengths of reports."""
        honest, malicious = (int(notes.get(who, 0)) for who in ("honest", "malicious"))
        return {
            "cheating": malicious,
            "cheating_share": malicious / max(clients, 1),
            "honest_length": notes.get("honest length", 0.0) / max(honest, 1),
            "cheating_length": notes.get("malicious length", 0.0) / max(malicious, 1),
        }

    def describe(self, claims: tuple[PrivacyClaim, ...]) -> dict[str, Any]:
        return {"kind": type(self).__name__}


ReportChange = Callable[[int, Ids, torch.Tensor], torch.Tensor | Sequence[torch.Tensor]]
"""(round, clients, their reports [K, P]) -> what they send instead, one report per client."""


@dataclass(frozen=True)
class ReportAttack(Adversary):
    """Everybody's reports, as they would be sent, pass through a function."""

    change: ReportChange

    remembers = True

    @property
    def identity(self) -> Stated:
        return (("adversary", "reports"), ("change", self.change))

    def malicious(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        return np.ones(len(ids), dtype=np.bool_)

    def send(self, context: AttackContext) -> ClientReports:
        sent, round = context.honest_reports(), context.clients.round
        if not isinstance(sent.reports, Rows):
            raise AssertionError("an adversary sees reports one by one")
        changed = self.change(round.number, round.ids, sent.reports.rows.clone())
        return replace(sent, reports=Rows.of(changed, context.size))
