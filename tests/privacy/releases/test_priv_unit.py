"""PrivUnitG: pure local DP for whole vectors, exactly, without bias, as noisy as it says.

Statistical tests have a false-alarm rate of at most 1e-6 each.
"""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from scipy.special import log_ndtr

from fedveil.base.errors import BadInput
from fedveil.privacy.noise.streams import normal_, uniform_
from fedveil.privacy.releases.priv_unit import PrivUnitG
from tests.privacy.releases.priv_unit_reports import FAR, reports, streams_of

EPSILONS = (0.1, 0.5, 1.0, 4.0, 8.0, 16.0, 50.0)
SIZES = (1, 2, 650, 1_000_000)


# --- privacy ---


@pytest.mark.parametrize("dimension", SIZES)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_densities_on_the_cap_and_beside_it_differ_by_e_to_the_epsilon(epsilon, dimension):
    one = PrivUnitG(epsilon, dimension)
    assert 0.5 < one.p < 1
    assert 0 < one.q < 0.5
    assert math.log(one.q) == pytest.approx(float(log_ndtr(-one.tau)), abs=1e-12)
    cap = math.log(one.p) - float(log_ndtr(-one.tau))
    rest = math.log1p(-one.p) - float(log_ndtr(one.tau))
    assert cap - rest == pytest.approx(epsilon, abs=1e-12)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_split_is_the_best_of_a_fine_grid(epsilon):
    first = np.linspace(0, epsilon, 100_001)[1:-1]
    p, q = 1 / (1 + np.exp(-first)), 1 / (1 + np.exp(epsilon - first))
    grid = stats.norm.pdf(stats.norm.isf(q)) * (p / q - (1 - p) / (1 - q))
    one = PrivUnitG(epsilon, 5)
    assert one.m >= grid.max() * (1 - 1e-12)
    assert one.m == pytest.approx(grid.max(), rel=1e-6)
    assert sum(one.split) == pytest.approx(epsilon, rel=1e-15)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_mean_and_square_of_t_are_the_integrals(epsilon):
    one = PrivUnitG(epsilon, 7)

    def moment(power):
        def value(t):
            share = one.p / one.q if t >= one.tau else (1 - one.p) / (1 - one.q)
            return t**power * stats.norm.pdf(t) * share

        low, high = (integrate.quad(value, a, b)[0] for a, b in ((-40, one.tau), (one.tau, 40)))
        return low + high

    assert moment(0) == pytest.approx(1, rel=1e-7)
    assert one.m == pytest.approx(moment(1), rel=1e-7)
    assert one.square == pytest.approx((7 - 1 + moment(2)) / moment(1) ** 2, rel=1e-7)


@pytest.mark.parametrize("epsilon", [1e-6, 300.0, 1e6])
def test_extreme_epsilons_have_finite_reports(epsilon):
    one = PrivUnitG(epsilon, 3)
    found = reports(one, [0.6, 0.0, 0.8], 1000)
    assert np.isfinite(found).all()
    assert sum(one.split) == pytest.approx(epsilon, rel=1e-12)
    assert 0 < one.m < math.inf


def capped(one, found, direction):
    return int((found @ direction * one.m >= one.tau).sum())


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_caps_are_met_as_often_as_epsilon_allows_and_no_more(epsilon):
    """A report of -v is on the cap of v with probability q (1 - p) / (1 - q)."""
    one, count, v = PrivUnitG(epsilon, 3), 200_000, np.array([0.0, 0.6, 0.8])
    own = capped(one, reports(one, v, count, seed=3), v)
    other = capped(one, reports(one, -v, count, seed=4), v)
    wrong = one.q * (1 - one.p) / (1 - one.q)
    assert stats.binomtest(own, count, one.p).pvalue > 1e-6
    assert stats.binomtest(other, count, wrong).pvalue > 1e-6
    spread = math.sqrt((1 - one.p) / one.p / count + (1 - wrong) / wrong / count)
    assert math.log(own / other) <= epsilon + FAR * spread
    beside = math.log((count - other) / (count - own))
    assert beside <= epsilon + FAR * spread * one.p / (1 - one.p)


@pytest.mark.parametrize("epsilon", [0.5, 4.0, 16.0])
def test_component_along_the_vector_has_the_law_of_t(epsilon):
    one, v = PrivUnitG(epsilon, 4), np.array([0.5, -0.5, 0.5, 0.5])
    found = reports(one, v, 100_000) * one.m

    def cdf(t):
        below = (1 - one.p) / (1 - one.q) * stats.norm.cdf(np.minimum(t, one.tau))
        above = one.p / one.q * (stats.norm.cdf(t) - stats.norm.cdf(one.tau))
        return below + np.where(t > one.tau, above, 0.0)

    assert stats.kstest(found @ v, cdf).pvalue > 1e-6
    across = found @ np.array([0.5, 0.5, 0.5, -0.5])
    assert stats.kstest(across, "norm").pvalue > 1e-6
    mixed = np.corrcoef(across, found @ v)[0, 1]
    assert abs(mixed) < FAR / math.sqrt(len(found))


# --- unbiased, and as noisy as it says ---

VECTORS = {
    "unit": [0.6, 0.0, -0.8],
    "short": [0.2, 0.1, -0.3],
    "shortest": [1e-30, 0.0, 0.0],
    "zero": [0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("length", [1.0, 3.0])
@pytest.mark.parametrize("name", VECTORS)
def test_reports_are_unbiased_and_have_their_variance(name, length):
    one, count = PrivUnitG(2.0, 3), 200_000
    vector = np.array(VECTORS[name]) * length
    found = reports(one, vector, count, length, seed=2)
    spread = found.std(axis=0) / math.sqrt(count)
    assert (np.abs(found.mean(axis=0) - vector) < FAR * spread).all()
    squares = ((found - vector) ** 2).sum(axis=1)
    wanted = length**2 * one.square - float(vector @ vector)
    assert abs(squares.mean() - wanted) < FAR * squares.std() / math.sqrt(count)


@pytest.mark.parametrize("dimension", [1, 5, 300])
def test_variance_of_a_unit_vector_is_the_printed_one(dimension):
    one, count = PrivUnitG(4.0, dimension), 5_000
    v = np.full(dimension, dimension**-0.5)
    squares = ((reports(one, v, count) - v) ** 2).sum(axis=1)
    wanted = dimension / one.m**2 + one.tau / one.m - 1
    assert one.square - 1 == pytest.approx(wanted, rel=1e-12)
    assert abs(squares.mean() - wanted) < FAR * squares.std() / math.sqrt(count)


# --- edges ---


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 9e-7, 1.1e6, math.nan, math.inf])
def test_epsilon_that_cannot_be_is_refused(epsilon):
    with pytest.raises(BadInput, match=r"^epsilon is"):
        PrivUnitG(epsilon, 3)


@pytest.mark.parametrize("dimension", [0, -1, 2.5])
def test_dimension_that_cannot_be_is_refused(dimension):
    with pytest.raises(BadInput, match="parameters is"):
        PrivUnitG(1.0, dimension)


def test_one_dimension_is_t_with_a_sign():
    """The vector -1 is reported as minus what the vector 1 is reported as, from the same draws."""
    one = PrivUnitG(1.0, 1)
    assert np.allclose(reports(one, [-1.0], 1000), -reports(one, [1.0], 1000), atol=1e-12)
    assert capped(one, reports(one, [1.0], 1000), np.ones(1)) > 500


def test_zero_is_a_random_sign_on_the_first_axis():
    one, count = PrivUnitG(16.0, 3), 100_000
    found = reports(one, [0.0, 0.0, 0.0], count)
    first = np.array([1.0, 0.0, 0.0])
    both = capped(one, found, first), capped(one, found, -first)
    each = 0.5 * (one.p + one.q * (1 - one.p) / (1 - one.q))
    assert all(stats.binomtest(n, count, each).pvalue > 1e-6 for n in both)
    assert stats.kstest(found[:, 1] * one.m, "norm").pvalue > 1e-6


def test_a_row_that_rounding_made_too_long_is_as_long_as_the_clip():
    one = PrivUnitG(1.0, 2)
    exact, long = reports(one, [1.0, 0.0], 5000), reports(one, [1.0 + 1e-9, 0.0], 5000)
    assert np.allclose(exact, long, atol=1e-6)


def test_rows_of_another_dimension_are_refused():
    with pytest.raises(AssertionError, match="rows of 2 for reports of 3"):
        reports(PrivUnitG(1.0, 3), [1.0, 0.0], 2)


def test_no_rows_are_no_reports():
    assert reports(PrivUnitG(1.0, 2), [1.0, 0.0], 0).shape == (0, 2)


def test_float32_rows_and_rows_longer_than_a_block_are_reported_the_same():
    one, size = PrivUnitG(8.0, 70_000), 70_000
    rows = torch.zeros(2, size)
    rows[:, -1] = 1.0
    one.report_(rows, 1.0, *streams_of(2))
    noise = normal_(torch.empty(2, size), streams_of(2)[0]) / one.m
    assert torch.allclose(rows[:, :-1], noise[:, :-1], atol=1e-6)
    draws = uniform_(torch.empty(2, 3, dtype=torch.float64), streams_of(2)[1])
    t = one._draw_t(draws[:, 1], draws[:, 2])
    assert torch.allclose(rows[:, -1].double(), t / one.m, atol=1e-5)
