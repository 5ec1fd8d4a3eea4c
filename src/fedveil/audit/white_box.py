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
from fedveil.privacy.accounting.claims import PrivacyClaim, Trust
from fedveil.training.engines.serial import Serial
from fedveil.training.engines.workers import available
from fedveil.training.round import Ask
from fedveil.training.session import Training, new_ledger
from fedveil.training.sums import CohortSum
from fedveil.tuning.bench import Bench

ATTACK = "white-box"
WATCHED = 8
"""Rounds that are watched, evenly over the training, the last among them."""

SERVER, CLIENT, ACTIVE = "passive, the server", "passive, a client", "active, the server"
_SEES_REPORTS = (Trust.LOCAL, Trust.CURATOR)
_CLIP = 1.0, 99.0

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
        scores = {way: [] for way in (SERVER, CLIENT, ACTIVE)}
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
    """What attackers see in trainings 0 and 1 of a pair, and in 2 and 3: the same, but active."""
    return [
        _Observed(halves, active=number >= 2).run(halves.at(number % 2)) for number in numbers
    ]


class _Observed:
    """One training with its rounds watched: sums over what each record showed, and the last."""

    def __init__(self, halves: Halves, *, active: bool) -> None:
        self._task, self._data = halves.training.task, halves.training.data
        self._seed, self._active = halves.seed, active
        self._last: list[dict[int, Numbers]] = []
        self._sum: Numbers | None = None
        self._times = np.zeros(self._data.records)

    def run(self, training: Training) -> Numbers:
        """[views, records, features]: by one's own client's report, and by the global model."""
        plan, engine = training.plan, training.engine
        if not isinstance(engine, Serial):
            raise AssertionError("an audit runs in this process")
        engine = replace(engine, job=replace(engine.job, rows=True))
        rounds = set(np.linspace(1, plan.permitted, WATCHED).round().astype(int).tolist())
        course = training.course(training.start(), new_ledger(plan))
        for ask in course:
            if not isinstance(ask, Ask):
                raise AssertionError("a round begins with what it asks for")
            chosen = self._chosen(ask.round) if ask.round in rounds else None
            starts, total = self._summed(engine, ask, chosen)
            reports = {int(k): row for ids, rows in total.kept or [] for k, row in zip(ids, rows)}
            total.kept = None
            result = course.send(total)
            if chosen is not None:
                after = result.state.params  # type: ignore[union-attr]
                for client, report in reports.items():
                    before = starts.get(client, ask.state.params)
                    self._look(client, chosen, before, before + report, after)
        return self._found()
