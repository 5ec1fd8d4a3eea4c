"""Secure noise: the right law on the grid, and claims that say what it costs.

Statistical tests have a false-alarm rate of 1e-6 each, by exact or normal laws of their statistic.
"""

import functools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest, norm

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.claims import Accountant, NoiseSource, Relation, Trust
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import Fixed, Median
from fedveil.privacy.noise import mechanisms
from fedveil.privacy.noise.grid import delta_of_sampler, grid_for
from fedveil.privacy.noise.mechanisms import (
    GaussianMechanism,
    LaplaceMechanism,
    TwoPointMechanism,
    add_to_sum_,
)
from fedveil.privacy.noise.streams import SecureKeys, Streams, laplace_, normal_
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.releases.central import central
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.releases.two_point import two_point
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson
from fedveil.privacy.secure import DIAGNOSTICS, SECURE, SLIP, planned_for, with_secure_noise
from tests.asking import asked, noised

FALSE_ALARM = 1e-6
BUDGET = Budget(8.0, 1e-3)


def within(squares, count, variance):
    """Whether a sum of squares of Gaussians is what chance allows."""
    low, high = chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], count)
    return low <= squares / variance <= high


# --- the law ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_rows_have_their_own_scales(dtype):
    """Rows of scales from 0.001 to 1000 in one call, as clients with budgets of their own have."""
    scales, size = np.array([1e-3, 1.0, 40.0, 1e3]), 20_000
    rows = torch.linspace(-1, 1, size, dtype=dtype).repeat(len(scales), 1)
    before = rows.clone()
    GaussianMechanism(2.0).add_(rows, scales, SecureKeys(len(scales)))
    noise = (rows.double() - before.double()).numpy()
    for row, scale in zip(noise, scales, strict=True):
        assert within((row**2).sum(), size, scale**2)
        assert kstest(row / scale, norm.cdf).pvalue > FALSE_ALARM


def test_laplace_rows_have_their_own_scales():
    scales, size = np.array([1e-2, 1.0, 50.0]), 20_000
    rows = torch.zeros(len(scales), size, dtype=torch.float64)
    LaplaceMechanism(1.5).add_(rows, scales, SecureKeys(len(scales)))
    for row, scale in zip(rows.numpy(), scales, strict=True):
        assert kstest(row / scale, "laplace").pvalue > FALSE_ALARM


def test_rows_do_not_share_their_noise():
    rows = torch.zeros(2, 20_000, dtype=torch.float64)
    GaussianMechanism(1.0).add_(rows, np.ones(2), SecureKeys(2))
    product = float((rows[0] * rows[1]).sum()) / math.sqrt(20_000)
    assert abs(product) < norm.isf(FALSE_ALARM / 2) * 1.05
    assert not torch.equal(rows[0], rows[1])


def test_a_row_is_on_a_grid_that_its_values_do_not_choose():
    """What a release can be does not depend on what it hides: every value is a multiple of a step.

    The values, multiples of 2^-52, are far finer than it.
    """
    scales = np.array([1.0, 64.0])
    for seed in range(3):
        rows = torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, (2, 300)))
        GaussianMechanism(1.0).add_(rows, scales, SecureKeys(2))
        for row, step in zip(rows, (2.0**-21, 2.0**-15), strict=True):
            assert torch.equal(row, torch.round(row / step) * step)


@pytest.mark.parametrize(
    ("mechanism", "name", "norm"),
    [
        (GaussianMechanism(0.5), "gaussian_int", Norm.L2),
        (LaplaceMechanism(0.5), "laplace_int", Norm.L1),
    ],
    ids=["gaussian", "laplace"],
)
def test_the_noise_is_as_large_as_was_asked_for(monkeypatch, mechanism, name, norm):
    drawn = []

    def spy(source, scale, size):
        drawn.append(scale)
        return np.zeros(size, dtype=np.int64)

    monkeypatch.setattr(mechanisms, name, spy)
    scales, size = np.array([0.5, 8.0]), 1000
    mechanism.add_(torch.zeros(2, size), scales, SecureKeys(2))
    for steps, scale in zip(drawn, scales, strict=True):
        grid = grid_for(scale / mechanism.multiplier, scale, size, norm)
        assert mechanism.grid(scale, size) == grid
        assert steps * grid.spacing == scale


def test_a_row_is_cut_and_never_lengthened(monkeypatch):
    monkeypatch.setattr(mechanisms, "gaussian_int", lambda e, s, n: np.zeros(n, dtype=np.int64))
    rows = torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, (3, 400)))
    before = rows.clone()
    GaussianMechanism(1.0).add_(rows, np.ones(3), SecureKeys(3))
    assert bool((rows.abs() <= before.abs()).all())
    assert not torch.equal(rows, before)


def test_a_sum_that_is_not_on_the_grid_is_not_released():
    total, mechanism = torch.full((100,), 1 / 3, dtype=torch.float64), GaussianMechanism(1.0)
    with pytest.raises(AssertionError, match="not on the grid"):
        add_to_sum_(mechanism, total, 1.0, SecureKeys(1))
    add_to_sum_(mechanism, mechanism.grid(1.0, 100).cut_(total), 1.0, SecureKeys(1))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_is_no_noise_is_never_released(scale):
    rows = torch.ones(2, 5)
    with pytest.raises(AssertionError, match="without noise"):
        GaussianMechanism(1.0).add_(rows, np.array([1.0, scale]), SecureKeys(2))
    assert torch.equal(rows, torch.ones(2, 5))


def test_two_point_reports_have_their_odds():
    """P(high) = 1/2 + (w - c) / (2 r kappa), here for the ends and the middle of the range."""
    size, mechanism = 30_000, TwoPointMechanism(1.0)
    rows = torch.tensor([-1.0, 0.0, 1.0])[:, None].repeat(1, size)
    mechanism.report_(rows, torch.zeros(size), torch.ones(size), SecureKeys(3))
    assert torch.equal(rows.abs().unique(), torch.tensor([mechanism.kappa]))
    for row, w in zip(rows, (-1.0, 0.0, 1.0), strict=True):
        p = 0.5 + w / (2 * mechanism.kappa)
        off = (float((row > 0).sum()) - size * p) / math.sqrt(size * p * (1 - p))
        assert abs(off) < norm.isf(FALSE_ALARM / 2) * 1.05


@pytest.mark.parametrize("draw", [normal_, laplace_])
def test_secret_noise_in_floats_is_refused(draw):
    with pytest.raises(AssertionError, match="on a grid"):
        draw(torch.zeros(2, 3), SecureKeys(2))


def test_nothing_secret_is_drawn_twice():
    keys = Streams(1, secure=True).keys("noise", 1, np.zeros(1))
    rows = [torch.zeros(1, 100, dtype=torch.float64) for _ in range(2)]
    for row in rows:
        GaussianMechanism(1.0).add_(row, np.ones(1), keys)
    assert not torch.equal(*rows)


# --- plans ---


NAMES = ("poisson", "fixed", "everyone", "local, Gaussian", "local, Laplace")


@functools.cache
def plan_of(name, budget=BUDGET, multiplier=None):
    schedule, few = Fixed(1.0), {"rounds": 5, "budget": budget, "multiplier": multiplier}
    match name:
        case "poisson":
            return central(Poisson(0.5), 100, schedule, **few)
        case "fixed":
            return central(FixedSize(10), 100, schedule, **few)
        case "everyone":
            return central(Everyone(), 100, schedule, **few)
    laplace = name == "local, Laplace"
    clip = Fixed(1.0, Norm.L1 if laplace else Norm.L2)
    sampler = FixedSize(10, 5)
    return client_noise(sampler, 100, clip, laplace=laplace, rounds=5, budgets=(budget,))


COSTLY = ("fixed", "poisson")  # to calibrate


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in COSTLY else []) for n in NAMES]
)
def test_a_secure_plan_keeps_epsilon_and_delta(name):
    """The claim is at the delta that was asked for; noise was planned with a little less."""
    seeded = plan_of(name)
    plan = with_secure_noise(plan_of(name, planned_for(BUDGET)), 650, diagnostics=False)
    for claim in plan.claims(5):
        assert claim.noise is NoiseSource.SECURE
        assert claim.epsilon <= BUDGET.epsilon or claim.accountant is not Accountant.PLD
        slip = BUDGET.delta * SLIP
        pure = claim.accountant is Accountant.PURE
        assert claim.delta == pytest.approx(slip if pure else BUDGET.delta, rel=1e-6)
        assert SECURE in claim.assumptions
        assert DIAGNOSTICS not in claim.assumptions
    assert plan.release.multiplier >= seeded.release.multiplier
    assert plan.release.multiplier == pytest.approx(seeded.release.multiplier, rel=1e-3)
    assert plan.permitted == 5


def test_the_share_of_delta_pays_for_the_sampler():
    plan = with_secure_noise(
        central(Everyone(), 100, Fixed(1.0), rounds=5, budget=BUDGET), 10**6, diagnostics=False
    )
    (line,) = plan.lines
    epsilon = plan.claims(5)[0].epsilon
    assert delta_of_sampler(10**6 + 100, 5, epsilon) <= line.slip
    assert delta_of_sampler(10**6 + 100, 5, line.vouched) <= line.slip


def test_diagnostics_are_in_the_assumptions_of_every_claim():
    plan = with_secure_noise(plan_of("everyone"), 650, diagnostics=True)
    assert all(DIAGNOSTICS in claim.assumptions for claim in plan.claims(5))


def test_an_epsilon_the_sampler_cannot_vouch_for_is_refused():
    plan = central(Everyone(), 100, Fixed(1.0), rounds=5, budget=Budget(60.0, 1e-3))
    with pytest.raises(BadInput, match="cannot be vouched for"):
        with_secure_noise(plan, 650, diagnostics=False)


RANGES = Ranges(0.0, 0.15, (650,), False, Perturb.UPDATE)


def two_point_plan(epsilon=0.02, sampler=None, **changes):
    settings = {"rounds": 5, "budget": planned_for(BUDGET), **changes}
    return two_point(sampler or Everyone(), 100, RANGES, epsilon=epsilon, **settings)


def test_an_account_the_sampler_cannot_vouch_for_is_told_as_such():
    """Adding epsilons of 650 weights comes to far more than the exact sum: it needs a delta of its
    own, e^epsilon times the sampler's distance, and the share of delta does not pay for that.
    """
    for epsilon, pure in ((0.001, True), (0.02, False)):
        plan = two_point_plan(epsilon)
        secure = with_secure_noise(plan, 650, diagnostics=False)
        claims = secure.claims(5)
        assert [c.accountant for c in claims] == [c.accountant for c in plan.claims(5)]
        client = [c for c in claims if not c.as_published]
        assert client[0].accountant is Accountant.BINOMIAL
        assert client[0].vouched
        (added,) = [c for c in client if c.accountant is Accountant.PURE]
        assert added.vouched is pure
        assert ("epsilon not vouched for, about 65 at delta" in str(added)) is not pure
        for claim in client:
            paid = delta_of_sampler(750, 10, claim.epsilon) <= BUDGET.delta * SLIP
            assert paid is claim.vouched


def test_a_shuffled_claim_never_stands_without_its_unshuffled_neighbour():
    seeded = two_point_plan(1.0, shuffled=100, budget=Budget(math.inf, 1e-3 * (1 - SLIP)), rounds=1)
    plan = with_secure_noise(seeded, 650, diagnostics=False)
    shuffled, alone, added, weight = plan.claims(1)
    assert (shuffled.trust, shuffled.vouched) == (Trust.SHUFFLED, True)
    for claim in (alone, added):
        assert (claim.trust, claim.covers, claim.vouched) == (Trust.LOCAL, "updates", False)
        assert "not vouched for, about" in claim.short
    assert weight.as_published


@pytest.mark.parametrize(
    ("sampler", "shuffled", "reports"),
    [
        (Everyone(), 0, 1),
        (Everyone(), 90, 100),
        (FixedSize(30), 20, 30),
        (Poisson(0.4), 20, 100),
    ],
    ids=str,
)
def test_draws_are_those_of_all_reports_that_hide_a_client(sampler, shuffled, reports):
    """The others' draws are what hides a client behind a shuffler; alone, only its own count."""
    plan = with_secure_noise(
        two_point_plan(0.02, sampler, shuffled=shuffled), 650, diagnostics=False
    )
    line = plan.lines[0]
    paid = delta_of_sampler(reports * 650 + 100, 2 * 5, line.vouched)
    assert 2 * paid == pytest.approx(line.slip, rel=1e-6)


def test_draws_of_a_curator_are_paid_for():
    schedule = Median(1.0, -60, 60, 1, Budget(0.5, 1e-4))
    plan = client_noise(
        Everyone(), 100, schedule, laplace=False, rounds=5, budgets=(planned_for(BUDGET),)
    )
    (line,) = with_secure_noise(plan, 10, diagnostics=False).lines
    paid = delta_of_sampler(10 + 121 + 100, 2 * 5, line.vouched)
    assert 2 * paid == pytest.approx(line.slip, rel=1e-6)


def test_terms_keep_what_is_vouched_for():
    (line,) = with_secure_noise(plan_of("poisson"), 650, diagnostics=False).lines
    assert BudgetLine.from_dict(line.to_dict()) == line
    assert 0 < line.vouched < math.inf


def test_sums_that_float64_would_round_are_refused():
    budget = planned_for(Budget(14.0, 1e-10))
    for clients, fine in ((10**4, True), (10**8, False)):
        plan = central(Poisson(1e-3), clients, Fixed(1.0), rounds=2, budget=budget, multiplier=0.7)
        if fine:
            with_secure_noise(plan, 10**9, diagnostics=False)
        else:
            with pytest.raises(BadInput, match="too long for the grid"):
                with_secure_noise(plan, 10**9, diagnostics=False)


@pytest.mark.parametrize("name", ["poisson", "fixed", "everyone"])
def test_the_servers_sum_gets_its_noise(name):
    free = planned_for(Budget(math.inf, BUDGET.delta))
    plan = with_secure_noise(plan_of(name, free, multiplier=2.0), 5000, diagnostics=False)
    clip = plan.clip(plan.first_state(torch.zeros(1)), 1)
    total = torch.linspace(-1, 1, 5000, dtype=torch.float64)
    secure = Streams(1, secure=True)
    plan.release.read_(total[None], asked(plan, total, [0], streams=secure))
    with_noise = noised(plan, total, clip, 1, secure)
    wanted = plan.release.multiplier * clip.sensitivity(plan.release.relation)
    assert within(float(((with_noise - total) ** 2).sum()), 5000, wanted**2)


def test_clients_rows_get_their_noise():
    plan = with_secure_noise(
        plan_of("local, Gaussian", planned_for(BUDGET)), 5000, diagnostics=False
    )
    moving = plan.first_state(torch.zeros(1))
    rows = torch.zeros(6, 5000)
    plan.release.randomise_(
        rows, asked(plan, torch.zeros(5000), np.arange(6), moving, 1, Streams(1, secure=True))
    )
    wanted = plan.release.multiplier * plan.clip(moving, 1).sensitivity(Relation.REPLACE)
    for row in rows.double():
        assert within(float((row**2).sum()), 5000, wanted**2)
