"""Every entry of the table (event, relation, accountant) against mathematics done here.

`hockey_stick` integrates numerically; nothing in it comes from dp-accounting.
"""

import logging
import math
from itertools import pairwise
from typing import get_args

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats
from scipy.special import gammaln, logsumexp

from fedveil.errors import BadInput, UnsupportedEvent
from fedveil.privacy.accounting.claims import Accountant, Relation
from fedveil.privacy.accounting.composition import (
    covers,
    epsilon,
    gaussian_epsilon,
    noise_in,
    supports,
)
from fedveil.privacy.accounting.events import (
    Event,
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

ONE_ROW = [Relation.ADD_REMOVE, Relation.ZERO_OUT]
COARSE = 1e-3
LIBRARY = [Accountant.PLD, Accountant.RDP]


def mostly_slow(cases, *quick):
    """The cases with all but the `quick` ones, by number, marked as slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
        for n, case in enumerate(cases)
        for marks in ([] if n in quick else [pytest.mark.slow],)
    ]


ROUNDS_TABLE = [
    (30 / 2400, 300, 1e-5, {1: (1.147, 1.232), 3: (0.749, 3.697), 8: (0.540, 9.576)}),
    (30 / 3383, 1000, 1e-5, {1: (1.299, 1.114), 3: (0.780, 3.582), 8: (0.568, 9.376)}),
    (0.1, 100, 1e-4, {1: (3.380, 1.125), 3: (1.495, 3.394), 8: (0.862, 9.222)}),
]


def gaussian_delta(mu, eps):
    """Balle and Wang's closed form."""
    return stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu)


def mixture(points, rate, mean, std):
    """The density of a sum that holds the differing row with probability `rate`."""
    there, absent = stats.norm.pdf(points, mean, std), stats.norm.pdf(points, 0, std)
    return rate * there + (1 - rate) * absent


def pair(rate, std, *, other):
    """A grid and the two densities: a row at +1 in one data set, at `other` (None: nowhere)."""
    points = np.linspace(-1 - 14 * std, 1 + 14 * std, 200_001)
    second = mixture(points, rate if other is not None else 0.0, other or 0.0, std)
    return points[1] - points[0], mixture(points, rate, 1.0, std), second


def hockey_stick(step, first, second, eps):
    """The delta at `eps` of one release, by quadrature; the larger of the two directions."""
    forth = np.maximum(first - math.exp(eps) * second, 0).sum() * step
    back = np.maximum(second - math.exp(eps) * first, 0).sum() * step
    return forth, back


def hockey_stick_of_two(step, first, second, eps):
    """The same for two independent releases, by quadrature over the plane."""
    thin = slice(None, None, 100)
    step, first, second = 100 * step, first[thin], second[thin]
    p, q = np.outer(first, first), np.outer(second, second)
    grown = math.exp(eps)
    return max(np.maximum(p - grown * q, 0).sum(), np.maximum(q - grown * p, 0).sum()) * step**2


# --- plain Gaussian ---


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize(("multiplier", "count"), [(0.3, 1), (1.0, 1), (4.0, 9), (50.0, 1000)])
def test_gaussian_meets_its_closed_form_under_every_relation(multiplier, count, relation):
    eps = epsilon(Gaussian(multiplier), count, 1e-5, relation)
    assert gaussian_delta(math.sqrt(count) / multiplier, eps) == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.parametrize("mu", [1e-6, 0.01, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_gaussian_epsilon_is_the_smallest_that_suffices(mu, delta):
    eps = gaussian_epsilon(mu, delta)
    if gaussian_delta(mu, 0.0) <= delta:
        assert eps == 0
        return
    if eps < 500:
        assert gaussian_delta(mu, eps * (1 + 1e-6)) < delta
        assert gaussian_delta(mu, eps * (1 - 1e-3)) > delta
    assert mu * mu / 2 < eps + 1e-9 or mu < 1
    assert eps <= mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))


def test_gaussian_epsilon_of_a_huge_loss_follows_its_normal_law():
    """The loss is N(mu^2 / 2, mu^2): far out, delta is its tail."""
    mu, delta = 1000.0, 1e-5
    near = mu * mu / 2 + mu * stats.norm.isf(delta)
    assert gaussian_epsilon(mu, delta) == pytest.approx(near, rel=1e-5)


@pytest.mark.parametrize(("multiplier", "count"), [(1.0, 1), (2.0, 3), (10.0, 50)])
def test_gaussian_agrees_with_the_library_grid(multiplier, count):
    grid = privacy_loss_distribution.from_gaussian_mechanism(
        multiplier, value_discretization_interval=1e-3
    ).self_compose(count)
    ours = epsilon(Gaussian(multiplier), count, 1e-5, Relation.ADD_REMOVE)
    theirs = grid.get_epsilon_for_delta(1e-5)
    assert ours <= theirs + 1e-9
    assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize("relation", list(Relation))
def test_gaussian_by_rdp_is_the_same_under_every_relation(relation):
    """The library's two accountants read replacement differently; ours may not."""
    eps = epsilon(Gaussian(3.731), 1, 1e-5, relation, Accountant.RDP)
    assert eps == pytest.approx(1.092, abs=2e-3)
    assert epsilon(Gaussian(3.731), 1, 1e-5, relation) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("eps", "multiplier"), [(1, 3.731), (2, 1.994), (4, 1.081), (8, 0.600)])
def test_one_gaussian_release_by_the_book(eps, multiplier):
    assert epsilon(Gaussian(multiplier), 1, 1e-5, Relation.ADD_REMOVE) == pytest.approx(
        eps, rel=2e-3
    )


# --- Poisson-sampled Gaussian, add-remove ---


@pytest.mark.parametrize("relation", ONE_ROW)
@pytest.mark.parametrize(
    ("rate", "multiplier", "eps"),
    [(0.5, 1.0, 0.7), (0.1, 0.6, 1.5), (0.9, 2.0, 0.5), (0.01, 1.0, 0.05), (0.999, 1.5, 1.2)],
)
def test_poisson_round_matches_quadrature_in_both_directions(rate, multiplier, eps, relation):
    forth, back = hockey_stick(*pair(rate, multiplier, other=None), eps)
    event = PoissonSampled(rate, Gaussian(multiplier))
    found = epsilon(event, 1, max(forth, back), relation, interval=COARSE)
    assert eps - 1e-6 <= found <= eps + 3e-3


def test_each_direction_of_add_remove_counts_somewhere():
    """A bound that looked at one direction only would fail one of these."""
    grid = pair(0.5, 2.0, other=None)
    forth, back = hockey_stick(*grid, 0.1)
    assert forth != pytest.approx(back, rel=0.05)
    event = PoissonSampled(0.5, Gaussian(2.0))
    for delta in (forth, back):
        found = epsilon(event, 1, delta, Relation.ADD_REMOVE, interval=COARSE)
        assert max(hockey_stick(*grid, found)) <= delta * (1 + 1e-6)


@pytest.mark.parametrize(("rate", "multiplier", "eps"), [(0.3, 1.0, 1.0), (0.8, 2.0, 1.0)])
def test_two_poisson_rounds_match_quadrature(rate, multiplier, eps):
    delta = hockey_stick_of_two(*pair(rate, multiplier, other=None), eps)
    event = PoissonSampled(rate, Gaussian(multiplier))
    found = epsilon(event, 2, delta, Relation.ADD_REMOVE, interval=COARSE)
    assert found == pytest.approx(eps, abs=3e-3)


@pytest.mark.parametrize("accountant", LIBRARY)
def test_poisson_at_rate_one_is_the_plain_gaussian(accountant):
    plain = epsilon(Gaussian(2.0), 3, 1e-5, Relation.ADD_REMOVE, accountant)
    event = PoissonSampled(1.0, Gaussian(2.0))
    sampled = epsilon(event, 3, 1e-5, Relation.ADD_REMOVE, accountant)
    assert plain - 1e-9 <= sampled <= plain * 1.001


@pytest.mark.parametrize("delta", [1e-8, 1e-12, 1e-14])
def test_composition_stays_an_upper_bound_at_tiny_deltas(delta):
    """Composition by FFT must not lose a tail as small as this."""
    event = PoissonSampled(1.0, Gaussian(5.0 * math.sqrt(1000)))
    found = epsilon(event, 1000, delta, Relation.ADD_REMOVE, interval=COARSE)
    exact = gaussian_epsilon(0.2, delta)
    assert exact <= found <= exact * 1.01


@pytest.mark.parametrize(("rate", "multiplier", "alpha"), [(0.1, 1.0, 4), (0.5, 2.0, 7)])
def test_poisson_by_rdp_never_beats_the_divergence_of_its_order(rate, multiplier, alpha):
    """RDP epsilon is the best over orders: at most what any one order, integrated here, gives."""
    step, first, second = pair(rate, multiplier, other=None)
    forth = math.log((first**alpha * second ** (1.0 - alpha)).sum() * step) / (alpha - 1)
    classical = forth + math.log(1e5) / (alpha - 1)
    event = PoissonSampled(rate, Gaussian(multiplier))
    found = epsilon(event, 1, 1e-5, Relation.ADD_REMOVE, Accountant.RDP)
    assert found <= classical
    assert max(hockey_stick(step, first, second, found)) <= 1e-5


@pytest.mark.parametrize(
    ("target", "rate", "rounds", "delta", "rows"),
    mostly_slow([(target, *row) for target in (1, 3, 8) for row in ROUNDS_TABLE], 0, 4, 8),
)
def test_reference_table_of_sampled_rounds(rate, rounds, delta, rows, target):
    noise, by_rdp = rows[target]
    event = PoissonSampled(rate, Gaussian(noise))
    pld = epsilon(event, rounds, delta, Relation.ADD_REMOVE, interval=COARSE)
    rdp = epsilon(event, rounds, delta, Relation.ADD_REMOVE, Accountant.RDP)
    assert pld == pytest.approx(target, rel=0.01)
    assert rdp == pytest.approx(by_rdp, rel=0.01)


# --- Poisson-sampled Gaussian, replacement ---


@pytest.mark.parametrize(
    ("rate", "multiplier", "eps"), [(0.5, 0.5, 0.8), (0.2, 1.0, 0.3), (0.9, 1.5, 0.6)]
)
def test_poisson_replacement_matches_quadrature(rate, multiplier, eps):
    """Rows +S and -S: in units of S the noise is twice the multiplier, which is relative to 2S."""
    delta = max(hockey_stick(*pair(rate, 2 * multiplier, other=-1.0), eps))
    event = PoissonSampled(rate, Gaussian(multiplier))
    found = epsilon(event, 1, delta, Relation.REPLACE, interval=COARSE)
    assert eps - 1e-6 <= found <= eps + 3e-3


def test_poisson_replacement_at_rate_one_is_the_plain_gaussian():
    plain = epsilon(Gaussian(1.2), 2, 1e-5, Relation.REPLACE)
    sampled = epsilon(PoissonSampled(1.0, Gaussian(1.2)), 2, 1e-5, Relation.REPLACE)
    assert plain - 1e-9 <= sampled <= plain * 1.001


@pytest.mark.parametrize("angle", [0.0, 0.5, 1.0])
def test_opposite_rows_are_the_worst_replacement(angle):
    """A replacement by a shorter or more similar row is covered by the same epsilon."""
    event = PoissonSampled(0.3, Gaussian(0.6))
    found = epsilon(event, 1, 1e-4, Relation.REPLACE, interval=COARSE)
    other = -math.cos(angle)
    assert max(hockey_stick(*pair(0.3, 1.2, other=other), found)) <= 1e-4


# --- sampling without replacement ---


def wang_bound(fraction, multiplier, alpha):
    """Wang, Balle, Kasiviswanathan 2019, theorem 9, for a Gaussian: RDP of integer order."""

    def log_choose(j):
        return gammaln(alpha + 1) - gammaln(j + 1) - gammaln(alpha - j + 1)

    def rdp(order):
        return order / (2 * multiplier**2)

    two = min(math.log(4 * math.expm1(rdp(2))), math.log(2) + rdp(2))
    terms = [0.0, 2 * math.log(fraction) + log_choose(2) + two]
    terms += [
        j * math.log(fraction) + log_choose(j) + math.log(2) + (j - 1) * rdp(j)
        for j in range(3, alpha + 1)
    ]
    return float(logsumexp(terms)) / (alpha - 1)


@pytest.mark.parametrize(
    ("size", "population", "multiplier", "count"),
    mostly_slow([(10, 1000, 1.0, 50), (1, 10, 2.0, 3), (50, 100, 5.0, 100)], 0),
)
def test_fixed_cohort_is_at_most_the_published_bound(size, population, multiplier, count):
    event = FixedSampled(size, population, Gaussian(multiplier))
    found = epsilon(event, count, 1e-5, Relation.REPLACE, Accountant.RDP)
    published = min(
        count * wang_bound(size / population, multiplier, a) + math.log(1e5) / (a - 1)
        for a in range(2, 257)
    )
    assert found <= published
    assert found >= 0.5 * published


@pytest.mark.parametrize(
    ("size", "population", "multiplier", "count"),
    mostly_slow([(1, 10, 0.5, 1), (9, 10, 1.0, 1), (5, 10, 1.0, 10), (50, 100, 5.0, 200)], 0, 2),
)
def test_fixed_cohort_is_at_least_its_worst_known_pair(size, population, multiplier, count):
    """All other clients zero: the cohort then holds +S or -S with probability size / N."""
    fixed = FixedSampled(size, population, Gaussian(multiplier))
    bound = epsilon(fixed, count, 1e-5, Relation.REPLACE, Accountant.RDP)
    attack = PoissonSampled(size / population, Gaussian(multiplier))
    assert bound >= epsilon(attack, count, 1e-5, Relation.REPLACE, interval=COARSE)


@pytest.mark.parametrize("multiplier", mostly_slow([0.7, 2.0], 0))
def test_fixed_cohort_of_all_but_one_costs_about_as_much_as_everyone(multiplier):
    fixed = FixedSampled(99_999, 100_000, Gaussian(multiplier))
    almost = epsilon(fixed, 1, 1e-5, Relation.REPLACE, Accountant.RDP)
    everyone = epsilon(Gaussian(multiplier), 1, 1e-5, Relation.REPLACE)
    assert 0.99 * everyone <= almost <= 1.3 * everyone


def test_fixed_cohort_is_amplified_by_sampling():
    rates = [10, 500]
    found = [
        epsilon(FixedSampled(s, 1000, Gaussian(2.0)), 10, 1e-5, Relation.REPLACE, Accountant.RDP)
        for s in rates
    ]
    assert found == sorted(found)
    assert found[0] < found[-1] / 10


# --- across entries ---


@pytest.mark.parametrize(
    ("multiplier", "rate", "count"),
    mostly_slow(
        [
            (m, rate, count)
            for count in (1, 40)
            for rate in (0.01, 0.2, 1.0)
            for m in (0.6, 1.0, 4.0)
        ],
        *(0, 4, 8, 10, 14, 15),
    ),
)
def test_pld_is_never_above_rdp(multiplier, rate, count):
    event = PoissonSampled(rate, Gaussian(multiplier)) if rate < 1 else Gaussian(multiplier)
    pld = epsilon(event, count, 1e-5, Relation.ADD_REMOVE, interval=COARSE)
    assert pld <= epsilon(event, count, 1e-5, Relation.ADD_REMOVE, Accountant.RDP) * (1 + 1e-3)


@pytest.mark.parametrize("accountant", LIBRARY)
def test_epsilon_moves_the_right_way(accountant):
    def at(rate=0.2, multiplier=1.5, count=10, delta=1e-5):
        event = PoissonSampled(rate, Gaussian(multiplier))
        return epsilon(event, count, delta, Relation.ADD_REMOVE, accountant, interval=COARSE)

    assert at() < at(rate=0.3)
    assert at() < at(count=11)
    assert at() > at(multiplier=1.6)
    assert at() > at(delta=1e-4)


@pytest.mark.parametrize(
    ("rate", "multiplier", "count", "relation"),
    mostly_slow(
        [
            (*case, relation)
            for case in ((0.1, 1.5, 10), (0.9, 3.0, 3))
            for relation in (Relation.ADD_REMOVE, Relation.REPLACE)
        ],
        *(0, 3),
    ),
)
def test_coarser_grid_never_gives_a_smaller_epsilon(rate, multiplier, count, relation):
    event = PoissonSampled(rate, Gaussian(multiplier))
    grids = (5e-4, 8.3e-4, 1e-3, 3.1e-3, 1e-2)
    found = [epsilon(event, count, 1e-5, relation, interval=grid) for grid in grids]
    assert all(fine <= coarse + 1e-9 for fine, coarse in pairwise(found))


def half_sampled_delta(multiplier, eps):
    """The closed form of add-remove at rate 1/2: the loss exceeds eps right of `edge`."""
    edge = multiplier**2 * math.log(2 * math.exp(eps) - 1) + 0.5
    right = stats.norm.sf((edge - 1) / multiplier)
    return 0.5 * (right + stats.norm.sf(edge / multiplier)) - math.exp(
        eps + stats.norm.logsf(edge / multiplier)
    )


def test_grid_too_large_for_memory_is_coarsened_upwards():
    """Noise of 0.05 has a loss of hundreds."""
    event = PoissonSampled(0.5, Gaussian(0.05))
    found = epsilon(event, 1, 1e-5, Relation.ADD_REMOVE, interval=COARSE)
    plain = epsilon(Gaussian(0.05), 1, 1e-5, Relation.ADD_REMOVE)
    assert 0.9 * plain < found < 1.001 * plain
    assert half_sampled_delta(0.05, found) <= 1e-5 < half_sampled_delta(0.05, 0.999 * found)


# --- edges ---


@pytest.mark.parametrize("accountant", LIBRARY)
def test_no_releases_cost_nothing(accountant):
    assert epsilon(Gaussian(1.0), 0, 1e-5, Relation.ADD_REMOVE, accountant) == 0
    event = PoissonSampled(0.1, Gaussian(1.0))
    assert epsilon(event, 0, 1e-5, Relation.ADD_REMOVE, accountant) == 0


def test_negative_count_is_refused():
    with pytest.raises(BadInput, match="-1"):
        epsilon(Gaussian(1.0), -1, 1e-5, Relation.ADD_REMOVE)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_delta_that_is_no_probability_is_refused(delta):
    with pytest.raises(BadInput, match="delta"):
        epsilon(Gaussian(1.0), 1, delta, Relation.ADD_REMOVE)


@pytest.mark.parametrize("accountant", LIBRARY)
@pytest.mark.parametrize("event", [Gaussian(0.0), PoissonSampled(0.1, Gaussian(0.0))], ids=str)
def test_no_noise_means_infinity(event, accountant):
    assert epsilon(event, 1, 1e-5, Relation.ADD_REMOVE, accountant) == math.inf


@pytest.mark.parametrize(
    ("event", "relation", "accountant"),
    [
        (PoissonSampled(0.1, Gaussian(1.0)), Relation.REPLACE, Accountant.RDP),
        (FixedSampled(1, 10, Gaussian(1.0)), Relation.REPLACE, Accountant.PLD),
        (FixedSampled(1, 10, Gaussian(1.0)), Relation.ADD_REMOVE, Accountant.RDP),
        (FixedSampled(1, 10, Gaussian(1.0)), Relation.ZERO_OUT, Accountant.RDP),
        (FixedSampled(1, 10, Gaussian(1.0)), Relation.ADD_REMOVE, Accountant.PLD),
        (FixedSampled(1, 10, Gaussian(1.0)), Relation.ZERO_OUT, Accountant.PLD),
    ],
    ids=str,
)
def test_entry_that_is_not_in_the_table_is_refused(event, relation, accountant):
    assert not supports(event, relation, accountant)
    for count in (0, 1):
        with pytest.raises(UnsupportedEvent, match=str(relation)):
            epsilon(event, count, 1e-5, relation, accountant)


def test_table_has_these_entries_and_no_others():
    pld, rdp = Accountant.PLD, Accountant.RDP
    binomial, pure, published = Accountant.BINOMIAL, Accountant.PURE, Accountant.PUBLISHED
    every, replaced = list(Relation), [Relation.REPLACE]
    table = {
        Gaussian(1.0): {pld: every, rdp: every},
        PoissonSampled(0.1, Gaussian(1.0)): {pld: every, rdp: ONE_ROW},
        FixedSampled(1, 10, Gaussian(1.0)): {rdp: replaced},
        Laplace(1.0): {pure: every},
        FuGaussian(1.0, 1.0): {published: every},
        TwoPoint(1.0): {binomial: replaced, pure: replaced},
        PureReport(1.0): {binomial: replaced, pure: replaced},
        Shuffled(TwoPoint(1.0), 10): {pld: replaced},
        GaussianWithBit(Gaussian(1.0), TwoPoint(1.0)): {pld: replaced},
        GaussianWithCurator(Gaussian(1.0), Gaussian(1.0), 3): {pld: replaced, rdp: replaced},
    }
    assert {type(event) for event in table} == set(get_args(Event))
    for event, known in table.items():
        for accountant in Accountant:
            found = [r for r in Relation if supports(event, r, accountant)]
            assert found == known.get(accountant, []), (event, accountant)


def test_negative_noise_is_never_worth_anything():
    """A negative multiplier once had epsilon 0."""
    with pytest.raises(BadInput):
        epsilon(Gaussian(-1.0), 1, 1e-5, Relation.ADD_REMOVE)


@pytest.mark.parametrize(
    "event",
    [
        Gaussian(2.5),
        Laplace(2.5),
        FuGaussian(2.5, 1.0),
        GaussianWithBit(Gaussian(2.5), TwoPoint(1.0)),
        PoissonSampled(0.1, Gaussian(2.5)),
        FixedSampled(1, 9, Gaussian(2.5)),
    ],
    ids=str,
)
def test_noise_of_an_event(event):
    assert noise_in(event) == 2.5


def test_reports_have_no_multiplier():
    assert noise_in(TwoPoint(1.0)) == noise_in(Shuffled(TwoPoint(1.0), 9)) == math.inf
    assert noise_in(PureReport(1.0)) == math.inf


@pytest.mark.parametrize(
    ("added", "claimed", "enough"),
    [
        (2.0, 2.0, True),
        (2.0, 1.0, True),
        (1.0, 2.0, False),
        (1.0, 1 + 1e-10, True),
        (1.0, 1 + 1e-8, False),
        (0.0, 0.0, True),
        (1e9, math.inf, False),
        (math.inf, math.inf, True),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
    ],
)
def test_noise_covers_what_is_claimed_if_there_is_no_less_of_it(added, claimed, enough):
    assert covers(added, claimed) is enough


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


# --- silence ---


def test_library_is_known_to_talk(caplog):
    """If this fails, the library became quiet and the next test proves nothing."""
    accountant = dpa.rdp.RdpAccountant(
        neighboring_relation=dpa.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    with caplog.at_level(logging.DEBUG):
        accountant.compose(dpa.PoissonSampledDpEvent(0.5, dpa.GaussianDpEvent(10.0)), 3)
        accountant.get_epsilon(1e-5)
    assert caplog.records


def test_library_does_not_talk_to_the_user(caplog, capfd):
    logger = logging.getLogger("absl")
    before = logger.level
    event = PoissonSampled(0.5, Gaussian(10.0))
    with caplog.at_level(logging.WARNING):
        for accountant in LIBRARY:
            epsilon(event, 3, 1e-5, Relation.ADD_REMOVE, accountant, interval=0.01)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
    assert logger.level == before


@pytest.mark.parametrize("event", [PoissonSampled(0.5, Gaussian(1e-5))])
def test_a_loss_that_no_grid_holds_is_infinite(event):
    assert epsilon(event, 10**6, 1e-9, Relation.ADD_REMOVE) == math.inf
    assert epsilon(event, 10**6, 1e-9, Relation.REPLACE) == math.inf


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
