"""Sampled Gaussians against quadrature, published tables, and one accountant against another."""

import math
from itertools import pairwise

import pytest
from scipy import stats
from scipy.special import gammaln, logsumexp

from fedveil.privacy.accounting.claims import Accountant, Relation
from fedveil.privacy.accounting.closed_forms import gaussian_epsilon
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import FixedSampled, Gaussian, PoissonSampled
from tests.privacy.accounting.quadrature import (
    COARSE,
    LIBRARY,
    ONE_ROW,
    hockey_stick,
    hockey_stick_of_two,
    mostly_slow,
    pair,
)

ROUNDS_TABLE = [
    (30 / 2400, 300, 1e-5, {1: (1.147, 1.232), 3: (0.749, 3.697), 8: (0.540, 9.576)}),
    (30 / 3383, 1000, 1e-5, {1: (1.299, 1.114), 3: (0.780, 3.582), 8: (0.568, 9.376)}),
    (0.1, 100, 1e-4, {1: (3.380, 1.125), 3: (1.495, 3.394), 8: (0.862, 9.222)}),
]


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
