"""Central DP: one noise for updates and bits, and a budget that is used and never exceeded."""

import math

import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import Accountant, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import FixedSampled, Gaussian, Laplace, PoissonSampled
from fedveil.privacy.clip_schedules import Fixed, Median, PerGradient, Poly, Quantile
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.releases.central import CentralNoise, central
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson, RoundRobin
from tests.asking import asked, noised

SCHEDULE = Fixed(0.5)
BUDGET = Budget(3.0, 1e-5)
SAMPLERS = [Everyone(), Poisson(0.2), Poisson(1.0), FixedSize(40), FixedSize(100), RoundRobin(30)]


def plan_of(
    sampler=None, population=100, schedule=SCHEDULE, *, rounds=10, budget=BUDGET, multiplier=None
):
    return central(
        sampler or Everyone(),
        population,
        schedule,
        rounds=rounds,
        budget=budget,
        multiplier=multiplier,
    )


def noise_std(plan, round=1):
    """The std of the noise on a sum, from the clip in force."""
    return plan.release.scale(plan.clip_schedule.clip(plan.clip_schedule.first_value(), round))


# --- calibrated noise ---


@pytest.mark.parametrize(
    "sampler",
    [pytest.param(s, marks=pytest.mark.slow if s == FixedSize(40) else []) for s in SAMPLERS],
    ids=str,
)
def test_calibrated_plan_uses_its_budget_for_all_of_its_rounds(sampler):
    plan = plan_of(sampler)
    assert plan.permitted == 10
    assert isinstance(plan.release, CentralNoise)
    assert 0.98 * BUDGET.epsilon < plan.claims(10)[0].epsilon <= BUDGET.epsilon


def test_round_robin_needs_less_noise_than_everyone():
    """A client in 3 of 10 rounds is charged three times."""
    often, seldom = plan_of(Everyone()), plan_of(RoundRobin(30))
    assert seldom.lines[0].participations(10) == 3
    ratio = seldom.release.multiplier / often.release.multiplier
    assert ratio == pytest.approx(math.sqrt(0.3), rel=5e-3)


def test_no_epsilon_and_no_multiplier_are_refused():
    with pytest.raises(BadInput, match=r"give multiplier or budget\.epsilon"):
        plan_of(budget=Budget(math.inf, 1e-5))


def test_infinite_budget_with_a_multiplier_reports_and_never_stops():
    plan = plan_of(budget=Budget(math.inf, 1e-5), multiplier=0.3)
    assert plan.permitted == 10
    assert plan.limit is None
    assert math.isfinite(plan.claims(10)[0].epsilon)


# --- given noise ---


def test_given_multiplier_is_kept():
    plan = plan_of(multiplier=2.0, budget=Budget(100.0, 1e-5))
    assert plan.release.mechanism == GaussianMechanism(2.0)


def test_budget_that_the_seventh_round_would_exceed_permits_six():
    free = plan_of(multiplier=4.0, budget=Budget(math.inf, 1e-5)).lines[0]
    six, seven = (free.claims(n)[0].epsilon for n in (6, 7))
    assert plan_of(multiplier=4.0, budget=Budget((six + seven) / 2, 1e-5)).permitted == 6
    assert plan_of(multiplier=4.0, budget=Budget(seven, 1e-5)).permitted == 7


def test_budget_of_a_round_robin_ends_before_a_client_has_its_second_turn():
    free = plan_of(RoundRobin(30), multiplier=4.0, budget=Budget(math.inf, 1e-5)).lines[0]
    one, two = (free.claims(n)[0].epsilon for n in (1, 2))
    assert one < two
    tight = plan_of(RoundRobin(30), multiplier=4.0, budget=Budget((one + two) / 2, 1e-5))
    assert tight.permitted == 3


def test_multiplier_zero_is_refused():
    with pytest.raises(BadInput, match="no finite epsilon exists"):
        plan_of(multiplier=0)


@pytest.mark.parametrize("multiplier", [-1.0, math.nan, math.inf])
def test_multiplier_that_is_no_noise_is_refused(multiplier):
    with pytest.raises(BadInput, match=r"^multiplier is "):
        plan_of(multiplier=multiplier)


def test_contradiction_names_both_numbers_and_the_price_of_one_round():
    with pytest.raises(BadInput, match="contradict") as e:
        plan_of(multiplier=0.5, budget=Budget(1.0, 1e-5))
    assert "0.5" in str(e.value)
    assert "epsilon 1 " in str(e.value)
    assert "epsilon 9.998 at delta 1e-05 per client" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(("count", "target"), [(3, 0.7), (7, 3.3), (12, 0.7), (1, 0.1), (24, 30.0)])
def test_pure_noise_computed_back_is_within_its_budget(count, target):
    """3 / (3 / 0.7) is 0.7000000000000001."""
    noise = least_noise(Laplace, count, Budget(target, 1e-5), Relation.REPLACE)
    assert epsilon(Laplace(noise), count, 0.0, Relation.REPLACE, Accountant.PURE) <= target
    assert noise == pytest.approx(count / target, rel=1e-9)


# --- what it says ---


@pytest.mark.parametrize(
    ("sampler", "event", "relation", "std"),
    [
        (Everyone(), Gaussian(9.0), Relation.ZERO_OUT, 4.5),
        (Poisson(0.2), PoissonSampled(0.2, Gaussian(9.0)), Relation.ZERO_OUT, 4.5),
        (FixedSize(40), FixedSampled(40, 100, Gaussian(9.0)), Relation.REPLACE, 9.0),
        (RoundRobin(30), Gaussian(9.0), Relation.ZERO_OUT, 4.5),
    ],
    ids=str,
)
def test_noise_and_its_accounting_agree_on_the_relation(sampler, event, relation, std):
    plan = plan_of(sampler, multiplier=9.0, budget=Budget(50.0, 1e-5))
    assert plan.lines[0].event == event
    assert plan.lines[0].relation is plan.release.relation is relation
    assert noise_std(plan) == std


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_divisor_is_public_and_fixed(sampler):
    plan = plan_of(sampler, multiplier=50.0)
    assert {
        plan.release.divisor(weight, plan.expected_cohort) for weight in (0.0, 1.0, 7.0, 1e6)
    } == {sampler.expected(100)}
    assert not plan.release.local


def test_claims_name_unit_trust_source_and_assumptions():
    plan = plan_of(Poisson(0.2), multiplier=3.0)
    for claim in plan.claims(3):
        assert (claim.unit, claim.trust, claim.noise) == (
            Unit.CLIENT,
            Trust.CENTRAL,
            NoiseSource.SEEDED,
        )
        assert plan.sampler.assumption in claim.assumptions
        assert any("trusted" in a for a in claim.assumptions)
        assert any("100" in a for a in claim.assumptions)
        assert any("simulation" in a for a in claim.assumptions)
    whole = plan.claims(plan.rounds)
    assert [c.accountant for c in whole] == [Accountant.PLD, Accountant.RDP]


def test_decaying_bound_costs_nothing_and_its_noise_decays_with_it():
    poly = plan_of(schedule=Poly(0.5, 1.0, 10, 0.01), multiplier=9.0)
    assert poly.claims(10) == plan_of(multiplier=9.0).claims(10)
    assert noise_std(poly, 6) == pytest.approx(noise_std(poly, 1) / 2)


# --- refusals ---


@pytest.mark.parametrize(
    "schedule",
    [Median(1.0, -2, 2, 1, BUDGET), PerGradient(SCHEDULE, lambda round: 1.0)],
    ids=["median", "gradient"],
)
def test_bound_that_is_not_for_central_dp_is_refused(schedule):
    with pytest.raises(BadInput, match="fixed, decaying or quantile"):
        plan_of(schedule=schedule)


def test_flipped_bits_are_for_local_dp():
    with pytest.raises(BadInput, match=r"^flip is for local DP"):
        plan_of(schedule=Quantile(1.0, 0.5, flip=1.0))


def test_capped_cohort_is_not_accounted_as_a_random_one():
    """Who is left depends on who came before: nothing is amplified, so nothing is claimed."""
    with pytest.raises(BadInput, match=r"^max_participations is "):
        plan_of(FixedSize(5, max_participations=3))


# --- quantile ---


@pytest.mark.parametrize(
    ("sampler", "sensitivity"),
    [(Everyone(), 0.5), (Poisson(0.2), 0.5), (FixedSize(40), 1.0), (RoundRobin(30), 0.5)],
    ids=str,
)
def test_updates_and_bits_are_one_gaussian_release(sampler, sensitivity):
    """After scaling each part by its own noise a client moves the pair by exactly 1 / z."""
    plan = plan_of(sampler, schedule=Quantile(0.3, 0.5, noise=5.0), multiplier=2.0)
    moved = plan.release.relation is Relation.REPLACE
    update = (0.6 if moved else 0.3) / noise_std(plan)
    bit = sensitivity / plan.clip_schedule.noise
    assert math.hypot(update, bit) == pytest.approx(1 / 2.0)
    assert plan.lines[0].event == sampler.event(Gaussian(2.0), 100)


def test_published_split():
    """z = 1, sigma_b = m / 20 = 5: 0.5 % more noise."""
    plan = plan_of(
        Everyone(),
        schedule=Quantile(0.1, 0.5, noise=5.0),
        multiplier=1.0,
        budget=Budget(99.0, 1e-5),
    )
    assert plan.release.multiplier == pytest.approx((1 - 0.1**2) ** -0.5)
    assert plan.release.multiplier == pytest.approx(1.005, abs=1e-4)


def test_calibrated_quantile_plan_uses_the_same_budget():
    fixed, quantile = plan_of(), plan_of(schedule=Quantile(0.5, 0.5, noise=50.0))
    assert quantile.claims(10) == fixed.claims(10)
    assert quantile.release.multiplier > fixed.release.multiplier


@pytest.mark.parametrize(
    ("sampler", "noise"), [(Everyone(), 0.5), (Everyone(), 0.4), (FixedSize(40), 1.0)], ids=str
)
def test_bits_that_alone_spend_the_round_are_refused(sampler, noise):
    """z >= 2 sigma_b under add-remove and zero-out, z >= sigma_b under replacement."""
    with pytest.raises(BadInput, match=r"^noise [0-9]") as e:
        plan_of(
            sampler,
            schedule=Quantile(0.1, 0.5, noise=noise),
            multiplier=1.0,
            budget=Budget(99.0, 1e-5),
        )
    least = float(str(e.value).rsplit(" ", 1)[1])
    enough = Quantile(0.1, 0.5, noise=least * 1.01)
    plan_of(sampler, schedule=enough, multiplier=1.0, budget=Budget(99.0, 1e-5))
    assert least == (1.0 if isinstance(sampler, FixedSize) else 0.5)


def test_default_bit_noise_of_ten_clients_is_infeasible():
    with pytest.raises(BadInput, match="raise it above"):
        plan_of(schedule=Quantile(0.1, 0.5, noise=0.5), multiplier=1.0, budget=Budget(99.0, 1e-5))


# --- release ---


def test_release_adds_the_plans_noise():
    plan = plan_of(FixedSize(40), multiplier=9.0, budget=Budget(50.0, 1e-5))
    total, clip = torch.zeros(20_000, dtype=torch.float64), plan.clip_schedule.clip(0.5, 1)
    total_noised = noised(plan, total, clip, 1, Streams(1))
    assert float(total_noised.std()) == pytest.approx(9.0, rel=0.04)
    assert not bool(total.any())
    assert torch.equal(total_noised, noised(plan, total, clip, 1, Streams(1)))
    assert not torch.equal(total_noised, noised(plan, total, clip, 2, Streams(1)))
    assert not torch.equal(total_noised, noised(plan, total, clip, 1, Streams(2)))


def test_release_of_an_empty_round_is_noise():
    empty = torch.zeros(0, 12, dtype=torch.float64).sum(dim=0)
    plan = plan_of()
    clip = plan.clip_schedule.clip(0.5, 1)
    assert int((noised(plan, empty, clip, 1, Streams(1)) == 0).sum()) == 0


def test_clients_of_a_trusted_server_add_nothing():
    rows = torch.ones(3, 4)
    plan = plan_of()
    plan.release.randomise_(
        rows, asked(plan, rows[0], [0, 1, 2], plan.first_state(rows[0]), 1, Streams(1))
    )
    assert torch.equal(rows, torch.ones(3, 4))
