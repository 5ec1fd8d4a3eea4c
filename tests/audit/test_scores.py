"""The guess is chosen on draws that are not counted."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from fedveil.audit.bounds import (
    GaussianBound,
    GeneralBound,
    choosing_draws,
    count_guesses,
    gaussian_mu,
    general_epsilon,
)
from fedveil.base.errors import BadInput


def test_the_better_way_of_scoring_side_and_threshold_are_found():
    generator = np.random.default_rng(0)
    useless = generator.normal(size=(2, 50_000))
    out, in_ = generator.normal(2.0, 1, 50_000), generator.normal(0.0, 1, 50_000)
    counts = count_guesses(np.stack([useless[0], out]), np.stack([useless[1], in_]), gaussian_mu)
    assert counts.positives == counts.negatives == 40_000
    assert 1.9 < GaussianBound(counts, 1e-5).mu_bound(0.05) < 2.02


def test_pure_bounds_look_for_the_tail():
    """Laplace noise of scale 1 and inputs 2 apart: the ratio is e^2 beyond either input."""
    generator = np.random.default_rng(1)
    out, in_ = generator.laplace(-1, 1, 10**5), generator.laplace(1, 1, 10**5)
    found = GeneralBound(count_guesses(out, in_, general_epsilon(0.0)), 0.0).lower_bound(0.05)
    assert 1.85 < found < 2.0


def test_choosing_on_the_draws_that_are_counted_would_be_wrong():
    """Scores that tell nothing, many ways of scoring: 95 % bounds exceed 0 in 5 % at most.

    Chosen and counted on the same draws they would in nearly all. False-alarm rate 1e-6.
    """
    generator, audits, wrong = np.random.default_rng(2), 60, 0
    for _ in range(audits):
        scores = generator.normal(size=(2, 40, 60))
        wrong += (
            GeneralBound(
                count_guesses(scores[0], scores[1], general_epsilon(0.0)), 0.0
            ).lower_bound(0.05)
            > 0
        )
    assert wrong <= binom.isf(1e-6, audits, 0.05)


def test_scores_that_are_not_finite_tell_as_well():
    """A release that fails with one input and not with the other tells them apart."""
    for value in (math.nan, math.inf, -math.inf):
        counts = count_guesses(np.full(1000, 1.0), np.full(1000, value), gaussian_mu)
        assert (counts.hits, counts.alarms) == (800, 0)
    assert (
        GaussianBound(
            count_guesses(*(np.full((2, 1000), math.nan)), gaussian_mu), 1e-5
        ).lower_bound(0.05)
        == 0
    )


def test_the_draws_that_choose_are_not_counted():
    scores = np.arange(20.0).reshape(2, 10)
    assert choosing_draws(scores).tolist() == [[0, 1], [10, 11]]
    assert count_guesses(np.arange(50), np.arange(50), gaussian_mu).draws == 80


def test_edges():
    with pytest.raises(BadInput, match="at least ten"):
        count_guesses(np.zeros(9), np.zeros(50), gaussian_mu)
    same = count_guesses(np.zeros(20), np.zeros(20), gaussian_mu)
    assert GaussianBound(same, 0.1).lower_bound(0.05) == 0
    assert float(gaussian_mu(norm.cdf(1.0), norm.cdf(-0.5))) == pytest.approx(1.5)
