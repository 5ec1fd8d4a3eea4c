"""PrivUnitG with the operating system's randomness: exact odds, on a grid that tells nothing.

Statistical tests have a false-alarm rate of at most 1e-6 each.
"""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.privacy.noise.streams import SecureKeys
from fedveil.privacy.releases import priv_unit as module
from fedveil.privacy.releases.priv_unit import PrivUnitG
from tests.privacy.releases.priv_unit_reports import FAR

ALARM = 1e-6
STEPS = 1 << 10


def secure_reports(one, vector, count, length=1.0, dtype=torch.float64):
    rows = torch.tensor(vector, dtype=dtype).repeat(count, 1)
    one.report_(rows, length, SecureKeys(count), SecureKeys(count))
    return rows.numpy()


def steps_of(one, found, length=1.0):
    """Reports in steps of the grid, which they have to be multiples of."""
    steps = found * one.m * STEPS / length
    assert np.abs(steps - np.rint(steps)).max(initial=0) < 1e-6
    return np.rint(steps).astype(np.int64)


# --- the odds ---


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 4.0, 8.0, 33.0, 64.0])
def test_exact_odds_keep_epsilon_and_waste_nothing(epsilon):
    p, q = PrivUnitG(epsilon, 3).exact_odds
    with mpmath.workdps(80):
        on, off = mpmath.mpf(p), mpmath.mpf(2**128 - p)
        tail = mpmath.mpf(q.numerator) / q.denominator
        true = mpmath.log(on / off) + mpmath.log((1 - tail) / tail)
        assert mpmath.mpf(epsilon) - 1e-15 < true <= epsilon
    assert q < Fraction(1, 2) < Fraction(p, 1 << 128) < 1


def test_the_odds_are_those_of_seeded_reports():
    one = PrivUnitG(4.0, 3)
    p, q = one.exact_odds
    assert p / 2**128 == pytest.approx(one.p, rel=1e-15)
    assert float(q) == one.q


def test_epsilons_that_nothing_could_vouch_for_are_refused():
    with pytest.raises(AssertionError, match="64 is the most"):
        secure_reports(PrivUnitG(64.5, 2), [1.0, 0.0], 1)


class Played:
    """A source whose next words are given."""

    def __init__(self, number):
        self.number = number

    def words(self, count):
        assert count == 2
        return np.array([self.number >> 64, self.number % 2**64], dtype=np.uint64)


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_the_side_is_decided_by_128_binary_digits(monkeypatch, epsilon):
    one, ends = PrivUnitG(epsilon, 2), []
    p, q = one.exact_odds
    monkeypatch.setattr(module, "directed_int", lambda source, scale, v, *given: ends.append(given))
    for number in (0, p - 1, p, 2**128 - 1):
        monkeypatch.setattr(module, "SecureRandom", lambda number=number: Played(number))
        one._draw_on_grid(np.array([1, 2]))
    assert ends == 2 * [(Fraction(0), q)] + 2 * [(q, Fraction(1))]


# --- the law ---


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_caps_are_met_as_often_as_epsilon_allows_and_no_more(epsilon):
    one, count, v = PrivUnitG(epsilon, 3), 1500, np.array([0.0, 0.6, 0.8])
    own, other = (
        int((secure_reports(one, sign * v, count) @ v * one.m >= one.tau).sum()) for sign in (1, -1)
    )
    wrong = one.q * (1 - one.p) / (1 - one.q)
    near = 2 * 1e-3  # what rounding may move over the edge
    assert stats.binomtest(own, count, one.p).pvalue > ALARM or abs(own / count - one.p) < near
    assert stats.binomtest(other, count, wrong).pvalue > ALARM
    spread = math.sqrt((1 - one.p) / one.p / count + (1 - wrong) / wrong / count)
    assert math.log(own / other) <= epsilon + FAR * spread


@pytest.mark.parametrize("vector", [[0.6, 0.0, -0.8], [0.2, 0.1, -0.3], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("length", [1.0, 3.0])
def test_reports_are_unbiased_and_have_their_variance(vector, length):
    one, count, mean = PrivUnitG(2.0, 3), 1000, np.array(vector) * length
    found = secure_reports(one, mean, count, length)
    spread = found.std(axis=0) / math.sqrt(count)
    assert (np.abs(found.mean(axis=0) - mean) < FAR * spread).all()
    squares = ((found - mean) ** 2).sum(axis=1)
    wanted = length**2 * one.square - float(mean @ mean)
    assert abs(squares.mean() - wanted) < FAR * squares.std() / math.sqrt(count)


def test_a_rare_cap_is_reached_and_a_long_report_has_normal_coordinates():
    one, size = PrivUnitG(16.0, 5000), 5000
    v = np.random.default_rng(1).standard_normal(size)
    v /= np.linalg.norm(v)
    g = secure_reports(one, v, 40, dtype=torch.float32).astype(np.float64) * one.m
    along = g @ v
    assert (along > one.tau - 0.01).sum() >= 30  # 38 are expected, as p is .957
    rest = g - np.outer(along, v)
    assert stats.kstest(rest.ravel(), "norm").pvalue > ALARM


# --- the grid ---


@pytest.mark.parametrize("modulus", [2, 3, 16])
def test_remainders_do_not_depend_on_the_update(modulus):
    one = PrivUnitG(2.0, 40)
    axis, even = np.eye(40)[0], np.full(40, 40**-0.5)
    counts = [
        np.bincount((steps_of(one, secure_reports(one, v, 500)) % modulus).ravel())
        for v in (axis, even)
    ]
    assert stats.chi2_contingency(counts).pvalue > ALARM
    for count in counts:
        assert stats.chisquare(count).pvalue > ALARM


@pytest.mark.parametrize("length", [1.0, 0.3])
@pytest.mark.parametrize("vector", [[1e-30, 0.0], [1e-200, 1e-200], [1.0, 1e-12], [-1.0, 1e-9]])
def test_every_update_is_reported_on_the_same_grid(vector, length):
    one = PrivUnitG(1.0, 2)
    steps_of(one, secure_reports(one, [length * x for x in vector], 20, length), length)


def test_float32_rows_are_the_same_grid_in_fewer_digits():
    one = PrivUnitG(1.0, 3)
    found = secure_reports(one, [0.1, 0.2, 0.3], 200, dtype=torch.float32)
    assert found.dtype == np.float32
    steps = found.astype(np.float64) * one.m * STEPS
    assert np.abs(steps - np.rint(steps)).max() < 0.01


def test_no_two_reports_are_the_same():
    one = PrivUnitG(1.0, 4)
    found = np.concatenate([secure_reports(one, [0.5, 0.5, 0.5, 0.5], 50) for _ in range(2)])
    assert len(np.unique(steps_of(one, found), axis=0)) == 100
    assert len(np.unique(steps_of(one, found)[:, 0])) > 90


def test_the_direction_is_what_is_reported_and_the_clip_its_length():
    """At an epsilon this large a report is nearly the update: noise is 1 / m = .1 of the clip."""
    one, v = PrivUnitG(64.0, 3), np.array([2.0, -1.0, 2.0])
    found = secure_reports(one, v, 200, length=3.0)
    assert np.abs(found.mean(axis=0) - v).max() < FAR * 3 / one.m / math.sqrt(200)
    # A third of the clip is the direction with probability 2/3, and its opposite with 1/3.
    along = secure_reports(one, v / 3, 600, length=3.0) @ v / 9
    own = one.p + (1 - one.p) * (0.5 - one.q) / (1 - one.q)  # beside the cap, above 0
    share = 2 / 3 * own + 1 / 3 * (1 - own)
    assert stats.binomtest(int((along > 0).sum()), 600, share).pvalue > ALARM


def test_a_zero_update_is_a_random_sign_on_the_first_axis():
    one = PrivUnitG(64.0, 3)
    found = secure_reports(one, [0.0, 0.0, 0.0], 400)
    assert (np.abs(found[:, 0]) > 0.5).sum() > 380
    assert stats.binomtest(int((found[:, 0] > 0).sum()), 400).pvalue > ALARM
    assert stats.kstest(found[:, 1] * one.m, "norm").pvalue > ALARM


def test_rows_of_another_dimension_and_no_rows():
    with pytest.raises(AssertionError, match="rows of 2 for reports of 3"):
        secure_reports(PrivUnitG(1.0, 3), [1.0, 0.0], 2)
    assert secure_reports(PrivUnitG(1.0, 2), [1.0, 0.0], 0).shape == (0, 2)
