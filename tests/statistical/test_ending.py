"""Who ends a run because of what it showed breaks the claim of its rounds, and not the plan's.

Privacy losses of Gaussian releases, summed round by round, under a rule that ends a run as soon as
its loss is beyond what its rounds claim. The delta that such a rule reaches is the mean of
max(0, 1 - exp(epsilon - loss)), whose epsilon is that of the rounds done, or of the plan. Means of
numbers between 0 and 1: Hoeffding's bound makes a false alarm less likely than 1e-6 each.
"""

import math

import numpy as np
import pytest

from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.clip_schedules import Fixed
from fedveil.privacy.releases.central import central
from fedveil.privacy.sampling import Everyone

ROUNDS, NOISE, DELTA, RUNS = 40, 3.0, 0.01, 200_000
ALARM = math.sqrt(math.log(1e6) / (2 * RUNS))


@pytest.fixture(scope="module")
def deltas():
    """What the rule reaches against the claim of the rounds done, and against the plan's."""
    line = central(
        *(Everyone(), 50, Fixed(1.0)),
        rounds=ROUNDS,
        budget=Budget(math.inf, DELTA),
        multiplier=NOISE,
    ).lines[0]
    claimed = np.array(
        [
            epsilon(line.event, n, DELTA, line.relation, line.accountants[0])
            for n in range(1, ROUNDS + 1)
        ]
    )
    drawn = np.random.default_rng().standard_normal((RUNS, ROUNDS))
    losses = np.cumsum(drawn / NOISE + 0.5 / NOISE**2, axis=1)
    beyond = losses > claimed + 0.5
    ended = np.where(beyond.any(axis=1), beyond.argmax(axis=1), ROUNDS - 1)
    loss = losses[np.arange(RUNS), ended]
    return tuple(
        float(np.maximum(0, 1 - np.exp(limit - loss)).mean())
        for limit in (claimed[ended], claimed[-1])
    )


def test_the_claim_of_the_rounds_done_is_broken_by_a_rule_that_looks(deltas):
    assert deltas[0] - ALARM > 2 * DELTA


def test_the_claim_of_all_planned_rounds_is_not(deltas):
    assert deltas[1] - ALARM <= DELTA
