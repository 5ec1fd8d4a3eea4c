"""Means and their intervals against scipy, and p-values that mean what they say."""

import math

import numpy as np
import pytest
from scipy import stats

from fedveil.tuning.repetitions import Mean, mean_of, paired_p_value


@pytest.mark.parametrize("count", [2, 3, 10, 200])
def test_the_interval_is_students(count):
    values = np.random.default_rng(count).normal(5.0, 2.0, count)
    low, high = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    found = mean_of(values)
    assert found.value == pytest.approx(values.mean(), rel=1e-12)
    assert (found.value - found.half, found.value + found.half) == pytest.approx((low, high))
    assert (found.count, found.diverged) == (count, 0)


def test_the_interval_covers_the_mean_in_95_of_100():
    """Five repetitions each; the number of misses is binomial: false alarms below 1e-6."""
    drawn = np.random.default_rng(0).normal(1.0, 3.0, (1500, 5))
    missed = sum(abs((m := mean_of(row)).value - 1.0) > m.half for row in drawn)
    assert stats.binomtest(missed, 1500, 0.05).pvalue > 1e-6


def test_one_repetition_has_no_interval():
    found = mean_of([3.25])
    assert found.value == 3.25
    assert math.isnan(found.half)
    assert str(found) == "3.25"


def test_equal_repetitions_have_an_interval_of_nothing():
    assert mean_of([2.0, 2.0, 2.0]) == Mean(2.0, 0.0, 3)


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_repetition_without_a_number_diverged(odd):
    found = mean_of([1.0, odd, 2.0, odd])
    assert found.value == math.inf
    assert math.isnan(found.half)
    assert str(found) == "diverged (2 of 4)"


def test_no_repetitions_are_no_number():
    found = mean_of([])
    assert (found.value, found.count, found.diverged) == (math.inf, 0, 0)


def test_p_values_are_uniform_when_nothing_is_worse():
    """2,000 comparisons of 6 paired repetitions; Kolmogorov-Smirnov, false alarms 1e-6."""
    drawn = np.random.default_rng(1)
    shared = drawn.normal(0.0, 10.0, (2000, 6))
    ours, theirs = (shared + drawn.normal(size=shared.shape) for _ in range(2))
    found = [paired_p_value(a, b) for a, b in zip(theirs, ours, strict=True)]
    assert stats.kstest(found, "uniform").pvalue > 1e-6


def test_p_values_are_those_of_the_paired_test_and_its_mirror():
    drawn = np.random.default_rng(2)
    theirs, ours = drawn.normal(0.3, 1.0, 12), drawn.normal(size=12)
    wanted = stats.ttest_rel(theirs, ours, alternative="greater").pvalue
    assert paired_p_value(theirs, ours) == pytest.approx(wanted, rel=1e-9)
    assert paired_p_value(ours, theirs) == pytest.approx(1 - wanted, rel=1e-9)
    assert paired_p_value(theirs + 7, ours + 7) == pytest.approx(wanted, rel=1e-9)


def test_pairs_share_their_random_numbers():
    """A small difference in every pair shows although the values themselves lie far apart."""
    drawn = np.random.default_rng(3)
    ours = drawn.normal(0.0, 100.0, 10)
    theirs = ours + 0.1 + 0.01 * drawn.normal(size=10)
    assert paired_p_value(theirs, ours) < 1e-6
    assert paired_p_value(ours, theirs) > 1 - 1e-6


def test_what_agrees_everywhere_is_not_worse():
    assert paired_p_value([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1.0
    assert paired_p_value([5.0], [1.0]) == 1.0
    assert paired_p_value([], []) == 1.0


def test_the_same_difference_in_every_repetition_is_certain():
    assert paired_p_value([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]) == 0.0
    assert paired_p_value([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]) == 1.0


def test_nearly_the_same_difference_raises_no_warning():
    """Rounding alone makes it vary; any warning is an error in these tests."""
    ours = np.random.default_rng(4).normal(size=10)
    assert paired_p_value(ours + 0.1, ours) < 1e-6


@pytest.mark.parametrize("odd", [math.inf, math.nan])
@pytest.mark.parametrize("best", [[1.0, 2.0], [9.0, 9.0]])
def test_what_diverged_is_worse_than_what_did_not(odd, best):
    assert paired_p_value([1.0, odd], best) == 0.0
    assert paired_p_value(best, [1.0, odd]) == 1.0
    assert paired_p_value([1.0, odd], [1.0, odd]) == 1.0
    assert paired_p_value([odd], [1.0]) == 0.0
