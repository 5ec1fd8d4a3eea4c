"""Successive halving: which of many recipes ends lowest, for a tenth of what trying all costs.

Every cell is tried once; the best third more often; the best of those still more often, until two
are left. Cells share their random numbers repetition by repetition, so that what is compared is the
recipe. A rung gets its share of the budget whatever its cells cost, so that cheap ones, few rounds
of few steps, are repeated more often.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedveil.planning.statistics import Mean, mean_of, worse
from fedveil.planning.trials import Laboratory, Prepared

OnTrial = Callable[[int, int, str], None]

SHARE = 0.075
"""Of the cost of `repeat` repetitions of every cell; what trials cost beside steps comes on top."""

_KEPT = 3
_FINALISTS = 2


@dataclass
class Arm:
    """One candidate and the losses of its repetitions so far."""

    prepared: Prepared
    losses: list[float] = field(default_factory=list)

    @property
    def mean(self) -> Mean:
        return mean_of(self.losses)

    @property
    def cost(self) -> float:
        """What a trial costs, in local steps; a round costs about as much as one more."""
        recipe = self.prepared.cell.recipe
        steps = getattr(recipe.local, "steps", None) or getattr(recipe.local, "epochs", None) or 1
        return float(recipe.total_rounds * (steps + 1))

    def score(self, repetitions: int) -> float:
        """The mean of the first repetitions; infinite if one of them diverged."""
        mean = mean_of(self.losses[:repetitions])
        return mean.value if math.isfinite(mean.value) else math.inf


@dataclass(frozen=True)
class Found:
    """Arms from best to worst (those tried more often first, those that diverged last), the
    number of trials made, and the seconds that they took.

    `p` of an arm is the p-value of "it is worse than the winner" over their common repetitions.
    """

    arms: list[Arm]
    trials: int
    seconds: float

    @property
    def winner(self) -> Arm:
        return self.arms[0]

    def p(self, arm: Arm) -> float:
        common = min(len(arm.losses), len(self.winner.losses))
        return worse(arm.losses[:common], self.winner.losses[:common])


def rungs(arms: int) -> list[int]:
    """How many arms are left on every rung.

    >>> rungs(30), rungs(2), rungs(1)
    ([30, 10, 4, 2], [2], [1])
    """
    found = [arms]
    while found[-1] > _FINALISTS:
        found.append(max(_FINALISTS, math.ceil(found[-1] / _KEPT)))
    return found


def search(
    laboratory: Laboratory,
    cells: Sequence[Prepared],
    repeat: int,
    on_trial: OnTrial = lambda done, total, name: None,
) -> Found:
    """The arms in order, by their mean loss; nobody is tried more than `repeat` times.

    `on_trial` is told the trials planned so far: how often the next rung tries its arms depends on
    which ones they are.
    """
    began = time.perf_counter()
    alive = [Arm(prepared) for prepared in cells]
    sizes = rungs(len(alive))
    left = SHARE * repeat * sum(arm.cost for arm in alive)
    places: list[list[Arm]] = []
    done = before = 0
    for i, size in enumerate(sizes):
        alive.sort(key=lambda arm: arm.score(before) if before else 0.0)
        places.append(alive[size:])
        alive = alive[:size]
        each = sum(arm.cost for arm in alive)
        afforded = int(left / (len(sizes) - i) / each) if i or len(sizes) == 1 else 1
        after = min(repeat, before + max(1, afforded))
        left -= (after - before) * each
        jobs = [(arm, block) for arm in alive for block in arm.prepared.blocks(before, after)]
        results: dict[tuple[int, int], float] = {}
        total = done + len(alive) * (after - before)
        for number, outcomes in laboratory.trials([(arm.prepared, block) for arm, block in jobs]):
            arm, block = jobs[number]
            for repetition, outcome in zip(block, outcomes, strict=True):
                results[id(arm), repetition] = outcome.metrics["loss"]
            done += len(block)
            on_trial(done, total, arm.prepared.cell.name)
        for arm in alive:
            arm.losses += [results[id(arm), r] for r in range(before, after)]
        before = after
    alive.sort(key=lambda arm: arm.score(before))
    ranked = [arm for group in (alive, *reversed(places)) for arm in group]
    ranked.sort(key=lambda arm: not math.isfinite(arm.mean.value))
    return Found(ranked, done, time.perf_counter() - began)
