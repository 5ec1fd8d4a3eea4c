"""Who takes part: the law of each sampler, and the event that goes with it.

Statistical tests use fixed seeds and a false-alarm rate of 1e-6 each.
"""

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.events import FixedSampled, Gaussian, PoissonSampled
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson, RoundRobin

ALARM = 1e-6
SAMPLERS = [Poisson(0.3), Poisson(1.0), FixedSize(4), RoundRobin(4), Everyone()]


def membership(sampler, population, rounds, seed=1):
    """[rounds, population] of 0 and 1."""
    out = np.zeros((rounds, population), dtype=np.int64)
    for round in range(rounds):
        out[round, sampler.cohort(population, round + 1, Streams(seed))] = 1
    return out


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_cohort_is_ascending_distinct_and_within_the_population(sampler):
    for round in range(1, 60):
        cohort = sampler.cohort(13, round, Streams(2))
        assert cohort.dtype == np.int64
        assert np.array_equal(cohort, np.unique(cohort))
        assert set(cohort) <= set(range(13))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_cohort_is_a_function_of_seed_and_round(sampler):
    forward = [sampler.cohort(50, r, Streams(3)).tolist() for r in range(1, 8)]
    backward = [sampler.cohort(50, r, Streams(3)).tolist() for r in range(7, 0, -1)]
    assert forward == backward[::-1]


@pytest.mark.parametrize("sampler", [Poisson(0.3), FixedSize(20), RoundRobin(20)], ids=str)
def test_cohort_changes_with_seed_and_round(sampler):
    base = sampler.cohort(60, 1, Streams(3)).tolist()
    assert base != sampler.cohort(60, 2, Streams(3)).tolist()
    assert base != sampler.cohort(60, 1, Streams(4)).tolist()


# --- Poisson ---


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0001, math.nan, math.inf])
def test_poisson_refuses_a_rate_that_is_no_probability(rate):
    with pytest.raises(BadInput, match=r"^rate is "):
        Poisson(rate)


def test_poisson_rate_one_is_everyone_without_amplification():
    assert Poisson(1.0).cohort(9, 1, Streams(1)).tolist() == list(range(9))
    assert Poisson(1.0).event(Gaussian(2.0), 9) == Gaussian(2.0)


def test_poisson_is_accounted_as_poisson():
    sampler = Poisson(0.25)
    assert sampler.event(Gaussian(2.0), 100) == PoissonSampled(0.25, Gaussian(2.0))
    assert sampler.relation is Relation.ZERO_OUT
    assert sampler.participation_share(100) == 1
    assert sampler.expected(100) == 25


def test_no_divisor_is_a_function_of_the_data_under_the_samplers_own_relation():
    """A neighbour under add-remove has another N, and the divisor would tell the two apart."""
    for sampler in (Poisson(0.25), FixedSize(25), RoundRobin(25), Everyone()):
        assert sampler.relation is not Relation.ADD_REMOVE
    assert Poisson(0.25).expected(100) != Poisson(0.25).expected(99)


@pytest.mark.parametrize(("population", "rate"), [(20, 0.2), (1000, 0.01), (50, 0.9)])
def test_poisson_sizes_are_binomial(population, rate):
    rounds = 4000
    sizes = membership(Poisson(rate), population, rounds).sum(axis=1)
    law = stats.binom(population, rate)
    low, high = int(law.ppf(0.01)), int(law.ppf(0.99))
    observed = Counter(np.clip(sizes, low, high).tolist())
    cells = range(low, high + 1)
    expected = law.pmf(cells)
    expected[0], expected[-1] = law.cdf(low), law.sf(high - 1)
    result = stats.chisquare([observed[c] for c in cells], rounds * expected)
    assert result.pvalue > ALARM


def test_poisson_includes_every_client_equally_often():
    rounds, rate = 4000, 0.15
    counts = membership(Poisson(rate), 40, rounds, seed=2).sum(axis=0)
    for count in counts:
        assert stats.binomtest(int(count), rounds, rate).pvalue > ALARM / 40


def test_poisson_clients_join_independently_of_each_other():
    rounds, rate = 6000, 0.3
    member = membership(Poisson(rate), 12, rounds, seed=3)
    for a, b in combinations(range(12), 2):
        both = int((member[:, a] & member[:, b]).sum())
        assert stats.binomtest(both, rounds, rate * rate).pvalue > ALARM / 66


def test_poisson_client_joins_independently_of_its_last_round():
    rounds, rate = 6000, 0.3
    member = membership(Poisson(rate), 12, rounds, seed=4)
    both = int((member[1:] & member[:-1]).sum(axis=0).max())
    assert stats.binom(rounds - 1, rate * rate).sf(both - 1) > ALARM / 12


def test_poisson_cohort_may_be_empty():
    sizes = membership(Poisson(0.1), 5, 1000, seed=5).sum(axis=1)
    empty = int((sizes == 0).sum())
    assert stats.binomtest(empty, 1000, 0.9**5).pvalue > ALARM
    round = int(np.argmin(sizes)) + 1
    assert Poisson(0.1).cohort(5, round, Streams(5)).shape == (0,)


@pytest.mark.parametrize(("sampler", "size"), [(Poisson(0.3), None), (FixedSize(2), 2)])
def test_secure_cohorts_have_the_law_that_is_accounted(sampler, size):
    """Every subset of five clients, from the operating system's words: seeds have no say."""
    population, draws = 5, 6000
    streams = Streams(1, secure=True)
    drawn = [tuple(sampler.cohort(population, 1, streams).tolist()) for _ in range(draws)]
    counts = Counter(drawn)
    sizes = range(population + 1) if size is None else (size,)
    every = [c for n in sizes for c in combinations(range(population), n)]
    assert set(counts) <= set(every)
    law = [1.0 if size else 0.3 ** len(c) * 0.7 ** (population - len(c)) for c in every]
    expected = draws * np.array(law) / sum(law)
    assert stats.chisquare([counts[c] for c in every], expected).pvalue > ALARM


# --- fixed size ---


@pytest.mark.parametrize("sampler", [FixedSize, RoundRobin])
@pytest.mark.parametrize("size", [0, -3])
def test_size_below_one_is_refused(sampler, size):
    with pytest.raises(BadInput, match=r"^size is "):
        sampler(size)


@pytest.mark.parametrize("sampler", [FixedSize, RoundRobin])
def test_size_above_the_population_is_refused(sampler):
    sampler(10).check(10)
    with pytest.raises(BadInput, match="only 9 clients"):
        sampler(10).check(9)


def test_fixed_size_is_never_accounted_as_poisson():
    sampler = FixedSize(5)
    assert sampler.event(Gaussian(2.0), 20) == FixedSampled(5, 20, Gaussian(2.0))
    assert sampler.relation is Relation.REPLACE
    assert sampler.participation_share(20) == 1
    assert sampler.expected(20) == 5


def test_fixed_size_of_everyone_is_not_amplified():
    assert FixedSize(20).event(Gaussian(2.0), 20) == Gaussian(2.0)
    assert FixedSize(20).cohort(20, 1, Streams(1)).tolist() == list(range(20))


@pytest.mark.parametrize(("population", "size"), [(6, 2), (6, 5), (7, 1)])
def test_fixed_size_draws_every_subset_equally_often(population, size):
    rounds = 6000
    sampler = FixedSize(size)
    seen = Counter(tuple(sampler.cohort(population, r, Streams(6)).tolist()) for r in range(rounds))
    subsets = list(combinations(range(population), size))
    assert set(seen) == set(subsets)
    assert stats.chisquare([seen[s] for s in subsets]).pvalue > ALARM


def test_fixed_size_is_uniform_over_a_large_population():
    """numpy draws few out of many by another algorithm."""
    counts = membership(FixedSize(3), 1000, 5000, seed=7).sum(axis=0)
    assert counts.sum() == 15_000
    assert stats.chisquare(counts).pvalue > ALARM


# --- round robin ---


@given(st.integers(1, 40), st.data())
@settings(max_examples=150, deadline=None)
def test_round_robin_charges_exactly_the_unluckiest_client(population, data):
    size = data.draw(st.integers(1, population))
    rounds = data.draw(st.integers(1, 3 * population))
    first = data.draw(st.integers(1, 100))
    sampler, streams = RoundRobin(size), Streams(1)
    turns = Counter()
    for round in range(first, first + rounds):
        cohort = sampler.cohort(population, round, streams)
        assert len(cohort) == size
        turns.update(cohort.tolist())
    assert max(turns.values()) == math.ceil(rounds * sampler.participation_share(population))


def test_round_robin_wraps_around():
    sampler, streams = RoundRobin(4), Streams(1)
    turns = Counter(
        client for r in range(1, 6) for client in sampler.cohort(10, r, streams).tolist()
    )
    assert turns == dict.fromkeys(range(10), 2)


def test_round_robin_claims_no_amplification():
    sampler = RoundRobin(5)
    assert sampler.event(Gaussian(2.0), 20) == Gaussian(2.0)
    assert sampler.relation is Relation.ZERO_OUT
    assert sampler.participation_share(20) == Fraction(1, 4)
    assert sampler.expected(20) == 5


def test_round_robin_order_is_a_random_one():
    firsts = {tuple(RoundRobin(3).cohort(10, 1, Streams(seed)).tolist()) for seed in range(30)}
    assert len(firsts) > 10


# --- everyone ---


def test_everyone_means_all_in_every_round_at_full_price():
    sampler = Everyone()
    sampler.check(1)
    assert sampler.cohort(5, 9, Streams(1)).tolist() == [0, 1, 2, 3, 4]
    assert sampler.event(Gaussian(2.0), 5) == Gaussian(2.0)
    assert sampler.participation_share(5) == 1
    assert sampler.relation is Relation.ZERO_OUT
    assert sampler.expected(5) == 5


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_every_sampler_says_what_its_accounting_assumes(sampler):
    assert sampler.assumption


# --- caps ---


def capped(sampler, population, rounds, seed=1):
    """Cohorts of a capped sampler, and the counts they lead to."""
    counts, cohorts = np.zeros(population, dtype=np.int64), []
    for round in range(1, rounds + 1):
        cohorts.append(sampler.cohort(population, round, Streams(seed), counts.copy()))
        counts[cohorts[-1]] += 1
    return cohorts, counts


@given(st.integers(1, 15), st.integers(1, 5), st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_nobody_takes_part_more_often_than_the_cap(population, cap, rounds, data):
    size = data.draw(st.integers(1, population))
    cohorts, counts = capped(FixedSize(size, cap), population, rounds)
    assert counts.max() <= cap
    for before, cohort in enumerate(cohorts):
        assert np.array_equal(cohort, np.unique(cohort))
        left = population - sum(
            c == cap for c in np.bincount(np.concatenate(cohorts[:before] or [[]]).astype(int))
        )
        assert len(cohort) == min(size, left)


def test_capped_sampler_asks_who_took_part():
    with pytest.raises(AssertionError, match="who took part"):
        FixedSize(2, 3).cohort(10, 1, Streams(1))


def test_cap_nobody_has_reached_changes_nothing_about_the_law():
    rounds, counts = 6000, np.zeros(6, dtype=np.int64)
    seen = Counter(
        tuple(FixedSize(2, 9).cohort(6, r, Streams(8), counts).tolist()) for r in range(rounds)
    )
    subsets = list(combinations(range(6), 2))
    assert stats.chisquare([seen[s] for s in subsets]).pvalue > ALARM


@pytest.mark.parametrize("cap", [0, -1])
def test_cap_below_one_is_refused(cap):
    with pytest.raises(BadInput, match=r"^max_participations is "):
        FixedSize(2, cap)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_uncapped_sampler_does_not_look_at_counts(sampler):
    counts = np.full(13, 10**6)
    free = sampler.cohort(13, 5, Streams(2))
    assert np.array_equal(sampler.cohort(13, 5, Streams(2), counts), free)
