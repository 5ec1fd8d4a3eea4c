"""What attackers inside a training see of every record: the server or a client, passive or active.

In some rounds, evenly over the training, they look at what a record shows of a step that was made
(`attacks.traces`). The server looks at a client's report, from the model that it sent, and at the
records that are asked of this client. A client looks at the global models, and at all records: it
does not know who took part.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from fedveil.attacks.ascent import Ascending
from fedveil.attacks.traces import ascended, traces
from fedveil.data.federated import Array, FederatedData
from fedveil.inputs import Inputs, taken
from fedveil.privacy.round import Round
from fedveil.training.engines.serial import Serial
from fedveil.training.round import RoundResult
from fedveil.training.session import Training, new_ledger
from fedveil.training.sums import CohortSum

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
        for client, report in _reports(total) if ask.number in rounds else ():
            rows, before = asked.of(client), ask.start
            seen.add(rows, traces(task, before, before + report, *asked.at(rows)))
    return seen.features


def by_active_server(training: Training, asked: Asked) -> Numbers:
    """The active server: in watched rounds it sends each client a model of its own.

    On that, the loss of half of the records that are asked of the client has been raised.
    """
    seen, rounds, task = Seen(asked.data.records), watched_rounds(training), training.task
    starts: dict[int, torch.Tensor] = {}

    def send(engine: Serial, ask: Round) -> CohortSum:
        starts.clear()
        if ask.number not in rounds:
            return _plainly(engine, ask)
        total = engine.job.zero()
        for client in ask.ids.tolist():
            rows = asked.some_of(client, ask.number)
            starts[client] = ascended(task, ask.start, *asked.at(rows))
            alone = replace(ask, ids=np.array([client]), start=starts[client])
            total.add_(engine.run(alone))
        return total

    for ask, total, _ in _played(training, send):
        for client, report in _reports(total) if starts else ():
            rows, before = asked.some_of(client, ask.number), starts[client]
            seen.add(rows, traces(task, before, before + report, *asked.at(rows)))
    return seen.features


def by_client(training: Training, asked: Asked) -> Numbers:
    """The passive client: it looks at the global models before and after watched rounds."""
    seen, rounds, task = Seen(asked.data.records), watched_rounds(training), training.task
    every = np.arange(asked.data.records)
    for ask, _, result in _played(training, _plainly):
        if ask.number in rounds:
            step = ask.start, result.state.params
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
        step = ask.start, result.state.params
        if ask.number in rounds:
            seen.add(every, traces(task, *step, *asked.at(every)))
        if ask.number - 1 in aims:
            rows = aims[ask.number - 1]
            back.add(rows, traces(task, *step, *asked.at(rows)))
    return np.concatenate([seen.features, back.features], axis=1)


def watched_rounds(training: Training) -> list[int]:
    """The rounds that are looked at."""
    return sorted({int(r) for r in np.linspace(1, training.plan.permitted, WATCHED).round()})


Sending = Callable[[Serial, Round], CohortSum]
"""How a round's cohort is asked, and what it comes to."""


def _plainly(engine: Serial, round: Round) -> CohortSum:
    return engine.run(round)


def _played(training: Training, send: Sending) -> Iterator[tuple[Round, CohortSum, RoundResult]]:
    """The rounds of a training, with all reports kept: (what was asked, what came, the result)."""
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
    """(client, its update) of everybody whose report was not refused."""
    for ids, rows in total.kept or []:
        yield from zip(ids.tolist(), rows, strict=True)
