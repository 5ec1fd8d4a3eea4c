"""Renyi divergences: against dp-accounting, integrals, sums of many digits and stored numbers."""

import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from mpmath import mp, mpf
from scipy import integrate, stats

from fedveil.privacy.accounting import renyi
from fedveil.privacy.accounting.events import FixedSampled, Gaussian, PoissonSampled

ROOT = Path(__file__).parents[3]


def fixed_sampled(size, population, noise, count, delta):
    return renyi.renyi_epsilon(FixedSampled(size, population, Gaussian(noise)), count, delta)


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
    found = fixed_sampled(size, population, noise, count, delta)
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
    assert renyi.renyi_epsilon(Gaussian(noise), count, delta) == pytest.approx(stored, rel=1e-6)


@pytest.mark.parametrize(
    ("rate", "noise", "count", "delta", "stored"),
    [
        (0.01, 1.0, 1000, 1e-5, 2.101366525420273),
        (0.5, 2.064, 40, 1e-5, 8.721206552690017),
        (0.1, 0.8, 10, 1e-7, 7.317064083128936),
    ],
)
def test_poisson_cohorts_have_the_stored_values(rate, noise, count, delta, stored):
    event = PoissonSampled(rate, Gaussian(noise))
    assert renyi.renyi_epsilon(event, count, delta) == pytest.approx(stored, rel=1e-6)


def test_orders_are_those_of_the_stored_values():
    assert renyi._ORDERS.tolist() == list(map(float, rdp_privacy_accountant.DEFAULT_RDP_ORDERS))


# --- Poisson cohorts and plain Gaussians, against dp-accounting ---

RATES = [1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.7, 0.99]
NOISES = [0.02, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 4.0, 10.0, 50.0]
DELTAS = [1e-12, 1e-8, 1e-5, 1e-3, 0.1]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("noise", NOISES)
def test_poisson_cohorts_are_dp_accountings(rate, noise):
    orders = rdp_privacy_accountant.DEFAULT_RDP_ORDERS
    theirs = rdp_privacy_accountant._compute_rdp_poisson_subsampled_gaussian(rate, noise, orders)
    event = PoissonSampled(rate, Gaussian(noise))
    ours = renyi._divergences(event)
    assert (np.isfinite(ours) == np.isfinite(theirs)).all()
    finite = np.isfinite(theirs)
    assert ours[finite] == pytest.approx(theirs[finite], rel=1e-9, abs=1e-12)
    for count in (1, 10, 1000):
        for delta in DELTAS:
            wanted = rdp_privacy_accountant.compute_epsilon(orders, count * theirs, delta)[0]
            found = renyi.renyi_epsilon(event, count, delta)
            assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("noise", [0.02, 0.3, 1.0, 7.0, 500.0, 1e5])
@pytest.mark.parametrize("count", [1, 30, 10**6])
def test_plain_gaussians_are_dp_accountings(noise, count):
    orders = np.array(rdp_privacy_accountant.DEFAULT_RDP_ORDERS, dtype=float)
    for delta in DELTAS:
        moments = count * orders / (2 * noise**2)
        wanted = rdp_privacy_accountant.compute_epsilon(orders, moments, delta)[0]
        found = renyi.renyi_epsilon(Gaussian(noise), count, delta)
        assert found == pytest.approx(wanted, rel=1e-9)
        assert renyi.renyi_epsilon(PoissonSampled(1.0, Gaussian(noise)), count, delta) == found


# --- and where floats alone do not suffice ---


def moment(order, rate, noise):
    """The moment of an integer order as the sum that it is, with a hundred digits."""
    with mp.workdps(100):
        q, half = mpf(rate), 1 / (2 * mpf(noise) ** 2)
        terms = (
            mp.binomial(order, k) * q**k * (1 - q) ** (order - k) * mp.exp(k * (k - 1) * half)
            for k in range(order + 1)
        )
        return mp.log(mp.fsum(terms))


@pytest.mark.parametrize("order", [2, 3, 11, 63, 256, 1024])
@pytest.mark.parametrize("rate", [1e-8, 1e-4, 0.02, 0.5, 0.999])
@pytest.mark.parametrize("noise", [0.02, 0.7, 3.0, 1000.0, 1e5])
def test_integer_moments_keep_their_digits_and_are_not_below(order, rate, noise):
    """The sum is 1 and a little: at a rate of 1e-8 and a noise of 1e5 it is 1 + 1e-26."""
    found, wanted = renyi.poisson_log_moment(order, rate, noise), moment(order, rate, noise)
    assert wanted <= found <= wanted * (1 + 1e-10)


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.3, 0.7), (0.5, 2.0), (0.9, 1.3)])
def test_fractional_moments_are_not_below_the_integral(rate, noise):
    orders = renyi._ORDERS[np.floor(renyi._ORDERS) != renyi._ORDERS]
    found = renyi._fractional_log_moments(orders, rate, noise)
    for order, log in list(zip(orders, found, strict=True))[::7]:

        def integrand(x, order=order):
            ratio = 1 - rate + rate * math.exp((2 * x - 1) / (2 * noise**2))
            return stats.norm.pdf(x, 0, noise) * ratio**order

        ends, middle = (-12 * noise, order + 12 * noise), [0.0, order]
        true = integrate.quad(integrand, *ends, points=middle, limit=400, epsrel=1e-12)[0]
        assert math.log(true) <= log * (1 + 1e-9) + 1e-11


def test_an_order_whose_series_does_not_end_in_time_is_not_used():
    """At a rate of one half and order 1.1 terms fall like i^-2.1: a thousand are not enough."""
    divergences = renyi._divergences(PoissonSampled(0.5, Gaussian(1.0)))
    assert divergences[0] == math.inf
    assert np.isfinite(divergences[20:]).all()
    assert math.isfinite(renyi.renyi_epsilon(PoissonSampled(0.5, Gaussian(1.0)), 10, 1e-5))


@pytest.mark.parametrize("rate", [1e-8, 1e-6])
@pytest.mark.parametrize("noise", [1000.0, 1e5])
def test_rounding_makes_no_epsilon_zero(rate, noise):
    """dp-accounting's moments are below 1 there by rounding, which it takes for an epsilon of 0."""
    divergences = renyi._divergences(PoissonSampled(rate, Gaussian(noise)))
    assert (divergences > 0).all()
    count = 10**6
    total = count * float(moment(2, rate, noise))
    delta = math.sqrt(total) / 100
    assert renyi.renyi_epsilon(PoissonSampled(rate, Gaussian(noise)), count, delta) > 0


def test_total_variation_below_delta_is_an_epsilon_of_zero():
    assert renyi.renyi_epsilon(Gaussian(1000.0), 1, 0.1) == 0.0
    assert renyi.renyi_epsilon(PoissonSampled(0.001, Gaussian(2.0)), 3, 0.05) == 0.0


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
    assert fixed_sampled(7, 7, 1.3, 9, 1e-5) == renyi.renyi_epsilon(Gaussian(1.3), 9, 1e-5)
    assert fixed_sampled(6, 7, 1.3, 9, 1e-5) <= renyi.renyi_epsilon(Gaussian(1.3), 9, 1e-5)


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 1e4, 1e6])
def test_extreme_noises_have_a_value(noise):
    assert fixed_sampled(10, 100, noise, 5, 1e-5) >= 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rate", [1e-300, 1e-9, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("noise", [1e-6, 1e-3, 1e6, 1e300])
def test_extreme_poisson_cohorts_have_a_value(rate, noise):
    found = renyi.renyi_epsilon(PoissonSampled(rate, Gaussian(noise)), 5, 1e-5)
    assert 0 <= found <= renyi.renyi_epsilon(Gaussian(noise), 5, 1e-5) * (1 + 1e-9) + 0.02


def test_dp_accounting_is_only_compared_with():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any("dp-accounting" in one for one in project["dependencies"])
    assert any("dp-accounting" in one for one in project["optional-dependencies"]["dev"])
    for file in (ROOT / "src").rglob("*.py"):
        assert "import dp_accounting" not in file.read_text()
        assert "from dp_accounting" not in file.read_text()
