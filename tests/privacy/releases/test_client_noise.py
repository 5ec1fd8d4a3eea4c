"""Local DP: any two inputs of a client, charged for its own turns."""

import math

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Accountant, Relation, Trust, Unit
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import FuGaussian, Gaussian, Laplace
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import Fixed, Median, PerGradient, Poly, Quantile
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.releases.client_noise import ClientNoise, Published
from fedveil.privacy.sampling import FixedSize, Poisson, RoundRobin
from tests.privacy.releases.client_noise_plans import BUDGET, L1, L2, plan_of


def scale(plan, round=1, client=0):
    """The noise scale of a client's report."""
    clip = plan.clip_schedule.clip(plan.clip_schedule.first_value(), round)
    return float(plan.release.scales(clip, np.array([client]))[0])


# --- strict noise ---


@pytest.mark.parametrize(
    ("target", "row"),
    [
        (10, [0.455, 0.644, 0.789, 0.911, 1.115, 1.288, 1.577, 2.230]),
        (20, [0.269, 0.381, 0.467, 0.539, 0.660, 0.762, 0.933, 1.320]),
        (30, [0.202, 0.285, 0.349, 0.403, 0.494, 0.570, 0.698, 0.988]),
    ],
)
def test_reference_table_of_gaussian_reports(target, row):
    """Noise over C is twice the table, whose sensitivity is 1: two inputs differ by 2 C."""
    for turns, noise in zip((1, 2, 3, 4, 6, 8, 12, 24), row, strict=True):
        plan = plan_of(rounds=turns, budgets=(Budget(target, 1e-4),))
        assert scale(plan) == pytest.approx(2 * noise, rel=0.01)
        assert plan.release.relation is Relation.REPLACE


@pytest.mark.parametrize(("target", "noise"), [(1, 7.461), (2, 3.988), (4, 2.162), (8, 1.200)])
def test_reference_values_of_one_report(target, noise):
    plan = plan_of(rounds=1, budgets=(Budget(target, 1e-5),))
    assert scale(plan) == pytest.approx(noise, rel=5e-3)


@pytest.mark.parametrize(("rounds", "turns"), [(10, 1), (20, 2), (21, 3), (240, 24)])
def test_laplace_scale_is_turns_times_both_inputs_over_epsilon(rounds, turns):
    schedule = PerGradient(Fixed(150.0, Norm.L1), lambda round: 0.05 * 4)
    plan = plan_of(RoundRobin(100), schedule, laplace=True, rounds=rounds)
    assert scale(plan) == pytest.approx(turns * 2 * 150.0 * 0.2 / 3.0)
    assert plan.lines[0].event == Laplace(plan.release.multiplier)
    (claim,) = plan.claims(rounds)
    assert (claim.accountant, claim.delta) == (Accountant.PURE, 0.0)
    assert claim.epsilon == pytest.approx(3.0)


def test_reach_of_a_round_scales_its_own_noise():
    schedule = PerGradient(Fixed(2.0), lambda round: 0.1 / round)
    plan = plan_of(schedule=schedule)
    assert scale(plan, 4) == pytest.approx(scale(plan, 1) / 4)


def test_decaying_bound_costs_nothing():
    poly, fixed = plan_of(schedule=Poly(1.0, 1.0, 10, 0.01)), plan_of()
    assert poly.claims(10) == fixed.claims(10)
    assert scale(poly, 6) == pytest.approx(scale(fixed) / 2)


@pytest.mark.parametrize("laplace", [False, True])
@pytest.mark.parametrize("target", [0.1, 0.7, 3.3, 7.0])
def test_calibrated_plan_runs_all_of_its_rounds_within_its_budget(laplace, target):
    """Also where epsilon, computed back from the noise, is rounded upwards."""
    for rounds in (1, 3, 7, 12, 14):
        plan = plan_of(
            schedule=L1 if laplace else L2,
            laplace=laplace,
            rounds=rounds,
            budgets=(Budget(target, 1e-5),),
        )
        assert plan.permitted == rounds
        assert 0.98 * target < plan.claims(rounds)[0].epsilon <= target


def test_claims_are_local_and_about_clients():
    plan = plan_of(multiplier=5.0)
    assert isinstance(plan.release, ClientNoise)
    for claim in plan.claims(4):
        assert (claim.unit, claim.trust, claim.neighbours) == (
            Unit.CLIENT,
            Trust.LOCAL,
            Relation.REPLACE,
        )
        assert any("not trusted" in a for a in claim.assumptions)
        assert any("how often" in a for a in claim.assumptions)
    most = plan.rounds
    assert plan.claims(most)[0].epsilon == epsilon(Gaussian(5.0), most, 1e-5, Relation.REPLACE)


@pytest.mark.parametrize("sampler", [Poisson(0.01), FixedSize(10)], ids=str)
def test_sampling_amplifies_nothing_against_the_server(sampler):
    plan = plan_of(sampler, multiplier=5.0)
    most = plan.rounds
    assert plan.claims(most)[0].epsilon == epsilon(Gaussian(5.0), most, 1e-5, Relation.REPLACE)


# --- caps ---


def test_noise_is_calibrated_to_the_cap_and_the_cap_is_kept():
    capped = plan_of(FixedSize(50, 4), rounds=60)
    assert capped.release.multiplier == plan_of(rounds=4).release.multiplier
    assert capped.lines[0].participations(60) == 4
    assert capped.permitted == 60
    counts = np.zeros(1000, dtype=np.int64)
    for round in range(1, 61):
        counts[capped.sampler.cohort(1000, round, Streams(1), counts)] += 1
    worst = capped.claims(60, counts)[0]
    assert worst.epsilon <= BUDGET.epsilon
    assert worst.epsilon == capped.lines[0].claims(int(counts.max()))[0].epsilon


def test_counts_that_exceed_the_account_are_told():
    plan = plan_of(FixedSize(50, 4), rounds=60)
    told = plan.claims(60, np.full(1000, 9))[0].epsilon
    assert told == plan.lines[0].claims(9)[0].epsilon > plan.claims(60)[0].epsilon


def test_cap_that_ends_before_the_run_is_refused():
    plan_of(FixedSize(50, 4), rounds=80)
    with pytest.raises(BadInput, match=r"after round 80 of 81"):
        plan_of(FixedSize(50, 4), rounds=81)


# --- refusals ---


@pytest.mark.parametrize(("schedule", "laplace"), [(L2, True), (L1, False)])
def test_norm_that_does_not_go_with_the_noise_is_refused(schedule, laplace):
    with pytest.raises(BadInput, match=r"^norm is "):
        plan_of(schedule=schedule, laplace=laplace)


@pytest.mark.parametrize(
    "schedule", [Quantile(1.0, 0.5, noise=5.0), Median(1.0, -3, 3, 5, BUDGET)], ids=["q", "m"]
)
def test_laplace_with_an_adaptive_bound_is_refused(schedule):
    with pytest.raises(BadInput):
        plan_of(schedule=schedule, laplace=True)


def test_several_budgets_and_one_multiplier_are_refused():
    with pytest.raises(BadInput, match=r"and budgets are several"):
        plan_of(budgets=(BUDGET, Budget(1.0, 1e-5)), multiplier=2.0)


def test_noise_and_budget_that_contradict_each_other_are_refused():
    with pytest.raises(BadInput, match="contradict"):
        plan_of(multiplier=0.1)


# --- budgets of their own ---


def test_each_client_has_the_noise_of_its_own_budget():
    members = np.arange(1000) % 3
    budgets = tuple(Budget(e, 1e-5) for e in (1.0, 8.0, 3.0))
    plan = plan_of(budgets=budgets, group_of=members)
    for group, budget in enumerate(budgets):
        alone = plan_of(budgets=(budget,))
        assert scale(plan, client=group) == scale(plan, client=group + 3) == scale(alone)
    assert [line.budget.epsilon for line in plan.lines] == [8.0, 3.0, 1.0]
    assert len({line.covers for line in plan.lines}) == 3
    assert "333 clients, group 2" in plan.lines[0].covers
    for line in plan.lines:
        assert 0.98 * line.budget.epsilon < line.claims(10)[0].epsilon <= line.budget.epsilon
    assert plan.permitted == 10
    assert plan.limit == 8.0


def test_no_claim_for_a_group_is_lower_than_what_its_median_client_lost():
    """The median over all clients says nothing about a group whose members came more often."""
    members = np.array([0] * 6 + [1] * 4)
    plan = plan_of(
        FixedSize(2, 5),
        population=10,
        budgets=(Budget(1.0, 1e-5), Budget(4.0, 1e-5)),
        group_of=members,
    )
    counts = np.array([1] * 6 + [4, 4, 4, 5])
    for line in plan.lines:
        group = 1 if "group 2" in line.covers else 0
        least = line.claims(int(np.median(counts[members == group])))[0].epsilon
        told = [c.epsilon for c in plan.claims(10, counts) if c.covers == line.covers]
        assert told
        assert min(told) >= least


@pytest.mark.parametrize("members", [[0, 1, 2], [0, 1, -1], [0, 1], [0, 1, 1, 0]], ids=str)
def test_client_without_a_budget_is_refused(members):
    """It would report without noise."""
    with pytest.raises(BadInput, match="group_of"):
        plan_of(population=3, budgets=(BUDGET, Budget(1.0, 1e-5)), group_of=np.array(members))
    with pytest.raises(BadInput, match="group_of"):
        plan_of(population=3, group_of=np.array([1, 0, 0]))


# --- as published ---


def test_published_noise_is_scaled_to_one_input_and_labelled():
    plan, strict = plan_of(published=Published()), plan_of()
    assert scale(plan) == pytest.approx(scale(strict) / 2)
    label, reading = plan.lines
    assert label.as_published
    assert not reading.as_published
    assert (label.reading, reading.reading) == (False, True)
    assert label.relation is Relation.ADD_REMOVE
    assert reading.relation is Relation.REPLACE
    assert "not a guarantee" in str(plan.claims(10)[0])


@pytest.mark.parametrize("laplace", [False, True])
def test_strict_reading_stands_beside_the_published_one_with_half_the_noise(laplace):
    schedule = L1 if laplace else L2
    plan = plan_of(schedule=schedule, laplace=laplace, published=Published())
    label, reading = plan.lines
    kind = Laplace if laplace else Gaussian
    assert label.event == kind(plan.release.multiplier)
    assert reading.event == kind(plan.release.multiplier / 2)
    published, *strict = plan.claims(10)
    assert published.epsilon <= BUDGET.epsilon
    assert not any(claim.as_published for claim in strict)
    if laplace:
        assert strict[0].epsilon == pytest.approx(2 * published.epsilon)
    else:
        exact = epsilon(Gaussian(plan.release.multiplier / 2), 10, 1e-5, Relation.REPLACE)
        assert strict[0].epsilon == exact > 2 * published.epsilon


@pytest.mark.parametrize(("target", "turns", "c2"), [(10, 1, 1.0), (20, 12, 1.0), (30, 24, 1.7)])
def test_fu_gaussian_noise_is_the_printed_formula(target, turns, c2):
    schedule = PerGradient(Fixed(3.0, Norm.L1), lambda round: 0.1)
    plan = plan_of(
        schedule=schedule,
        rounds=turns,
        budgets=(Budget(target, 1e-4),),
        published=Published(c2, Unit.RECORD),
    )
    sigma = c2 * math.sqrt(turns * math.log(1e4)) / target
    assert scale(plan) == pytest.approx(sigma * 0.3)
    label, reading = plan.lines
    assert label.event == FuGaussian(plan.release.multiplier, c2)
    assert (label.unit, reading.unit) == (Unit.RECORD, Unit.CLIENT)
    assert plan.permitted == turns
    published, strict, _ = plan.claims(turns)
    assert published.accountant is Accountant.PUBLISHED
    assert published.epsilon == pytest.approx(target)
    assert strict.epsilon == epsilon(
        Gaussian(plan.release.multiplier / 2), turns, 1e-4, Relation.REPLACE
    )


def test_fu_gaussian_without_its_constant_is_refused():
    schedule = PerGradient(Fixed(3.0), lambda round: 0.1)
    with pytest.raises(BadInput, match="c2"):
        plan_of(schedule=schedule, published=Published(None, Unit.RECORD))


@pytest.mark.parametrize("schedule", [L1, L2], ids=["l1", "l2"])
def test_fu_constant_does_not_go_with_laplace_noise(schedule):
    """With an L2 clip the strict reading beside it would be wrong by up to sqrt(parameters)."""
    with pytest.raises(BadInput, match=r"^c2|^norm"):
        plan_of(schedule=schedule, laplace=True, published=Published(1.0))
