"""What attackers inside a training see of every record: the server or a client, passive or active.

In some rounds, evenly over the training, they look at what a record shows of a step that was made
(`audit.traces`). The server looks at a client's report, from the model that it sent, and at the
records that are asked of this client. A client looks at the global models, and at all records: it
does not know who took part.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from fedveil.audit.traces import ascended, traces
from fedveil.data.federated import Array, FederatedData
from fedveil.identity import Stated
from fedveil.inputs import Inputs, taken
from fedveil.models.task import Task
from fedveil.privacy.plan import PrivacyPlan
from fedveil.training.adversary import Adversary, Chance, Ids
from fedveil.training.engines.serial import Serial
from fedveil.training.exchange import Sent
from fedveil.training.round import Ask, RoundResult
from fedveil.training.session import Training, new_ledger
from fedveil.training.sums import CohortSum

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
        step = ascended(self.task, turn.start, *self.aimed_at(turn.round)) - turn.start
        return chance.sent(chance.skipping(self.boost * step[None]))

    def aimed_at(self, round: int) -> tuple[Inputs[Array], Array]:
        """What is asked about in a round."""
        rows = self.aims[round]
        return taken(self.asked.x, rows), self.asked.y[rows]

    def assumption(self, plan: PrivacyPlan) -> str:
        return "one client attacks membership in this simulation: the claim is about the others"


WATCHED = 5
"""Rounds that are watched, the last among them."""

Numbers = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Asked:
    """The records in question: each client's own and as many that it does not have."""

    data: FederatedData
    seed: int

    def at(self, rows: Rows) -> tuple[Inputs[Array], Array]:
        """Features and targets."""
        return taken(self.data.x, rows), self.data.y[rows]

    def of(self, client: int) -> Rows:
        """Those that are asked of a client."""
        return np.arange(self.data.offsets[client], self.data.offsets[client + 1])

    def some_of(self, client: int, round: int) -> Rows:
        """Half of them, another half in every round."""
        generator = np.random.default_rng([self.seed, client, round, 0xA5C])
        own = self.of(client)
        return np.sort(generator.permutation(own)[: max(1, len(own) // 2)])

    def dealt(self, rounds: list[int]) -> dict[int, Rows]:
        """All records, each in one of the rounds."""
        order = np.random.default_rng([self.seed, 0xDEA1]).permutation(self.data.records)
        parts = np.array_split(order, len(rounds))
        return {round: np.sort(part) for round, part in zip(rounds, parts, strict=True)}


class Seen:
    """What each record showed, on average and when it was last looked at."""

    def __init__(self, records: int) -> None:
        self._times = np.zeros(records)
        self._sum = self._last = np.zeros((records, 0))

    def add(self, rows: Rows, shown: Numbers) -> None:
        """Take in [rows, features]."""
        if not self._times.any():
            self._sum = np.zeros((len(self._times), shown.shape[1]))
            self._last = self._sum.copy()
        self._sum[rows] += shown
        self._last[rows] = shown
        self._times[rows] += 1

    @property
    def features(self) -> Numbers:
        """[records, 2 x features]; zeros for a record that was never looked at."""
        mean = self._sum / np.maximum(self._times, 1)[:, None]
        return np.concatenate([mean, self._last], axis=1)


def by_server(training: Training, asked: Asked) -> Numbers:
    """The passive server: it looks at every report of a watched round."""
    seen, rounds, task = Seen(asked.data.records), watched_rounds(training), training.task
    for ask, total, _ in _played(training, _plainly):
        for client, report in _reports(total) if ask.round in rounds else ():
            rows, before = asked.of(client), ask.state.params
            seen.add(rows, traces(task, before, before + report, *asked.at(rows)))
    return seen.features


def by_active_server(training: Training, asked: Asked) -> Numbers:
    """The active server: in watched rounds it sends each client a model of its own.

    On that, the loss of half of the records that are asked of the client has been raised.
    """
    seen, rounds, task = Seen(asked.data.records), watched_rounds(training), training.task
    starts: dict[int, torch.Tensor] = {}

    def send(engine: Serial, ask: Ask) -> CohortSum:
        starts.clear()
        if ask.round not in rounds:
            return _plainly(engine, ask)
        total = engine.job.zero()
        for client in ask.ids.tolist():
            rows = asked.some_of(client, ask.round)
            starts[client] = ascended(task, ask.state.params, *asked.at(rows))
            state = replace(ask.state, params=starts[client])
            total.add_(engine.run(ask.round, np.array([client]), state))
        return total

    for ask, total, _ in _played(training, send):
        for client, report in _reports(total) if starts else ():
            rows, before = asked.some_of(client, ask.round), starts[client]
            seen.add(rows, traces(task, before, before + report, *asked.at(rows)))
    return seen.features


def by_client(training: Training, asked: Asked) -> Numbers:
    """The passive client: it looks at the global models before and after watched rounds."""
    seen, rounds, task = Seen(asked.data.records), watched_rounds(training), training.task
    every = np.arange(asked.data.records)
    for ask, _, result in _played(training, _plainly):
        if ask.round in rounds:
            step = ask.state.params, result.state.params
            seen.add(every, traces(task, *step, *asked.at(every)))
    return seen.features


def by_active_client(training: Training, asked: Asked) -> Numbers:
    """The active client: it raises the loss of some records, and looks at them a round later.

    It is client 0, takes part in watched rounds whether it is drawn or not, and looks at the
    global models as a passive one does besides.
    """
    plan, task = training.plan, training.task
    rounds = watched_rounds(training)
    aims = asked.dealt([r for r in rounds if r < plan.permitted] or rounds)
    boost = plan.expected / float(getattr(training.server, "lr", 1.0))
    attacker = Ascending(task, asked.data, 0, aims, boost)
    seen, back = Seen(asked.data.records), Seen(asked.data.records)
    every = np.arange(asked.data.records)
    for ask, _, result in _played(replace(training, adversary=attacker), _plainly):
        step = ask.state.params, result.state.params
        if ask.round in rounds:
            seen.add(every, traces(task, *step, *asked.at(every)))
        if ask.round - 1 in aims:
            rows = aims[ask.round - 1]
            back.add(rows, traces(task, *step, *asked.at(rows)))
    return np.concatenate([seen.features, back.features], axis=1)


def watched_rounds(training: Training) -> list[int]:
    """The rounds that are looked at."""
    return sorted({int(r) for r in np.linspace(1, training.plan.permitted, WATCHED).round()})


Sending = Callable[[Serial, Ask], CohortSum]
"""How a round's cohort is asked, and what it comes to."""


def _plainly(engine: Serial, ask: Ask) -> CohortSum:
    return engine.run(ask.round, ask.ids, ask.state)


def _played(training: Training, send: Sending) -> Iterator[tuple[Ask, CohortSum, RoundResult]]:
    """The rounds of a training, with all reports kept: (what was asked, what came, the result)."""
    engine = training.engine
    if not isinstance(engine, Serial):
        raise AssertionError("an audit runs in this process")
    engine = replace(engine, job=replace(engine.job, rows=True))
    course = training.course(training.start(), new_ledger(training.plan))
    for ask in course:
        if not isinstance(ask, Ask):
            raise AssertionError("a round begins with what it asks for")
        total = send(engine, ask)
        result = course.send(total)
        if not isinstance(result, RoundResult):
            raise AssertionError("a round that was sent its sum has a result")
        yield ask, total, result


def _reports(total: CohortSum) -> Iterator[tuple[int, torch.Tensor]]:
    """(client, its update) of everybody whose report was not refused."""
    for ids, rows in total.kept or []:
        yield from zip(ids.tolist(), rows, strict=True)
