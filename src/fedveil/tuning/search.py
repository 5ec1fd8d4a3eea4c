"""Successive halving: which of many recipes ends lowest, for a tenth of what trying all costs.

Try every cell once, and stop adding rounds when the loss has tripled. Repeat the best third more
often, and the best four of those at least four times. The same repetition of two cells has the same
clients and the same first model, so that recipes are compared. Noise, cohorts and batches are each
trial's own. A rung gets its share of the budget whatever its cells cost, so cheap cells (few rounds
of few steps) are repeated more often.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedveil.tuning.means import Mean, mean_of, worse
from fedveil.tuning.plan_report import pair_of
from fedveil.tuning.prepared_cell import PreparedCell
from fedveil.tuning.trials import Laboratory

OnTrial = Callable[[int, int, str], None]

SHARE = 0.05
"""The budget of steps, as a share of `repeat` repetitions of every cell."""

RISEN = 3.0
"""Stop adding rounds when the loss is this many times its minimum.

More rounds train more and add more noise: over rounds the loss falls, then rises.
"""

_KEPT = 3
_FINALISTS = 4
_LEAST = 4


@dataclass
class Arm:
    """One candidate and the losses of its repetitions so far."""

    prepared: PreparedCell
    losses: list[float] = field(default_factory=list)

    @property
    def mean(self) -> Mean:
        return mean_of(self.losses)

    @property
    def cost(self) -> float:
        """The cost of a trial in local steps. A round costs about one step more."""
        steps, rounds = pair_of(self.prepared.cell)
        return float(rounds * (steps + 1))

    def score(self, repetitions: int) -> float:
        """The mean loss of the first repetitions, infinite if one of them diverged."""
        mean = mean_of(self.losses[:repetitions])
        return mean.value if math.isfinite(mean.value) else math.inf


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        arms: From best to worst. Arms that were tried more often come first, arms that diverged or
            were not tried come last.
        trials: The number of trials.
        seconds: The time that they took.
    """

    arms: list[Arm]
    trials: int
    seconds: float

    @property
    def winner(self) -> Arm:
        return self.arms[0]

    def p(self, arm: Arm) -> float:
        """The p-value of "worse than the winner", over common repetitions."""
        common = min(len(arm.losses), len(self.winner.losses))
        return worse(arm.losses[:common], self.winner.losses[:common])


def rungs(arms: int) -> list[int]:
    """How many arms are left on every rung.

    >>> rungs(30), rungs(2), rungs(1)
    ([30, 10, 4], [2], [1])
    """
    sizes = [arms]
    while sizes[-1] > _FINALISTS:
        sizes.append(max(_FINALISTS, math.ceil(sizes[-1] / _KEPT)))
    return sizes


def search(
    laboratory: Laboratory,
    cells: Sequence[PreparedCell],
    repeat: int,
    on_trial: OnTrial = lambda done, total, name: None,
) -> SearchResult:
    """Rank the arms by mean loss, with at most `repeat` trials of each.

    `on_trial` gets the number of trials planned so far. It grows, because how often the next rung
    repeats its arms depends on which ones they are.
    """
    with laboratory.held(cells):
        return _Search(laboratory, [Arm(prepared) for prepared in cells], repeat, on_trial).result()


class _Search:
    def __init__(
        self, laboratory: Laboratory, arms: list[Arm], repeat: int, on_trial: OnTrial
    ) -> None:
        self._laboratory, self._arms, self._on_trial = laboratory, arms, on_trial
        self._repeat, self._done, self._spent = repeat, 0, 0.0

    def result(self) -> SearchResult:
        began, budget = time.perf_counter(), SHARE * self._repeat * sum(a.cost for a in self._arms)
        alive, before, sizes = self._tried_once(), 1, rungs(len(self._arms))[1:]
        places: list[list[Arm]] = []
        for i, size in enumerate(sizes or [len(alive)]):
            alive.sort(key=lambda arm: arm.score(before))
            places.append(alive[size:])
            alive = alive[:size]
            each = sum(arm.cost for arm in alive)
            afforded = int((budget - self._spent) / max(1, len(sizes) - i) / each)
            least = _LEAST - before if i + 1 >= len(sizes) else 1
            after = min(self._repeat, before + max(1, least, afforded))
            self._try(alive, before, after)
            before = after
        alive.sort(key=lambda arm: arm.score(before))
        ranked = [arm for group in (alive, *reversed(places)) for arm in group]
        ranked += [arm for arm in self._arms if not arm.losses]
        ranked.sort(key=lambda arm: not math.isfinite(arm.mean.value))
        return SearchResult(ranked, self._done, time.perf_counter() - began)

    def _tried_once(self) -> list[Arm]:
        """Arms that differ in their rounds only, from few to many, until the loss has risen."""
        going, tried, rung = _ladders(self._arms), list[Arm](), 0
        while going:
            wave = [ladder[rung] for ladder in going]
            self._try(wave, 0, 1)
            tried, rung = tried + wave, rung + 1
            going = [arms for arms in going if len(arms) > rung and not _risen(arms[:rung])]
        return tried

    def _try(self, arms: list[Arm], before: int, after: int) -> None:
        jobs = [(arm, block) for arm in arms for block in arm.prepared.blocks(before, after)]
        results: dict[tuple[int, int], float] = {}
        total = self._done + len(arms) * (after - before)
        trials = self._laboratory.trials([(arm.prepared, block) for arm, block in jobs])
        for number, outcomes in trials:
            arm, block = jobs[number]
            for repetition, outcome in zip(block, outcomes, strict=True):
                results[id(arm), repetition] = outcome.metrics["loss"]
            self._done += len(block)
            self._on_trial(self._done, total, arm.prepared.cell.name)
        for arm in arms:
            arm.losses += [results[id(arm), r] for r in range(before, after)]
            self._spent += arm.cost * (after - before)


def _ladders(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Arms that differ in nothing but their rounds together, those of few rounds first."""
    ladders: dict[object, list[Arm]] = {}
    for arm in sorted(arms, key=lambda arm: arm.prepared.cell.recipe.total_rounds):
        rest = tuple(pair for pair in arm.prepared.cell.choice if pair[0] != "rounds")
        ladders.setdefault(rest, []).append(arm)
    return list(ladders.values())


def _risen(arms: Sequence[Arm]) -> bool:
    """Whether the last arm is far worse than the best, or diverged."""
    losses = [arm.losses[0] for arm in arms]
    least = min(losses)
    return not losses[-1] - least <= (RISEN - 1) * abs(least)
