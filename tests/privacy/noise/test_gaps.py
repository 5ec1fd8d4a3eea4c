"""Cohorts by gaps are Poisson cohorts, exactly: every threshold, every subset, every rate.

Tests of the operating system's words cannot be seeded; each has a false-alarm rate of 1e-6.
"""

import math
from collections import Counter
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.base.errors import BadInput
from fedveil.privacy.noise import secure_random
from fedveil.privacy.noise.secure_random import SecureRandom, geometric_int, poisson_subset, power

ALARM = 1e-6
WORDS = 2**64
RATES = [0.5, 0.3, 1 / 3, 0.01, 1e-3, 1e-5, 0.75, 0.937, 1 - 2.0**-53]


class Seeded(SecureRandom):
    """Words from a seed, so that a test repeats itself; first words are below `below`."""

    def __init__(self, seed, below=WORDS):
        self.generator, self.below = np.random.Generator(np.random.Philox(seed)), below

    def words(self, count):
        below = WORDS if count == 2 else self.below
        return self.generator.integers(0, below, count, dtype=np.uint64)


class Played(SecureRandom):
    """The words of a list, in order."""

    def __init__(self, *words):
        self.left = list(words)

    def words(self, count):
        given, self.left = self.left[:count], self.left[count:]
        assert len(given) == count
        return np.array(given, dtype=np.uint64)


# --- one gap ---


@pytest.mark.parametrize("rate", RATES)
def test_every_threshold_is_where_it_belongs(rate):
    """G >= k for U below (1 - rate)^k, to the last of 64 digits and, on the edge, beyond."""
    most, stays = 60, 1 - Fraction(rate)
    for k in range(1, most + 1):
        edge = stays**k * WORDS
        word = math.floor(edge)
        below = [] if word == 0 else [gap(rate, most, word - 1)]
        above = [gap(rate, most, word + 1)] if word + 1 < WORDS else []
        assert all(g >= k for g in below)
        assert all(g < k for g in above)
        if edge == word:
            assert gap(rate, most, word) < k
            continue
        digits = math.floor((edge - word) * 2**128)
        if digits > 0:
            assert gap(rate, most, word, *split(digits - 1)) >= k
        if digits + 1 < 2**128:
            assert gap(rate, most, word, *split(digits + 1)) < k


def gap(rate, most, *words):
    """The gap that begins with these words, and goes on with halves."""
    return int(geometric_int(Played(*words, *[2**63] * 8), rate, most, 1)[0])


def split(digits):
    return digits >> 64, digits % WORDS


def test_an_edge_is_decided_by_as_many_digits_as_it_takes():
    """(1 - 2^-70) is a string of ones: only the second pair of words tells."""
    edge = 2**128 - 2**122
    assert gap(2.0**-70, 1, WORDS - 1, *split(edge - 1)) == 1
    assert gap(2.0**-70, 1, WORDS - 1, *split(edge)) == 0
    edge = math.floor((1 - Fraction(0.3)) ** 8 * 2**320)
    for aside, right in ((-1, 8), (1, 7)):
        pairs = [split((edge + aside) % 2**256 >> shift & 2**128 - 1) for shift in (128, 0)]
        source = Played(edge >> 256, *pairs[0], *pairs[1])
        assert geometric_int(source, 0.3, 20, 1).tolist() == [right]
        assert source.left == []


def decided(rate, word):
    """floor(ln U / ln(1 - rate)) with 60 digits, or None where 64 bits of U do not tell."""
    with localcontext() as context:
        context.prec = 60
        slope = (1 - Decimal(rate)).ln()
        ends = [(Decimal(word + more) / WORDS) for more in (0, 1)]
        found = {math.floor(end.ln() / slope) if end else None for end in ends}
    return found.pop() if len(found) == 1 else None


@pytest.mark.parametrize("below", [WORDS, 2**52, 2**40])
@pytest.mark.parametrize("rate", [*RATES, 1e-7, 0.2137, 1e-12])
def test_floats_decide_as_arithmetic_of_60_digits_does(rate, below):
    most, count = 10**15, 100
    words = Seeded(1, below).words(count)
    found = geometric_int(Played(*words.tolist(), *[2**63] * 2 * count), rate, most, count)
    expected = [decided(rate, int(word)) for word in words]
    told = [e is not None for e in expected]
    assert sum(told) > count / 2 or rate < 1e-4 or below < WORDS
    for value, right in zip(found.tolist(), expected, strict=True):
        assert right is None or value == min(right, most)


@pytest.mark.parametrize("rate", [*RATES, 1e-12, 5e-324, 2.0**-70, 0.999, 2.0**-30])
def test_logarithm_of_the_rate_is_as_good_as_the_note_assumes(rate):
    with localcontext() as context:
        context.prec = 400
        exact = (1 - Decimal(rate)).ln()
        error = abs(Decimal(math.log1p(-rate)) / exact - 1)
    assert error < Decimal(2) ** -48


def test_integers_are_asked_as_rarely_as_the_note_says(monkeypatch):
    """Once in 65,536 words, and hardly ever because of an edge."""
    asked = []
    monkeypatch.setattr(secure_random, "_draw_exactly", lambda *given: asked.append(given[-1]) or 0)
    geometric_int(Seeded(2), 0.01, 10**9, 1_000_000)
    assert all(word < 2**48 for word in asked)
    assert stats.binomtest(len(asked), 1_000_000, 2.0**-16).pvalue > ALARM


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_gaps_are_geometric(rate):
    draws = geometric_int(Seeded(3), rate, 10**6, 200_000)
    law = stats.geom(rate, loc=-1)
    last = int(law.ppf(0.999))
    cells = np.arange(last + 2)
    expected = np.append(law.pmf(cells[:-1]), law.sf(last))
    observed = np.bincount(np.minimum(draws, last + 1), minlength=last + 2)
    keep = 200_000 * expected > 5
    both = [np.append(v[keep], v[~keep].sum()) for v in (observed, 200_000 * expected)]
    assert stats.chisquare(*[v[v > 0] if not v[-1] else v for v in both]).pvalue > ALARM


def test_a_gap_is_cut_at_the_most_that_is_asked_for():
    words = Seeded(4).words(2000).tolist()
    far = geometric_int(Played(*words), 0.2, 10**6, 2000)
    for most in (0, 1, 5):
        near = geometric_int(Played(*words, *[0] * 64), 0.2, most, 2000)
        assert np.array_equal(near, np.minimum(far, most))


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_gaps_need_a_rate_strictly_between(rate):
    with pytest.raises(ValueError, match="above 0 and below 1"):
        geometric_int(SecureRandom(), rate, 5, 1)


@given(
    top=st.integers(0, 2**20),
    k=st.integers(0, 300),
    bits=st.integers(1, 200),
)
@settings(max_examples=200, deadline=None)
def test_powers_lie_between_their_bounds(top, k, bits):
    base = Fraction(top, 2**20)
    low, high = power(base, k, bits)
    assert low <= base**k * 2**bits <= high
    assert high - low < max(1, 4 * 2 ** k.bit_length())
    assert low >= 0
    assert high <= 2**bits


# --- cohorts ---


def subsets(population):
    sizes = range(population + 1)
    return list(chain.from_iterable(combinations(range(population), n) for n in sizes))


@pytest.mark.parametrize("source", [Seeded(5), SecureRandom()], ids=["seeded", "secure"])
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.85])
def test_every_subset_has_its_own_probability(rate, source):
    """All memberships together: each alone, each pair, and the size follow from it."""
    draws, population = 12_000, 4
    counts = Counter(tuple(poisson_subset(source, rate, population).tolist()) for _ in range(draws))
    every = subsets(population)
    assert set(counts) <= set(every)
    expected = [rate ** len(s) * (1 - rate) ** (population - len(s)) for s in every]
    observed = np.array([counts[s] for s in every])
    assert stats.chisquare(observed, draws * np.array(expected)).pvalue > ALARM


@pytest.mark.parametrize(("population", "rate"), [(30, 0.3), (1000, 0.01), (100_000, 2e-5)])
def test_sizes_are_binomial(population, rate):
    draws = 5000
    source = Seeded(6)
    sizes = [len(poisson_subset(source, rate, population)) for _ in range(draws)]
    law = stats.binom(population, rate)
    low, high = int(law.ppf(0.005)), int(law.ppf(0.995))
    cells = np.arange(low, high + 1)
    expected = law.pmf(cells)
    expected[0], expected[-1] = law.cdf(low), law.sf(high - 1)
    observed = np.bincount(np.clip(sizes, low, high) - low, minlength=len(cells))
    assert stats.chisquare(observed, draws * expected).pvalue > ALARM


def test_everybody_joins_equally_often_among_many():
    draws, population, rate = 400, 5000, 0.02
    source = SecureRandom()
    counts = np.zeros(population)
    for _ in range(draws):
        counts[poisson_subset(source, rate, population)] += 1
    spread = ((counts - draws * rate) ** 2 / (draws * rate * (1 - rate))).sum()
    assert ALARM / 2 < stats.chi2.sf(spread, population) < 1 - ALARM / 2
    for half in (counts[: population // 2], counts[population // 2 :]):
        assert stats.binomtest(int(half.sum()), draws * population // 2, rate).pvalue > ALARM / 2


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.5])
def test_cohorts_of_a_million_have_their_size(rate):
    ids = poisson_subset(SecureRandom(), rate, 1_000_000)
    assert stats.binomtest(len(ids), 1_000_000, rate).pvalue > ALARM
    assert (np.diff(ids) > 0).all()
    assert ids.dtype == np.int64


def test_more_gaps_are_drawn_until_the_population_is_passed():
    """The largest words are gaps of 0: a hundred of them are the whole population."""
    source = Played(*[WORDS - 2**30] * 100)
    assert poisson_subset(source, 0.01, 100).tolist() == list(range(100))
    assert source.left == []


def test_a_gap_that_reaches_the_end_is_the_last():
    """At a half, words from 2^61 on up to 2^62 are gaps of 2."""
    two, none, more = 2**61 + 2**60, 2**63 + 2**62, [2**63 + 2**62] * 16
    assert poisson_subset(Played(two, two, *more), 0.5, 5).tolist() == [2]
    assert poisson_subset(Played(two, two, two, *more), 0.5, 6).tolist() == [2, 5]
    assert poisson_subset(Played(two, none, two, *more), 0.5, 6).tolist() == [2, 3]


def test_rates_and_populations_at_the_ends():
    assert poisson_subset(SecureRandom(), 0.0, 10).tolist() == []
    assert poisson_subset(SecureRandom(), 1.0, 3).tolist() == [0, 1, 2]
    assert poisson_subset(SecureRandom(), 0.5, 0).tolist() == []
    assert poisson_subset(SecureRandom(), 5e-324, 10**6).tolist() == []
    assert poisson_subset(Seeded(7), 2.0**-60, 10**6).tolist() == []
    assert len(poisson_subset(Seeded(8), 1 - 2.0**-53, 1000)) == 1000


@pytest.mark.parametrize("rate", [-1e-9, 1.0000001, math.nan, math.inf])
def test_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(BadInput, match="probability"):
        poisson_subset(SecureRandom(), rate, 3)


@pytest.mark.parametrize("rate", [1e-9, 1e-3, 0.3])
def test_no_more_gaps_are_drawn_than_there_are_clients(rate):
    """The share of delta for the sampler counts one draw per client."""

    class Counting(Seeded):
        drawn = 0

        def words(self, count):
            self.drawn += count
            return super().words(count)

    for population in (1, 5, 50):
        source = Counting(9)
        poisson_subset(source, rate, population)
        assert source.drawn <= population
