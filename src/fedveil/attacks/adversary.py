"""`Adversary`: some clients are malicious, train on other records, and send other reports.

A malicious client is a client of the cohort like any other. What it sends goes through the same
acceptance as every report. `BackdoorAttack` trains on poisoned records and scales updates up.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedveil.attacks.backdoors import Backdoor, Pairs, poisoned
from fedveil.attacks.certificate import BASE_RATE, in_words
from fedveil.base.checks import ANY_COUNT, COUNT, PORTION, POSITIVE, one_of
from fedveil.base.errors import BadInput
from fedveil.base.identity import Stated, named_values
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting
from fedveil.privacy.clip import Clip, row_norms
from fedveil.privacy.clip_schedules import Lengths
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Ids
from fedveil.privacy.releases.two_point import honest_reports
from fedveil.training.evaluate import BATCH
from fedveil.training.exchange import client_report, forked_updates
from fedveil.training.participants import Group, Participants
from fedveil.training.reports import ClientBatch, ClientReports, Rows, accept, clip_rows_
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
        return Rows.from_reports(done.rows, self.size).rows  # type: ignore[union-attr]

    def complying(self, rows: torch.Tensor, ids: Ids | None = None) -> torch.Tensor:
        """`rows` clipped and randomised as the protocol asks, with the noise of clients `ids`."""
        round = self.clients.round
        own = Rows.from_reports(rows.clone(), self.size)
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
        reports = Rows.from_reports(rows, self.size)
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

    def malicious_mask(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of the clients `ids` are malicious in `round`."""
        return np.zeros(len(ids), dtype=np.bool_)

    def other_records(self, round: int, ids: Ids) -> Ids:
        """The client of `records` on whose records each malicious client trains, -1 for its own."""
        return np.full(len(ids), -1, dtype=np.int64)

    def send(self, context: AttackContext) -> ClientReports:
        """What the malicious clients of a block send."""
        return context.honest_reports()

    def assumption(self, plan: PrivacyPlan) -> str:
        return "some clients cheat in this simulation: the claim is about the others"

    def groups(self, round: int, ids: Ids) -> Iterator[Group]:
        """Honest clients first, so that they are computed as fast as without an attack."""
        malicious = self.malicious_mask(round, ids)
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

    def malicious_mask(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        return np.ones(len(ids), dtype=np.bool_)

    def send(self, context: AttackContext) -> ClientReports:
        sent, round = context.honest_reports(), context.clients.round
        if not isinstance(sent.reports, Rows):
            raise AssertionError("an adversary sees reports one by one")
        changed = self.change(round.number, round.ids, sent.reports.rows.clone())
        return replace(sent, reports=Rows.from_reports(changed, context.size))


class AttackerNoise(StrEnum):
    """Whether attackers add the noise that clients are to add, skip it, or cancel it in pairs."""

    COMPLY = "comply"
    SKIP = "skip"
    HIDE = "hide"


@dataclass(frozen=True)
class When:
    """The rounds in which attackers attack.

    Attributes:
        start: The first round.
        end: The last round, None for the last of the training.
        every: The distance of two attacks in rounds.
        present: Whether attackers join the cohorts of those rounds uninvited. Otherwise they attack
            when they are drawn.
    """

    start: int = 1
    end: int | None = None
    every: int = 1
    present: bool = True

    @property
    def identity(self) -> Stated:
        return (("when", "rounds"), *named_values(self, "start", "end", "every", "present"))

    def __post_init__(self) -> None:
        COUNT.check("attack.start", self.start)
        COUNT.check("attack.every", self.every)
        if self.end is not None and self.end < self.start:
            raise BadInput(f"attack.end is {self.end} and attack.start {self.start}: end later")

    def due(self, round: int) -> bool:
        """Whether they attack in `round`."""
        last = round if self.end is None else self.end
        return self.start <= round <= last and (round - self.start) % self.every == 0


@dataclass(frozen=True, eq=False)
class BackdoorAttack(Adversary):
    """The clients `attackers` learn from poisoned records while they attack, and are honest else.

    They train as honest clients do, or as `work` says, and send `boost` times their update: model
    replacement (Bagdasaryan et al. 2020). With `project`, they stay within clip / `boost` of the
    round's model while they train, so that a known clip cuts nothing off afterwards. What they do
    about noise at the clients is in `noise`: comply; skip it, in a form that the server accepts;
    or hide, when pairs of them draw the same noise with opposite signs: each report by itself is
    distributed as the protocol says, and in the sum the noise is gone.

    Their reports go through the same acceptance as everybody's; noise that the server adds holds
    for them as well. Honest clients are sampled and charged as without an attack.
    """

    attackers: npt.NDArray[np.int64]
    held_out: Pairs
    records: FederatedData | None = None
    boost: float = 1.0
    project: bool = False
    noise: AttackerNoise = AttackerNoise.COMPLY
    when: When = When()
    work: ClientWork | None = None

    @property
    def identity(self) -> Stated:
        return (
            ("adversary", "backdoor"),
            *named_values(self, "attackers", "held_out"),
            ("poisoned", self.records),
            *named_values(self, "boost", "project", "noise", "when", "work"),
        )

    def __post_init__(self) -> None:
        POSITIVE.check("attack.boost", self.boost)
        one_of("attack.noise", self.noise, AttackerNoise)
        if len(self.attackers) != (0 if self.records is None else self.records.clients):
            raise AssertionError("every attacker has its own poisoned records")

    @classmethod
    def of(
        cls,
        data: FederatedData,
        backdoor: Backdoor,
        *,
        attackers: int = 1,
        share: float = 0.5,
        boost: float = 1.0,
        project: bool = False,
        noise: AttackerNoise = AttackerNoise.COMPLY,
        when: When | None = None,
        work: ClientWork | None = None,
        seed: int = 0,
    ) -> "BackdoorAttack":
        """An attack by random clients. With 0 attackers the backdoor is only measured.

        | edge | behaviour |
        |---|---|
        | as many attackers as clients, or more | BadInput: no honest client is left |
        | share outside (0, 1] | BadInput |
        | boost <= 0 | BadInput |
        | records of several inputs by name | BadInput |
        """
        ANY_COUNT.check("attack.attackers", attackers)
        PORTION.check("attack.share", share)
        if isinstance(data.x, dict):
            raise BadInput(
                f"records have inputs by name ({', '.join(data.x)}): backdoors are for records of "
                "one array"
            )
        if attackers >= data.clients:
            raise BadInput(
                f"attack.attackers is {attackers} of {data.clients} clients: at least one must be "
                "honest"
            )
        rng = np.random.default_rng([seed, 0xBAD])
        chosen = np.sort(rng.choice(data.clients, size=attackers, replace=False)).astype(np.int64)
        backdoor.check(data)
        records = poisoned(data, backdoor, chosen, share, rng) if attackers else None
        x, y = backdoor.held_out(data)
        held = x.astype(data.x.dtype, copy=False), y.astype(data.y.dtype, copy=False)
        return cls(chosen, held, records, boost, project, noise, when or When(), work)

    def cohort(self, round: int, ids: Ids) -> Ids:
        """The clients that were drawn, and the attackers if they join uninvited."""
        if not self.when.present or not self.when.due(round):
            return ids
        return np.union1d(ids, self.attackers)

    def malicious_mask(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        if not self.when.due(round):
            return np.zeros(len(ids), dtype=np.bool_)
        return np.isin(ids, self.attackers)

    def other_records(self, round: int, ids: Ids) -> Ids:
        return np.searchsorted(self.attackers, ids)

    def send(self, context: AttackContext) -> ClientReports:
        """Train, boost, and then comply with, skip or cancel the noise."""
        clip, within = context.clients.round.clip, None
        if self.project and clip is not None:
            within = Clip(clip.value / self.boost, clip.norm)
        elif self.work is None and context.plan.steps is not None:
            within = clip  # of each example's gradient, without which there is no DP-SGD
        rows = context.train(self.work, within)
        rows = rows.nan_to_num(0.0, 0.0, 0.0).mul_(self.boost)
        if not context.plan.release.adds_noise:
            return context.sent(rows)
        match self.noise:
            case AttackerNoise.COMPLY:
                return context.sent(context.complying(rows))
            case AttackerNoise.SKIP:
                return context.sent(context.skipping(rows))
        return context.sent(self._hiding(context, rows, clip))

    def _hiding(
        self, context: AttackContext, rows: torch.Tensor, clip: Clip | None
    ) -> torch.Tensor:
        """The clipped update with noise that the partner's noise cancels.

        Partners are pairs of attackers in the round's cohort. One without a partner complies.
        """
        clients = context.clients
        together = np.sort(np.intersect1d(self.attackers, clients.everyone))
        places = np.searchsorted(together, clients.round.ids)
        leaders = together[places - places % 2]
        alone = (places == len(together) - 1) & (len(together) % 2 == 1)
        noise = context.complying(torch.zeros_like(rows), leaders)
        signs = torch.from_numpy(np.where((places % 2 == 1) & ~alone, -1.0, 1.0))
        own = clip_rows_(rows, clip).rows
        return own + noise * signs[:, None].to(noise.dtype)

    def measure(self, task: Task, params: torch.Tensor) -> dict[str, float]:
        """`backdoor`: the share of held-out triggered records that the attacker's answer is given.

        Where answers are sequences, each counts that is not padding.
        """
        given = wanted = 0
        x, y = self.held_out
        for a in range(0, len(x), BATCH):
            with torch.inference_mode():
                here = torch.tensor(y[a : a + BATCH])
                outputs = task.answers(params, torch.tensor(x[a : a + BATCH])).argmax(-1)
                given += int((outputs == here).sum())
                wanted += int((here >= 0).sum())
        return {"backdoor": given / max(wanted, 1)}

    def check_plan(self, plan: PrivacyPlan) -> None:
        """Refuse plans to which the attack does not apply, with secure noise, or whose claim it
        would break.
        """
        if self.noise is AttackerNoise.HIDE and not plan.release.additive:
            raise BadInput(
                "attack.noise is 'hide' and clients add no Gaussian or Laplace noise: leave it "
                "out, or use noise.where = 'client'"
            )
        if self.noise is AttackerNoise.SKIP and not plan.release.adds_noise and plan.steps is None:
            raise BadInput(
                "attack.noise is 'skip' and clients add no noise: leave it out (noise that the "
                "server adds holds for attackers too)"
            )
        if self.project and plan.steps is not None:
            raise BadInput("attack.project is for a clip on updates, which dp-sgd has not: drop it")
        if plan.secure:
            raise BadInput("attacks are simulations: use noise.source = 'seeded'")
        counted_on = honest_reports(plan)
        tolerated = plan.release.channel.minimum - counted_on
        if counted_on and len(self.attackers) > tolerated:
            raise BadInput(
                f"attack.attackers is {len(self.attackers)} and shuffle.dishonest is {tolerated}: "
                "the claim counts on honest reports; raise shuffle.dishonest and lower "
                "shuffle.minimum, or attack with fewer clients"
            )

    def describe(self, claims: tuple[PrivacyClaim, ...]) -> dict[str, Any]:
        first = counting(claims)
        when = self.when
        return {
            "attackers": len(self.attackers),
            "boost": self.boost,
            "noise": str(self.noise),
            "rounds": {"start": when.start, "end": when.end, "every": when.every},
            "certificate": in_words(first, BASE_RATE, drawn=not when.present),
        }

    def assumption(self, plan: PrivacyPlan) -> str:
        count = len(self.attackers)
        return (
            f"{count} of {plan.population} clients attack in this simulation: the claim is about "
            "the honest ones, whose account is the same as without an attack"
        )
