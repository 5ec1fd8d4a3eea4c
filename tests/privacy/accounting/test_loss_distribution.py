"""Loss distributions: against sums and convolutions written out."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq

from fedveil.privacy.accounting.loss_distribution import (
    LossDistribution,
    coin_losses,
    coin_span,
    compose,
)


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
    assert far.epsilon(0.1) == pytest.approx(1200 + math.log(0.1 / 0.2))  # e^-1200 is no float
    assert far.epsilon(0.4) == pytest.approx(800 + math.log(0.1 / 0.3))
    assert some(lower=-9_000).epsilon(1e-3) == 0.0


def convolved(masses, count):
    found = np.ones(1)
    for _ in range(count):
        found = np.convolve(found, masses)
    return found


@pytest.mark.parametrize("delta", [0.3, 1e-3, 1e-30])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_repeated_is_the_convolution_in_its_tail(count, delta):
    one = some(infinite=0.0)
    found, wanted = compose([(one, count)], delta), convolved(one.masses, count)
    first = found.lower - one.lower * count
    kept = wanted[first : first + len(found.masses)]
    tail = np.cumsum(kept[::-1])[::-1] < 10 * delta
    assert found.masses[tail] == pytest.approx(kept[tail], rel=1e-8)
    assert found.masses.sum() >= 1 - 1e-15
    losses = (one.lower * count + np.arange(len(wanted))) * one.interval
    for epsilon in np.linspace(0, losses[-1], 40):
        true = float(wanted @ np.maximum(0.0, -np.expm1(epsilon - losses)))
        assert divergence(found, epsilon) >= true * (1 - 1e-13) or true > 10 * delta


@pytest.mark.parametrize("size", [1, 40, 1024, 1025, 30_000])
def test_a_sketch_has_the_mass_and_the_mean_and_larger_exponentials(size):
    one = some(size)
    places, masses = one.sketch
    every = np.arange(size)
    assert len(places) <= 1025
    assert masses.sum() == pytest.approx(one.masses.sum(), rel=1e-12)
    assert places @ masses == pytest.approx(every @ one.masses, rel=1e-12)
    for order in np.array([-500, -20, -1, -0.01, 0.01, 1, 20, 500]) / size:
        true = np.log(np.exp(order * every - max(0, order * size)) @ one.masses)
        found = np.log(np.exp(order * places - max(0, order * size)) @ masses)
        assert true - 1e-12 <= found <= true + 0.1


@pytest.mark.parametrize("delta", [0.1, 1e-3, 1e-12])
def test_a_window_that_is_shorter_than_one_release(delta):
    """Sums are transformed on a circle of the window's size, around which a release is wound."""
    masses = np.exp(-((np.arange(5000) - 2500) ** 2) / (2 * 20.0**2))
    one = LossDistribution(0.01, -2480, masses / masses.sum(), 0.0)
    found, wanted = compose([(one, 4)], delta), convolved(one.masses, 4)
    assert len(found.masses) < 1500
    exact = LossDistribution(0.01, 4 * one.lower, wanted, 0.0).epsilon(delta)
    assert exact > 0.5
    assert exact * (1 - 1e-12) <= found.epsilon(delta) <= exact * (1 + 1e-9)


def test_infinite_losses_add_up():
    one = some(infinite=1e-4)
    found = compose([(one, 7)], 1e-2).infinite
    assert 1 - (1 - 1e-4) ** 7 <= found <= 1 - (1 - 1e-4) ** 7 + 1e-14


def test_a_million_releases_lose_no_digit_of_a_small_delta():
    """Coins, whose number of heads is binomial; a transform by itself is wrong by 1e-10 here."""
    eps0, count = 1e-3, 10**6
    told = 1 / (1 + math.exp(-eps0))
    one = LossDistribution(eps0, -1, np.array([1 - told, 0.0, told]), 0.0)
    exact = replace(coin_losses(eps0, count, eps0), infinite=0.0)
    for delta in (1e-3, 1e-8, 1e-12):
        found, wanted = compose([(one, count)], delta).epsilon(delta), exact.epsilon(delta)
        assert found == pytest.approx(wanted, rel=1e-7)


def test_what_leaves_the_window_is_infinite():
    found = compose([(some(infinite=0.0), 5_000)], 1e-6)
    assert len(found.masses) < 30 * 5_000  # the whole of it would be 39 * 5,000 + 1
    assert 0 < found.infinite <= 1e-15
    assert found.masses.sum() + found.infinite >= 1
    assert found.masses.min() >= 0


def test_what_is_below_the_window_counts_as_its_lowest_loss():
    masses = np.exp(-np.arange(4_000) / 100)
    found = compose([(LossDistribution(0.01, 0, masses / masses.sum(), 0.0), 1)], 1e-20)
    assert found.lower > 3_000
    assert found.masses.sum() >= 1 - 1e-15


@pytest.mark.parametrize("delta", [0.3, 1e-2, 1e-20])
def test_beside_is_the_convolution_in_its_tail(delta):
    one, other = some(infinite=0.0), some(size=15, seed=2, infinite=0.0, lower=4)
    found, wanted = compose([(one, 1), (other, 1)], delta), np.convolve(one.masses, other.masses)
    kept = wanted[found.lower - one.lower - other.lower :][: len(found.masses)]
    tail = np.cumsum(kept[::-1])[::-1] < 10 * delta
    assert found.masses[tail] == pytest.approx(kept[tail], rel=1e-8)
    assert (found.masses[tail] >= kept[tail]).all()
    infinite = compose([(some(), 1), (some(infinite=1e-3), 1)], delta).infinite
    assert infinite == pytest.approx(1.0999e-3, rel=1e-11)


def test_connected_has_the_divergences_it_is_made_from():
    losses = np.arange(-30, 41) * 0.1
    true = np.array([divergence(some(interval=0.037), e) for e in losses])
    made = LossDistribution.from_deltas(0.1, -30, true)
    assert [divergence(made, e) for e in losses] == pytest.approx(true, abs=1e-12)
    assert made.masses.sum() + made.infinite == pytest.approx(1)
    between = losses[:-1] + 0.05
    assert all(divergence(made, e) >= divergence(some(interval=0.037), e) for e in between)


@pytest.mark.parametrize("eps0", [1e-9, 0.03, 0.5, 3.0, 40.0])
@pytest.mark.parametrize("interval", [0.07, 1.0])
def test_the_losses_of_a_coin_are_rounded_up(eps0, interval):
    made = coin_losses(eps0, 1, interval)
    told, other = 1 / (1 + math.exp(-eps0)), 1 / (1 + math.exp(eps0))
    assert made.masses.sum() == pytest.approx(1)
    for epsilon in np.linspace(0, eps0 * 1.2, 7):
        true = max(0.0, told - math.exp(epsilon) * other)
        assert divergence(made, epsilon) >= true - 1e-12
    fine = coin_losses(eps0, 1, eps0 / 1_000)
    assert fine.epsilon(1e-3 * told) == pytest.approx(
        max(0.0, math.log((told - 1e-3 * told) / other)), rel=1e-2, abs=1e-2 * eps0
    )


@pytest.mark.parametrize("count", [1, 6, 3_000])
def test_coins_are_counted(count):
    """On a grid that holds their losses, and on a coarser one by at most its step more."""
    eps0, delta = 0.5, 1e-4
    one = coin_losses(eps0, 1, 0.25)
    found, coarse = (coin_losses(eps0, count, interval) for interval in (0.25, 0.3))
    assert found.masses.sum() == pytest.approx(1)
    wanted = compose([(one, count)], delta).epsilon(delta)
    assert found.epsilon(delta) == pytest.approx(wanted, rel=1e-9)
    assert wanted * (1 - 1e-9) <= coarse.epsilon(delta) <= wanted + 0.3


def test_coins_of_any_odds_and_number_fit_into_memory():
    assert coin_losses(800.0, 1, 1.0).epsilon(1e-9) == pytest.approx(800, abs=1)
    span = coin_span(1.0, 10**6)
    assert len(coin_losses(1.0, 10**6, span / 2e6).masses) <= 2e6 + 1


def test_losses_whose_exponentials_are_hardly_floats():
    """Between 709 and 745 e^-loss is a number below the normal ones."""
    for loss in (700.0, 712.0, 740.0):
        found = LossDistribution(loss, 0, np.array([0.1, 0.9]), 0.0).epsilon(1e-3)
        assert found == pytest.approx(loss - math.log(0.9 / 0.899), abs=1e-6)
