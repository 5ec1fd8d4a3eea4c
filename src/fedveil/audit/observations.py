"""What an adversary sees of one client in a round, through the code that a training runs.

Whoever attacks reports sees what the recipe shows: a report after its noise where clients protect
themselves; the clipped update where a trusted server adds the noise, and to everybody else the
noisy sum; behind a shuffler a sum of reports. Of a sum the attacker of the claim knows all others'
part, and takes it off.

Views of a release alone: a client sends one of two worst-case inputs, far too long, so that clips
are put to the test as well. It goes through `client_report`, `server_sum` and the release's own
noise, none of which is written a second time. For DP-SGD the model is one linear layer and the loss
a squared error, so that a record whose features are zero contributes nothing at all, and another's
gradient points along its features, far beyond the clip. The server, which sends the model, turns
its sign in every other round.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedveil.base.errors import BadInput
from fedveil.base.identity import seed_of
from fedveil.data.federated import FederatedData
from fedveil.models.metrics import squared_error
from fedveil.models.task import Task
from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.claims import Accountant, PrivacyClaim
from fedveil.privacy.clip import Clip, Clipped, Norm
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Ids, Round
from fedveil.privacy.releases.priv_unit import with_dimension
from fedveil.privacy.releases.two_point import honest_reports
from fedveil.training.cohort import CohortData
from fedveil.training.engines.serial import Serial
from fedveil.training.exchange import client_report, server_sum
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.gradients.trajectories import Gradients
from fedveil.training.participants import Participants
from fedveil.training.reports import ClientBatch, ClientReports, CohortSum, Rows, accept
from fedveil.training.round import noised_sum
from fedveil.training.session import Training
from fedveil.training.work import ClientDpSgd, ClientWork

_BLOCK = 1 << 24


class View(Enum):
    """One client's report, or the sum that is released of a round's reports."""

    REPORT = auto()
    SUM = auto()

    def description(self, plan: PrivacyPlan) -> str:
        """Whose view it is, in words."""
        release = plan.release
        if self is View.REPORT:
            if not release.requires.only_sum:
                return "as the server sees it"
            if release.local:
                return "as it is before the shuffler"
            return "as the trusted server sees it"
        if release.local:
            return "as the server sees it behind the shuffler, all others known"
        return "as everybody else sees it, all others known"


def views(plan: PrivacyPlan) -> tuple[View, ...]:
    """The views of a plan: the report, and the sum where that is all that is released."""
    return (View.REPORT, View.SUM) if plan.release.requires.only_sum else (View.REPORT,)


def strict_line(plan: PrivacyPlan) -> BudgetLine | None:
    """The budget line that an audit is compared with: the first that is a guarantee."""
    return next((line for line in plan.lines if not line.as_published), None)


def claim_of(line: BudgetLine, turns: int) -> PrivacyClaim:
    """The claim of the line for so many turns. The pure claim for a single turn, if any."""
    claims = line.claims(turns)
    pure = [claim for claim in claims if claim.accountant is Accountant.PURE]
    return pure[0] if pure and turns == 1 else claims[0]


def claimed(plan: PrivacyPlan) -> PrivacyClaim | None:
    """The claim that leaks are compared with: the first that is a guarantee, if any."""
    line = strict_line(plan)
    return None if line is None else claim_of(line, line.participations(plan.permitted))


def claim_against(view: View, plan: PrivacyPlan) -> PrivacyClaim | None:
    """The claim about whoever has this view: none about somebody whom the claim trusts."""
    return None if view is View.REPORT and plan.release.requires.only_sum else claimed(plan)


def check_unattacked(training: Training, attack: str) -> None:
    """Refuse a run that is attacked already."""
    if type(training.participants) is not Participants:
        raise BadInput(f"the run has an attack of its own: leave out --attacks {attack}")


def replay(training: Training, rounds: int) -> Iterator[Round]:
    """Yield the first `rounds` rounds, each before its clients work. Nothing is charged on disk."""
    state, ledger = training.start(), training.new_ledger()
    while (round := training.begin(state, ledger)) is not None:
        yield round
        if round.number >= rounds:
            return
        state = training.end(round, state, training.engine.run(round), ledger).state


def rerun(training: Training, seed: int, **changes: object) -> Training:
    """The training with another seed, in this process, and measured at the end only."""
    alone = {"workers": 1, "every": training.plan.rounds, "clients_every": None, **changes}
    return replace(training, seed=seed, **alone)  # type: ignore[arg-type]


def audit_rerun(training: Training, seed: int, **changes: object) -> Training:
    """The training with the randomness of the audit of that seed."""
    return rerun(training, int(np.random.default_rng([seed, 0xA6A1]).integers(2**31)), **changes)


def serial_engine(training: Training) -> Serial:
    """The engine of a training that runs in this process, as those of an audit do."""
    engine = training.engine
    assert isinstance(engine, Serial), "an audit runs in this process"
    return engine


@dataclass(frozen=True, eq=False)
class Observer:
    """Observes what clients send that have the records of `data`, in any round of a training.

    `streams` are those of their noise: the training's own, to see what its clients send, or
    others, for clients that the attacker makes up.
    """

    training: Training
    data: FederatedData
    streams: Streams

    def observed_updates(self, view: View, round: Round, ids: Ids, whose: Ids) -> torch.Tensor:
        """The updates of clients `ids` with the records of clients `whose`, [K, P], in a view."""
        plan, work = self.training.plan, self.training.work
        updates = []
        for clients in self._batches(round, ids, whose):
            rows = _accepted(work, plan, clients)
            if view is View.SUM:
                sums = [self._released_sum(clients.round, k, row) for k, row in enumerate(rows)]
                updates.append(torch.stack(sums))
            else:
                updates.append(plan.release.channel.updates(rows, clients.round))
        return torch.cat(updates)

    def noiseless_updates(self, round: Round, ids: Ids, whose: Ids) -> torch.Tensor:
        """The same updates clipped and not noised, as an attacker makes them from its records."""
        work = self.training.work
        if isinstance(work, ClientDpSgd):
            work = replace(work, noisy=replace(work.noisy, multiplier=0.0))
        return torch.cat([_updates(work, each) for each in self._batches(round, ids, whose)])

    def _batches(self, round: Round, ids: Ids, whose: Ids) -> Iterator[ClientBatch]:
        """Clients in blocks that are computed together, or one by one where they have to be."""
        looped = serial_engine(self.training).mode is Mode.LOOPED
        step = 1 if looped else max(1, _BLOCK // self.training.task.size)
        round = replace(round, streams=self.streams)
        for a in range(0, len(ids), step):
            cohort = CohortData(self.data, ids[a : a + step], whose[a : a + step])
            yield ClientBatch.from_round(round, cohort, self._gradients)

    @cached_property
    def _gradients(self) -> Gradients:
        training, engine = self.training, serial_engine(self.training)
        private = training.plan.steps is not None
        mixes = engine.job.mixes
        return gradients_of(training.task, engine.mode, self.data, mixes=mixes, private=private)

    def _released_sum(self, round: Round, k: int, row: torch.Tensor) -> torch.Tensor:
        """The round's released sum with client k's report `row`, less the others' known part.

        Noise is drawn for this client alone. Behind a shuffler there are as many others as the
        claim counts on, and their reports are noise around the model.
        """
        plan = self.training.plan
        seed = seed_of("sum", self.streams.seed, round.number, int(round.ids[k]))
        own = replace(round, streams=Streams(seed, self.streams.secure), attempt=0)
        rows, total = row[None], CohortSum.zero(len(row), 0, noisy=False)
        if plan.release.adds_noise:
            others = torch.zeros(max(0, honest_reports(plan) - 1), len(row))
            own = replace(own, ids=np.arange(len(others), dtype=np.int64))
            plan.release.randomise_(others, own)
            rows = torch.cat([rows, others])
        plan.release.channel.add_(total.total, rows, torch.ones(len(rows)).double(), own)
        return noised_sum(plan, own, total).float()


def _accepted(work: ClientWork, plan: PrivacyPlan, clients: ClientBatch) -> torch.Tensor:
    """What the server has of the reports."""
    reports = client_report(work, plan, clients).reports
    assert isinstance(reports, Rows), "an attacker sees reports one by one"
    accept(reports, None if plan.release.local else clients.round.clip)
    return reports.rows


def _updates(work: ClientWork, clients: ClientBatch) -> torch.Tensor:
    """Updates as clients compute them. One that is not finite counts as zero, as everywhere."""
    done = work.updates(clients)
    reports = Rows.from_reports(done.rows, clients.round.start.shape[-1])  # type: ignore[union-attr]
    accept(reports, None)
    return reports.rows


Values = npt.NDArray[np.float64]

FEW = 4
"""Coordinates of rows where their number does not matter to the release."""

_TOO_LONG = 1e3
_NUMBERS_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class Sending:
    """Local work that learns nothing: clients send the rows they were told to.

    `short` tells the clip, where it asks, whether they were within it.
    """

    sent_rows: torch.Tensor
    short: bool

    def updates(self, clients: ClientBatch) -> Clipped:
        rows = self.sent_rows.clone()
        clipped = torch.full((len(rows),), not self.short)
        norms = torch.full((len(rows),), 0.0 if self.short else 1e12, dtype=torch.float64)
        return Clipped(rows, norms, clipped)


class Bench:
    """Rounds of clients that have one record of no meaning each, and send given rows.

    Args:
        plan: Whose release is drawn from.
        streams: Of the noise.
        size: Coordinates of a row.
    """

    def __init__(self, plan: PrivacyPlan, streams: Streams, size: int) -> None:
        self._plan, self._streams, self._size = plan, streams, size
        x, y = np.zeros((2, 1), dtype=np.float32), np.zeros(2, dtype=np.float32)
        self._data = FederatedData.from_clients([("0", x, y), ("1", x, y)], test=(x, y), classes=0)
        task = Task(nn.Linear(1, 1), squared_error)
        self._gradients = gradients_of(task, Mode.VECTORISED, self._data)

    def make_round(self, number: int, ids: Ids, *, like: int | None = None) -> Round:
        """Round `number` of clients `ids`, from a model of zeros, with the clip of round `like`."""
        start = torch.zeros(self._size)
        state = self._plan.first_state(start)
        clip = self._plan.clip(state, number if like is None else like)
        return Round(number, ids, start, clip, state, self._streams)

    def sent(self, round: Round, rows: torch.Tensor, *, short: bool) -> ClientReports:
        """What clients with these updates send."""
        work: Any = Sending(rows, short)
        cohort = CohortData(self._data, round.ids, np.zeros(len(round.ids), dtype=np.int64))
        return client_report(
            work, self._plan, ClientBatch.from_round(round, cohort, self._gradients)
        )

    def summed(self, round: Round, sent: ClientReports) -> CohortSum:
        """What the server has of it before noise."""
        noisy = self._plan.release.adds_noise
        total = CohortSum.zero(self._size, self._plan.width, noisy=noisy)
        weights = torch.ones(len(round.ids), dtype=torch.float64)
        server_sum([(total, slice(None))], self._plan, round, sent, weights)
        return total

    def published_statistic(self, round: Round, total: CohortSum) -> Values:
        """The published statistic of an adaptive clip, empty if there is none in this round."""
        noisy = self._plan.noisy_statistic(total.statistic, round)
        return np.zeros(0) if noisy is None else noisy.numpy()


def worst(clip: Clip | None, size: int) -> torch.Tensor:
    """A direction in which noise hides least, [size], as long as the clip's norm allows.

    In L2 it has two coordinates of opposite signs, so that noise which they share cancels.
    """
    row = torch.zeros(size, dtype=torch.float64)
    row[0] = 1.0
    if size > 1 and (clip is None or clip.norm is Norm.L2):
        row[0], row[1] = 0.5**0.5, -(0.5**0.5)
    return row


def reduced(plan: PrivacyPlan) -> tuple[PrivacyPlan, int]:
    """The plan with reports of a few coordinates, where its claim does not depend on them."""
    few = with_dimension(plan, FEW)
    return few, few.parameters or FEW


def client_views(
    plan: PrivacyPlan, streams: Streams, sign: float, turns: int, draws: int
) -> Iterator[tuple[Values, Values, Values]]:
    """Reports of clients that protect themselves, a block of draws at a time.

    Each draw is a client whose update points along the worst direction in odd turns and against
    it in even ones, times `sign`. The attacker also knows what another client sends in the same
    rounds, and this one in others: what it would if `sign` were 1. Yields reports along the
    direction over the clip, [turns, draws]; those of the known ones, [2, turns, draws]; and what
    the client told the clip, [turns, draws].
    """
    plan, size = reduced(plan)
    bench = Bench(plan, streams, size)
    together = max(1, _NUMBERS_AT_ONCE // (2 * size))
    short = sign > 0
    for first in range(0, draws, together):
        count = min(together, draws - first)
        ids = 2 * first + np.arange(2 * count)
        mine, known, told = [], [], []
        for t in range(turns):
            round = bench.make_round(t + 1, ids)
            clip = 1.0 if round.clip is None else round.clip.value
            along = worst(round.clip, size)
            length = (1 - 2e-6 if plan.statistic is not None and short else _TOO_LONG) * clip
            rows = ((-1) ** t * _TOO_LONG * clip * along).float().repeat(2 * count, 1)
            later = replace(round, number=round.number + turns)
            again, _ = _along(bench, later, rows, along, short=False)
            rows[::2] = (sign * (-1) ** t * length * along).float()
            seen, watched = _along(bench, round, rows, along, short=short)
            mine.append(seen[::2])
            known.append([seen[1::2], again[::2]])
            flips = plan.statistic is not None and plan.statistic.flip > 0  # what the server sees
            told.append(watched[::2].sum(axis=1) if flips else np.zeros(count))
        yield np.array(mine), np.array(known).swapaxes(0, 1), np.array(told)


def _along(
    bench: Bench, round: Round, rows: torch.Tensor, along: torch.Tensor, *, short: bool
) -> tuple[Values, Values]:
    """What clients report along a direction, over the clip, and what they tell the clip."""
    sent = bench.sent(round, rows, short=short)
    assert isinstance(sent.reports, Rows), "reports of clients that protect themselves are rows"
    clip = 1.0 if round.clip is None else round.clip.value
    return (sent.reports.rows.double() @ along).numpy() / clip, sent.statistic.numpy()


def server_views(
    plan: PrivacyPlan, streams: Streams, sign: float, turns: int, draws: int
) -> Values:
    """Noisy sums that one client is in, over the clip, [turns, draws].

    `sign` 0 is the client that contributes nothing. What the server accepts of a row that is far
    too long is in every coordinate, so that each round's noise gives as many draws.
    """
    bench = Bench(plan, streams, 1)
    wide = min(draws, 1 << 16)
    found = []
    for first in range(0, draws, wide):
        rounds = []
        for t in range(turns):
            number, nobody = 1 + t + turns * (first // wide), np.zeros(1, dtype=np.int64)
            round = bench.make_round(number, nobody, like=1 + t)
            assert round.clip is not None, "noise on a sum needs a clip"
            row = torch.full((1, 1), sign * (-1) ** t * _TOO_LONG * round.clip.value)
            total = bench.summed(round, bench.sent(round, row, short=False))
            total.total = total.total.expand(wide).clone()
            rounds.append(noised_sum(plan, round, total).numpy() / round.clip.value)
        found.append(np.array(rounds))
    return np.concatenate(found, axis=1)[:, :draws]


def statistic_views(
    plan: PrivacyPlan, streams: Streams, sign: float, draws: int
) -> tuple[Values, Values]:
    """One round of one client and the statistic that a curator, or the server, publishes.

    (the report or the noisy sum over the clip, the statistic along its worst direction), [draws]
    each. One published sum is one draw. `sign` 0 is a client that is not there.
    """
    plan, _ = reduced(plan)
    bench, every = Bench(plan, streams, 2), 1 if plan.statistic is None else plan.statistic.every
    seen, told = np.empty(draws), np.empty(draws)
    ids = np.zeros(1 if sign else 0, dtype=np.int64)
    for k in range(draws):
        round = bench.make_round(1 + k * every, ids, like=1)
        assert round.clip is not None, "an adaptive schedule has a clip"
        along = worst(round.clip, 2)
        length = (1 - 2e-6 if sign > 0 else _TOO_LONG) * round.clip.value
        rows = (sign * length * along).float().expand(len(ids), -1)
        total = bench.summed(round, bench.sent(round, rows, short=sign > 0))
        seen[k] = float(noised_sum(plan, round, total) @ along) / round.clip.value
        published = bench.published_statistic(round, total)
        told[k] = published[0] if len(published) == 1 else published[0] - published[-1]
    return seen, told


_FAR = 1e6
_DRAWS_AT_ONCE = 1 << 16


def step_views(
    plan: PrivacyPlan, streams: Streams, sign: float, turns: int, draws: int
) -> Iterator[tuple[Values, Values, Values]]:
    """Yield updates of clients whose only record is there (`sign` 1) or contributes nothing.

    As `client_views` has it: [turns, draws] along the record's gradient, of the client, [1, turns,
    draws] of another without such a record, and nothing that a clip was told.
    """
    assert plan.steps is not None, "a plan without noisy steps"
    along = worst(None, FEW)
    x = torch.stack([torch.zeros(FEW), along.float()]).numpy()
    y = np.zeros(2, dtype=np.float32)
    data = FederatedData.from_clients(
        [("without", x[:1], y[:1]), ("with", x[1:], y[1:])], test=(x, y), classes=0
    )
    task = Task(nn.Linear(FEW, 1, bias=False), squared_error)
    gradients = gradients_of(task, Mode.VECTORISED, data)
    work = ClientDpSgd(plan.steps, lr=1.0)
    state = plan.first_state(torch.zeros(FEW))
    for first in range(0, draws, _DRAWS_AT_ONCE):
        count = min(_DRAWS_AT_ONCE, draws - first)
        ids = 2 * first + np.arange(2 * count)
        whose = np.where((ids % 2 == 0) & (sign > 0), 1, 0)
        mine, other = [], []
        for t in range(turns):
            start = ((-1.0) ** t * _FAR * along).float()
            clip = plan.clip(state, t + 1)
            round = Round(t + 1, ids, start, clip, state, streams)
            clients = ClientBatch.from_round(round, CohortData(data, ids, whose), gradients)
            sent = client_report(work, plan, clients)
            if clip is None or not isinstance(sent.reports, Rows):
                raise AssertionError("DP-SGD clips, and sends rows")
            size = plan.steps.nominal or 1
            seen = -(sent.reports.rows.double() @ along).numpy() * plan.steps.rate * size
            mine.append(seen[::2] / clip.value)
            other.append(seen[1::2] / clip.value)
        yield np.array(mine), np.array([other]), np.zeros((turns, count))
