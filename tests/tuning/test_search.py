"""Successive halving, on losses that are made up."""

import math
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from fedveil.tuning.recipe_grid import Space, axis, candidates, cells
from fedveil.tuning.search import Rival, rungs, search
from fedveil.tuning.trials import Laboratory, PreparedCell, TrialOutcome

SHOCKS = np.random.default_rng(0).normal(size=1000)


class Made(Laboratory):
    """Losses by arm and repetition, handed over out of order; keeps what was asked for."""

    def __init__(self, loss):
        super().__init__()
        self.loss, self.asked = loss, defaultdict(list)

    def pool(self, cells):
        return nullcontext(self)

    def outcomes(self, jobs):
        for number in reversed(range(len(jobs))):
            prepared, repetitions = jobs[number]
            self.asked[prepared.number] += repetitions
            losses = [self.loss(prepared.number, repetition) for repetition in repetitions]
            yield number, [TrialOutcome(1, {"loss": loss}) for loss in losses]


@dataclass(frozen=True, eq=False)
class Numbered(PreparedCell):
    number: int = 0


def numbered(grid):
    return [Numbered(cell, None, None, None, 0.0, 3, number) for number, cell in enumerate(grid)]


def arms(count, together="rounds:seed"):
    """Arms of more and more rounds, which differ in something else as well."""
    values = ",".join(":".join([str(r + 1)] * len(together.split(":"))) for r in range(count))
    return numbered(cells("dp-fedavg", [], [axis(f"{together}={values}")]))


LADDERS = {  # the losses over rounds, and how many of them are tried
    "falls": ([9.0, 5.0, 3.0, 2.0, 1.5], 5),
    "falls, then rises a little": ([9.0, 5.0, 3.0, 4.0, 8.0], 5),
    "rises at once": ([1.0, 3.1, 0.5, 0.5, 0.5], 2),
    "rises late": ([5.0, 1.0, 2.9, 3.1, 0.1], 4),
    "diverges": ([5.0, 4.0, math.nan, 1.0, 1.0], 3),
    "begins with one that diverges": ([math.inf, 1.0, 1.0, 1.0, 1.0], 1),
    "below zero": ([-1.0, -2.0, -3.0, -4.0, -5.0], 5),
    "from below zero": ([-1.0, 0.9, 1.1, 0.0, 0.0], 3),
}


@pytest.mark.parametrize("how", LADDERS)
def test_more_rounds_are_not_tried_where_the_loss_has_risen(how):
    losses, tried = LADDERS[how]
    made = Made(lambda arm, r: losses[arm])
    found = search(made, arms(5, "rounds"), 4)
    assert sorted(made.asked) == list(range(tried))
    untried = [arm for arm in found.rivals if not arm.trial_losses]
    assert len(untried) == 5 - tried
    assert all(str(arm.mean_loss) == "not tried" for arm in untried)
    assert numbers(found)[0] == min(
        range(tried), key=lambda a: losses[a] if math.isfinite(losses[a]) else math.inf
    )


def numbers(found):
    return [arm.prepared.number for arm in found.rivals]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 30, 100])
def test_rungs_end_at_four(count):
    sizes = rungs(count)
    assert sizes[0] == count
    assert sizes[-1] == min(count, 4)
    assert all(a > b for a, b in pairwise(sizes))


@pytest.mark.parametrize("best", [0, 7, 29])
def test_the_best_of_many_is_found_by_common_random_numbers(best):
    """Repetitions differ a hundred times more than arms: comparing unlike ones would be luck."""
    made = Made(lambda arm, r: 0.01 * abs(arm - best) + SHOCKS[r])
    found = search(made, arms(30), 20)
    assert found.winner.prepared.number == best
    assert {abs(number - best) for number in numbers(found)[1:3]} <= {1, 2}


def test_every_arm_has_the_same_first_repetitions():
    made = Made(lambda arm, r: SHOCKS[r] - arm)
    found = search(made, arms(30), 20)
    for arm in found.rivals:
        asked = made.asked[arm.prepared.number]
        assert sorted(asked) == list(range(len(asked)))
        assert arm.trial_losses == [SHOCKS[r] - arm.prepared.number for r in range(len(asked))]
    tried = [len(arm.trial_losses) for arm in found.rivals]
    assert tried == sorted(tried, reverse=True)
    assert tried[0] == tried[3] > tried[4] > tried[10] == tried[-1] == 1
    assert tried[0] >= 4


def test_what_is_told_is_what_is_done():
    made, told = Made(lambda arm, r: arm + SHOCKS[r]), []
    found = search(made, arms(30), 20, lambda *progress: told.append(progress))
    steps = [b - a for a, b in pairwise([0, *(done for done, _, _ in told)])]
    assert set(steps) <= {1, 2, 3}
    assert all(done <= total for done, total, _ in told)
    assert told[-1][:2] == (found.trials, found.trials)
    assert found.trials == sum(map(len, made.asked.values()))
    assert {name for _, _, name in told[:30]} == {arm.prepared.cell.name for arm in found.rivals}


def test_it_costs_about_a_tenth():
    prepared = numbered(candidates("dp-fedavg", [], Space()))
    found = search(Made(lambda arm, r: arm + SHOCKS[r]), prepared, 20)
    spent = sum(arm.steps_per_trial * len(arm.trial_losses) for arm in found.rivals)
    assert spent <= 0.1 * 20 * sum(Rival(p).steps_per_trial for p in prepared)


@pytest.mark.parametrize(("count", "repeat"), [(1, 1), (1, 5), (2, 3), (3, 1), (9, 2), (30, 3)])
def test_nobody_is_tried_more_often_than_asked(count, repeat):
    found = search(Made(lambda arm, r: -arm), arms(count), repeat)
    assert max(len(arm.trial_losses) for arm in found.rivals) <= repeat
    assert min(len(arm.trial_losses) for arm in found.rivals) >= 1
    assert found.winner.prepared.number == count - 1


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_arm_that_diverges_never_wins(wrong):
    """Even one that looks best at first, and even if it meets only its like in the final."""

    def loss(arm, repetition):
        if arm < 10:
            return wrong if repetition >= 1 else -100.0 + arm
        return float(arm)

    found = search(Made(loss), arms(30), 20)
    assert found.winner.prepared.number == 10
    diverged = [arm.mean_loss.diverged > 0 for arm in found.rivals]
    assert diverged == sorted(diverged)
    assert any(diverged)


def test_all_arms_may_diverge():
    found = search(Made(lambda arm, r: math.nan), arms(5), 4)
    assert found.winner.mean_loss.value == math.inf


def test_p_is_over_common_repetitions():
    made = Made(lambda arm, r: arm + (1 + 0.01 * arm) * SHOCKS[r])
    found = search(made, arms(30), 60)
    second = found.rivals[1]
    assert len(second.trial_losses) >= 5
    assert found.p_value(second) < 1e-3
    assert found.p_value(found.winner) == 1.0
