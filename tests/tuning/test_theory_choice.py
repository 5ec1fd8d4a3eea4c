"""What is chosen by the bound: local steps and rounds, and how the error goes with both."""

import math

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.tuning.theory import (
    NO_NOISE,
    Constants,
    GaussianNoise,
    LaplaceNoise,
    Sizes,
    best_rounds,
    best_steps,
    convergence,
    decayed_bound,
    rule_of_thumb,
)
from tests.tuning.theory_examples import HAND, SOME, PowerNoise


def shape(z, iterations):
    """E^2 / T + E^(1 - z) T^(z - 1) for E = 1, ..., T."""
    e = np.arange(1.0, iterations + 1)
    return e**2 / iterations + e ** (1 - z) * iterations ** (z - 1)


def test_below_one_the_best_e_is_one():
    """z = 0.5, T = 10^6: the published rule says E = 100 and ends ten times as far away or more."""
    values = shape(0.5, 10**6)
    assert values.argmin() == 0
    assert rule_of_thumb(0.5, 10**6) == 1.0
    assert values[99] > 10 * values[0]


@pytest.mark.parametrize("iterations", [10**4, 10**6])
def test_above_one_the_best_e_is_a_power_of_t(iterations):
    best = 1 + int(shape(2.0, iterations).argmin())
    assert best == pytest.approx(0.5 ** (1 / 3) * iterations ** (2 / 3), rel=0.01)
    assert rule_of_thumb(2.0, iterations) == pytest.approx(iterations ** (2 / 3), rel=1e-12)


def test_at_one_constants_decide():
    assert rule_of_thumb(1.0, 1000) is None


@pytest.mark.parametrize("z", [0.0, 0.5, 0.9, 1.0, 1.5, 2.0, 3.0])
def test_verdicts_are_the_slopes_of_the_shape(z):
    """log2 of what happens to the error when T doubles, E fixed at 3 and E chosen best."""
    few, many = shape(z, 2**20), shape(z, 2**21)
    found = convergence(z)
    assert found.fixed_power == pytest.approx(math.log2(many[2] / few[2]), abs=0.02)
    assert found.best_power == pytest.approx(math.log2(many.min() / few.min()), abs=0.02)
    assert (found.best_power < 0) == (z < 1)
    word = "converges" if z < 1 else "constant" if z == 1 else "diverges"
    assert word in str(found)


@pytest.mark.parametrize("z", [-0.1, math.nan, math.inf])
def test_a_z_that_cannot_be_is_refused(z):
    with pytest.raises(BadInput, match="z is"):
        convergence(z)


def test_the_bound_itself_goes_as_its_verdict_says():
    """Noise that decides: doubling T doubles the Laplace bound, leaves the Gaussian one, and halves
    the root of one with z = 0.5."""
    quiet = Constants(2.0, 0.5, 0.0, 0.0, 1.0, exact=True)
    everyone = Sizes(4, 4, 100)
    for noise in (LaplaceNoise(0.1, 5.0), GaussianNoise(5.0, 5.0), PowerNoise(50.0, 0.5)):
        few, many = (
            decayed_bound(quiet, everyone, noise, steps=2, rounds=r) for r in (20_000, 40_000)
        )
        assert math.log2(many / few) == pytest.approx(
            convergence(noise.exponent).fixed_power, abs=0.01
        )


@pytest.mark.parametrize("noise", [NO_NOISE, LaplaceNoise(1.0, 5.0), GaussianNoise(1.0, 5.0)])
def test_best_steps_is_the_true_minimiser(noise):
    def bound(steps, rounds):
        return decayed_bound(HAND, SOME, noise, steps=steps, rounds=rounds)

    iterations = 90
    values = {}
    for e in range(1, iterations + 1):
        values[e] = bound(e, max(1, round(iterations / e)))
    found = best_steps(bound, iterations)
    assert values[found] == min(values.values())
    assert found == min(e for e, value in values.items() if value == values[found])
    assert (found > 1) == isinstance(noise, LaplaceNoise)


def test_best_steps_of_a_known_function():
    assert best_steps(lambda e, rounds: abs(e - 7) + 0 * rounds, 20) == 7
    assert best_steps(lambda e, rounds: abs(e - 7), 5) == 5
    assert best_steps(lambda e, rounds: -rounds, 5) == 1
    assert best_steps(lambda e, rounds: 0.0, 1) == 1
    seen = []
    best_steps(lambda e, rounds: seen.append((e, rounds)) or 0.0, 5)
    assert seen == [(1, 5), (2, 2), (3, 2), (4, 1), (5, 1)]
    with pytest.raises(BadInput, match="iterations is 0"):
        best_steps(lambda e, rounds: 0.0, 0)


def test_best_rounds_is_where_more_of_them_hurt():
    def bound(steps, rounds):
        noise = LaplaceNoise(50.0, 1.0)
        return decayed_bound(HAND, Sizes(5, 5, 4), noise, steps=steps, rounds=rounds)

    found = best_rounds(bound, 2)
    values = [bound(2, r) for r in range(1, 1001)]
    assert values[found - 1] == min(values)
    assert 1 < found < 1000
    assert bound(2, found) < min(bound(2, found - 1), bound(2, found + 1))


def test_best_rounds_are_the_most_looked_at_where_the_bound_only_falls():
    def bound(steps, rounds):
        return decayed_bound(HAND, SOME, NO_NOISE, steps=steps, rounds=rounds)

    assert best_rounds(bound, 1, most=50) == 50
    assert best_rounds(lambda steps, rounds: abs(rounds - 4) + steps, 3, most=9) == 4


def test_laplace_noise_asks_for_more_local_steps_than_gaussian():
    """The minimiser of the bound grows like T^(2/3) for Laplace noise that decides."""
    flat = Constants(1.0, 1.0, 0.0, 1.0, 1.0, exact=True)

    def best(iterations):
        noise = PowerNoise(3.0, 2.0)
        everyone = Sizes(1, 1, 1)
        return best_steps(
            lambda e, r: decayed_bound(flat, everyone, noise, steps=e, rounds=r), iterations
        )

    assert best(1600) / best(200) == pytest.approx(8 ** (2 / 3), rel=0.35)
