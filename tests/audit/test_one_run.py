"""One-run auditing: published numbers, brute force over all outcomes, its own confidence."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from fedveil.audit.record_audits import OneRun, count_right_guesses, p_value
from fedveil.base.errors import BadInput


def by_definition(canaries, guesses, right, epsilon, delta):
    """The formula of corollary 5.4, term by term."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    chance = [binom.pmf(k, guesses, q) for k in range(guesses + 1)]
    gains = [sum(chance[right - i : right]) / i for i in range(1, right + 1)]
    return min(1.0, sum(chance[right:]) + 2 * canaries * delta * max(gains, default=0.0))


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3, 0.02])
def test_the_p_value_is_its_definition(epsilon, delta):
    for guesses in (1, 7, 12):
        for right in range(1, guesses + 1):
            found = p_value(12, guesses, right, epsilon, delta)
            assert found == pytest.approx(by_definition(12, guesses, right, epsilon, delta))


def test_the_published_example():
    """Steinke et al., appendix D: 75 of 100 guesses right, 1,000 canaries, delta 1e-4, 95 %."""
    assert OneRun(1000, ((100, 75),), 1e-4).lower_bound(0.05) == pytest.approx(0.673, abs=5e-4)


def test_without_delta_it_is_clopper_and_pearson():
    found = OneRun(100, ((100, 90),), 0.0).lower_bound(0.05)
    q = math.exp(found) / (1 + math.exp(found))
    assert binom.sf(89, 100, q) == pytest.approx(0.05, rel=1e-6)
    assert OneRun(100, ((100, 90),), 1e-4).lower_bound(0.05) < found


def test_several_ways_of_guessing_share_the_confidence():
    one, other = (100, 90), (20, 11)
    both = OneRun(100, (one, other), 1e-5).lower_bound(0.05)
    assert both == OneRun(100, (one,), 1e-5).lower_bound(0.025)
    assert both < OneRun(100, (one,), 1e-5).lower_bound(0.05)


def test_edges():
    assert p_value(10, 0, 0, 1.0, 0.0) == 1
    assert p_value(10, 10, 0, 1.0, 1e-5) == 1
    assert OneRun(10, ((10, 5),), 0.0).lower_bound(0.05) == 0
    for bad in (
        (1, 2, 1, 0.0, 0.0),
        (3, 2, 3, 0.0, 0.0),
        (3, 2, 1, -1.0, 0.0),
        (3, 2, 1, 0.0, 2.0),
    ):
        with pytest.raises(BadInput, match="no such outcome"):
            p_value(*bad)


def test_guesses_are_made_at_both_ends():
    scores = np.array([5.0, -3.0, 0.1, 4.0, -2.0, 0.0])
    inside = np.array([True, False, True, False, True, True])
    assert count_right_guesses(scores, inside, (0.34, 0.7)) == ((2, 2), (4, 2))


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomised_response_is_never_found_out(epsilon):
    """The worst case: every canary by itself. 95 % bounds exceed epsilon in 5 % of audits at most.

    False-alarm rate 1e-6.
    """
    generator, canaries, audits = np.random.default_rng(2), 200, 400
    right = generator.binomial(canaries, math.exp(epsilon) / (1 + math.exp(epsilon)), audits)
    wrong = sum(
        OneRun(canaries, ((canaries, int(v)),), 0.0).lower_bound(0.05) > epsilon for v in right
    )
    assert 0 < wrong <= binom.isf(1e-6, audits, 0.05)
