"""Many two-point reports about one client: an exact sum, against enumeration."""

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from fedveil.privacy.accounting.closed_forms import randomised_response_epsilon


def enumerated_delta(eps0, count, eps):
    """The hockey-stick divergence over all 2^count outcomes of `count` flipped bits."""
    p = 1 / (1 + math.exp(-eps0))
    total = 0.0
    for outcome in product((0, 1), repeat=count):
        one = math.prod(p if bit else 1 - p for bit in outcome)
        other = math.prod(1 - p if bit else p for bit in outcome)
        total += max(one - math.exp(eps) * other, 0)
    return total


@pytest.mark.parametrize(("count", "epsilon"), [(10, 10.0), (100, 79.8), (1000, 577.8)])
def test_reference_values(count, epsilon):
    assert randomised_response_epsilon(1.0, count, 1e-5) == pytest.approx(epsilon, abs=0.05)


@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize("eps0", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-6, 1e-3, 0.05])
def test_epsilon_is_the_smallest_that_enumeration_allows(eps0, count, delta):
    found = randomised_response_epsilon(eps0, count, delta)
    assert enumerated_delta(eps0, count, found) <= delta * (1 + 1e-6)
    if found > 0:
        assert enumerated_delta(eps0, count, found - 1e-4) > delta


def test_mixed_inputs_are_never_worse():
    """Reports that move against each other are the same coin with its sides renamed."""
    p = 1 / (1 + math.exp(-0.7))
    found = randomised_response_epsilon(0.7, 4, 1e-2)
    for moved in product((0.5, p, 1 - p), repeat=4):
        total = 0.0
        for outcome in product((0, 1), repeat=4):
            one = math.prod(p if bit else 1 - p for bit in outcome)
            other = math.prod(q if bit else 1 - q for bit, q in zip(outcome, moved, strict=True))
            total += max(one - math.exp(found) * other, 0)
        assert total <= 1e-2 * (1 + 1e-9)


def test_a_million_reports_follow_the_central_limit():
    """The loss is eps0 (2 X - k), X binomial: far out its tail is a normal one."""
    count, p = 10**6, 1 / (1 + math.exp(-1.0))
    found = randomised_response_epsilon(1.0, count, 1e-5)
    near = count * (2 * p - 1) + 2 * math.sqrt(count * p * (1 - p)) * stats.norm.isf(1e-5)
    assert found == pytest.approx(near, rel=1e-4)


@pytest.mark.parametrize("count", [0, 1, 17])
def test_pure_delta_is_pure_composition(count):
    assert randomised_response_epsilon(0.3, count, 0.0) == count * 0.3


def test_no_reports_cost_nothing():
    assert randomised_response_epsilon(1.0, 0, 1e-5) == 0


def test_delta_that_allows_everything_costs_nothing():
    assert randomised_response_epsilon(0.1, 1, 0.5) == 0


@pytest.mark.parametrize("eps0", [0.05, 1.0, 10.0])
def test_never_above_pure_composition_and_growing_in_count(eps0):
    counts = np.array([1, 2, 3, 10, 50, 200])
    found = [randomised_response_epsilon(eps0, int(k), 1e-5) for k in counts]
    assert found == sorted(found)
    assert (np.array(found) <= counts * eps0 * (1 + 1e-12)).all()
