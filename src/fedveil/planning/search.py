"""Successive halving: which of many recipes ends lowest, for a tenth of what trying all costs.

Every cell is tried once; the best quarter again; the best of those more often, until two are left.
Cells share their random numbers repetition by repetition, so that what is compared is the recipe.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedveil.planning.statistics import Mean, mean_of, worse
from fedveil.planning.trials import Laboratory, Prepared

OnTrial = Callable[[int, int, str], None]

_KEPT = 4
_FINALISTS = 2
_LADDER = (1, 2, 5, 10, 20, 50, 100)


@dataclass
class Arm:
    """One candidate and the losses of its repetitions so far."""

    prepared: Prepared
    losses: list[float] = field(default_factory=list)

    @property
    def mean(self) -> Mean:
        return mean_of(self.losses)

    def score(self, repetitions: int) -> float:
        """The mean of the first repetitions; infinite if one of them diverged."""
        mean = mean_of(self.losses[:repetitions])
        return mean.value if math.isfinite(mean.value) else math.inf


@dataclass(frozen=True)
class Found:
    """Arms from best to worst (those tried more often first), and the number of trials made.

    `p` of an arm is the p-value of "it is worse than the winner" over their common repetitions.
    """

    arms: list[Arm]
    trials: int

    @property
    def winner(self) -> Arm:
        return self.arms[0]

    def p(self, arm: Arm) -> float:
        common = min(len(arm.losses), len(self.winner.losses))
        return worse(arm.losses[:common], self.winner.losses[:common])


def rungs(arms: int, repeat: int) -> list[tuple[int, int]]:
    """(arms left, repetitions each has had) of every rung; `repeat` is the most for anyone.

    >>> rungs(36, 20)
    [(36, 1), (9, 2), (3, 5), (2, 10)]
    """
    last = max(1, repeat // 2) if arms > _FINALISTS else repeat
    steps = [r for r in _LADDER if r < last] + [last]
    found = []
    for i, repetitions in enumerate(steps):
        final = i == len(steps) - 1
        found.append((min(arms, _FINALISTS) if final and i else arms, repetitions))
        arms = max(min(arms, _FINALISTS), math.ceil(arms / _KEPT))
    return found


def search(
    laboratory: Laboratory,
    cells: Sequence[Prepared],
    repeat: int,
    on_trial: OnTrial = lambda done, total, name: None,
) -> Found:
    """The arms in order, by their mean loss."""
    arms = [Arm(prepared) for prepared in cells]
    plan = rungs(len(arms), repeat)
    total, done, before, alive = _trials(plan), 0, 0, list(arms)
    places: list[list[Arm]] = []
    for count, repetitions in plan:
        alive.sort(key=lambda arm: arm.score(before) if before else 0.0)
        places.append(alive[count:])
        alive = alive[:count]
        jobs = [(arm.prepared, r) for r in range(before, repetitions) for arm in alive]
        results: dict[int, float] = {}
        for number, outcome in laboratory.trials(jobs):
            results[number] = outcome.metrics["loss"]
            done += 1
            on_trial(done, total, jobs[number][0].cell.name)
        for number in range(len(jobs)):
            alive[number % len(alive)].losses.append(results[number])
        before = repetitions
    alive.sort(key=lambda arm: arm.score(before))
    ranked = [alive, *reversed(places)]
    return Found([arm for group in ranked for arm in group], done)


def _trials(plan: Sequence[tuple[int, int]]) -> int:
    before, total = 0, 0
    for count, repetitions in plan:
        total += count * (repetitions - before)
        before = repetitions
    return total
