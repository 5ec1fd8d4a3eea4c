"""A run that is ended by whatever rule keeps its printed (epsilon, delta).

Dynamic programming over the privacy loss. After n rounds with loss L a rule may end the run, which
counts max(0, 1 - exp(epsilon_n - L)), or do one more round. The best it can do, from the first
round on, is the true delta of the epsilons that are printed. The losses of one round are put on a
grid, half of each to either side, so that their mean is kept: nothing is drawn, and there are no
false alarms. The grid's error is below 1 %, as the known deltas of claims of the rounds done show.
"""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.signal import fftconvolve
from scipy.stats import norm

from fedveil.privacy.accounting.budget import EARLY, Budget
from fedveil.privacy.accounting.meaning import counting, smaller
from fedveil.privacy.clip_schedules import Fixed
from fedveil.privacy.releases.central import central
from fedveil.privacy.sampling import Everyone, Poisson

STEP, EXACT = 0.005, 1.01


def planned(noise, rounds, delta, rate=None):
    """A plan of `rounds` Gaussian rounds, of everyone or of a Poisson sample."""
    sampler = Everyone() if rate is None else Poisson(rate)
    return central(
        *(sampler, 50, Fixed(1.0)),
        rounds=rounds,
        budget=Budget(math.inf, delta),
        multiplier=noise,
    )


def losses(noise, rate=1.0, *, removed=True):
    """(loss on the grid in steps, probability) of one round, in either of its two directions."""
    x = np.linspace(-12 * noise, 12 * noise + 1, 200_001)
    without, with_ = norm.pdf(x, 0, noise), norm.pdf(x, 1, noise)
    ratio = np.log1p(rate * np.expm1((2 * x - 1) / (2 * noise**2)))
    loss, weight = (ratio, (1 - rate) * without + rate * with_) if removed else (-ratio, without)
    weight /= weight.sum()
    below = np.floor(loss / STEP).astype(int)
    above = loss / STEP - below
    first = below.min()
    found = np.bincount(below - first, weight * (1 - above), below.max() - first + 2)
    found += np.bincount(below - first + 1, weight * above, len(found))
    return first, found


def worst(printed, increment, *, counted=None):
    """The true delta of the epsilons `printed` after 1, 2, ... rounds, under the worst rule.

    Only ends after a number of rounds that is `counted` count; None, all of them.
    """
    first, probability = increment
    span = max(abs(first), first + len(probability))
    size = int((max(printed) + 25) / STEP)
    grid = STEP * np.arange(-size, size + 1)
    value = np.zeros_like(grid)
    for n in reversed(range(len(printed))):
        if n < len(printed) - 1:
            wide = np.concatenate([np.full(span, value[0]), value, np.full(span, value[-1])])
            value = fftconvolve(wide, probability[::-1], "valid")[span + first :][: len(grid)]
        if counted is None or counted[n]:
            value = np.maximum(value, -np.expm1(np.minimum(printed[n] - grid, 0)))
    middle = size + first
    return float(probability @ value[middle : middle + len(probability)])


def printed_by(plan):
    """Epsilon after each number of rounds: what counts, and the smaller one on a condition."""
    every = [plan.claims(n) for n in range(1, plan.rounds + 1)]
    quoted = np.array([counting(claims).epsilon for claims in every])
    naive = np.array([(smaller(claims) or counting(claims)).epsilon for claims in every])
    return quoted, naive


KNOWN = [  # noise, rounds, delta claimed, true delta of the claim of the rounds done
    (3.0, 40, 1e-2, 4.0e-2),
    (3.0, 40, 1e-5, 9.7e-5),
    (1.0, 40, 1e-5, 1.1e-4),
    (10.0, 400, 1e-5, 1.65e-4),
]


@pytest.mark.parametrize(("noise", "rounds", "delta", "true"), KNOWN)
def test_the_claim_of_the_rounds_done_is_broken_by_a_rule_that_looks(noise, rounds, delta, true):
    _, naive = printed_by(planned(noise, rounds, delta))
    assert worst(naive, losses(noise)) == pytest.approx(true, rel=0.03)


@pytest.mark.parametrize("delta", [1e-2, 1e-5])
def test_without_a_rule_the_simulation_finds_the_delta_that_is_claimed(delta):
    _, naive = printed_by(planned(3.0, 40, delta))
    last = np.arange(40) == 39
    assert worst(naive, losses(3.0), counted=last) == pytest.approx(delta, rel=0.01)


CASES = [
    *((noise, rounds, delta, None, True) for noise, rounds, delta, _ in KNOWN),
    (2.0643147, 40, 1e-5, 0.5, True),
    (2.0643147, 40, 1e-5, 0.5, False),
]


@pytest.mark.parametrize(("noise", "rounds", "delta", "rate", "removed"), CASES)
def test_what_counts_is_kept_under_every_rule(noise, rounds, delta, rate, removed):
    """Ends below the plan's epsilon share a hundredth of delta, all others the whole of it."""
    quoted, _ = printed_by(planned(noise, rounds, delta, rate))
    increment = losses(noise, rate or 1.0, removed=removed)
    early = quoted < quoted[-1]
    assert 0 < early.sum() < rounds - 1
    assert worst(quoted, increment, counted=early) <= EARLY * delta * EXACT
    assert worst(quoted, increment, counted=~early) <= delta * EXACT
    assert worst(quoted, increment) <= (1 + EARLY) * delta * EXACT


@pytest.mark.slow
def test_the_numbers_in_the_proof_are_those_of_central():
    """Rounded up to two digits: three, ten and twenty of 40 rounds, and from when on the plan's."""
    quoted, naive = printed_by(planned(2.0643147, 40, 1e-5, 0.5))
    assert next(n for n in range(1, 41) if quoted[n - 1] == quoted[-1]) == 21
    proof = (Path(__file__).parents[2] / "docs/proofs/ending.md").read_text()
    for n in (3, 10, 20):
        both = [math.ceil(100 * values[n - 1]) / 100 for values in (quoted, naive)]
        assert f"| {n} | {both[0]:.2f} | {both[1]:.2f} |" in proof
