"""The low bits of noise on the grid say nothing about the sum; those of float noise do.

Statistical tests have a false-alarm rate of 1e-6 each and repeat themselves.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.privacy.noise.grid import gaussian_int, grid_for
from tests.privacy.noise.seeded_words import ALARM, Seeded

# Two neighbouring sums, 0 and 1/64 in each of 4096 coordinates: distance 1. With noise of
# deviation 4 nobody may tell them apart with an advantage above 2 Phi(1/8) - 1 = 0.0995.

SIZE, SHIFT, DEVIATION, TRIALS = 4096, 2.0**-6, 4.0, 500


def fine_near_zero(releases, dtype):
    """Whether a release has a coordinate near 0 that is no multiple of the spacing at the shift.

    A float 1/64 + noise near 0 is a difference of two floats of that size, so that it is a
    multiple of their spacing; a float 0 + noise near 0 has finer bits.
    """
    spacing = SHIFT * float(np.finfo(dtype).eps) / 2
    releases = releases.astype(np.float64)
    near = np.abs(releases) < SHIFT / 2
    return (near & (np.rint(releases / spacing) * spacing != releases)).any(axis=1)


def advantage(zero, shifted):
    """How much more often a test says yes to one than to the other, and how far chance goes."""
    chance = stats.norm.isf(ALARM / 2) * math.sqrt(0.5 / TRIALS)
    return abs(zero.mean() - shifted.mean()), chance


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_low_bits_of_float_noise_tell_two_sums_apart(dtype):
    generator = np.random.default_rng(10)

    def release(total):
        noise = generator.standard_normal((TRIALS, SIZE), dtype=dtype) * dtype(DEVIATION)
        return dtype(total) + noise

    found, chance = advantage(*(fine_near_zero(release(t), dtype) for t in (0.0, SHIFT)))
    assert found > 2 * stats.norm.cdf(1 / (2 * DEVIATION)) - 1 + chance
    assert found > 0.9


@pytest.fixture(scope="module")
def grid_releases():
    """Releases of both sums on the grid, in steps."""
    grid = grid_for(1.0, DEVIATION, SIZE)
    scale = DEVIATION / grid.spacing
    totals = [grid.quantise(torch.full((SIZE,), total)).numpy() for total in (0.0, SHIFT + 1e-9)]
    return grid, [
        t + gaussian_int(Seeded(11 + i), scale, (TRIALS, SIZE)) for i, t in enumerate(totals)
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_same_test_learns_nothing_from_the_grid(grid_releases, dtype):
    grid, releases = grid_releases
    seen = [grid.dequantise(torch.from_numpy(r)).numpy().astype(dtype) for r in releases]
    for release in seen:
        assert np.array_equal(release / grid.spacing, np.rint(release / grid.spacing))
    found, chance = advantage(*(fine_near_zero(s, dtype) for s in seen))
    assert found <= chance
    assert found == 0


@pytest.mark.parametrize("modulus", [2, 3, 16, 256])
def test_remainders_on_the_grid_do_not_depend_on_the_sum(grid_releases, modulus):
    _, releases = grid_releases
    counts = [np.bincount((r % modulus).ravel(), minlength=modulus) for r in releases]
    assert stats.chi2_contingency(counts).pvalue > ALARM
    for count in counts:
        assert stats.chisquare(count).pvalue > ALARM


def test_best_test_of_one_release_has_the_advantage_of_the_gaussian_mechanism(grid_releases):
    """The sum of all coordinates tells the most; it must not tell more than it may."""
    grid, releases = grid_releases
    middle = SIZE * SHIFT / 2 / grid.spacing
    found, chance = advantage(*(r.sum(axis=1) > middle for r in releases))
    assert abs(found - (2 * stats.norm.cdf(1 / (2 * DEVIATION)) - 1)) <= chance
