"""Skellam noise has exactly its law. Statistical tests have a false-alarm rate of 1e-6 each."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from fedveil.privacy.noise import skellam
from fedveil.privacy.noise.secure_random import SecureRandom
from fedveil.privacy.noise.skellam import poisson_int, skellam_int
from tests.privacy.noise.seeded_words import ALARM, Seeded

DRAWS = 200_000
VARIANCES = [1e-3, 0.7, 9.0, 1234.5, 2.0**22]


class Played(SecureRandom):
    """The words of a list, in order."""

    def __init__(self, *words):
        self.left = list(words)

    def words(self, count):
        given, self.left = self.left[:count], self.left[count:]
        return np.array(given, dtype=np.uint64)


def fits(draws, law):
    """The p-value of draws against a law on the integers, in up to 100 bins."""
    edges = np.unique(np.floor(law.ppf(np.arange(1, 100) / 100))) + 0.5
    share = np.diff(law.cdf(edges), prepend=0.0, append=1.0)
    counts = np.bincount(np.searchsorted(edges, draws), minlength=len(share))
    keep = share * len(draws) > 5
    rest = share[~keep].sum()
    expected, found = share[keep] * len(draws), counts[keep]
    if rest * len(draws) > 1e-3:
        expected, found = (
            np.append(expected, rest * len(draws)),
            np.append(found, counts[~keep].sum()),
        )
    if len(expected) == 1:
        return 1.0
    return stats.chisquare(found, expected * found.sum() / expected.sum()).pvalue


def normal_law(variance):
    """Skellam noise of a variance so large that SciPy's own law of it overflows."""
    return stats.norm(0, math.sqrt(variance))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("variance", VARIANCES)
def test_draws_have_the_law_and_the_variance(variance, seed):
    draws = skellam_int(Seeded(seed, 2**63), variance, DRAWS)
    law = stats.skellam(variance / 2, variance / 2) if variance < 1e4 else normal_law(variance)
    assert fits(draws, law) > ALARM
    # squares have the mean v and the variance 2 v^2 + v
    spread = math.sqrt((2 * variance**2 + variance) / DRAWS)
    assert abs(float((draws.astype(float) ** 2).mean()) - variance) < 5 * spread
    assert abs(float(draws.mean())) < 5 * math.sqrt(variance / DRAWS)


def test_shares_add_up_to_the_law_of_one():
    source = Seeded(7, 2**63)
    total = sum(skellam_int(source, 2.5, DRAWS) for _ in range(4))
    assert fits(total, stats.skellam(5.0, 5.0)) > ALARM


def exact_tails(mean, most):
    """P(X <= k) of a Poisson variable, k = 0 .. most, between two fractions."""
    weights = [Fraction(1)]
    for k in range(1, 400):
        weights.append(weights[-1] * mean / k)
    whole = sum(weights)
    rest = weights[-1]  # more than all that is left, for means below 100
    so_far, out = Fraction(0), []
    for weight in weights[: most + 1]:
        so_far += weight
        out.append((so_far / (whole + rest), so_far / whole))
    return out


@pytest.mark.parametrize("bits", [64, 192])
@pytest.mark.parametrize("mean", [0.25, 3.5, 41.0])
def test_edges_are_less_than_two_units_below_the_law(mean, bits):
    first, edges = skellam._edges(mean, bits)
    for k, (low, high) in enumerate(exact_tails(Fraction(mean), 60)):
        if 0 <= k - first + 1 < len(edges):
            edge = edges[k - first + 1]
            assert edge <= high * 2**bits
            assert low * 2**bits < edge + skellam._WIDTH
    assert edges[0] == 0
    assert edges[-1] + skellam._WIDTH > 2**bits - 1


@pytest.mark.parametrize("mean", [0.5, 1000.0, 2.0**20 + 0.5])
def test_words_at_an_edge_are_decided_by_more_digits(mean):
    """The uniform number just below an edge, and just above it, fall on either side."""
    table = skellam._words_table(mean)
    at = len(table.edges) // 2
    value = table.first - 1 + at
    wide_first, wide = skellam._edges(mean, 192)
    edge = wide[value - wide_first + 1]
    for place, expected in ((edge - 10, value), (edge + 10, value + 1)):
        top = place >> 128
        words = [top, place >> 64 & (2**64 - 1), place & (2**64 - 1)]
        source = Played(*words)
        assert poisson_int(source, mean, 1).tolist() == [expected]
        assert source.left == [], "more digits were needed"


def test_an_edge_that_192_digits_do_not_decide_takes_320():
    first, edges = skellam._edges(3.0, 192)
    place = edges[4 - first + 1] + 1
    parts = [place >> 128, place >> 64 & (2**64 - 1), place & (2**64 - 1)]
    source = Played(*parts, 0, 0)
    drawn = poisson_int(source, 3.0, 1)
    assert source.left == []
    assert drawn.tolist()[0] in (4, 5)


def test_the_ends_of_the_range():
    assert poisson_int(Played(0, 0, 0), 2.0, 1).tolist() == [0]
    far = poisson_int(Played(2**64 - 1, 2**64 - 1, 0), 2.0, 1).tolist()[0]
    assert 30 < far < 60
    low = poisson_int(Played(0, 0, 2**40), 5000.0, 1).tolist()[0]
    assert low < 5000 - 12 * math.sqrt(5000)


def test_edges_of_the_arguments():
    assert skellam_int(SecureRandom(), 0.0, (2, 3)).tolist() == [[0, 0, 0], [0, 0, 0]]
    for wrong in (-1.0, math.nan, math.inf, 2.0**33, 2.0**-70):
        with pytest.raises(ValueError, match="a Poisson variable of mean"):
            skellam_int(SecureRandom(), wrong, 3)


@pytest.mark.slow
def test_the_largest_variance_has_its_law():
    draws = skellam_int(SecureRandom(), 2.0**32, 10**6)
    assert fits(draws, normal_law(2.0**32)) > ALARM
    square = float((draws.astype(float) ** 2).sum()) / 2.0**32
    assert ALARM < stats.chi2.cdf(square, 10**6) < 1 - ALARM
