"""The bound against what private local SGD does, its shape, its noise, and what is chosen by it.

Clients have quadratic losses, so the error of a run is known in two ways: by running it many times,
and exactly, since the first two moments of the model go through a round in closed form.
"""

import itertools
import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from fedveil import Budget, FederatedData, Fixed, PerGradient, Task, Training, squared_error, train
from fedveil.errors import BadInput
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.events import Gaussian
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.rows import Norm
from fedveil.privacy.sampling import Everyone, FixedSize, RoundRobin
from fedveil.training.batches import Batches
from fedveil.training.gradients.choice import Mode
from fedveil.training.work import ClientSgd, Decay
from fedveil.tuning.constants import constants_of
from fedveil.tuning.theory import (
    Constants,
    GaussianNoise,
    LaplaceNoise,
    NoNoise,
    Sizes,
    best_rounds,
    best_steps,
    constant,
    decayed_bound,
    error_bound,
    rate_is_slow,
    rule_of_thumb,
    verdict,
)

SIGMAS = 6.0
"""Standard errors that a mean of hundreds of runs may be off: false alarms are below 1e-6, some
skewness allowed for (1e-9 for a normal mean)."""


@dataclass(frozen=True)
class PowerNoise:
    """Any mechanism that states its z: std scale x turns^(z/2) x reach."""

    scale: float
    exponent: float

    def variance(self, reach, turns):
        return turns**self.exponent * (self.scale * reach) ** 2


@dataclass(frozen=True)
class Problem:
    """Client l's loss is w'H_l w / 2 - h_l'w; H [N, p, p], h [N, p], and where a run starts [p]."""

    curvature: np.ndarray
    slope: np.ndarray
    start: np.ndarray

    @property
    def clients(self):
        return len(self.slope)

    @property
    def size(self):
        return len(self.start)

    @property
    def best(self):
        return np.linalg.solve(self.curvature.mean(axis=0), self.slope.mean(axis=0))

    def constants(self, gradient):
        values = np.linalg.eigvalsh(self.curvature)
        own = np.linalg.solve(self.curvature, self.slope[..., None])[..., 0]
        away = self.best - own
        gaps = np.einsum("li,lij,lj->l", away, self.curvature, away) / 2
        distance = float(((self.start - self.best) ** 2).sum())
        return Constants(values.max(), values.min(), gaps.mean(), gradient, distance, exact=True)


def problem(seed, clients=6, size=3, mu=0.5, smoothness=2.0, spread=1.0, away=2.0):
    """Curvatures from mu to `smoothness`, clients' optima `spread` apart, a start far `away`."""
    drawn = np.random.default_rng(seed)
    turn = np.linalg.qr(drawn.normal(size=(clients, size, size)))[0]
    values = drawn.uniform(mu, smoothness, (clients, size))
    values[0, 0], values[-1, -1] = mu, smoothness
    curvature = np.einsum("lij,lj,lkj->lik", turn, values, turn)
    slope = np.einsum("lij,lj->li", curvature, spread * drawn.normal(size=(clients, size)))
    return Problem(curvature, slope, away * drawn.normal(size=size))


def simulated(p, cohort, rates, add, repetitions, seed):
    """|theta - theta*|^2 after each round of each run [rounds, runs], and the longest gradient.

    `rates` is [rounds, steps]; `add(drawn, round, shape)` is the noise of one client's report.
    """
    drawn = np.random.default_rng(seed)
    here = np.tile(p.start, (repetitions, 1))
    errors, longest = [], 0.0
    for r, etas in enumerate(rates):
        local = np.repeat(here[:, None, :], p.clients, axis=1)
        for eta in etas:
            gradient = np.einsum("lij,rlj->rli", p.curvature, local) - p.slope
            longest = max(longest, float(np.linalg.norm(gradient, axis=2).max()))
            local = local - eta * gradient
        order = np.argsort(drawn.random((repetitions, p.clients)), axis=1)[:, :cohort]
        reports = np.take_along_axis(local, order[..., None], axis=1)
        here = (reports + add(drawn, r, reports.shape)).mean(axis=1)
        errors.append(((here - p.best) ** 2).sum(axis=1))
    return np.array(errors), longest


def expected(p, cohort, rates, variances):
    """E|theta - theta*|^2 after each round, exactly, and the longest gradient in mean square.

    (theta - theta*, 1) goes through a client's round by a matrix P_l. The second moment of the mean
    of b of N of them takes the P_l S P_l' and the P_l S P_m' with their chances.
    """
    n, b, width = p.clients, cohort, p.size + 1
    pull = p.slope - p.curvature @ p.best
    slopes = np.concatenate([p.curvature, -pull[..., None]], axis=2)
    here = np.append(p.start - p.best, 1.0)
    moment = np.outer(here, here)
    errors, longest = [], 0.0
    for etas, variance in zip(rates, variances, strict=True):
        way = np.tile(np.eye(width), (n, 1, 1))
        for eta in etas:
            gradient = slopes @ way
            longest = max(longest, np.einsum("lij,jk,lik->l", gradient, moment, gradient).max())
            way[:, : p.size] -= eta * gradient
        same = np.einsum("lij,jk,lmk->im", way, moment, way)
        crossed = way.sum(axis=0) @ moment @ way.sum(axis=0).T - same
        moment = same / (b * n)
        if b > 1:
            moment += (b - 1) / (b * n * (n - 1)) * crossed
        moment[: p.size, : p.size] += variance / b * np.eye(p.size)
        errors.append(float(np.trace(moment) - 1))
    return np.array(errors), math.sqrt(longest)


def decayed(constants, steps):
    gamma = max(constants.least_gamma, steps)
    return lambda k: 2 / (constants.convexity * (k + gamma))


def rates_of(rate, steps, rounds):
    return rate(np.arange(float(steps * rounds))).reshape(rounds, steps)


def as_planned(noise, sizes, rounds):
    """The noise of a run that was planned for that many rounds, in any of them."""
    once = float(noise.variance(np.ones(1), sizes.turns(rounds))[0])
    return PowerNoise(math.sqrt(once), 0.0)


def bounds(constants, sizes, noise, rate, steps, rounds):
    """The bound after each round of a run of so many rounds."""
    planned = as_planned(noise, sizes, rounds)
    return np.array(
        [
            error_bound(constants, sizes, planned, rate, steps=steps, rounds=r + 1)
            for r in range(rounds)
        ]
    )


LAPLACE, GAUSSIAN = LaplaceNoise(60.0, 5.0), GaussianNoise(0.05, 5.0)


def adding(noise, variances):
    """How simulated clients draw the noise."""
    if isinstance(noise, LaplaceNoise):
        return lambda drawn, r, shape: drawn.laplace(0.0, math.sqrt(variances[r] / 2), shape)
    return lambda drawn, r, shape: drawn.normal(0.0, math.sqrt(variances[r]), shape)


def run(p, cohort, noise, rate, steps, rounds, repetitions=400, seed=0):
    """Simulate a run as it was planned."""
    rates = rates_of(rate, steps, rounds)
    sizes = Sizes(p.clients, cohort, p.size)
    variances = noise.variance(rates.sum(axis=1), sizes.turns(rounds))
    errors, longest = simulated(
        p, cohort, rates, adding(noise, variances), repetitions, np.random.SeedSequence(seed)
    )
    return errors, longest, expected(p, cohort, rates, variances)


def significant(larger, smaller):
    """Whether the first mean is above the second, by far more than chance (1e-6)."""
    gap = larger.mean() - smaller.mean()
    noise = math.hypot(larger.std(), smaller.std()) / math.sqrt(len(larger))
    return gap > SIGMAS * noise


RUNS = list(
    itertools.product(
        ("constant", "decayed"),
        ("laplace", "gaussian", "no"),
        ((1, 24), (3, 8), (6, 12)),
        (1, 2, 6),
    )
)


@pytest.mark.parametrize(
    ("kind", "name", "lengths", "cohort"),
    [
        pytest.param(*case, marks=[] if n % 4 == n // 27 else pytest.mark.slow)
        for n, case in enumerate(RUNS)
    ],
)
def test_runs_stay_below_the_bound_in_every_round(kind, name, lengths, cohort):
    (steps, rounds), noise = (
        lengths,
        {"laplace": LAPLACE, "gaussian": GAUSSIAN}.get(name, NoNoise()),
    )
    p = problem(seed=steps)
    rate = decayed(p.constants(0.0), steps) if kind == "decayed" else constant(0.12)
    errors, longest, (exact, _) = run(p, cohort, noise, rate, steps, rounds)
    limits = bounds(p.constants(longest), Sizes(6, cohort, 3), noise, rate, steps, rounds)
    margin = SIGMAS * errors.std(axis=1) / math.sqrt(errors.shape[1]) + 1e-9
    assert np.isfinite(limits).all()
    assert (errors.mean(axis=1) - margin <= limits).all()
    assert (abs(errors.mean(axis=1) - exact) <= margin).all()


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.slow if n % 4 else []) for n in range(120)]
)
def test_the_exact_error_stays_below_the_bound(seed):
    """Random problems, small and large curvature, noise and spread; no chance in it.

    Gradients count in root mean square, as in the proof.
    """
    drawn = np.random.default_rng(seed)
    clients, size = int(drawn.integers(2, 7)), int(drawn.integers(1, 4))
    p = problem(
        seed,
        clients,
        size,
        mu=2 * 10 ** drawn.uniform(-3, 0),
        spread=10 ** drawn.uniform(-2, 1),
        away=drawn.choice([0.0, 1.0, 10.0]),
    )
    cohort, steps, rounds = int(drawn.integers(1, clients + 1)), int(drawn.integers(1, 9)), 12
    sizes, before = Sizes(clients, cohort, size), p.constants(0.0)
    noise = PowerNoise(10 ** drawn.uniform(-3, 1), drawn.choice([1.0, 2.0]))
    for rate in (constant(1 / (4 * before.smoothness)), decayed(before, steps)):
        rates = rates_of(rate, steps, rounds)
        variances = noise.variance(rates.sum(axis=1), sizes.turns(rounds))
        errors, longest = expected(p, cohort, rates, variances)
        limits = bounds(p.constants(longest), sizes, noise, rate, steps, rounds)
        assert (errors <= limits * (1 + 1e-9)).all()


def test_noise_alone_is_bounded_exactly():
    """From the optimum, alike and round, one step: nothing but noise, p v / b, and no slack."""
    p = Problem(np.tile(np.eye(4), (5, 1, 1)), np.zeros((5, 4)), np.zeros(4))
    sizes, rate = Sizes(5, 2, 4), constant(0.2)
    for noise, variance in (
        (LAPLACE, 2 * (1 * 2 * 5.0 * 0.2 / 60.0) ** 2),
        (GAUSSIAN, (0.05 * 2 * 5.0 * 0.2) ** 2),
    ):
        found = error_bound(p.constants(0.0), sizes, noise, rate, steps=1, rounds=1)
        assert found == pytest.approx(4 * variance / 2, rel=1e-12)
        errors, _, _ = run(p, 2, noise, rate, 1, 1, repetitions=20_000)
        assert abs(errors.mean() - found) <= SIGMAS * errors.std() / math.sqrt(20_000)


class Least:
    """Federations of least squares for the engine, whose clients hold a few records each."""

    clients, features, records = 8, 2, 24

    def __init__(self):
        drawn = np.random.default_rng(4)
        x = drawn.normal(size=(self.clients, self.records, self.features)).astype(np.float32)
        wanted = drawn.normal(size=(self.clients, self.features, 1))
        y = (x @ wanted)[..., 0].astype(np.float32) + np.float32(0.5)
        flat, target = x.reshape(-1, self.features), y.reshape(-1)
        ends = np.arange(self.clients + 1) * self.records
        self.data = FederatedData(flat, target, ends, flat[:2], target[:2], 0)
        wide = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2).astype(np.float64)
        self.problem = Problem(
            2 / self.records * np.einsum("lni,lnj->lij", wide, wide),
            2 / self.records * np.einsum("lni,ln->li", wide, y.astype(np.float64)),
            np.zeros(3),
        )

    def task(self):
        module = nn.Linear(self.features, 1)
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)
        return Task(module, squared_error)


@pytest.mark.parametrize(
    ("sampler", "laplace", "is_decayed"),
    [(Everyone(), True, False), (FixedSize(3), False, True)],
    ids=["everyone-laplace", "some-gaussian-decayed"],
)
def test_trainings_do_what_the_theory_speaks_of(sampler, laplace, is_decayed):
    """The engine's mean error over 40 seeds is the exact one, round by round, and below the bound.

    Gradients stay below zeta, so that nothing is clipped.
    """
    least, steps, rounds, zeta, repetitions = Least(), 3, 5, 60.0, 40
    p, task = least.problem, least.task()
    constants = constants_of(task, least.data)
    decay = Decay(constants.convexity, constants.least_gamma) if is_decayed else None
    work = ClientSgd(Batches(0, steps=steps), 0.9 / (4 * constants.smoothness), decay=decay)
    rates = np.array([[work.rate(k, r + 1) for k in range(steps)] for r in range(rounds)])
    rule = PerGradient(Fixed(zeta, Norm.L1 if laplace else Norm.L2), work.reach)
    budget = Budget(800.0 if laplace else 400.0, 1e-5)
    plan = client_noise(
        sampler, least.clients, rule, laplace=laplace, rounds=rounds, budgets=(budget,)
    )
    errors = np.empty((rounds, repetitions))
    for seed in range(repetitions):
        task.parameters.zero_()
        training = Training(
            task, least.data, plan, work, seed=seed, mode=Mode.VECTORISED, workers=1, every=rounds
        )
        for r, result in enumerate(train(training)):
            assert result.clipped == 0
            errors[r, seed] = ((result.state.params.double().numpy() - p.best) ** 2).sum()
    cohort = round(sampler.expected(least.clients))
    scale = 2 * zeta * plan.release.multiplier * (math.sqrt(2) if laplace else 1.0)
    noise = PowerNoise(scale, 0.0)
    exact, longest = expected(p, cohort, rates, noise.variance(rates.sum(axis=1), 1))
    margin = SIGMAS * errors.std(axis=1) / math.sqrt(repetitions)
    assert (abs(errors.mean(axis=1) - exact) <= margin).all()
    flat = rates.reshape(-1)
    limits = bounds(
        p.constants(longest),
        Sizes(least.clients, cohort, 3),
        noise,
        lambda k: flat[: len(k)],
        steps,
        rounds,
    )
    assert np.isfinite(limits).all()
    assert (errors.mean(axis=1) - margin <= limits).all()


def final(p, cohort, noise, rate, steps, rounds):
    """The errors at the end of simulated runs, and the bound."""
    errors, longest, _ = run(p, cohort, noise, rate, steps, rounds, seed=steps * rounds)
    constants, sizes = p.constants(longest), Sizes(p.clients, cohort, p.size)
    bound = error_bound(constants, sizes, noise, rate, steps=steps, rounds=rounds)
    return errors[-1], bound


@pytest.mark.parametrize("is_decayed", [False, True], ids=["constant", "decayed"])
def test_with_laplace_noise_more_rounds_end_farther_away(is_decayed):
    p = problem(1, spread=0.1)
    rate = decayed(p.constants(0.0), 2) if is_decayed else constant(0.1)
    ends = [final(p, 6, LaplaceNoise(30.0, 5.0), rate, 2, rounds) for rounds in (10, 40, 160)]
    for (few, low), (many, high) in pairwise(ends):
        assert significant(many, few)
        assert high > low


def test_without_noise_more_rounds_end_closer():
    p = problem(1)
    ends = [final(p, 6, NoNoise(), decayed(p.constants(0.0), 2), 2, r) for r in (10, 40, 160)]
    for (few, low), (many, high) in pairwise(ends):
        assert many.mean() < few.mean()
        assert high < low


def test_more_local_steps_help_where_laplace_noise_decides():
    """From the optimum, so that noise is all there is, and slowly, so that it does not make the
    gradients any longer."""
    p = problem(2)
    p, noise = replace(p, start=p.best), LaplaceNoise(0.3, 5.0)
    ends = [final(p, 6, noise, constant(1e-4), e, 60 // e) for e in (1, 3, 12)]
    for (few, high), (many, low) in pairwise(ends):
        assert significant(few, many)
        assert low < high


def test_more_local_steps_hurt_where_drift_decides():
    p = problem(3, spread=3.0)
    noise = LaplaceNoise(1e4, 5.0)
    ends = [final(p, 6, noise, constant(0.12), e, 120 // e) for e in (1, 4, 20)]
    for (few, low), (many, high) in pairwise(ends):
        assert significant(many, few)
        assert high > low


HAND = Constants(
    smoothness=2.0, convexity=0.5, heterogeneity=0.25, gradient=3.0, distance=7.0, exact=True
)
SOME = Sizes(clients=5, cohort=2, parameters=4)


def test_the_recursion_by_hand():
    """E = 2 in two rounds: B = 6 x 2 x 0.25 + 8 x 9 = 75, C = 4 x 3 / (2 x 4) x 4 x 9 = 54."""
    noise = PowerNoise(0.1, 1.0)
    variance = 1 * (0.1 * 0.2) ** 2  # ceil(2 x 2 / 5) = 1 turn, reach 2 x 0.1
    y = 7.0
    for _ in range(2):
        y = 0.95 * y + 0.01 * 75
        y = 0.95 * y + 0.01 * (75 + 54) + 4 * variance / 2
    found = error_bound(HAND, SOME, noise, constant(0.1), steps=2, rounds=2)
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
    found = error_bound(given, some, NoNoise(), constant(0.1), **lengths)
    assert found == pytest.approx(recursion, rel=1e-12)
    assert decayed_bound(given, some, NoNoise(), **lengths) == pytest.approx(closed, rel=1e-12)


def test_without_errors_to_add_closed_form_and_recursion_are_the_same():
    quiet = Constants(2.0, 0.5, 0.0, 0.0, 7.0, exact=True)
    for steps, rounds in ((1, 1), (3, 5), (40, 2)):
        rate = decayed(quiet, steps)
        found = decayed_bound(quiet, SOME, NoNoise(), steps=steps, rounds=rounds)
        wanted = error_bound(quiet, SOME, NoNoise(), rate, steps=steps, rounds=rounds)
        assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("noise", [NoNoise(), LAPLACE, GAUSSIAN, PowerNoise(3.0, 1.5)], ids=str)
@pytest.mark.parametrize("gamma", [None, 32.0, 300.0])
def test_the_closed_form_is_above_the_recursion_and_not_far(noise, gamma):
    for steps in (1, 2, 7, 32):
        for rounds in (1, 3, 50):
            found = decayed_bound(HAND, SOME, noise, steps=steps, rounds=rounds, gamma=gamma)
            used = gamma or max(32.0, steps)

            def rate(k, used=used):
                return 2 / (0.5 * (k + used))

            recursion = error_bound(HAND, SOME, noise, rate, steps=steps, rounds=rounds)
            assert recursion * (1 - 1e-12) <= found <= 2.1 * recursion


def test_a_rate_outside_the_theory_is_infinite():
    def bound(rate, steps=2, rounds=3):
        return error_bound(HAND, SOME, NoNoise(), rate, steps=steps, rounds=rounds)

    assert math.isfinite(bound(constant(1 / 8)))
    assert bound(constant(0.126)) == math.inf
    assert bound(lambda k: 0.01 * (1 + k)) == math.inf  # rises
    assert bound(lambda k: 0.1 * 0.49**k) == math.inf  # falls by more than half in a round
    assert math.isfinite(bound(lambda k: 0.1 * 0.49**k, steps=1))
    assert bound(lambda k: np.full(len(k), math.nan)) == math.inf


def test_a_single_round_must_be_gentle_too():
    rates = np.array([0.1, 0.06, 0.04])
    assert not rate_is_slow(HAND, rates, 3)
    assert rate_is_slow(HAND, rates, 1)
    assert rate_is_slow(HAND, np.array([0.1, 0.06, 0.05]), 3)


@pytest.mark.parametrize(("gamma", "steps"), [(31.9, 1), (1.0, 1), (math.nan, 1), (39.0, 40)])
def test_a_gamma_too_small_for_the_theory_is_infinite(gamma, steps):
    """8 lambda / mu is 32 here; a gamma of 1 would make the closed form's start vanish."""
    found = decayed_bound(HAND, SOME, NoNoise(), steps=steps, rounds=3, gamma=gamma)
    assert found == math.inf


@pytest.mark.parametrize(("steps", "rounds"), [(0, 1), (1, 0), (-1, 2)])
def test_no_steps_and_no_rounds_are_refused(steps, rounds):
    with pytest.raises(BadInput, match="at least one"):
        error_bound(HAND, SOME, NoNoise(), constant(0.1), steps=steps, rounds=rounds)
    with pytest.raises(BadInput, match="at least one"):
        decayed_bound(HAND, SOME, NoNoise(), steps=steps, rounds=rounds)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"convexity": 0.0}, "convexity is 0: the theory needs strongly convex"),
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
        assert Sizes(clients, cohort, 1).turns(rounds) == counts.max()


@pytest.mark.parametrize(
    ("noise", "z"),
    [(NoNoise(), 0), (LAPLACE, 2), (GAUSSIAN, 1), (PowerNoise(0.3, 0.5), 0.5)],
    ids=str,
)
def test_variance_goes_with_turns_to_the_z_and_with_the_square_of_reach(noise, z):
    assert noise.exponent == z
    reach = np.array([0.1, 0.2, 0.7])
    once = noise.variance(reach, 1)
    assert (once > 0).all() or isinstance(noise, NoNoise)
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
    turns = Sizes(clients, cohort, 3).turns(rounds)
    moving = plan.start(torch.zeros(3))
    for r in range(1, rounds + 1):
        scale = plan.release.scales(plan.clip(moving, r), np.zeros(1, dtype=np.int64))[0]
        found = noise.variance(np.array([work.reach(r)]), turns)[0]
        assert found == pytest.approx(
            (2 if laplace else 1) * scale**2, rel=1e-9 if laplace else 2e-3
        )
        if laplace:
            assert scale == pytest.approx(turns * 2 * zeta * work.reach(r) / 3.0, rel=1e-9)


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
    found = verdict(z)
    assert found.fixed == pytest.approx(math.log2(many[2] / few[2]), abs=0.02)
    assert found.best == pytest.approx(math.log2(many.min() / few.min()), abs=0.02)
    assert (found.best < 0) == (z < 1)
    word = "converges" if z < 1 else "constant" if z == 1 else "diverges"
    assert word in str(found)


@pytest.mark.parametrize("z", [-0.1, math.nan, math.inf])
def test_a_z_that_cannot_be_is_refused(z):
    with pytest.raises(BadInput, match="z is"):
        verdict(z)


def test_the_bound_itself_goes_as_its_verdict_says():
    """Noise that decides: doubling T doubles the Laplace bound, leaves the Gaussian one, and halves
    the root of one with z = 0.5."""
    quiet = Constants(2.0, 0.5, 0.0, 0.0, 1.0, exact=True)
    everyone = Sizes(4, 4, 100)
    for noise in (LaplaceNoise(0.1, 5.0), GaussianNoise(5.0, 5.0), PowerNoise(50.0, 0.5)):
        few, many = (
            decayed_bound(quiet, everyone, noise, steps=2, rounds=r) for r in (20_000, 40_000)
        )
        assert math.log2(many / few) == pytest.approx(verdict(noise.exponent).fixed, abs=0.01)


@pytest.mark.parametrize("noise", [NoNoise(), LaplaceNoise(1.0, 5.0), GaussianNoise(1.0, 5.0)])
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
        return decayed_bound(HAND, SOME, NoNoise(), steps=steps, rounds=rounds)

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
