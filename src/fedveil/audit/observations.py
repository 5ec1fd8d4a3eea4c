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
from torch import Tensor, nn

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
from fedveil.training.work import ClientDpSgd, SiteSum

_BLOCK = 1 << 24


class View(Enum):
    """What an attacker sees of a client: its report, or the released sum of a round's reports."""

    REPORT = auto()
    SUM = auto()

    def description(self, plan: PrivacyPlan) -> str:
        """Return a clause such as "as the server sees it", to append to a sentence on an update."""
        local = plan.release.local
        if self is View.SUM and local:
            return "as the server sees it behind the shuffler, all others known"
        if self is View.SUM:
            return "as everybody else sees it, all others known"
        if not plan.release.requires.only_sum:
            return "as the server sees it"
        return "as it is before the shuffler" if local else "as the trusted server sees it"


def views(plan: PrivacyPlan) -> tuple[View, ...]:
    """Return the attackers' views of a plan.

    They are (REPORT, SUM) if only the sum of reports is released, and otherwise (REPORT,).
    """
    return (View.REPORT, View.SUM) if plan.release.requires.only_sum else (View.REPORT,)


def strict_line(plan: PrivacyPlan) -> BudgetLine | None:
    """Return the plan's first budget line that is a guarantee.

    None if all are only as published.
    """
    return next((line for line in plan.lines if not line.as_published), None)


def line_claim(line: BudgetLine, turns: int) -> PrivacyClaim:
    """Return the claim of a budget line for `turns` participations.

    For a single turn it is the pure claim, if the line has one. Otherwise it is the line's first
    claim.
    """
    claims = line.claims(turns)
    pure = [claim for claim in claims if claim.accountant is Accountant.PURE]
    return pure[0] if pure and turns == 1 else claims[0]


def strict_claim(plan: PrivacyPlan) -> PrivacyClaim | None:
    """Return the claim of the plan's first line that is a guarantee, for all rounds.

    None without one.
    """
    line = strict_line(plan)
    return None if line is None else line_claim(line, line.participations(plan.permitted))


def claim_against(view: View, plan: PrivacyPlan) -> PrivacyClaim | None:
    """Return the strict claim against an attacker with this view.

    None if the claim trusts that attacker, or the plan has no strict claim.
    """
    return None if view is View.REPORT and plan.release.requires.only_sum else strict_claim(plan)


def real_records(data: FederatedData) -> bool:
    """Return whether records are real numbers in one array."""
    return not isinstance(data.x, dict) and data.x.dtype.kind == "f"


def check_unattacked(training: Training, attack: str) -> None:
    """Raise BadInput if the training has dishonest clients. `attack` is a name for the message."""
    if type(training.participants) is not Participants:
        raise BadInput(f"the run has an attack of its own: leave out --attacks {attack}")


def replay(training: Training, rounds: int) -> Iterator[Round]:
    """Run a training, and yield its first `rounds` rounds, each before clients train.

    Yields fewer if the budget permits fewer. A ledger in memory is charged, none on disk.
    """
    state, ledger = training.start(), training.new_ledger()
    while (round := training.begin(state, ledger)) is not None:
        yield round
        if round.number >= rounds:
            return
        state = training.end(round, state, training.engine.run(round), ledger).state


def rerun(training: Training, seed: int, **changes: object) -> Training:
    """Return the training with another seed, in this process, evaluated only at the end.

    `changes` replace further fields of the training. The run's participants stay unless changed.
    """
    alone = {"workers": 1, "every": training.plan.rounds, "clients_every": None, **changes}
    return replace(training, seed=seed, **alone)  # type: ignore[arg-type]


def audit_rerun(training: Training, seed: int, **changes: object) -> Training:
    """Return a copy of the training for an audit with this seed. Nothing is trained.

    The copy has a training seed of its own, runs in this process and is evaluated only at the end
    (`rerun`). `changes` replace further fields.
    """
    return rerun(training, int(np.random.default_rng([seed, 0xA6A1]).integers(2**31)), **changes)


def serial_engine(training: Training) -> Serial:
    """Return the engine of a training in this process.

    AssertionError if the training has workers.
    """
    engine = training.engine
    assert isinstance(engine, Serial), "an audit runs in this process"
    return engine


@dataclass(frozen=True, eq=False)
class Observer:
    """An attacker that sees updates of clients in any round of a training.

    Attributes:
        training: The training. It must run in this process.
        data: The clients' records: those of the training, or of clients that the attacker makes up.
        streams: Streams of their noise: those of the training, or others for made-up clients.
    """

    training: Training
    data: FederatedData
    streams: Streams

    def observed_updates(self, view: View, round: Round, ids: Ids, whose: Ids) -> Tensor:
        """Return updates [K, P] of clients in a view, noise included.

        Args:
            view: A report, or the released sum that the report is in.
            round: The round. Its own cohort does not matter.
            ids: The clients whose noise is drawn, [K].
            whose: The clients of `data` whose records are trained on, [K].
        """
        plan, work = self.training.plan, self.training.work
        updates = []
        for clients in self._batches(round, ids, whose):
            reports = client_report(work, plan, clients).reports
            assert isinstance(reports, Rows), "an attacker sees reports one by one"
            accept(reports, None if plan.release.local else clients.round.clip)
            rows = reports.rows
            if view is View.SUM:
                sums = [self._released_sum(clients.round, k, row) for k, row in enumerate(rows)]
                updates.append(torch.stack(sums))
            else:
                updates.append(plan.release.channel.updates(rows, clients.round).float())
        return torch.cat(updates)

    def noiseless_updates(self, round: Round, ids: Ids, whose: Ids) -> Tensor:
        """Return the updates [K, P] that clients would send without any noise.

        They are clipped as the training clips: under DP-SGD each example's gradient and not the
        update. An update that is not finite is zero. `ids` and `whose` are as in
        `observed_updates`: whose random draws are used, and whose records are trained on.
        """
        work, updates = self.training.work, []
        if isinstance(work, ClientDpSgd | SiteSum):
            work = replace(work, noisy=replace(work.noisy, multiplier=0.0))
        for clients in self._batches(round, ids, whose):
            done: Any = work.updates(clients)
            reports = Rows.from_reports(done.rows, clients.round.start.shape[-1])
            accept(reports, None)
            updates.append(reports.rows)
        return torch.cat(updates)

    def _batches(self, round: Round, ids: Ids, whose: Ids) -> Iterator[ClientBatch]:
        """Yield clients in blocks that are computed together, one by one in looped mode.

        `ids` and `whose` are those of `observed_updates`.
        """
        looped = serial_engine(self.training).mode is Mode.LOOPED
        step = 1 if looped else max(1, _BLOCK // self.training.task.size)
        round = replace(round, streams=self.streams)
        for a in range(0, len(ids), step):
            cohort = CohortData(self.data, ids[a : a + step], whose[a : a + step])
            yield ClientBatch.from_round(round, cohort, self._gradients)

    @cached_property
    def _gradients(self) -> Gradients:
        """Return the gradient computation for these clients, in the mode of the training."""
        training, engine = self.training, serial_engine(self.training)
        private = training.plan.noisy_steps is not None
        mixes = engine.job.mixes
        return gradients_of(training.task, engine.mode, self.data, mixes=mixes, private=private)

    def _released_sum(self, round: Round, k: int, row: Tensor) -> Tensor:
        """Return the released sum [P] with the report `row` of client round.ids[k], others removed.

        The attacker knows the others' part, which is therefore absent or pure noise. Noise is drawn
        for this client alone. Behind a shuffler there are as many others as the claim counts on,
        and their reports are noise around the model.
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


Values = npt.NDArray[np.float64]

FEW = 4
"""Coordinates of a row if the release does not depend on their number."""

_TOO_LONG = 1e3
_NUMBERS_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class Sending:
    """Local work without learning: clients send given rows.

    Attributes:
        sent_rows: The rows, [K, P].
        short: Whether clients report to an adaptive clip that they were within it.
    """

    sent_rows: Tensor
    short: bool

    def updates(self, clients: ClientBatch) -> Clipped:
        """Return the given rows, marked as within the clip if `short`, and otherwise as clipped.

        Norms are 0 if `short`, and otherwise huge.
        """
        rows = self.sent_rows.clone()
        clipped = torch.full((len(rows),), not self.short)
        norms = torch.full((len(rows),), 0.0 if self.short else 1e12, dtype=torch.float64)
        return Clipped(rows, norms, clipped)


class Bench:
    """Runs rounds of a plan with clients that send given rows, without a model or data.

    Args:
        plan: The plan whose release is drawn from.
        streams: Streams of the noise.
        size: Coordinates of a row.
    """

    def __init__(self, plan: PrivacyPlan, streams: Streams, size: int) -> None:
        self._plan, self._streams, self._size = plan, streams, size
        x, y = np.zeros((2, 1), dtype=np.float32), np.zeros(2, dtype=np.float32)
        self._data = FederatedData.from_clients([("0", x, y), ("1", x, y)], test=(x, y), classes=0)
        task = Task(nn.Linear(1, 1), squared_error)
        self._gradients = gradients_of(task, Mode.VECTORISED, self._data)

    def make_round(self, number: int, ids: Ids, *, like: int | None = None) -> Round:
        """Return round `number` of clients `ids`, from a model of zeros.

        Its clip is that of round `like`, or of round `number` if `like` is None.
        """
        start = torch.zeros(self._size)
        state = self._plan.first_state(start)
        clip = self._plan.clip(state, number if like is None else like)
        return Round(number, ids, start, clip, state, self._streams)

    def send(self, round: Round, rows: Tensor, *, short: bool) -> ClientReports:
        """Return the reports of a round's clients with updates `rows` [K, size].

        `short` is whether clients report to an adaptive clip that they were within it, whatever
        `rows` are.
        """
        work: Any = Sending(rows, short)
        cohort = CohortData(self._data, round.ids, np.zeros(len(round.ids), dtype=np.int64))
        clients = ClientBatch.from_round(round, cohort, self._gradients)
        return client_report(work, self._plan, clients)

    def cohort_sum(self, round: Round, rows: Tensor, *, short: bool) -> CohortSum:
        """Return the server's sum of the reports of clients with updates `rows`, before its noise.

        `rows` are [K, size]. `short` is whether clients report to an adaptive clip that they were
        within it, whatever `rows` are.
        """
        sent = self.send(round, rows, short=short)
        noisy = self._plan.release.adds_noise
        total = CohortSum.zero(self._size, self._plan.width, noisy=noisy)
        weights = torch.ones(len(round.ids), dtype=torch.float64)
        server_sum([(total, slice(None))], self._plan, round, sent, weights)
        return total


def worst_direction(clip: Clip | None, size: int) -> Tensor:
    """Return a direction [size] of length 1 in the clip's norm, in which noise hides least.

    In L2, or without a clip, it has two coordinates of opposite signs, so that noise which they
    share cancels. Otherwise, or in one dimension, it is the first axis.
    """
    row = torch.zeros(size, dtype=torch.float64)
    row[0] = 1.0
    if size > 1 and (clip is None or clip.norm is Norm.L2):
        row[0], row[1] = 0.5**0.5, -(0.5**0.5)
    return row


def client_views(
    plan: PrivacyPlan, streams: Streams, sign: float, turns: int, draws: int
) -> Iterator[tuple[Values, Values, Values]]:
    """Yield reports of clients that protect themselves, a block of draws at a time.

    Each draw is a client whose update points along the worst direction in odd turns and against it
    in even ones, times `sign`. The attacker also knows reports of another client in the same
    rounds, and of this one in other rounds, both with `sign` 1.

    Args:
        plan: The plan. If its claim does not depend on coordinates, reports have only a few.
        streams: Streams of the noise.
        sign: 1 or -1.
        turns: Reports of each client.
        draws: Clients in all. The last axes of all blocks sum to this number.

    Yields:
        Reports along the direction over the clip, [turns, draws]; known reports, [2, turns, draws];
        what clients reported to an adaptive clip, [turns, draws].
    """
    plan = with_dimension(plan, FEW)
    size = plan.parameters or FEW
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
            along = worst_direction(round.clip, size)
            length = (1 - 2e-6 if plan.statistic is not None and short else _TOO_LONG) * clip
            rows = ((-1) ** t * _TOO_LONG * clip * along).float().repeat(2 * count, 1)
            later = replace(round, number=round.number + turns)
            again, _ = _reports_along(bench, later, rows, along, short=False)
            rows[::2] = (sign * (-1) ** t * length * along).float()
            seen, watched = _reports_along(bench, round, rows, along, short=short)
            mine.append(seen[::2])
            known.append([seen[1::2], again[::2]])
            flips = plan.statistic is not None and plan.statistic.flip > 0  # what the server sees
            told.append(watched[::2].sum(axis=1) if flips else np.zeros(count))
        yield np.array(mine), np.array(known).swapaxes(0, 1), np.array(told)


def _reports_along(
    bench: Bench, round: Round, rows: Tensor, along: Tensor, *, short: bool
) -> tuple[Values, Values]:
    """Return (clients' reports along a direction, divided by the clip; their clip statistics).

    The clients clip and randomise the updates `rows` [K, P], and each report is multiplied with
    `along` [P]: the first result is [K]. Without a clip nothing is divided. The statistics are [K,
    width]. `short` is whether clients report to an adaptive clip that they were within it, whatever
    their rows are.
    """
    sent = bench.send(round, rows, short=short)
    assert isinstance(sent.reports, Rows), "reports of clients that protect themselves are rows"
    clip = 1.0 if round.clip is None else round.clip.value
    return (sent.reports.rows.double() @ along).numpy() / clip, sent.statistic_values.numpy()


def server_views(
    plan: PrivacyPlan, streams: Streams, sign: float, turns: int, draws: int
) -> Values:
    """Return noisy sums that one client is in, divided by the clip, [turns, draws].

    The part of a too long row that the server accepts is in every coordinate, so that each round's
    noise gives as many draws. The sign alternates between turns. AssertionError without a clip.

    Args:
        plan: The plan.
        streams: Streams of the noise.
        sign: 1 or -1, or 0 for a client that contributes nothing.
        turns: Sums that the client is in.
        draws: The number of draws.
    """
    bench = Bench(plan, streams, 1)
    wide = min(draws, 1 << 16)
    blocks = []
    for first in range(0, draws, wide):
        rounds = []
        for t in range(turns):
            number, nobody = 1 + t + turns * (first // wide), np.zeros(1, dtype=np.int64)
            round = bench.make_round(number, nobody, like=1 + t)
            assert round.clip is not None, "noise on a sum needs a clip"
            row = torch.full((1, 1), sign * (-1) ** t * _TOO_LONG * round.clip.value)
            total = bench.cohort_sum(round, row, short=False)
            total.total = total.total.expand(wide).clone()
            rounds.append(noised_sum(plan, round, total).numpy() / round.clip.value)
        blocks.append(np.array(rounds))
    return np.concatenate(blocks, axis=1)[:, :draws]


def statistic_views(
    plan: PrivacyPlan, streams: Streams, sign: float, draws: int
) -> tuple[Values, Values]:
    """Return (reports or noisy sums over the clip [draws], published clip statistics [draws]).

    One round of one client is one draw. A statistic of several numbers is the first less the last.
    AssertionError without an adaptive clip.

    Args:
        plan: The plan.
        streams: Streams of the noise.
        sign: 1 for a client within the clip, -1 for one far beyond it, 0 for an absent one.
        draws: The number of draws.
    """
    plan = with_dimension(plan, FEW)
    bench, every = Bench(plan, streams, 2), 1 if plan.statistic is None else plan.statistic.every
    seen, told = np.empty(draws), np.empty(draws)
    ids = np.zeros(1 if sign else 0, dtype=np.int64)
    for k in range(draws):
        round = bench.make_round(1 + k * every, ids, like=1)
        assert round.clip is not None, "an adaptive schedule has a clip"
        along = worst_direction(round.clip, 2)
        length = (1 - 2e-6 if sign > 0 else _TOO_LONG) * round.clip.value
        rows = (sign * length * along).float().expand(len(ids), -1)
        total = bench.cohort_sum(round, rows, short=sign > 0)
        seen[k] = float(noised_sum(plan, round, total) @ along) / round.clip.value
        noisy = plan.noisy_statistic(total.statistic_values, round)
        assert noisy is not None, "every round of these has a statistic"
        published = noisy.numpy()
        told[k] = published[0] if len(published) == 1 else published[0] - published[-1]
    return seen, told


_FAR = 1e6
_DRAWS_AT_ONCE = 1 << 16


def step_views(
    plan: PrivacyPlan, streams: Streams, sign: float, turns: int, draws: int
) -> Iterator[tuple[Values, Values, Values]]:
    """Yield updates by DP-SGD of clients with one record, a block of draws at a time.

    Where persons are protected, it is as many equal records of one person as count. The record is
    present if `sign` is positive, and contributes nothing otherwise. The blocks are
    those of `client_views`: updates along the record's gradient, [turns, draws], those of another
    client without the record, [1, turns, draws], and zeros for the clip. With secure noise clients
    are computed one by one, as in a run. AssertionError without noisy steps.
    """
    assert plan.noisy_steps is not None, "a plan without noisy steps"
    along = worst_direction(None, FEW)
    cap = plan.noisy_steps.cap
    each = cap or 1
    x = torch.stack([torch.zeros(FEW), along.float()]).repeat_interleave(each, dim=0).numpy()
    y = np.zeros(2 * each, dtype=np.float32)
    pair = [("without", x[:each], y[:each]), ("with", x[each:], y[each:])]
    persons = None if cap is None else [[0] * cap] * 2
    data = FederatedData.from_clients(pair, test=(x, y), classes=0, persons=persons)
    data = data if cap is None else data.capped(cap)
    task = Task(nn.Linear(FEW, 1, bias=False), squared_error)
    gradients = gradients_of(task, Mode.LOOPED if plan.secure else Mode.VECTORISED, data)
    work, together = ClientDpSgd(plan.noisy_steps, lr=1.0), 1 if plan.secure else 2 * _DRAWS_AT_ONCE
    state = plan.first_state(torch.zeros(FEW))
    for first in range(0, draws, _DRAWS_AT_ONCE):
        count = min(_DRAWS_AT_ONCE, draws - first)
        ids = 2 * first + np.arange(2 * count)
        whose = np.where((ids % 2 == 0) & (sign > 0), 1, 0)
        mine, other = [], []
        for t in range(turns):
            start = ((-1.0) ** t * _FAR * along).float()
            clip, rows = plan.clip(state, t + 1), []
            assert clip is not None, "DP-SGD has a clip"
            for a in range(0, 2 * count, together):
                own = slice(a, a + together)
                round = Round(t + 1, ids[own], start, clip, state, streams)
                cohort = CohortData(data, ids[own], whose[own])
                sent = client_report(work, plan, ClientBatch.from_round(round, cohort, gradients))
                assert isinstance(sent.reports, Rows), "DP-SGD sends rows"
                rows.append(sent.reports.rows.double())
            size = plan.noisy_steps.nominal or each // plan.noisy_steps.group
            seen = -(torch.cat(rows) @ along).numpy() * plan.noisy_steps.rate * size
            mine.append(seen[::2] / clip.value)
            other.append(seen[1::2] / clip.value)
        yield np.array(mine), np.array([other]), np.zeros((turns, count))
