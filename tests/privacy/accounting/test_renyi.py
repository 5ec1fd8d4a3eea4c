"""Stored numbers: an upstream change of dp-accounting cannot change claims unseen."""

import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import stats

from fedveil.privacy.accounting import renyi

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("size", "population", "noise", "count", "delta", "stored"),
    [
        (100, 1000, 1.0, 100, 1e-5, 14.053750225346512),
        (100, 1000, 2.0, 100, 1e-5, 5.3790096960759),
        (10, 1000, 1.0, 1000, 1e-5, 3.576111482350549),
        (1, 100, 0.7, 10, 1e-6, 3.2658782724017246),
        (50, 100, 5.0, 200, 1e-5, 16.512875946682545),
        (5, 10000, 0.5, 3000, 1e-8, 8.439436734330277),
        (20, 100, 20.0, 1000, 1e-5, 2.863691738854383),
        (3, 300, 300.0, 100000, 1e-9, 0.11277217053181018),
        (999, 1000, 1.5, 3, 1e-3, 4.216416503114254),
        (30, 30, 2.0, 7, 1e-5, 6.5425593977702565),
    ],
)
def test_fixed_cohorts_have_the_stored_values(size, population, noise, count, delta, stored):
    """Those of dp-accounting 0.6.0, which reads noise relative to the distance of two rows."""
    found = renyi.fixed_sampled(size, population, noise, count, delta)
    assert found == pytest.approx(stored, rel=1e-6)


@pytest.mark.parametrize(
    ("noise", "count", "delta", "stored"),
    [
        (1.0, 1, 1e-5, 4.728507067217623),
        (5.0, 100, 1e-6, 11.68862679916635),
        (0.7, 3, 1e-9, 18.16601462504492),
    ],
)
def test_plain_gaussians_have_the_stored_values(noise, count, delta, stored):
    assert renyi.gaussian(noise, count, delta) == pytest.approx(stored, rel=1e-6)


@pytest.mark.parametrize(
    ("rate", "noise", "count", "delta", "stored"),
    [
        (0.01, 1.0, 1000, 1e-5, 2.101366525420273),
        (0.5, 2.064, 40, 1e-5, 8.721206552690017),
        (0.1, 0.8, 10, 1e-7, 7.317064083128936),
    ],
)
def test_poisson_cohorts_have_the_stored_values(rate, noise, count, delta, stored):
    assert renyi.poisson_sampled(rate, noise, count, delta) == pytest.approx(stored, rel=1e-6)


def test_orders_are_those_of_the_stored_values():
    assert list(renyi._ORDERS) == pytest.approx(rdp_privacy_accountant.DEFAULT_RDP_ORDERS)


@pytest.mark.parametrize("noise", [0.6, 1.0, 4.0])
def test_differences_are_moments_of_the_ratio_less_one(noise):
    """By quadrature; the largest order whose integrand is still inside the grid."""
    x = np.linspace(-14 * noise, 14 * noise + 12 / noise, 400_001)
    ratio = np.exp((x - 0.5) / noise**2)
    density = stats.norm.pdf(x, 0, noise)
    found = renyi._log_differences(noise)
    for order in (2, 4, 6):
        wanted = ((ratio - 1) ** order * density).sum() * (x[1] - x[0])
        assert found[order // 2] == pytest.approx(math.log(wanted), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("noise", [0.05, 1.0, 1000.0])
def test_differences_keep_their_digits_up_to_the_last(noise):
    """It falls like l! / ((l/2)! (2 m^2)^(l/2)) where noise is large, and is f(l) where not."""
    last = renyi._log_differences(noise)[-1]
    order, half = 256, 1 / (2 * noise * noise)
    largest = order * (order - 1) * half
    if noise < 1:
        assert last == pytest.approx(largest, rel=1e-9)
    elif noise > 100:
        moment = math.lgamma(order + 1) - math.lgamma(order / 2 + 1) + order / 2 * math.log(half)
        assert last == pytest.approx(moment, rel=1e-2)
    least = largest + order * math.log(-math.expm1(-(order - 1) * half))
    assert least * (1 - 1e-12) <= last <= largest + order * math.log(2)


@pytest.mark.parametrize(("share", "noise"), [(0.1, 1.0), (0.4, 2.5), (0.02, 0.8)])
def test_moments_are_above_the_true_divergence_of_a_replaced_unit(share, noise):
    """Of a unit at +1/2 against one at -1/2, in a cohort with probability `share`."""
    x = np.linspace(-40 * noise, 40 * noise, 400_001)
    one, other = (
        share * stats.norm.pdf(x, sign / 2, noise) + (1 - share) * stats.norm.pdf(x, 0, noise)
        for sign in (1, -1)
    )
    bounds = renyi.fixed_sampled_moments(share, noise)
    for order, bound in list(zip(renyi._ORDERS, bounds, strict=True))[::12]:
        if order > 20:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            log = order * np.log(one) + (1 - order) * np.log(other)
        true = math.log(np.exp(log[np.isfinite(log)]).sum() * (x[1] - x[0])) / (order - 1)
        assert true <= bound
        assert bound <= max(20 * true, order / (2 * noise**2))


def test_a_cohort_of_everybody_is_not_amplified_and_no_cohort_is_worse():
    assert renyi.fixed_sampled(7, 7, 1.3, 9, 1e-5) == renyi.gaussian(1.3, 9, 1e-5)
    assert renyi.fixed_sampled(6, 7, 1.3, 9, 1e-5) <= renyi.gaussian(1.3, 9, 1e-5)


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 1e4, 1e6])
def test_extreme_noises_have_a_value(noise):
    assert renyi.fixed_sampled(10, 100, noise, 5, 1e-5) >= 0


def test_the_library_has_an_upper_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = (one for one in project["dependencies"] if one.startswith("dp-accounting"))
    assert "<" in needed
