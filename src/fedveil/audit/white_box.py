"""Membership, white box (Nasr et al. 2019): an attacker inside the training, not after it.

The server sees every client's report, a client the global models. The passive ones look at what
each record leaves in them (`attacks.traces`) over several rounds. The active server sends clients a
model on which it has raised the loss of the records in question: at a client that has a record,
training brings its loss back. The attacker knows of half of the records whether they were trained
on, learns from these what members look like, and guesses about the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from fedveil.attacks.traces import ascended, traces
from fedveil.audit.halves import Halves, OnTraining
from fedveil.audit.kept import Kept
from fedveil.audit.leak import Leak
from fedveil.audit.roc import Roc, roc_png
from fedveil.data.federated import Array, FederatedData
from fedveil.errors import BadInput
from fedveil.inputs import Inputs, taken
from fedveil.models.task import Task
from fedveil.privacy.accounting.claims import PrivacyClaim, Trust
from fedveil.training.engines.serial import Serial
from fedveil.training.engines.workers import available
from fedveil.training.round import Ask, RoundResult
from fedveil.training.session import Training, new_ledger
from fedveil.training.sums import CohortSum
from fedveil.tuning.bench import Bench

ATTACK = "white-box"
WATCHED = 8
"""Rounds that are watched, evenly over the training, the last among them."""

SERVER, CLIENT, ACTIVE = "passive, the server", "passive, a client", "active, the server"
_SEES_REPORTS = (Trust.LOCAL, Trust.CURATOR)
_ENDS = 1.0, 99.0
"""Percentiles at which features are cut."""

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class WhiteBox:
    """From `seed`, on so many processes (0: one per core)."""

    seed: int = 0
    workers: int = 0
    kept: Kept = field(default_factory=Kept)

    def leaks(
        self,
        training: Training,
        claim: PrivacyClaim | None,
        on_training: OnTraining = lambda done, of: None,
    ) -> Iterator[Leak]:
        """One for each attacker; nothing is claimed against a server that the claim trusts."""
        if training.adversary is not None:
            raise BadInput("the run has an attack of its own: leave out --attacks white-box")
        halves = Halves(training, 1, self.seed)
        found = self.curves(halves, on_training)
        what = f"{training.data.records:,} records, in and out; half of them known"
        self.kept.picture(ATTACK, roc_png(found, what))
        against = claim if claim is not None and claim.trust in _SEES_REPORTS else None
        for way, roc in found.items():
            yield Leak(ATTACK, f"{way}: {what}", roc.measures, claim if way == CLIENT else against)

    def curves(
        self, halves: Halves, on_training: OnTraining = lambda done, of: None
    ) -> dict[str, Roc]:
        """Scores by attacker: of each record, once in and once not."""
        seen = self._seen(halves, on_training)
        scores: dict[str, list[Numbers]] = {way: [] for way in (SERVER, CLIENT, ACTIVE)}
        for number, inside in enumerate(halves.inside):
            passive, active = seen[number], seen[2 + number]
            views = {SERVER: passive[0], CLIENT: passive[1], ACTIVE: active[0]}
            for way, rows in views.items():
                scores[way].append(guessed(rows, inside, self.seed))
        first = halves.inside[0]
        return {
            way: Roc(np.where(first, a, b), np.where(first, b, a), paired=True)
            for way, (a, b) in scores.items()
        }

    def _seen(self, halves: Halves, on_training: OnTraining) -> list[Numbers]:
        """What is seen in four trainings: both of the pair, passive and then active."""
        found = {n: self.kept.array(_name(n)) for n in range(4)}
        left = [n for n in found if found[n] is None]
        for number, rows in self._watched(halves, left):
            found[number] = rows
            self.kept.keep(_name(number), rows)
            on_training(sum(each is not None for each in found.values()), len(found))
        return [each for each in found.values() if each is not None]

    def _watched(self, halves: Halves, left: Sequence[int]) -> Iterator[tuple[int, Numbers]]:
        processes = min(len(left), self.workers or available())
        if processes <= 1:
            yield from ((number, watched(halves, [number])[0]) for number in left)
            return
        with Bench([halves], watched, processes) as bench:
            for job, (rows,) in bench.outcomes([(halves, [number]) for number in left]):
                yield left[job], rows


def watched(halves: Halves, numbers: Sequence[int]) -> list[Numbers]:
    """What attackers see in trainings 0 and 1 of a pair, and in 2 and 3: the same, but active.

    Each is [views, records, features]: by the record's own client's reports, by global models.
    """
    return [_watch(halves, halves.at(number % 2), active=number >= 2) for number in numbers]


def _watch(halves: Halves, training: Training, *, active: bool) -> Numbers:
    """Train, and look at every record whenever its client reports in a round that is watched."""
    plan, engine = training.plan, training.engine
    if not isinstance(engine, Serial):
        raise AssertionError("an audit runs in this process")
    engine = replace(engine, job=replace(engine.job, rows=True))
    asked = _Asked(halves.training.data, halves.seed, active=active)
    seen = _Seen(asked.data.records)
    rounds = {int(r) for r in np.linspace(1, plan.permitted, WATCHED).round()}
    course = training.course(training.start(), new_ledger(plan))
    for ask in course:
        if not isinstance(ask, Ask):
            raise AssertionError("a round begins with what it asks for")
        look = ask.round in rounds
        starts = {k: asked.start(training.task, ask, k) for k in ask.ids.tolist() if look}
        total = _reported(engine, ask, starts if active else {})
        reports = [pair for ids, rows in total.kept or [] for pair in zip(ids, rows, strict=True)]
        result = course.send(total)
        if not isinstance(result, RoundResult):
            raise AssertionError("a round that was sent its sum has a result")
        for client, report in reports if look else []:
            rows = asked.records(ask.round, int(client))
            before = starts[int(client)]
            afters = before + report, result.state.params
            seen.add(rows, traces(training.task, before, afters, *asked.at(rows)))
    return seen.rows


def _reported(engine: Serial, ask: Ask, starts: dict[int, torch.Tensor]) -> CohortSum:
    """The sum over the cohort, each client from its own start where it has one."""
    if not starts:
        return engine.run(ask.round, ask.ids, ask.state)
    total = engine.job.zero()
    for client, start in starts.items():
        state = replace(ask.state, params=start)
        total.add_(engine.run(ask.round, np.array([client]), state))
    return total


@dataclass(frozen=True, eq=False)
class _Asked:
    """The records in question, clients' own and others dealt to them, and how they are asked.

    The active server asks about half of them at a time, another half in every round.
    """

    data: FederatedData
    seed: int
    active: bool

    def records(self, round: int, client: int) -> npt.NDArray[np.int64]:
        """Those of a client that are looked at in a round."""
        own = np.arange(self.data.offsets[client], self.data.offsets[client + 1])
        if not self.active:
            return own
        generator = np.random.default_rng([self.seed, client, round, 0xA5C])
        return np.sort(generator.permutation(own)[: max(1, len(own) // 2)])

    def at(self, rows: npt.NDArray[np.int64]) -> tuple[Inputs[Array], Array]:
        """Features and targets."""
        return taken(self.data.x, rows), self.data.y[rows]

    def start(self, task: Task, ask: Ask, client: int) -> torch.Tensor:
        """The model that is sent to a client."""
        if not self.active:
            return ask.state.params
        return ascended(task, ask.state.params, *self.at(self.records(ask.round, client)))


class _Seen:
    """What each record showed, on average and when it was last looked at."""

    def __init__(self, records: int) -> None:
        self._records, self._times = records, np.zeros(records)
        self._sum = self._last = np.zeros((2, records, 0))

    def add(self, rows: npt.NDArray[np.int64], shown: Numbers) -> None:
        """Take in [views, rows, features]."""
        if not self._times.any():
            self._sum = np.zeros((len(shown), self._records, shown.shape[2]))
            self._last = self._sum.copy()
        self._sum[:, rows] += shown
        self._last[:, rows] = shown
        self._times[rows] += 1

    @property
    def rows(self) -> Numbers:
        """[views, records, 2 x features]; zeros of records whose client never reported."""
        mean = self._sum / np.maximum(self._times, 1)[:, None]
        return np.concatenate([mean, self._last], axis=2)


def guessed(rows: Numbers, inside: npt.NDArray[np.bool_], seed: int) -> Numbers:
    """Scores of all records [n] by what a logistic regression learns from the other half of them.

    Whose membership is known is a coin for each record, and the same in every training: nothing
    about a record is used to score it.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    known = np.random.default_rng([seed, 0xF01D]).random(len(rows)) < 0.5
    scores = np.zeros(len(rows))
    for learnt in (known, ~known):
        ends = np.percentile(rows[learnt], _ENDS, axis=0)
        cut = np.clip(rows, *ends)
        if len(np.unique(inside[learnt])) < 2 or not rows.shape[1]:
            continue
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
        model.fit(cut[learnt], inside[learnt])
        scores[~learnt] = model.decision_function(cut[~learnt])
    return scores


def _name(number: int) -> str:
    return f"white-box-{number}"
