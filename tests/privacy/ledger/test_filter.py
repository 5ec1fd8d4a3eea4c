"""The Renyi filter: curves against known ones, and what it admits against exact epsilons."""

import math
from functools import cache

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import binom

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.events import (
    FixedSampled,
    FuGaussian,
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    Laplace,
    PoissonSampled,
    PureReport,
    Shuffled,
    TwoPoint,
)
from fedveil.privacy.ledger.shared import ORDERS, RenyiFilter, renyi_curve

DELTA = 1e-5
ADD = Relation.ADD_REMOVE


def reference(event):
    """dp-accounting's own curve at the same orders."""
    accountant = RdpAccountant(ORDERS)
    accountant.compose(event)
    return np.array(accountant._rdp)


# --- curves ---


@pytest.mark.parametrize("m", [0.3, 1.0, 4.0, 50.0])
def test_gaussian_curve(m):
    wanted = reference(dp_accounting.GaussianDpEvent(m))
    assert renyi_curve(Gaussian(m), ADD) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("m", [0.2, 1.0, 7.0, 300.0])
def test_laplace_curve(m):
    wanted = reference(dp_accounting.LaplaceDpEvent(m))
    found = renyi_curve(Laplace(m), ADD)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert (found <= 1 / m).all()


@pytest.mark.parametrize("m", [0.5, 2.0])
@pytest.mark.parametrize("order", [2, 5, 8])
def test_laplace_curve_is_the_integral(m, order):
    """E_Q[(P / Q)^a] over all outcomes, with P centred at 1, Q at 0."""

    def ratio(x):
        return math.exp((-order * abs(x - 1) + (order - 1) * abs(x)) / m) / (2 * m)

    total = sum(quad(ratio, a, b)[0] for a, b in ((-30 * m, 0), (0, 1), (1, 1 + 30 * m)))
    found = renyi_curve(Laplace(m), ADD, (order,))[0]
    assert found == pytest.approx(math.log(total) / (order - 1), rel=1e-6)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("m", [0.6, 1.0, 4.0])
@pytest.mark.parametrize("relation", [ADD, Relation.ZERO_OUT])
def test_sampled_gaussian_curve(rate, m, relation):
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(m))
    found = renyi_curve(PoissonSampled(rate, Gaussian(m)), relation)
    assert found == pytest.approx(reference(event), rel=1e-6, abs=1e-12)
    assert (found <= renyi_curve(Gaussian(m), relation)).all()


@pytest.mark.parametrize("eps0", [1e-3, 0.5, 2.0, 30.0])
def test_two_point_curve_is_the_sum_over_both_reports(eps0):
    p = 1 / (1 + math.exp(-eps0))
    q = math.exp(-eps0) * p
    for order, found in zip(ORDERS, renyi_curve(TwoPoint(eps0), ADD), strict=True):
        terms = [
            order * math.log(p) + (1 - order) * math.log(q),
            order * math.log(q) + (1 - order) * math.log(p),
        ]
        wanted = np.logaddexp(*terms) / (order - 1)
        assert found == pytest.approx(min(wanted, eps0), rel=1e-6, abs=1e-12)


def test_no_input_of_a_two_point_report_exceeds_its_curve():
    """The curve is that of the two extreme inputs; any other pair within e^eps is below it."""
    eps0 = 1.3
    p = np.linspace(0.001, 0.999, 400)[:, None]
    q = np.linspace(0.001, 0.999, 400)[None, :]
    worst = np.maximum(np.log(p / q), np.log((1 - p) / (1 - q)))
    near = np.maximum(worst, worst.T) <= eps0
    for order, curve in zip(ORDERS[:8], renyi_curve(TwoPoint(eps0), ADD), strict=False):
        both = p**order * q ** (1 - order) + (1 - p) ** order * (1 - q) ** (1 - order)
        assert np.log(both[near]).max() / (order - 1) <= curve


@pytest.mark.parametrize("eps0", [0.3, 2.0, 8.0])
def test_no_pure_report_of_another_form_exceeds_its_curve(eps0):
    """Randomised response over five values, and two values that are not symmetric."""
    several = np.full((2, 5), 1 / (math.exp(eps0) + 4))
    several[0, 0] = several[1, 1] = math.exp(eps0) / (math.exp(eps0) + 4)
    rare = np.array([[1e-3, 1 - 1e-3], [1e-3 * math.exp(-eps0), 1 - 1e-3 * math.exp(-eps0)]])
    for p, q in (several, rare, rare[::-1]):
        assert np.abs(np.log(p / q)).max() <= eps0 + 1e-12
        for order, curve in zip(ORDERS, renyi_curve(PureReport(eps0), ADD), strict=True):
            logs = order * np.log(p) + (1 - order) * np.log(q)
            assert np.logaddexp.reduce(logs) / (order - 1) <= curve + 1e-12


def test_pure_report_has_the_curve_of_the_two_points_that_dominate_it():
    assert (renyi_curve(PureReport(1.3), ADD) == renyi_curve(TwoPoint(1.3), ADD)).all()
    assert renyi_curve(PureReport(1e6), ADD)[-1] == pytest.approx(1e6)


def test_two_releases_about_one_client_add_up():
    both = renyi_curve(GaussianWithBit(Gaussian(2.0), TwoPoint(0.4)), ADD)
    assert both == pytest.approx(renyi_curve(Gaussian(2.0), ADD) + renyi_curve(TwoPoint(0.4), ADD))
    watched = renyi_curve(GaussianWithCurator(Gaussian(2.0), Gaussian(7.0), 1), ADD)
    assert watched == pytest.approx(
        renyi_curve(Gaussian(2.0), ADD) + renyi_curve(Gaussian(7.0), ADD)
    )


@pytest.mark.parametrize(
    "event",
    [FixedSampled(3, 30, Gaussian(1.5)), PoissonSampled(0.1, Gaussian(1.5))],
    ids=["fixed", "poisson"],
)
def test_sampling_under_replacement_amplifies_nothing(event):
    assert (renyi_curve(event, Relation.REPLACE) == renyi_curve(Gaussian(1.5), ADD)).all()


def test_a_rate_of_one_is_no_sampling():
    assert (
        renyi_curve(PoissonSampled(1.0, Gaussian(2.0)), ADD) == renyi_curve(Gaussian(2.0), ADD)
    ).all()


@pytest.mark.parametrize(
    "event",
    [
        Shuffled(TwoPoint(1.0), 100),
        FuGaussian(1.0, 1.0),
        Gaussian(0.0),
        Laplace(0.0),
        PoissonSampled(0.5, Gaussian(0.0)),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_has_no_curve_is_refused(event):
    with pytest.raises(BadInput, match="cannot count"):
        renyi_curve(event, ADD)


# --- the filter ---


def exact_gaussian(mu, delta):
    """The least epsilon of Gaussian noise of multiplier 1 / mu at delta (Balle and Wang 2018)."""

    def at(eps):
        return ndtr(mu / 2 - eps / mu) - math.exp(eps) * ndtr(-mu / 2 - eps / mu)

    low, high = 0.0, 200.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) > delta else (low, middle)
    return high


def spend(filter, choose, most=2000):
    """Charge what `choose` picks from all that was spent; returns what was admitted."""
    spent, admitted = np.zeros(len(filter.orders)), []
    for number in range(most):
        event = choose(number, spent)
        curve = renyi_curve(event, ADD)
        if not filter.admits(spent, curve):
            break
        spent = spent + curve
        admitted.append(event)
    return spent, admitted


def greedy(filter):
    """Always the least noise, of a list, that still fits: it ends right at the limit."""

    def choose(number, spent):
        sizes = np.geomspace(0.3, 200.0, 60)
        fits = [m for m in sizes if filter.admits(spent, renyi_curve(Gaussian(m), ADD))]
        return Gaussian(float(fits[0] if fits else 0.3))

    return choose


STRATEGIES = {
    "always the same": lambda filter: lambda n, spent: Gaussian(30.0),
    "ever larger steps": lambda filter: lambda n, spent: Gaussian(40.0 / (1 + n)),
    "a random walk": lambda filter: (
        lambda n, spent: Gaussian(float(np.random.default_rng(n).uniform(1, 20)))
    ),
    "as much as fits": greedy,
}


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0, 30.0])
@pytest.mark.parametrize("how", STRATEGIES)
def test_what_is_admitted_is_within_the_exact_epsilon(epsilon, how):
    """Gaussians compose exactly, also when chosen one after the other: mu^2 = sum of 1 / m^2.

    That holds for the final mu where it does not depend on outcomes, as in these strategies.
    """
    filter = RenyiFilter(epsilon, DELTA)
    spent, admitted = spend(filter, STRATEGIES[how](filter))
    assert admitted
    mu = math.sqrt(sum(event.multiplier**-2 for event in admitted))
    assert exact_gaussian(mu, DELTA) <= filter.epsilon_of(spent) <= epsilon


def test_the_filter_is_not_far_too_strict():
    filter = RenyiFilter(8.0, DELTA)
    _, admitted = spend(filter, greedy(filter))
    mu = math.sqrt(sum(event.multiplier**-2 for event in admitted))
    assert exact_gaussian(mu, DELTA) >= 0.75 * 8.0


def test_an_adaptive_adversary_stays_within_delta_exactly():
    """Who goes on only while the loss so far is high gains nothing beyond delta.

    Randomised response of 0.1 and of 0.05, whose losses are multiples of 0.05: the whole tree of
    outcomes is followed, as (loss, number of each) -> probability, and P(loss > epsilon), which
    clips delta, is compared with delta. The adversary goes for large steps while it is behind.
    """
    filter = RenyiFilter(3.0, 1e-2)
    curves = [renyi_curve(TwoPoint(e), ADD) for e in (0.1, 0.05)]
    states, ended = {(0, 0, 0): 1.0}, {}

    @cache
    def fits(large, small, which):
        return bool(filter.admits(large * curves[0] + small * curves[1], curves[which]))

    while states:
        following = {}
        for (loss, large, small), mass in states.items():
            which = 0 if loss <= 20 else 1
            if not fits(large, small, which):
                which = 1 - which
            if not fits(large, small, which):
                ended[loss] = ended.get(loss, 0.0) + mass
                continue
            step = 2 - which
            up = 1 / (1 + math.exp(-0.05 * step))
            for gain, chance in ((step, up), (-step, 1 - up)):
                key = (loss + gain, large + (which == 0), small + (which == 1))
                following[key] = following.get(key, 0.0) + mass * chance
        states = following
    assert sum(ended.values()) == pytest.approx(1.0)
    beyond = sum(mass for loss, mass in ended.items() if 0.05 * loss > 3.0 + 1e-9)
    assert 0 < beyond <= 1e-2


def test_an_order_that_is_used_up_stays_used_up():
    """Small orders last longest for large releases, large ones for small releases."""
    filter = RenyiFilter(3.0, DELTA)
    random = np.random.default_rng(0)
    spent, gone = np.zeros(len(ORDERS)), np.zeros(len(ORDERS), dtype=bool)
    for _ in range(300):
        curve = renyi_curve(Gaussian(float(random.uniform(2, 60))), ADD)
        if not filter.admits(spent, curve):
            continue
        spent = spent + curve
        over = spent > filter.order_limits
        assert not (gone & ~over).any()
        gone |= over
        assert not over.all()
    assert gone.any()


def test_each_row_is_admitted_by_itself():
    filter = RenyiFilter(2.0, DELTA)
    curve = renyi_curve(Gaussian(4.0), ADD)
    full, _ = spend(filter, STRATEGIES["as much as fits"](filter))
    assert filter.admits(np.stack([0 * full, full]), curve).tolist() == [True, False]


def test_delta_is_divided_among_the_orders():
    """At each order a spending at its limit has exactly delta / |A| of conversion left."""
    filter = RenyiFilter(2.0, DELTA)
    orders = np.array(ORDERS)
    left = np.exp(-(orders - 1) * (2.0 - filter.order_limits))
    assert left.sum() == pytest.approx(DELTA)
    assert RenyiFilter(2.0, DELTA, (8,)).order_limits[0] > filter.order_limits[ORDERS.index(8)]


def test_nothing_spent_is_nothing_claimed_and_a_little_is_not_nothing():
    filter = RenyiFilter(2.0, DELTA)
    assert filter.epsilon_of(np.zeros(len(ORDERS))) == 0
    assert filter.epsilon_of(renyi_curve(Gaussian(1e4), ADD)) > 0


def test_what_is_spent_is_told_as_the_filter_counts_it():
    """At the limit of whichever order, epsilon is all of the budget; below it, less."""
    filter = RenyiFilter(2.0, DELTA)
    for k in np.flatnonzero(filter.order_limits > 0):
        spent = np.full(len(ORDERS), 1e9)
        spent[k] = filter.order_limits[k]
        assert filter.epsilon_of(spent) == pytest.approx(2.0, rel=1e-12)
        spent[k] -= 0.5 * filter.order_limits[k]
        assert filter.epsilon_of(spent) < 2.0


def test_pure_releases_are_no_cheaper_than_their_exact_composition():
    """k reports of randomised response: the filter's epsilon is above the binomial one."""
    filter, eps0, count = RenyiFilter(5.0, DELTA), 0.2, 20
    found = filter.epsilon_of(count * renyi_curve(TwoPoint(eps0), ADD))
    p = 1 / (1 + math.exp(-eps0))
    ones = np.arange(count + 1)
    mass, loss = binom.pmf(ones, count, p), eps0 * (2 * ones - count)
    delta = (mass * np.maximum(0, 1 - np.exp(found - loss))).sum()
    assert delta <= DELTA


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((0.0, DELTA), "epsilon 0.0"),
        ((-1.0, DELTA), "epsilon -1.0"),
        ((math.inf, DELTA), "a finite one is needed"),
        ((math.nan, DELTA), "epsilon nan"),
        ((1.0, 0.0), "delta is 0.0"),
        ((1.0, 1.0), "delta is 1.0"),
        ((1.0, DELTA, ()), "at least one Renyi order"),
        ((1.0, DELTA, (1, 2)), "2 or more"),
        ((0.01, DELTA), "too small for a Renyi filter"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(arguments, told):
    with pytest.raises(BadInput, match=told):
        RenyiFilter(*arguments)
