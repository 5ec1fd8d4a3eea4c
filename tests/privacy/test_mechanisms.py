"""Noise asks the bound for its sensitivity.

Statistical tests use fixed seeds and a false-alarm rate of 1e-6 each.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.errors import BadInput
from fedveil.privacy.accounting import epsilon
from fedveil.privacy.claims import Relation
from fedveil.privacy.clipping import FixedBound
from fedveil.privacy.events import Gaussian
from fedveil.privacy.mechanisms import GaussianMechanism
from fedveil.privacy.randomness import Streams

ALARM = 1e-6


def noised(total, *, multiplier=2.0, value=0.5, relation=Relation.ADD_REMOVE, round=1):
    keys = Streams(1).keys("noise", round, np.zeros(1))
    return GaussianMechanism(multiplier).apply(total, FixedBound(value), relation, keys)


def zeros(size):
    return torch.zeros(size, dtype=torch.float64)


@pytest.mark.parametrize("multiplier", [-1e-9, -1.0, math.nan, math.inf])
def test_multiplier_that_is_no_noise_is_refused(multiplier):
    with pytest.raises(BadInput, match=r"noise\.multiplier"):
        GaussianMechanism(multiplier)


@pytest.mark.parametrize(
    ("relation", "std"),
    [(Relation.ADD_REMOVE, 1.0), (Relation.ZERO_OUT, 1.0), (Relation.REPLACE, 2.0)],
)
def test_std_is_multiplier_times_sensitivity(relation, std):
    assert GaussianMechanism(2.0).std(FixedBound(0.5), relation) == std


@pytest.mark.parametrize(
    ("relation", "std"),
    [(Relation.ADD_REMOVE, 1.0), (Relation.ZERO_OUT, 1.0), (Relation.REPLACE, 2.0)],
)
@pytest.mark.parametrize("size", [9, 100_000])
def test_noise_added_has_the_promised_law(relation, std, size):
    """Also for sums of few coordinates, which torch draws in another way."""
    rounds = range(1, 2 + 3000 // size)
    draws = torch.cat([noised(zeros(size), relation=relation, round=r) for r in rounds])
    assert stats.kstest(draws.numpy(), stats.norm(scale=std).cdf).pvalue > ALARM
    n = len(draws)
    spread = float((draws**2).sum()) / std**2
    assert stats.chi2(n).ppf(ALARM / 2) < spread < stats.chi2(n).isf(ALARM / 2)


def test_noise_goes_on_top_of_the_sum():
    total = torch.linspace(-5, 5, 40, dtype=torch.float64)
    assert torch.allclose(noised(total) - total, noised(zeros(40)), atol=1e-12)
    assert torch.equal(total, torch.linspace(-5, 5, 40, dtype=torch.float64))


def test_noise_does_not_depend_on_the_sum():
    assert torch.allclose(
        noised(torch.full((40,), 1e3).double()) - 1e3, noised(zeros(40)), atol=1e-9
    )


def test_sum_of_no_rows_is_noised_all_the_same():
    rows = torch.zeros(0, 30, dtype=torch.float64)
    assert int((noised(rows.sum(dim=0)) == 0).sum()) == 0


def test_noise_is_new_in_every_round():
    assert not torch.equal(noised(zeros(20), round=1), noised(zeros(20), round=2))


def test_multiplier_zero_adds_nothing_and_is_worth_nothing():
    mechanism = GaussianMechanism(0.0)
    assert torch.equal(noised(zeros(5), multiplier=0.0), zeros(5))
    assert mechanism.release == Gaussian(0.0)
    assert epsilon(mechanism.release, 1, 1e-5, Relation.ADD_REMOVE) == math.inf


def test_release_is_relative_to_the_sensitivity_of_its_own_relation():
    assert GaussianMechanism(1.7).release == Gaussian(1.7)


@pytest.mark.parametrize("size", [9, 64, 1000])
def test_noise_has_the_tails_of_float64(size):
    """float32 normals end at 5.77 standard deviations.

    An update of length S along one coordinate then shows itself outright with probability
    Phi(1 / multiplier - 5.77), 8e-5 at multiplier 0.5: more than a delta of 1e-5 allows.
    """
    draws = noised(zeros(size), multiplier=1.0, value=1.0)
    assert int((draws.float().double() != draws).sum()) > size / 2


def test_result_is_float64_of_the_same_length():
    result = noised(zeros(7))
    assert result.dtype is torch.float64
    assert result.shape == (7,)
