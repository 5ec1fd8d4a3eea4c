"""What a shuffler adds, against sums over all reports and inputs done here."""

import math
from itertools import combinations_with_replacement, pairwise, product

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.closed_forms import (
    randomised_response_epsilon,
    shuffled_delta,
    shuffled_epsilon,
)


def count_law(chances):
    """The law of how many of independent reports are high."""
    law = np.ones(1)
    for chance in chances:
        law = np.append(law * (1 - chance), 0.0) + np.append(0.0, law * chance)
    return law


def hockey_stick(first, second, eps):
    return float(np.maximum(first - math.exp(eps) * second, 0).sum())


def pairs(eps0, reports, inputs):
    """The laws of the count for every pair of inputs of one client and every pattern of others."""
    p = 1 / (1 + math.exp(-eps0))
    chances = [0.5 + x * (p - 0.5) for x in inputs]
    for others in combinations_with_replacement(chances, reports - 1):
        for mine, its in product(chances, repeat=2):
            yield count_law((*others, mine)), count_law((*others, its))


@pytest.mark.parametrize("eps0", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("reports", [1, 2, 3, 6])
def test_one_release_is_the_worst_over_extremes_in_both_directions(eps0, reports):
    epsilons = np.array([-0.5 * eps0, -0.1, 0.0, 0.05, 0.3 * eps0, 0.7 * eps0, 0.99 * eps0])
    laws = list(pairs(eps0, reports, (-1, 1)))
    worst = [max(hockey_stick(a, b, e) for a, b in laws) for e in epsilons]
    assert shuffled_delta(eps0, reports, epsilons) == pytest.approx(worst, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("eps0", "reports"), [(1.0, 5), (2.5, 4)])
def test_inputs_between_the_extremes_are_never_worse(eps0, reports):
    epsilons = np.array([0.0, 0.1 * eps0, 0.4 * eps0, 0.8 * eps0])
    bound = shuffled_delta(eps0, reports, epsilons)
    for first, second in pairs(eps0, reports, (-1, -0.4, 0.0, 0.7, 1)):
        for eps, limit in zip(epsilons, bound, strict=True):
            assert hockey_stick(first, second, eps) <= limit + 1e-12


def test_no_pattern_of_the_others_is_worst_everywhere():
    """Why the maximum is taken at every epsilon, not once."""
    p, worst = 1 / (1 + math.exp(-1.0)), []
    for eps in (0.0, 0.6):
        found = []
        for high in range(100):
            others = [p] * high + [1 - p] * (99 - high)
            rest = count_law(others)
            up, down = (np.append(rest * (1 - q), 0) + np.append(0, rest * q) for q in (p, 1 - p))
            found.append(hockey_stick(up, down, eps))
        worst.append(int(np.argmax(found)))
    assert worst == [42, 99]


def composed_delta(first, second, count, eps):
    """The same release `count` times, outcome by outcome."""
    total = 0.0
    for outcome in product(range(len(first)), repeat=count):
        one = math.prod(first[k] for k in outcome)
        total += max(one - math.exp(eps) * math.prod(second[k] for k in outcome), 0)
    return total


@pytest.mark.parametrize(("eps0", "reports", "count"), [(1.0, 4, 3), (2.0, 3, 4), (0.5, 6, 2)])
@pytest.mark.parametrize("delta", [1e-4, 1e-2])
def test_composition_covers_every_fixed_pair(eps0, reports, count, delta):
    found = shuffled_epsilon(eps0, reports, count, delta)
    exact = [composed_delta(a, b, count, found) for a, b in pairs(eps0, reports, (-1, 1))]
    assert max(exact) <= delta * (1 + 1e-6)
    assert found <= count * eps0
    loose = [composed_delta(a, b, count, 0.8 * found) for a, b in pairs(eps0, reports, (-1, 1))]
    assert max(loose) > delta


def test_composition_covers_patterns_that_change_between_releases():
    """Others may be all low at one position and half high at the next."""
    found, extremes = shuffled_epsilon(1.0, 4, 3, 1e-3), list(pairs(1.0, 4, (-1, 1)))
    for chosen in combinations_with_replacement(extremes, 3):
        (a1, b1), (a2, b2), (a3, b3) = chosen
        one = np.einsum("i,j,k->ijk", a1, a2, a3)
        other = np.einsum("i,j,k->ijk", b1, b2, b3)
        assert np.maximum(one - math.exp(found) * other, 0).sum() <= 1e-3 * (1 + 1e-6)


def test_composition_agrees_with_an_fft_of_one_pattern():
    """All others low, 400 releases: the loss on a grid, rounded to nearest, by FFT."""
    p, reports, count, step = 1 / (1 + math.exp(-1.0)), 100, 400, 1e-4
    rest = count_law([1 - p] * (reports - 1))
    up, down = (np.append(rest * (1 - q), 0) + np.append(0, rest * q) for q in (p, 1 - p))
    size = 1 << 21
    grid = np.zeros(size)
    np.add.at(grid, np.round(np.log(up / down) / step).astype(int) % size, up)
    law = np.fft.irfft(np.fft.rfft(grid) ** count, size)
    loss = step * np.where(np.arange(size) < size // 2, np.arange(size), np.arange(size) - size)
    found = shuffled_epsilon(1.0, reports, count, 1e-5)

    def delta(eps):
        return float((law * -np.expm1(np.minimum(eps - loss, 0))).sum())

    assert delta(found) <= 1e-5
    assert delta(0.94 * found) > 1e-5


REFERENCE = [
    (1, 0.408),
    (10, 1.326),
    (100, 4.78),
    (1000, 19.65),
    (10**4, 102.8),
    (218_400, 1477),
    pytest.param(10**6, 6240, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("count", "epsilon"), REFERENCE)
def test_reference_values_of_a_hundred_reports(count, epsilon):
    assert shuffled_epsilon(1.0, 100, count, 1e-5) == pytest.approx(epsilon, rel=0.01)


@pytest.mark.parametrize(
    ("reports", "eps0", "epsilon"),
    [
        (1000, 1.0, 0.106),
        (1000, 4.0, 1.360),
        (200, 4.0, 4.0),
        (500, 10.0, 10.0),
        pytest.param(10_000, 1.0, 0.029, marks=pytest.mark.slow),
        pytest.param(10_000, 4.0, 0.265, marks=pytest.mark.slow),
    ],
)
def test_reference_values_of_one_release(reports, eps0, epsilon):
    """The printed 0.029 has two digits."""
    rel = 0.02 if epsilon < 0.1 else 0.01
    assert shuffled_epsilon(eps0, reports, 1, 1e-5) == pytest.approx(epsilon, rel=rel)


@pytest.mark.parametrize("count", [1, 30])
def test_more_reports_never_cost_more(count):
    found = [shuffled_epsilon(1.0, n, count, 1e-5) for n in (1, 2, 5, 20, 60, 200)]
    assert all(few >= many * (1 - 1e-4) for few, many in pairwise(found))
    assert found[-1] < found[0] / 2


@pytest.mark.parametrize("eps0", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("reports", [1, 2, 50])
@pytest.mark.parametrize("count", [1, 7, 300])
def test_never_above_randomised_response(eps0, reports, count):
    alone = randomised_response_epsilon(eps0, count, 1e-5)
    assert shuffled_epsilon(eps0, reports, count, 1e-5) <= alone


def test_one_report_hides_nothing():
    assert shuffled_epsilon(1.0, 1, 5, 1e-5) == pytest.approx(
        randomised_response_epsilon(1.0, 5, 1e-5), rel=1e-6
    )


def test_no_release_costs_nothing():
    assert shuffled_epsilon(1.0, 100, 0, 1e-5) == 0


@pytest.mark.parametrize("reports", [0, -4])
def test_shuffle_of_nothing_is_refused(reports):
    with pytest.raises(BadInput, match=r"^reports is "):
        shuffled_epsilon(1.0, reports, 1, 1e-5)


def test_grid_rounds_up():
    """The profile on the grid is never below the exact one."""
    found = shuffled_epsilon(1.0, 100, 1, 1e-5)
    assert float(shuffled_delta(1.0, 100, np.array([found]))[0]) <= 1e-5
    assert float(shuffled_delta(1.0, 100, np.array([0.995 * found]))[0]) > 1e-5


@pytest.mark.parametrize("eps0", [37.0, 40.0, 800.0])
def test_report_that_hides_next_to_nothing_is_worth_what_it_is_alone(eps0):
    """1 - p rounds to 0, which no sum over reports survives."""
    assert shuffled_epsilon(eps0, 10, 3, 1e-5) == randomised_response_epsilon(eps0, 3, 1e-5)


def test_reports_beyond_twenty_thousand_change_nothing(monkeypatch):
    asked = []

    def law(eps0, reports, interval):
        asked.append((reports, interval))
        raise KeyError

    monkeypatch.setattr("fedveil.privacy.accounting.closed_forms._shuffled_losses", law)
    for reports in (20_000, 10**6, 10**12):
        with pytest.raises(KeyError):
            shuffled_epsilon(1.0, reports, 1, 1e-5)
    assert len(set(asked)) == 1
    assert asked[0][0] == 20_000
