"""The account of Skellam noise: exact divergences, the papers' bounds, and a published value."""

import math
from decimal import Decimal

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import gammaln, ive

from fedveil.base.errors import BadInput, UnsupportedEvent
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import Accountant, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import FixedSampled, Gaussian, PoissonSampled, Skellam
from fedveil.privacy.accounting.renyi import _ORDERS, _divergences, gaussian_alike
from fedveil.privacy.ledger.shared import renyi_curve
from fedveil.privacy.noise.rotation import bound

WIDE = 3000
RDP = Accountant.RDP
ONE_ROW = Relation.ADD_REMOVE, Relation.ZERO_OUT


def log_law(mu):
    """log P(n) of Skellam noise, for n from -WIDE to WIDE."""
    with np.errstate(divide="ignore"):
        return np.log(ive(np.abs(np.arange(-WIDE, WIDE + 1)).astype(float), mu))


def exact(order, p, q):
    """The Renyi divergence of two laws given by their logarithms."""
    known = np.isfinite(p) & np.isfinite(q)
    return np.logaddexp.reduce(order * p[known] - (order - 1) * q[known]) / (order - 1)


def divergence(event, order):
    return _divergences(event)[np.flatnonzero(order == _ORDERS)[0]]


@pytest.mark.parametrize("mu", [0.05, 1.0, 7.0, 100.0, 1000.0])
def test_bounds_are_above_exact_divergences(mu):
    law = log_law(mu)
    for shift in (1, 2, 5, 20):
        if shift > 10 * math.sqrt(mu):
            continue
        event = Skellam(math.sqrt(mu) / shift, shift)
        for order in (2, 3, 5, 10):
            true = exact(order, np.roll(law, shift)[200:-200], law[200:-200])
            found = divergence(event, order)
            assert found >= true * (1 - 1e-9)
            if mu >= 1000 and shift <= 5:
                assert found == pytest.approx(true, rel=3e-3)


def test_of_several_coordinates_only_the_length_counts():
    """The divergence of a product is the sum of those of its coordinates."""
    law, row = log_law(50.0), (3, -1, 2)
    event = Skellam(math.sqrt(50.0 / 14), math.sqrt(14))
    for order in (2, 4, 8):
        true = sum(exact(order, np.roll(law, x)[200:-200], law[200:-200]) for x in row)
        assert true <= divergence(event, order) <= 1.1 * true


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
@pytest.mark.parametrize(("mu", "shift"), [(0.5, 1), (10.0, 2), (200.0, 10)])
def test_sampled_bounds_are_above_both_directions(rate, mu, shift):
    without = log_law(mu)
    moved = np.roll(without, shift)
    here, there = without[200:-200], moved[200:-200]
    mixed = np.logaddexp(math.log1p(-rate) + here, math.log(rate) + there)
    event = PoissonSampled(rate, Skellam(math.sqrt(mu) / shift, shift))
    for order in (2, 3, 6):
        found, first = divergence(event, order), exact(order, mixed, here)
        assert found >= first * (1 - 1e-9)
        assert first >= exact(order, here, mixed) * (1 - 1e-9)
        if mu > 100:
            assert found <= 1.1 * first


def zhu_wang(order, rate, plain):
    """Theorem 5 of Zhu and Wang (2019), for a mechanism with the divergences plain(order)."""
    logs = [(order - 1) * math.log1p(-rate) + math.log1p(rate * (order - 1))]
    for k in range(2, order + 1):
        binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        factor = math.log(3) if k > 2 else 0.0
        one = k * math.log(rate) + (order - k) * math.log1p(-rate) + (k - 1) * plain(k)
        logs.append(factor + binomial + one)
    return np.logaddexp.reduce(logs) / (order - 1)


def test_symmetric_noise_is_below_the_bound_for_any_mechanism():
    noise = Skellam(1.0, 500.0)
    for order in (2, 3, 10, 30):
        general = zhu_wang(order, 0.1, lambda k: divergence(noise, k))
        found = divergence(PoissonSampled(0.1, noise), order)
        assert found <= general * (1 + 1e-9)
        assert found >= general / 3


def published(order, sensitivity, size, variance):
    """The bound of Agarwal, Kairouz and Liu (2021), in steps."""
    absolute = min(math.sqrt(size), sensitivity) * sensitivity
    more = ((2 * order - 1) * sensitivity**2 + 6 * absolute) / (4 * variance**2)
    crude = 3 * absolute / (2 * variance)
    return order * sensitivity**2 / (2 * variance) + min(more, crude)


def test_the_published_standard_deviation_is_found():
    """google-research/federated: epsilon 6, scale 350, clip 3, 16 clients, 150 rounds."""
    size, length, sites = 2**24, 350 * 3.0, 16
    sensitivity = math.sqrt(length**2 + size / 4 + length + math.sqrt(size) / 2)
    assert bound(length, size) == math.floor(sensitivity**2)

    def event(local):
        return Skellam(math.sqrt(sites) * 350 * local / sensitivity, sensitivity)

    def of_paper(local):
        variance = sites * (350 * local) ** 2
        return min(
            150 * published(order, sensitivity, size, variance)
            + math.log1p(-1 / order)
            - math.log(0.01 * order) / (order - 1)
            for order in range(2, 64)
        )

    ours = brentq(lambda x: epsilon(event(x), 150, 0.01, Relation.ADD_REMOVE, RDP) - 6, 5, 50)
    assert ours == pytest.approx(11.43585395098052, abs=1e-6)
    assert brentq(lambda x: of_paper(x) - 6, 5, 50) == pytest.approx(ours, abs=1e-6)


def test_fractional_orders_are_not_used():
    whole = np.floor(_ORDERS) == _ORDERS
    for event in (Skellam(1.0, 99.0), PoissonSampled(0.2, Skellam(1.0, 99.0))):
        assert np.isinf(_divergences(event)[~whole]).all()
        assert np.isfinite(_divergences(event)[whole]).all()
        plain = epsilon(event, 10, 1e-5, Relation.ZERO_OUT, RDP)
        gaussian = gaussian_alike(Skellam(1.0, 99.0))
        alike = gaussian if isinstance(event, Skellam) else PoissonSampled(0.2, gaussian)
        assert plain >= epsilon(alike, 10, 1e-5, Relation.ZERO_OUT, RDP)


@pytest.mark.parametrize("multiplier", [1e-9, 1e-3, 0.1, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("sensitivity", [1.0, 1e3, 1e9])
def test_skellam_noise_counts_a_little_less_than_gaussian_noise(multiplier, sensitivity):
    alike = gaussian_alike(Skellam(multiplier, sensitivity)).multiplier
    assert 0 < alike < multiplier
    variance = (multiplier * sensitivity) ** 2
    if variance > 1:
        assert alike > multiplier * (1 - 9 / (8 * variance) - 1e-12)


@pytest.mark.parametrize("mu", [0.01, 0.5, 3.0, 50.0, 1e3, 1e5])
def test_the_bound_is_above_the_largest_curvature(mu):
    """ln(I_0 / I_1) is that of the logarithm of the law, at 0; the proof needs no less."""
    largest = math.log(ive(0, mu) / ive(1, mu))
    sensitivity = 5.0
    alike = gaussian_alike(Skellam(math.sqrt(mu) / sensitivity, sensitivity)).multiplier
    found = 1 / (2 * alike**2 * sensitivity**2)
    assert found >= largest * (1 + 1e-12 - 1e-15 * mu)
    exact = Decimal(mu)
    root = (exact * exact + Decimal("2.25")).sqrt()
    formula = float(((root + Decimal("0.5")) / exact).ln())
    assert found == pytest.approx(max(formula, 1 / (2 * mu)), rel=1e-12)


def test_edges():
    assert gaussian_alike(Skellam(0.0, 5.0)) == Gaussian(0.0)
    assert epsilon(Skellam(0.0, 5.0), 1, 1e-5, Relation.ZERO_OUT, RDP) == math.inf
    assert 0 < gaussian_alike(Skellam(1e90, 1e90)).multiplier < math.inf
    for wrong in (0.5, 0.0, -1.0, math.inf, math.nan):
        with pytest.raises(BadInput, match="sensitivity of integer rows"):
            Skellam(1.0, wrong)
    with pytest.raises(BadInput, match="multiplier"):
        Skellam(-1.0, 5.0)
    with pytest.raises(UnsupportedEvent, match="skellam"):
        epsilon(Skellam(1.0, 5.0), 1, 1e-5, Relation.ZERO_OUT)


def test_noise_is_found_for_a_budget():
    budget = Budget(2.0, 1e-5)

    def event(m):
        return PoissonSampled(0.05, Skellam(m, 1000.0))

    noise = least_noise(event, 100, budget, Relation.ZERO_OUT)
    assert epsilon(event(noise), 100, 1e-5, Relation.ZERO_OUT, RDP) <= 2.0
    assert epsilon(event(noise * 0.998), 100, 1e-5, Relation.ZERO_OUT, RDP) > 2.0


def line_of(event):
    return BudgetLine(
        event=event,
        budget=Budget(math.inf, 1e-5),
        unit=Unit.RECORD,
        relation=Relation.ZERO_OUT,
        trust=Trust.SECURE_SUM,
        noise=NoiseSource.SECURE,
        assumptions=(),
    )


@pytest.mark.parametrize("units", [2, 5])
def test_several_units_move_a_sum_by_so_many_sensitivities(units):
    (claim,) = line_of(Skellam(20.0, 1000.0)).claims(10)
    several = epsilon(Skellam(20.0 / units, 1000.0 * units), 10, 1e-5, Relation.ZERO_OUT, RDP)
    assert claim.for_units(units).epsilon == several > claim.epsilon
    (sampled,) = line_of(PoissonSampled(0.5, Skellam(20.0, 1000.0))).claims(10)
    found = sampled.for_units(units).epsilon
    assert sampled.epsilon < found <= several
    exact_claim = line_of(PoissonSampled(0.5, Gaussian(20.0))).claims(10)[0]
    assert exact_claim.accountant is Accountant.PLD
    assert found >= exact_claim.for_units(units).epsilon


def test_a_ledger_keeps_the_event():
    line = line_of(PoissonSampled(0.3, Skellam(1.5, 123.25)))
    assert BudgetLine.from_dict(line.to_dict()) == line
    assert line.accountants == (RDP,)


@pytest.mark.parametrize("relation", list(Relation))
def test_a_shared_ledger_counts_it_at_integer_orders(relation):
    orders = (2, 3, 8)
    plain = renyi_curve(Skellam(1.5, 100.0), relation, orders)
    assert plain.tolist() == pytest.approx([divergence(Skellam(1.5, 100.0), a) for a in orders])
    event = PoissonSampled(0.1, Skellam(1.5, 100.0))
    sampled = renyi_curve(event, relation, orders)
    if relation is Relation.REPLACE:
        assert sampled.tolist() == plain.tolist()
    else:
        assert sampled.tolist() == pytest.approx([divergence(event, a) for a in orders])
        assert (sampled < plain).all()


def test_cohorts_of_fixed_size_have_no_account():
    event = FixedSampled(2, 9, Skellam(1.0, 9.0))
    for relation in Relation:
        with pytest.raises(UnsupportedEvent):
            epsilon(event, 1, 1e-5, relation, RDP)
