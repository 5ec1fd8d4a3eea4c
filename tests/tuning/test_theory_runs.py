"""The bound against what private local SGD does.

Clients have quadratic losses, so the error of a run is known in two ways: by running it many times,
and exactly, since the first two moments of the model go through a round in closed form.
"""

import itertools
import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from torch import nn

from fedveil import Budget, FederatedData, Task, Training, train
from fedveil.models import squared_error
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import Fixed, PerGradient
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.sampling import Everyone, FixedSize
from fedveil.training.cohort import Batches
from fedveil.training.gradients.modes import Mode
from fedveil.training.work import ClientSgd, Decay
from fedveil.tuning.theory import (
    NO_NOISE,
    Constants,
    LaplaceNoise,
    Sizes,
    constant_rate,
    error_bound,
)
from fedveil.tuning.theory_plan import constants_of
from tests.tuning.theory_examples import GAUSSIAN, LAPLACE, PowerNoise, decayed

SIGMAS = 6.0
"""Standard errors that a mean of hundreds of runs may be off: false alarms are below 1e-6, some
skewness allowed for (1e-9 for a normal mean)."""


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


def rates_of(rate, steps, rounds):
    return rate(np.arange(float(steps * rounds))).reshape(rounds, steps)


def as_planned(noise, sizes, rounds):
    """The noise of a run that was planned for that many rounds, in any of them."""
    once = float(noise.variance(np.ones(1), sizes.most_turns(rounds))[0])
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


def adding(noise, variances):
    """How simulated clients draw the noise."""
    if isinstance(noise, LaplaceNoise):
        return lambda drawn, r, shape: drawn.laplace(0.0, math.sqrt(variances[r] / 2), shape)
    return lambda drawn, r, shape: drawn.normal(0.0, math.sqrt(variances[r]), shape)


def run(p, cohort, noise, rate, steps, rounds, repetitions=400, seed=0):
    """Simulate a run as it was planned."""
    rates = rates_of(rate, steps, rounds)
    sizes = Sizes(p.clients, cohort, p.size)
    variances = noise.variance(rates.sum(axis=1), sizes.most_turns(rounds))
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
        {"laplace": LAPLACE, "gaussian": GAUSSIAN}.get(name, NO_NOISE),
    )
    p = problem(seed=steps)
    rate = decayed(p.constants(0.0), steps) if kind == "decayed" else constant_rate(0.12)
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
    for rate in (constant_rate(1 / (4 * before.smoothness)), decayed(before, steps)):
        rates = rates_of(rate, steps, rounds)
        variances = noise.variance(rates.sum(axis=1), sizes.most_turns(rounds))
        errors, longest = expected(p, cohort, rates, variances)
        limits = bounds(p.constants(longest), sizes, noise, rate, steps, rounds)
        assert (errors <= limits * (1 + 1e-9)).all()


def test_noise_alone_is_bounded_exactly():
    """From the optimum, alike and round, one step: nothing but noise, p v / b, and no slack."""
    p = Problem(np.tile(np.eye(4), (5, 1, 1)), np.zeros((5, 4)), np.zeros(4))
    sizes, rate = Sizes(5, 2, 4), constant_rate(0.2)
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
    rate = decayed(p.constants(0.0), 2) if is_decayed else constant_rate(0.1)
    ends = [final(p, 6, LaplaceNoise(30.0, 5.0), rate, 2, rounds) for rounds in (10, 40, 160)]
    for (few, low), (many, high) in pairwise(ends):
        assert significant(many, few)
        assert high > low


def test_without_noise_more_rounds_end_closer():
    p = problem(1)
    ends = [final(p, 6, NO_NOISE, decayed(p.constants(0.0), 2), 2, r) for r in (10, 40, 160)]
    for (few, low), (many, high) in pairwise(ends):
        assert many.mean() < few.mean()
        assert high < low


def test_more_local_steps_help_where_laplace_noise_decides():
    """From the optimum, so that noise is all there is, and slowly, so that it does not make the
    gradients any longer."""
    p = problem(2)
    p, noise = replace(p, start=p.best), LaplaceNoise(0.3, 5.0)
    ends = [final(p, 6, noise, constant_rate(1e-4), e, 60 // e) for e in (1, 3, 12)]
    for (few, high), (many, low) in pairwise(ends):
        assert significant(few, many)
        assert low < high


def test_more_local_steps_hurt_where_drift_decides():
    p = problem(3, spread=3.0)
    noise = LaplaceNoise(1e4, 5.0)
    ends = [final(p, 6, noise, constant_rate(0.12), e, 120 // e) for e in (1, 4, 20)]
    for (few, low), (many, high) in pairwise(ends):
        assert significant(many, few)
        assert high > low
