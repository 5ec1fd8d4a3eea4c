"""Bounds against closed forms, brute force, and their own confidence. False-alarm rate 1e-6."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from fedveil.audit.bounds import Counts, GaussianBound, GeneralBound, SameKindBound, least, most
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.closed_forms import gaussian_epsilon
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled

FALSE_ALARM = 1e-6


@pytest.mark.parametrize("found", [0, 1, 3, 17, 39, 40])
@pytest.mark.parametrize("alpha", [0.05, 1e-4])
def test_ends_are_where_the_binomial_tail_is_alpha(found, alpha):
    low, high = float(least(found, 40, alpha)), float(most(found, 40, alpha))
    if found:
        assert binom.sf(found - 1, 40, low) == pytest.approx(alpha)
    else:
        assert low == 0
    if found < 40:
        assert binom.cdf(found, 40, high) == pytest.approx(alpha)
    else:
        assert high == 1


def missed(rate, of, alpha):
    """How likely it is that the ends do not hold a rate: (above it, below it), by summing."""
    found = np.arange(of + 1)
    chance = binom.pmf(found, of, rate)
    above, below = least(found, of, alpha) > rate, most(found, of, alpha) < rate
    return float(chance[above].sum()), float(chance[below].sum())


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.3, 0.5, 0.9, 0.999])
def test_ends_miss_a_rate_with_probability_alpha_at_most(rate):
    for of in (10, 57, 300):
        assert max(missed(rate, of, 0.025)) <= 0.025 * (1 + 1e-9)
    assert max(missed(0.3, 300, 0.025)) > 0.015  # and hardly less: they are not idle


@pytest.mark.parametrize(
    ("hits", "positives", "alarms", "negatives"), [(1, 0, 0, 1), (2, 1, 0, 1), (-1, 1, 0, 1)]
)
def test_counts_that_cannot_be_are_refused(hits, positives, alarms, negatives):
    with pytest.raises(BadInput, match="guesses of"):
        Counts(hits, positives, alarms, negatives)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1])
def test_no_confidence_is_refused(alpha):
    with pytest.raises(BadInput, match="alpha is"):
        Counts(1, 2, 1, 2).rate_ends(alpha)


def test_any_mechanism_is_the_textbook_formula():
    counts = Counts(900, 1000, 100, 1000)
    low, high = counts.rate_ends(0.025)
    found = GeneralBound(counts, 0.01).lower_bound(0.05)
    assert found == pytest.approx(math.log((low - 0.01) / high))
    assert found < math.log(0.89 / 0.1)
    assert GeneralBound(counts, 0.0).lower_bound(0.05) > found


def test_nothing_is_said_where_nothing_is_known():
    assert GeneralBound(Counts(5, 10, 5, 10), 0.0).lower_bound(0.05) == 0
    assert GeneralBound(Counts(10, 10, 0, 10), 0.9).lower_bound(0.05) == 0
    assert GaussianBound(Counts(0, 10, 0, 10), 1e-5).lower_bound(0.05) == 0
    assert GaussianBound(Counts(9, 10, 10, 10), 1e-5).lower_bound(0.05) == 0
    assert GaussianBound(Counts(4, 10, 6, 10), 1e-5).lower_bound(0.05) == 0
    assert SameKindBound(Counts(4, 10, 6, 10), 1e-5, gaussian).lower_bound(0.05) == 0
    assert SameKindBound(Counts(0, 10, 0, 10), 1e-5, gaussian).lower_bound(0.05) == 0


@pytest.mark.parametrize("delta", [-0.1, 0.0, 1.0])
def test_a_delta_that_is_none_is_refused(delta):
    for kind in (GaussianBound, lambda c, d: SameKindBound(c, d, gaussian)):
        with pytest.raises(BadInput, match="delta is"):
            kind(Counts(1, 2, 1, 2), delta)
    if delta:
        with pytest.raises(BadInput, match="delta is"):
            GeneralBound(Counts(1, 2, 1, 2), delta)


def gaussian(noise, delta, fine=True):
    return epsilon(Gaussian(noise), 1, delta, Relation.ZERO_OUT)


def at(mu, threshold, draws):
    """Counts of a Gaussian mechanism as they are on average."""
    hit, alarm = norm.sf(threshold - mu), norm.sf(threshold)
    return Counts(round(draws * hit), draws, round(draws * alarm), draws)


def test_gaussian_dp_with_many_draws_finds_mu():
    found = GaussianBound(at(1.5, 0.75, 10**9), 1e-5)
    assert found.mu_bound(0.05) == pytest.approx(1.5, abs=1e-3)
    assert found.mu_bound(0.05) < 1.5
    assert found.lower_bound(0.05) == pytest.approx(gaussian_epsilon(1.5, 1e-5), abs=0.01)


@pytest.mark.parametrize("threshold", [0.2, 0.75, 2.0])
def test_the_claimed_kind_is_gaussian_dp_for_a_gaussian(threshold):
    """Two ways to the same number; the second knows fewer deltas, so it finds no more."""
    counts = at(1.5, threshold, 10**6)
    exact = GaussianBound(counts, 1e-5).lower_bound(0.05)
    found = SameKindBound(counts, 1e-5, gaussian).lower_bound(0.05)
    assert 0.93 * exact < found <= exact * (1 + 1e-3)


@pytest.mark.slow
def test_the_claimed_kind_rules_out_exactly_what_the_claim_rules_out():
    """By brute force: no noise below the answer contradicts the counts, the answer's does."""

    def sampled(noise, delta, fine=True):
        event = PoissonSampled(0.3, Gaussian(noise))
        return epsilon(event, 5, delta, Relation.ZERO_OUT, interval=1e-3)

    counts = Counts(600, 1000, 300, 1000)
    low, high = counts.rate_ends(0.025)
    found = SameKindBound(counts, 1e-5, sampled).lower_bound(0.05)

    def contradicts(noise):
        return any(
            low > math.exp(sampled(noise, d)) * high + d for d in np.linspace(0.001, low, 15)
        )

    edge = min(n for n in np.geomspace(0.7, 1.6, 12) if contradicts(n))
    assert found == pytest.approx(sampled(edge, 1e-5), rel=0.15)


def test_bounds_are_wrong_as_seldom_as_they_say():
    """300 audits of a Gaussian mechanism whose epsilon is known: false alarms at 95 %."""
    generator, mu, draws = np.random.default_rng(1), 1.0, 400
    true, wrong = gaussian_epsilon(mu, 1e-3), 0
    for _ in range(300):
        hits = int((generator.normal(mu, 1, draws) >= 0.5).sum())
        alarms = int((generator.normal(0, 1, draws) >= 0.5).sum())
        wrong += GaussianBound(Counts(hits, draws, alarms, draws), 1e-3).lower_bound(0.05) > true
    assert wrong <= binom.isf(FALSE_ALARM, 300, 0.05)
