"""The bound by hand: its terms, its closed form, its noise, and what it refuses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil import Budget
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.events import Gaussian
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import Fixed, PerGradient
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.sampling import RoundRobin
from fedveil.training.cohort import Batches
from fedveil.training.work import ClientSgd, Decay
from fedveil.tuning.theory import (
    NO_NOISE,
    Constants,
    GaussianNoise,
    LaplaceNoise,
    Sizes,
    constant_rate,
    decayed_bound,
    error_bound,
    is_rate_covered,
)
from tests.tuning.theory_examples import GAUSSIAN, HAND, LAPLACE, SOME, PowerNoise, decayed


def test_the_recursion_by_hand():
    """E = 2 in two rounds: B = 6 x 2 x 0.25 + 8 x 9 = 75, C = 4 x 3 / (2 x 4) x 4 x 9 = 54."""
    noise = PowerNoise(0.1, 1.0)
    variance = 1 * (0.1 * 0.2) ** 2  # ceil(2 x 2 / 5) = 1 turn, reach 2 x 0.1
    y = 7.0
    for _ in range(2):
        y = 0.95 * y + 0.01 * 75
        y = 0.95 * y + 0.01 * (75 + 54) + 4 * variance / 2
    found = error_bound(HAND, SOME, noise, constant_rate(0.1), steps=2, rounds=2)
    assert found == pytest.approx(y, rel=1e-12)


def test_the_closed_form_by_hand():
    """gamma = 32, E = 1, two rounds: B = 3, C = 13.5, D = p v / (b eta^2) = 4 x 0.01 / 2."""
    noise = PowerNoise(0.1, 1.0)
    top = 31 * 30 * 7.0 + 16 * (2 * 3 + 2 * (13.5 + 0.02))
    found = decayed_bound(HAND, SOME, noise, steps=1, rounds=2)
    assert found == pytest.approx(top / (33 * 32), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "value", "cohort", "steps", "rounds", "recursion", "closed"),
    [
        # B = 6 x 2 x 0.25 = 3: 0.01 x 3 x (1 + 0.95), and 16 x 2 x 3 / (33 x 32)
        ("heterogeneity", 0.25, 5, 2, 1, 0.0585, 1 / 11),
        # B = 8 x 2^2 x 3^2 = 288: 0.01 x 288 x (1 + 0.95 + 0.9025), and 16 x 3 x 288 / (34 x 33)
        ("gradient", 3.0, 5, 3, 1, 8.2152, 2304 / 187),
        # C = 4 x 3 / (2 x 4) x 3^2 = 13.5: 0.01 x 13.5 x (1 + 0.95), and 16 x 2 x 13.5 / (33 x 32)
        ("gradient", 3.0, 2, 1, 2, 0.26325, 9 / 22),
    ],
    ids=["heterogeneity", "drift", "cohort"],
)
def test_each_term_alone_is_the_number_computed_by_hand(
    name, value, cohort, steps, rounds, recursion, closed
):
    """From the optimum and without noise, so that one term is all there is.

    Runs on quadratic losses stay so far below the bound that it could be half of itself.
    """
    quiet = replace(HAND, heterogeneity=0.0, gradient=0.0, distance=0.0)
    given, some = replace(quiet, **{name: value}), Sizes(5, cohort, 4)
    lengths = {"steps": steps, "rounds": rounds}
    found = error_bound(given, some, NO_NOISE, constant_rate(0.1), **lengths)
    assert found == pytest.approx(recursion, rel=1e-12)
    assert decayed_bound(given, some, NO_NOISE, **lengths) == pytest.approx(closed, rel=1e-12)


def test_without_errors_to_add_closed_form_and_recursion_are_the_same():
    quiet = Constants(2.0, 0.5, 0.0, 0.0, 7.0, exact=True)
    for steps, rounds in ((1, 1), (3, 5), (40, 2)):
        rate = decayed(quiet, steps)
        found = decayed_bound(quiet, SOME, NO_NOISE, steps=steps, rounds=rounds)
        wanted = error_bound(quiet, SOME, NO_NOISE, rate, steps=steps, rounds=rounds)
        assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "noise",
    [NO_NOISE, LAPLACE, GAUSSIAN, PowerNoise(3.0, 1.5)],
    ids=lambda noise: type(noise).__name__,
)
def test_the_closed_form_is_above_the_recursion_and_not_far(noise):
    for steps in (1, 2, 7, 32):
        for rounds in (1, 3, 50):
            found = decayed_bound(HAND, SOME, noise, steps=steps, rounds=rounds)
            used = max(32.0, steps)

            def rate(k, used=used):
                return 2 / (0.5 * (k + used))

            recursion = error_bound(HAND, SOME, noise, rate, steps=steps, rounds=rounds)
            assert recursion * (1 - 1e-12) <= found <= 2.1 * recursion


def test_a_rate_outside_the_theory_is_infinite():
    def bound(rate, steps=2, rounds=3):
        return error_bound(HAND, SOME, NO_NOISE, rate, steps=steps, rounds=rounds)

    assert math.isfinite(bound(constant_rate(1 / 8)))
    assert bound(constant_rate(0.126)) == math.inf
    assert bound(lambda k: 0.01 * (1 + k)) == math.inf  # rises
    assert bound(lambda k: 0.1 * 0.49**k) == math.inf  # falls by more than half in a round
    assert math.isfinite(bound(lambda k: 0.1 * 0.49**k, steps=1))
    assert bound(lambda k: np.full(len(k), math.nan)) == math.inf


def test_a_single_round_must_be_gentle_too():
    rates = np.array([0.1, 0.06, 0.04])
    assert not is_rate_covered(HAND, rates, 3)
    assert is_rate_covered(HAND, rates, 1)
    assert is_rate_covered(HAND, np.array([0.1, 0.06, 0.05]), 3)


@pytest.mark.parametrize(("steps", "rounds"), [(0, 1), (1, 0), (-1, 2)])
def test_no_steps_and_no_rounds_are_refused(steps, rounds):
    with pytest.raises(BadInput, match="at least 1"):
        error_bound(HAND, SOME, NO_NOISE, constant_rate(0.1), steps=steps, rounds=rounds)
    with pytest.raises(BadInput, match="at least 1"):
        decayed_bound(HAND, SOME, NO_NOISE, steps=steps, rounds=rounds)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"convexity": 0.0}, "convexity is 0.0: the theory needs strongly convex"),
        ({"convexity": -1.0}, "simulate instead"),
        ({"convexity": 3.0}, "above smoothness"),
        ({"smoothness": math.inf}, "smoothness is inf"),
        ({"smoothness": math.nan}, "smoothness is nan"),
        ({"heterogeneity": -0.1}, "heterogeneity is -0.1"),
        ({"gradient": math.nan}, "gradient is nan"),
        ({"distance": math.inf}, "distance is inf"),
    ],
)
def test_constants_that_cannot_be_are_refused(changed, words):
    given = {**HAND.__dict__, **changed}
    with pytest.raises(BadInput, match=words):
        Constants(**given)


@pytest.mark.parametrize("given", [(0, 1, 1), (3, 0, 1), (3, 4, 1), (3, 1, 0)])
def test_federations_that_cannot_be_are_refused(given):
    with pytest.raises(BadInput):
        Sizes(*given)


@pytest.mark.parametrize(("clients", "cohort"), [(10, 1), (10, 3), (10, 10), (7, 5)])
def test_turns_are_those_of_the_busiest_client_in_turn(clients, cohort):
    counts = np.zeros(clients, dtype=int)
    for rounds in range(1, 25):
        counts[RoundRobin(cohort).cohort(clients, rounds, Streams(3))] += 1
        assert Sizes(clients, cohort, 1).most_turns(rounds) == counts.max()


@pytest.mark.parametrize(
    ("noise", "z"),
    [(NO_NOISE, 0), (LAPLACE, 2), (GAUSSIAN, 1), (PowerNoise(0.3, 0.5), 0.5)],
    ids=lambda value: str(value) if isinstance(value, float | int) else type(value).__name__,
)
def test_variance_goes_with_turns_to_the_z_and_with_the_square_of_reach(noise, z):
    assert noise.exponent == z
    reach = np.array([0.1, 0.2, 0.7])
    once = noise.variance(reach, 1)
    assert (once > 0).all() or noise is NO_NOISE
    for turns in (2, 10, 1000):
        assert noise.variance(reach, turns) == pytest.approx(turns**z * once, rel=1e-12)
    assert noise.variance(3 * reach, 7) == pytest.approx(9 * noise.variance(reach, 7), rel=1e-12)


@pytest.mark.parametrize("laplace", [True, False], ids=["laplace", "gaussian"])
@pytest.mark.parametrize(("clients", "cohort", "rounds"), [(10, 3, 1), (10, 3, 9), (50, 50, 20)])
def test_noise_is_what_the_privacy_plan_adds(laplace, clients, cohort, rounds):
    """Round by round, for a decaying rate; the Gaussian one to what calibration leaves open."""
    zeta, budget = 1.7, Budget(3.0, 1e-5)
    work = ClientSgd(Batches(0, steps=4), 0.1, decay=Decay(0.5, 40.0))
    rule = PerGradient(Fixed(zeta, Norm.L1 if laplace else Norm.L2), work.reach)
    plan = client_noise(
        RoundRobin(cohort), clients, rule, laplace=laplace, rounds=rounds, budgets=(budget,)
    )
    if laplace:
        noise = LaplaceNoise(budget.epsilon, zeta)
    else:
        one = least_noise(Gaussian, 1, budget, Relation.REPLACE)
        noise = GaussianNoise(one, zeta)
    turns = Sizes(clients, cohort, 3).most_turns(rounds)
    moving = plan.first_state(torch.zeros(3))
    for r in range(1, rounds + 1):
        scale = plan.release.scales(plan.clip(moving, r), np.zeros(1, dtype=np.int64))[0]
        found = noise.variance(np.array([work.reach(r)]), turns)[0]
        assert found == pytest.approx(
            (2 if laplace else 1) * scale**2, rel=1e-9 if laplace else 2e-3
        )
        if laplace:
            assert scale == pytest.approx(turns * 2 * zeta * work.reach(r) / 3.0, rel=1e-9)
