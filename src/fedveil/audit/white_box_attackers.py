"""Four attackers inside a training: the server or a client, passive or active.

In `WATCHED` rounds, spread evenly over the training, each computes traces of target records
(`audit.traces`) in a step of the training. The server compares the model that it sent with each
client's report, and traces the target records of that client. A client compares the global models
before and after the round, and traces all target records: it does not know who took part.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from fedveil.audit.traces import ascended, traces
from fedveil.base.identity import Stated
from fedveil.base.inputs import Inputs, taken
from fedveil.data.federated import Array, FederatedData
from fedveil.models.task import Task
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.round import Round
from fedveil.training.adversary import Adversary, Chance, Ids
from fedveil.training.engines.serial import Serial
from fedveil.training.exchange import Sent
from fedveil.training.round import RoundResult
from fedveil.training.session import Training, new_ledger
from fedveil.training.sums import CohortSum

WATCHED = 5
"""The number of rounds that attackers watch, the last round among them."""

Numbers = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ascending(Adversary):
    """The active client of Nasr et al. (2019): it raises the loss of target records.

    If somebody trains on such a record, the next rounds bring its loss down again. The client
    skips noise where the server accepts that, and is honest in all other rounds.

    Attributes:
        asked: The target records.
        client: The id of the client that attacks.
        aims: The rows of `asked` whose loss is raised, by round.
        boost: The factor on the step that raises their mean loss by one, so that the step survives
            the mean over the cohort.
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
        """Features and targets of the records whose loss is raised in a round."""
        rows = self.aims[round]
        return taken(self.asked.x, rows), self.asked.y[rows]

    def assumption(self, plan: PrivacyPlan) -> str:
        return "one client attacks membership in this simulation: the claim is about the others"


@dataclass(frozen=True, eq=False)
class TargetRecords:
    """The records whose membership is guessed: for each client its own, half of them trained on."""

    data: FederatedData
    seed: int

    def at(self, rows: Rows) -> tuple[Inputs[Array], Array]:
        """Features and targets of some rows."""
        return taken(self.data.x, rows), self.data.y[rows]

    def of(self, client: int) -> Rows:
        """The rows of a client."""
        return np.arange(self.data.offsets[client], self.data.offsets[client + 1])

    def half_of(self, client: int, round: int) -> Rows:
        """A random half of a client's rows, a new one in every round."""
        generator = np.random.default_rng([self.seed, client, round, 0xA5C])
        own = self.of(client)
        return np.sort(generator.permutation(own)[: max(1, len(own) // 2)])

    def by_round(self, rounds: list[int]) -> dict[int, Rows]:
        """All rows, divided at random among the rounds."""
        order = np.random.default_rng([self.seed, 0xDEA1]).permutation(self.data.records)
        parts = np.array_split(order, len(rounds))
        return {round: np.sort(part) for round, part in zip(rounds, parts, strict=True)}


class RecordTraces:
    """Traces of each record: their mean over the rounds, and the latest."""

    def __init__(self, records: int) -> None:
        self._times = np.zeros(records)
        self._sum = self._last = np.zeros((records, 0))

    def add(self, rows: Rows, shown: Numbers) -> None:
        """Add the traces [rows, features] of one round."""
        if not self._times.any():
            self._sum = np.zeros((len(self._times), shown.shape[1]))
            self._last = self._sum.copy()
        self._sum[rows] += shown
        self._last[rows] = shown
        self._times[rows] += 1

    @property
    def features(self) -> Numbers:
        """Means and latest traces, [records, 2 x features], zeros for a record never traced."""
        mean = self._sum / np.maximum(self._times, 1)[:, None]
        return np.concatenate([mean, self._last], axis=1)


def by_server(training: Training, targets: TargetRecords) -> Numbers:
    """The passive server: it traces records in every report of a watched round."""
    history, task = RecordTraces(targets.data.records), training.task
    rounds = watched_rounds(training)
    for round, total, _ in _played(training, _plainly):
        for client, report in _reports(total) if round.number in rounds else ():
            rows, before = targets.of(client), round.start
            history.add(rows, traces(task, before, before + report, *targets.at(rows)))
    return history.features


def by_active_server(training: Training, targets: TargetRecords) -> Numbers:
    """The active server: in watched rounds it sends each client a model of its own.

    In that model the loss of half of the client's target records has been raised.
    """
    history, task = RecordTraces(targets.data.records), training.task
    rounds = watched_rounds(training)
    starts: dict[int, torch.Tensor] = {}

    def send(engine: Serial, round: Round) -> CohortSum:
        starts.clear()
        if round.number not in rounds:
            return _plainly(engine, round)
        total = engine.job.zero()
        for client in round.ids.tolist():
            rows = targets.half_of(client, round.number)
            starts[client] = ascended(task, round.start, *targets.at(rows))
            alone = replace(round, ids=np.array([client]), start=starts[client])
            total.add_(engine.run(alone))
        return total

    for round, total, _ in _played(training, send):
        for client, report in _reports(total) if starts else ():
            rows, before = targets.half_of(client, round.number), starts[client]
            history.add(rows, traces(task, before, before + report, *targets.at(rows)))
    return history.features


def by_client(training: Training, targets: TargetRecords) -> Numbers:
    """The passive client: it compares the global models before and after watched rounds."""
    history, task = RecordTraces(targets.data.records), training.task
    rounds = watched_rounds(training)
    every = np.arange(targets.data.records)
    for round, _, result in _played(training, _plainly):
        if round.number in rounds:
            step = round.start, result.state.params
            history.add(every, traces(task, *step, *targets.at(every)))
    return history.features


def by_active_client(training: Training, targets: TargetRecords) -> Numbers:
    """The active client: it raises the loss of some records, and traces them a round later.

    It is client 0 and takes part in watched rounds whether it is drawn or not. It also traces all
    records in watched rounds, as the passive client does.
    """
    plan, task = training.plan, training.task
    rounds = watched_rounds(training)
    aims = targets.by_round([r for r in rounds if r < plan.permitted] or rounds)
    boost = plan.expected / float(getattr(training.server, "lr", 1.0))
    attacker = Ascending(task, targets.data, 0, aims, boost)
    history, back = RecordTraces(targets.data.records), RecordTraces(targets.data.records)
    every = np.arange(targets.data.records)
    for round, _, result in _played(replace(training, adversary=attacker), _plainly):
        step = round.start, result.state.params
        if round.number in rounds:
            history.add(every, traces(task, *step, *targets.at(every)))
        if round.number - 1 in aims:
            rows = aims[round.number - 1]
            back.add(rows, traces(task, *step, *targets.at(rows)))
    return np.concatenate([history.features, back.features], axis=1)


def watched_rounds(training: Training) -> list[int]:
    """The numbers of the watched rounds."""
    return sorted({int(r) for r in np.linspace(1, training.plan.permitted, WATCHED).round()})


Sending = Callable[[Serial, Round], CohortSum]
"""Computes the sum of a round's cohort."""


def _plainly(engine: Serial, round: Round) -> CohortSum:
    return engine.run(round)


def _played(training: Training, send: Sending) -> Iterator[tuple[Round, CohortSum, RoundResult]]:
    """Run a training and yield (round, sum with all reports, result) of every round."""
    engine = training.engine
    if not isinstance(engine, Serial):
        raise AssertionError("an audit runs in this process")
    engine = replace(engine, job=replace(engine.job, rows=True))
    state, ledger = training.start(), new_ledger(training.plan)
    while (round := training.begin(state, ledger)) is not None:
        total = send(engine, round)
        result = training.end(round, state, total, ledger)
        state = result.state
        yield round, total, result


def _reports(total: CohortSum) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (client, its update) for every report that was accepted."""
    for ids, rows in total.kept or []:
        yield from zip(ids.tolist(), rows, strict=True)
