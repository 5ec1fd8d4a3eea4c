"""Loss distributions: against sums and convolutions written out."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq

from fedveil.privacy.accounting.loss_distribution import LossDistribution, two_losses


def some(size=40, seed=1, infinite=1e-4, lower=-12, interval=0.1):
    masses = np.random.default_rng(seed).random(size)
    return LossDistribution(interval, lower, masses / masses.sum() * (1 - infinite), infinite)


def divergence(found, epsilon):
    losses = (found.lower + np.arange(len(found.masses))) * found.interval
    return found.infinite + float(found.masses @ np.maximum(0.0, -np.expm1(epsilon - losses)))


@pytest.mark.parametrize("delta", [2e-4, 1e-2, 0.1, 0.3])
def test_epsilon_is_where_the_divergence_is_delta(delta):
    found = some()
    root = brentq(lambda e: divergence(found, e) - delta, 0, 10, xtol=1e-14)
    assert found.epsilon(delta) == pytest.approx(root, rel=1e-12)


def test_edges_of_epsilon():
    assert some().epsilon(0.9) == 0.0
    assert some(infinite=1e-3).epsilon(1e-4) == math.inf
    far = LossDistribution(400.0, 0, np.array([0.5, 0.0, 0.3, 0.2]), 0.0)
    assert far.epsilon(0.1) == 1200.0  # e^-1200 is 0: delta is passed there
    assert far.epsilon(0.4) == 800.0
    assert some(lower=-9_000).epsilon(1e-3) == 0.0


@pytest.mark.parametrize("count", [1, 2, 7])
def test_repeated_is_the_convolution(count):
    one = some()
    found, wanted = one.repeated(count), np.ones(1)
    for _ in range(count):
        wanted = np.convolve(wanted, one.masses)
    first = found.lower - one.lower * count
    assert found.masses == pytest.approx(wanted[first : first + len(found.masses)], abs=1e-15)
    assert wanted[:first].sum() + wanted[first + len(found.masses) :].sum() <= 1e-15
    assert found.infinite == pytest.approx(1 - (1 - one.infinite) ** count, rel=1e-9)
    assert found.infinite > 1 - (1 - one.infinite) ** count


def test_what_leaves_the_window_is_infinite():
    found = some(infinite=0.0).repeated(5_000)
    assert len(found.masses) < 30 * 5_000  # the whole of it would be 39 * 5,000 + 1
    assert found.infinite == 1e-15
    assert found.masses.sum() + found.infinite >= 1 - 1e-12
    assert found.masses.min() >= 0


def test_beside_is_the_convolution():
    one, other = some(), some(size=15, seed=2, infinite=1e-3, lower=4)
    found = one.beside(other)
    assert found.masses == pytest.approx(np.convolve(one.masses, other.masses), abs=1e-15)
    assert found.lower == one.lower + other.lower
    assert found.infinite == pytest.approx(1 - (1 - 1e-4) * (1 - 1e-3))


def test_connected_has_the_divergences_it_is_made_from():
    losses = np.arange(-30, 41) * 0.1
    true = np.array([divergence(some(interval=0.037), e) for e in losses])
    made = LossDistribution.connected(0.1, -30, true)
    assert [divergence(made, e) for e in losses] == pytest.approx(true, abs=1e-12)
    assert made.masses.sum() + made.infinite == pytest.approx(1)
    between = losses[:-1] + 0.05
    assert all(divergence(made, e) >= divergence(some(interval=0.037), e) for e in between)


@pytest.mark.parametrize("eps0", [1e-9, 0.03, 0.5, 3.0, 40.0])
@pytest.mark.parametrize("interval", [0.07, 1.0])
def test_two_losses_are_those_of_a_coin_or_more(eps0, interval):
    made = two_losses(eps0, interval)
    told, other = 1 / (1 + math.exp(-eps0)), 1 / (1 + math.exp(eps0))
    assert made.masses.sum() == pytest.approx(1)
    for epsilon in np.linspace(0, eps0 * 1.2, 7):
        true = max(0.0, told - math.exp(epsilon) * other)
        assert divergence(made, epsilon) >= true - 1e-12
    fine = two_losses(eps0, eps0 / 1_000)
    assert fine.epsilon(1e-3 * told) == pytest.approx(
        max(0.0, math.log((told - 1e-3 * told) / other)), rel=1e-2, abs=1e-2 * eps0
    )
