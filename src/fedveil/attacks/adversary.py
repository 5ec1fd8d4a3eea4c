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

from fedveil.attacks.backdoors import Backdoor, Pairs, poison_records
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
    """The means of malicious clients in a round: the honest work, and the protocol.

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
        """Train as the round asks, and return reports that are clipped and noised as asked.

        The records are those of `clients`, which an attack may have replaced. Each call trains
        again.
        """
        return client_report(self.work, self.plan, self.clients)

    def train(self, work: ClientWork | None = None, clip: Clip | None = None) -> torch.Tensor:
        """Updates from local work on the clients' records, [K, P], before noise on reports.

        Noise in the work's own steps (DP-SGD) is in them.

        Args:
            work: The work to do, by default the work that is asked of them.
            clip: The clip to apply while they train, by default none, whatever the round's clip.
                DP-SGD needs one: AssertionError without.
        """
        batch = replace(self.clients, round=replace(self.clients.round, clip=clip), only_sum=False)
        work = work or self.work
        done = forked_updates(work, batch) if batch.gradients.forks else work.updates(batch)
        return Rows.from_reports(done.rows, self.size).rows  # type: ignore[union-attr]

    def complying(self, rows: torch.Tensor, ids: Ids | None = None) -> torch.Tensor:
        """A copy of `rows` [K, P], clipped and randomised as the protocol asks.

        The noise is that of the clients `ids` [K], by default of the clients themselves. Without
        noise at the clients, rows are only clipped. Rows that are not finite become zero first.
        """
        round = self.clients.round
        own = Rows.from_reports(rows.clone(), self.size)
        accept(own, round.clip)
        if self.plan.release.adds_noise:
            noise_round = round if ids is None else replace(round, ids=ids)
            self.plan.release.randomise_(own.rows, noise_round)
        return own.rows

    def skipping(self, rows: torch.Tensor) -> torch.Tensor:
        """A copy of `rows` [K, P] without noise, encoded so that the server does not refuse it."""
        own = rows.clone()
        self.plan.release.channel.encode_(own, self.clients.round)
        return own

    def sent(self, rows: torch.Tensor | Sequence[torch.Tensor]) -> ClientReports:
        """Reports that send these rows, one per client.

        The statistic of an adaptive clip is computed from the rows' true lengths. No client is
        marked as clipped or diverged.
        """
        reports = Rows.from_reports(rows, self.size)
        nobody = torch.zeros(len(self.clients.cohort), dtype=torch.bool)
        lengths = Lengths(row_norms(reports.rows), nobody)
        statistic = self.plan.client_statistic(lengths, self.clients.round)
        return ClientReports(reports, statistic, nobody, nobody)


class Adversary(Participants):
    """Participants some of whom are malicious. By default none is.

    Subclasses override `malicious_mask`, `other_records` and `send`. A malicious client may train
    on records of `records` instead of its own.
    """

    @property
    def identity(self) -> Stated:
        """Identity pairs: (("adversary", "nobody"),)."""
        return (("adversary", "nobody"),)

    def malicious_mask(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        """Mask of the clients among `ids` that are malicious in `round`, bool [K].

        By default none.
        """
        return np.zeros(len(ids), dtype=np.bool_)

    def other_records(self, round: int, ids: Ids) -> Ids:
        """For each malicious client of `ids`, the client of `records` on whose records it trains.

        -1 means its own records, which is the default.
        """
        return np.full(len(ids), -1, dtype=np.int64)

    def send(self, context: AttackContext) -> ClientReports:
        """The reports of the malicious clients of a block. By default they are honest ones."""
        return context.honest_reports()

    def assumption(self, plan: PrivacyPlan) -> str:
        """The assumption to add to every claim: that it is about the honest clients only."""
        return "some clients cheat in this simulation: the claim is about the others"

    def groups(self, round: int, ids: Ids) -> Iterator[Group]:
        """Yield two groups: the honest clients of `ids`, then the malicious ones.

        Either may be empty. Honest clients are so computed as fast as without an attack.
        """
        malicious = self.malicious_mask(round, ids)
        yield Group(ids[~malicious])
        others, bad = None, ids[malicious]
        if self.records is not None:
            others = self.other_records(round, bad)
        yield Group(bad, is_honest=False, other_records=others)

    def report(self, work: ClientWork, plan: PrivacyPlan, clients: ClientBatch) -> ClientReports:
        """The reports of malicious clients, made by `send`."""
        return self.send(AttackContext(work, plan, clients))

    def notes(self, group: Group, lengths: torch.Tensor) -> dict[str, float]:
        """The number of clients of a group, and the sum of their reports' lengths.

        The keys are "honest" and "honest length", or "malicious" and "malicious length".
        """
        who = "honest" if group.is_honest else "malicious"
        return {who: len(lengths), f"{who} length": float(lengths.sum())}

    def summary(self, notes: dict[str, float], clients: int) -> dict[str, float]:
        """The entries of a round's result about malicious clients. There are always four.

        "cheating" is their number, and "cheating_share" their share of `clients`. "honest_length"
        and "cheating_length" are the mean lengths of reports as they arrive at the server, which
        honest clients have clipped already. A length is 0 if there are no such clients.

        Args:
            notes: The results of `notes`, summed by name over the round.
            clients: The number of clients in the round, honest or not.
        """
        honest, malicious = (int(notes.get(who, 0)) for who in ("honest", "malicious"))
        return {
            "cheating": malicious,
            "cheating_share": malicious / max(clients, 1),
            "honest_length": notes.get("honest length", 0.0) / max(honest, 1),
            "cheating_length": notes.get("malicious length", 0.0) / max(malicious, 1),
        }

    def describe(self, claims: tuple[PrivacyClaim, ...]) -> dict[str, Any]:
        """{"kind": name of the class}, the section about the participants in a run's result."""
        return {"kind": type(self).__name__}


ReportChange = Callable[[int, Ids, torch.Tensor], torch.Tensor | Sequence[torch.Tensor]]
"""(round, clients, their reports [K, P]) -> what they send instead, one report per client."""


@dataclass(frozen=True)
class ReportAttack(Adversary):
    """An attack in which `change` replaces the reports that all clients would honestly send.

    All clients count as malicious. Everything is computed in one process.
    """

    change: ReportChange

    remembers = True

    @property
    def identity(self) -> Stated:
        """Identity pairs: ("adversary", "reports") and ("change", change)."""
        return (("adversary", "reports"), ("change", self.change))

    def malicious_mask(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        """All True: every client's report is passed through `change`."""
        return np.ones(len(ids), dtype=np.bool_)

    def send(self, context: AttackContext) -> ClientReports:
        """The reports that `change` returns for copies of the honest ones."""
        sent, round = context.honest_reports(), context.clients.round
        assert isinstance(sent.reports, Rows), "an adversary sees reports one by one"
        changed = self.change(round.number, round.ids, sent.reports.rows.clone())
        return replace(sent, reports=Rows.from_reports(changed, context.size))


class AttackerNoise(StrEnum):
    """What attackers do about noise at the clients.

    COMPLY adds it, SKIP leaves it out, HIDE adds noise that cancels between pairs of attackers.
    """

    COMPLY = "comply"
    SKIP = "skip"
    HIDE = "hide"


@dataclass(frozen=True)
class When:
    """The rounds in which attackers attack.

    Raises BadInput for numbers below 1, and an end before the start.

    Attributes:
        start: The first round.
        end: The last round, None for the last of the training.
        every: Rounds from one attack to the next.
        present: Whether attackers join the cohorts of those rounds uninvited. Otherwise they attack
            when they are drawn.
    """

    start: int = 1
    end: int | None = None
    every: int = 1
    present: bool = True

    @property
    def identity(self) -> Stated:
        """Identity pairs: ("when", "rounds"), and all fields with values."""
        return (("when", "rounds"), *named_values(self, "start", "end", "every", "present"))

    def __post_init__(self) -> None:
        COUNT.check("attack.start", self.start)
        COUNT.check("attack.every", self.every)
        if self.end is not None and self.end < self.start:
            raise BadInput(f"attack.end is {self.end} and attack.start {self.start}: end later")

    def due(self, round: int) -> bool:
        """Whether attackers attack in `round`."""
        last = round if self.end is None else self.end
        return self.start <= round <= last and (round - self.start) % self.every == 0


@dataclass(frozen=True, eq=False)
class BackdoorAttack(Adversary):
    """A backdoor attack: the clients `attackers` train on poisoned records while they attack.

    They are honest otherwise. Their reports go through the same acceptance as everybody's, and
    noise that the server adds holds for them as well. Honest clients are sampled and charged as
    without an attack.

    Attributes:
        attackers: The attackers, ascending.
        held_out: Records with the attackers' answers that measure the backdoor.
        records: The poisoned records: client j has those of attacker j. None without attackers.
        boost: Factor of the update that is sent: model replacement (Bagdasaryan et al. 2020).
        project: Whether attackers stay within clip / `boost` of the round's model while they train,
            so that a known clip cuts nothing off afterwards.
        noise: What attackers do about noise at the clients. COMPLY adds it. SKIP leaves it out, in
            a form that the server accepts. HIDE lets pairs of attackers draw the same noise with
            opposite signs: each report by itself is distributed as the protocol says, and in the
            sum the noise is gone.
        when: The rounds of the attack.
        work: The local work of attackers while they attack, None for the honest work.
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
        """Identity pairs: ("adversary", "backdoor"), and all fields with values.

        The word of `records` is "poisoned".
        """
        return (
            ("adversary", "backdoor"),
            *named_values(self, "attackers", "held_out"),
            ("poisoned", self.records),
            *named_values(self, "boost", "project", "noise", "when", "work"),
        )

    def __post_init__(self) -> None:
        POSITIVE.check("attack.boost", self.boost)
        one_of("attack.noise", self.noise, AttackerNoise)
        poisoned = 0 if self.records is None else self.records.clients
        assert len(self.attackers) == poisoned, "every attacker has its own poisoned records"

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

        Args:
            data: The clients' records.
            backdoor: The attackers' goal.
            attackers: The number of attackers.
            share: The share of poisoned records among those that an attacker trains on.
            boost: As in the class, and so are `project`, `noise` and `work`.
            when: The rounds of the attack, None for all.
            seed: Decides who attacks and how records are drawn.

        | edge | behaviour |
        |---|---|
        | as many attackers as clients, or more | BadInput: no honest client is left |
        | share outside (0, 1] | BadInput |
        | boost <= 0 | BadInput |
        | records of several inputs by name | BadInput |
        | records that the backdoor is not for | BadInput |
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
        records = poison_records(data, backdoor, chosen, share, rng) if attackers else None
        x, y = backdoor.held_out(data)
        held = x.astype(data.x.dtype, copy=False), y.astype(data.y.dtype, copy=False)
        return cls(chosen, held, records, boost, project, noise, when or When(), work)

    def cohort(self, round: int, ids: Ids) -> Ids:
        """The clients `ids` that were drawn, and all attackers if they join `round` uninvited."""
        if not self.when.present or not self.when.due(round):
            return ids
        return np.union1d(ids, self.attackers)

    def malicious_mask(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        """Mask of the attackers among `ids`, bool [K]. All False in rounds without an attack."""
        if not self.when.due(round):
            return np.zeros(len(ids), dtype=np.bool_)
        return np.isin(ids, self.attackers)

    def other_records(self, round: int, ids: Ids) -> Ids:
        """The position of each attacker of `ids` in `attackers`: its client in `records`."""
        return np.searchsorted(self.attackers, ids)

    def send(self, context: AttackContext) -> ClientReports:
        """Train, boost, and then comply with, skip or cancel the noise, as `noise` says.

        Updates that are not finite are sent as zeros where they are not.
        """
        clip, within = context.clients.round.clip, None
        if self.project and clip is not None:
            within = Clip(clip.value / self.boost, clip.norm)
        elif self.work is None and context.plan.noisy_steps is not None:
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
        return context.sent(self._cancel_noise(context, rows, clip))

    def _cancel_noise(
        self, context: AttackContext, rows: torch.Tensor, clip: Clip | None
    ) -> torch.Tensor:
        """Updates [K, P] clipped to `clip`, with noise that the partner's noise cancels.

        Partners are pairs of attackers in the round's cohort. An attacker without a partner
        complies. `rows` is clipped in place.
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
        """{"backdoor": the share of held-out triggered records with the attacker's answer}.

        Where answers are sequences, each answer counts that is not padding. 0 without such records.
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
        """Raise BadInput for plans with secure noise, and for plans that the attack does not fit.

        Also for plans whose claim counts on more honest reports than are left.
        """
        if self.noise is AttackerNoise.HIDE and not plan.release.additive:
            raise BadInput(
                "attack.noise is 'hide' and clients add no Gaussian or Laplace noise: "
                "omit it, or use noise.where = 'client'"
            )
        noiseless = not plan.release.adds_noise and plan.noisy_steps is None
        if self.noise is AttackerNoise.SKIP and noiseless:
            raise BadInput(
                "attack.noise is 'skip' and clients add no noise: omit it (noise that the "
                "server adds holds for attackers too)"
            )
        if self.project and plan.noisy_steps is not None:
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
        """The section about the attack in a run's result.

        Keys: "attackers" (a number), "boost", "noise", "rounds" ("start", "end" and "every") and
        "certificate", a sentence on what the claims certify against poisoning.
        """
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
        """The assumption to add to every claim: how many clients attack, and whom it is about."""
        count = len(self.attackers)
        return (
            f"{count} of {plan.population} clients attack in this simulation: the claim is about "
            "the honest ones, whose account is the same as without an attack"
        )
