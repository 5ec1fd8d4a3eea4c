"""The PLD of a sampled Gaussian: the library's own, point by point, and the integral."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import integrate, stats

from fedveil.privacy.accounting.closed_forms import gaussian_epsilon
from fedveil.privacy.accounting.loss_distribution import (
    add_remove_losses,
    compose,
    replacement_losses,
)

ADD_REMOVE = dpa.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dpa.NeighboringRelation.REPLACE_ONE
DIRECTIONS = {ADD_REMOVE: add_remove_losses, REPLACE: replacement_losses}


@pytest.mark.parametrize("relation", [ADD_REMOVE, REPLACE])
@pytest.mark.parametrize(
    ("rate", "noise", "interval"),
    [
        (0.2, 1.3, 2e-3),
        (1.0, 0.8, 1e-3),
        (1e-4, 0.6, 5e-3),
        (0.5, 0.05, 0.1),
        (0.999, 0.01, 20.0),
        (0.01, 20.0, 1e-3),
        (1e-9, 3.0, 1e-4),
    ],
)
def test_it_is_the_library_s(relation, rate, noise, interval):
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        sampling_prob=rate,
        value_discretization_interval=interval,
        neighboring_relation=relation,
    )
    ours = DIRECTIONS[relation](rate, noise, interval)
    for count in (1, 20):
        other = theirs.self_compose(count)
        for delta in (1e-2, 1e-6):
            wanted = other.get_epsilon_for_delta(delta)
            found = max(compose([(each, count)], delta).epsilon(delta) for each in ours)
            if wanted < 600:
                assert found == pytest.approx(wanted, rel=1e-6, abs=1e-12)
            else:  # where e^-loss is no float, the library takes the next loss of its grid
                assert wanted - 2 * interval - 9 <= found <= wanted


@pytest.mark.parametrize("rate", [0.1, 1.0])
@pytest.mark.parametrize("relation", [ADD_REMOVE, REPLACE])
@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.2])
def test_it_is_the_integral_and_not_below_it(relation, rate, epsilon):
    noise, interval = 0.9, 1e-3

    def density(x, at):
        return (1 - rate) * stats.norm.pdf(x, 0, noise) + rate * stats.norm.pdf(x, at, noise)

    points = np.linspace(-12, 12, 100_001)
    one, other = density(points, 1), density(points, -1 if relation is REPLACE else 0)
    true = max(
        integrate.simpson(np.maximum(0, p - np.exp(epsilon) * q), x=points)
        for p, q in ((one, other), (other, one))
    )
    found = max(each.epsilon(true) for each in DIRECTIONS[relation](rate, noise, interval))
    assert epsilon - 1e-7 <= found <= epsilon + 1e-4


@pytest.mark.parametrize(
    ("noise", "count", "delta"),
    [(100.0, 10**5, 1e-13), (40.0, 10**4, 1e-12), (5.0, 100, 1e-12), (0.1414, 2, 1e-15),
     (0.4714, 2, 1e-13), (0.1732, 3, 1e-15), (3.0, 100, 1e-9)],
)  # fmt: skip
def test_small_deltas_are_not_lost_in_rounding(noise, count, delta):
    """At rate 1 the exact epsilon is known; a plain transform is below it by up to 1.6 %."""
    exact = gaussian_epsilon(math.sqrt(count) / noise, delta)
    (one,) = add_remove_losses(1.0, noise, 1e-3)
    assert exact <= compose([(one, count)], delta).epsilon(delta) <= exact * 1.05
