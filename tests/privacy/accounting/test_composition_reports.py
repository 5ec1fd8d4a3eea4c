"""What clients report: pure and published epsilons, Gaussians with a bit or with a curator."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from scipy import stats

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Accountant, Relation
from fedveil.privacy.accounting.closed_forms import gaussian_epsilon
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import (
    FuGaussian,
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    Laplace,
    PureReport,
    TwoPoint,
)
from tests.privacy.accounting.quadrature import COARSE, mostly_slow, pair

# --- pure and published ---


@pytest.mark.parametrize("relation", list(Relation))
def test_laplace_adds_up_and_its_delta_is_zero(relation):
    assert epsilon(Laplace(4.0), 6, 0.0, relation, Accountant.PURE) == 1.5
    assert epsilon(Laplace(4.0), 0, 0.0, relation, Accountant.PURE) == 0
    assert epsilon(Laplace(0.0), 1, 0.0, relation, Accountant.PURE) == math.inf


def test_laplace_epsilon_is_reached_by_its_own_density():
    """Sensitivity 1, scale 4: the log-ratio of the two densities is 1/4 wherever x <= 0."""
    points = np.linspace(-60, 60, 1001)
    ratio = stats.laplace(0, 4).logpdf(points) - stats.laplace(1, 4).logpdf(points)
    assert np.abs(ratio).max() == pytest.approx(
        epsilon(Laplace(4.0), 1, 0.0, Relation.REPLACE, Accountant.PURE)
    )


def test_reports_add_up_under_the_pure_accountant():
    assert epsilon(TwoPoint(0.5), 30, 0.0, Relation.REPLACE, Accountant.PURE) == 15


@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize("eps0", [0.1, 1.0, 4.0])
def test_pure_reports_compose_like_randomised_response(eps0, count):
    """delta(epsilon), summed over how many reports point the right way, is what was asked for."""
    found = epsilon(PureReport(eps0), count, 1e-5, Relation.REPLACE, Accountant.BINOMIAL)
    p = 1 / (1 + math.exp(-eps0))
    delta = sum(
        math.comb(count, x)
        * max(
            0.0,
            p**x * (1 - p) ** (count - x) - math.exp(found) * (1 - p) ** x * p ** (count - x),
        )
        for x in range(count + 1)
    )
    assert 1e-5 * (1 - 1e-5) <= delta <= 1e-5 * (1 + 1e-9)
    assert epsilon(PureReport(eps0), count, 0.0, Relation.REPLACE, Accountant.PURE) == count * eps0
    assert found < count * eps0


@pytest.mark.parametrize("values", [3, 10])
def test_no_pure_report_of_another_form_exceeds_its_account(values):
    """Randomised response over several values, three times, delta by enumeration."""
    eps0, count = 1.0, 3
    low = 1 / (math.exp(eps0) + values - 1)
    first, second = np.full(values, low), np.full(values, low)
    first[0] = second[1] = low * math.exp(eps0)
    for _ in range(count - 1):
        first = np.outer(first, [math.exp(eps0) * low, *[low] * (values - 1)]).ravel()
        second = np.outer(second, [low, math.exp(eps0) * low, *[low] * (values - 2)]).ravel()
    for delta in (1e-5, 1e-2):
        found = epsilon(PureReport(eps0), count, delta, Relation.REPLACE, Accountant.BINOMIAL)
        assert np.maximum(first - math.exp(found) * second, 0).sum() <= delta


def test_pure_alone_takes_a_delta_of_zero():
    for event, accountant in (
        (TwoPoint(1.0), Accountant.BINOMIAL),
        (Gaussian(1.0), Accountant.PLD),
    ):
        with pytest.raises(BadInput, match="delta"):
            epsilon(event, 1, 0.0, Relation.REPLACE, accountant)
    with pytest.raises(BadInput, match="delta"):
        epsilon(Laplace(1.0), 1, 1.0, Relation.REPLACE, Accountant.PURE)


def test_fu_formula_is_the_printed_one():
    """sigma = c_2 sqrt(T_l log(1 / delta)) / epsilon, solved for epsilon."""
    sigma = 1.7 * math.sqrt(12 * math.log(1e4)) / 20
    found = epsilon(FuGaussian(sigma, 1.7), 12, 1e-4, Relation.ADD_REMOVE, Accountant.PUBLISHED)
    assert found == pytest.approx(20)


# --- Gaussian with a bit ---


def delta_with_bits(multiplier, eps0, count, eps):
    """E over the bits of the Gaussian's own delta: Bin(count, p) of them point one way."""
    p = 1 / (1 + math.exp(-eps0))
    mu = math.sqrt(count) / multiplier
    ones = np.arange(count + 1)
    left = eps - eps0 * (2 * ones - count)
    first = stats.norm.cdf(mu / 2 - left / mu)
    second = np.exp(left + stats.norm.logcdf(-mu / 2 - left / mu))
    return float((stats.binom.pmf(ones, count, p) * (first - second)).sum())


@pytest.mark.parametrize(
    ("multiplier", "eps0", "count"), [(2.0, 0.1, 1), (1.0, 1.0, 1), (6.0, 0.3, 20), (3.0, 2.0, 3)]
)
def test_gaussian_with_bits_matches_the_sum_over_its_bits(multiplier, eps0, count):
    event = GaussianWithBit(Gaussian(multiplier), TwoPoint(eps0))
    found = epsilon(event, count, 1e-5, Relation.REPLACE, interval=COARSE)
    assert delta_with_bits(multiplier, eps0, count, found) <= 1e-5 * (1 + 1e-6)
    assert delta_with_bits(multiplier, eps0, count, 0.99 * found) > 1e-5


def test_sum_over_bits_agrees_with_quadrature():
    """The reference of the test above, checked for one release by integrating densities."""
    step, first, second = pair(1.0, 1.5, other=None)
    p = 1 / (1 + math.exp(-0.8))
    delta = sum(
        np.maximum(a * first - math.exp(0.9) * b * second, 0).sum() * step
        for a, b in ((p, 1 - p), (1 - p, p))
    )
    assert delta_with_bits(1.5, 0.8, 1, 0.9) == pytest.approx(delta, rel=1e-6)


def test_gaussian_with_a_bit_lies_between_its_parts_and_their_sum():
    event = GaussianWithBit(Gaussian(4.0), TwoPoint(0.2))
    alone = epsilon(Gaussian(4.0), 9, 1e-5, Relation.REPLACE)
    found = epsilon(event, 9, 1e-5, Relation.REPLACE, interval=COARSE)
    assert alone < found < alone + 9 * 0.2


def test_a_bit_beside_a_loss_that_no_grid_holds():
    event = GaussianWithBit(Gaussian(1e-5), TwoPoint(1.0))
    assert epsilon(event, 10**6, 1e-9, Relation.REPLACE) == math.inf


@pytest.mark.parametrize("delta", [1e-6, 1e-10, 1e-13])
@pytest.mark.parametrize(("m", "count"), [(5.0, 100), (20.0, 2_000)])
def test_coins_that_say_nothing_leave_the_gaussian_s_epsilon(m, count, delta):
    """Never below the exact one, at deltas that a plain transform would lose."""
    exact = gaussian_epsilon(math.sqrt(count) / m, delta)
    event = GaussianWithBit(Gaussian(m), TwoPoint(1e-12))
    assert exact <= epsilon(event, count, delta, Relation.REPLACE) <= exact * 1.001 + 2e-4


# --- Gaussian with a curator ---


@pytest.mark.parametrize(
    ("multiplier", "noise", "most", "count"),
    mostly_slow([(2.0, 5.0, 1, 1), (3.0, 1.0, 4, 3), (6.0, 4.0, 3, 20), (0.7, 0.5, 9, 2)], 0, 2),
)
def test_gaussian_with_a_curator_matches_the_library_composing_both(multiplier, noise, most, count):
    """The library's grid of privacy losses, and its RDP."""
    event = GaussianWithCurator(Gaussian(multiplier), Gaussian(noise), most)
    for accountant, slack in (
        (dpa.pld.PLDAccountant(dpa.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-4), 1e-3),
        (dpa.rdp.RdpAccountant(), 1e-9),
    ):
        accountant.compose(dpa.GaussianDpEvent(multiplier), count)
        accountant.compose(dpa.GaussianDpEvent(noise), min(count, most))
        kind = Accountant.PLD if slack == 1e-3 else Accountant.RDP
        found = epsilon(event, count, 1e-5, Relation.REPLACE, kind)
        assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=slack)


def test_curator_without_noise_is_worth_nothing():
    event = GaussianWithCurator(Gaussian(9.0), Gaussian(0.0), 1)
    assert epsilon(event, 1, 1e-5, Relation.REPLACE) == math.inf
