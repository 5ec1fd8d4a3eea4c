"""Sampler, bound, mechanism and budget, checked as a whole."""

import math

import pytest
import torch

from fedveil.errors import BadInput
from fedveil.privacy.claims import Accountant, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.clipping import FixedBound
from fedveil.privacy.events import FixedSampled, Gaussian, PoissonSampled
from fedveil.privacy.mechanisms import GaussianMechanism
from fedveil.privacy.plan import PrivacyPlan, central, unprotected
from fedveil.privacy.randomness import Streams
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson, RoundRobin
from fedveil.privacy.terms import Budget

BOUND = FixedBound(0.5)
BUDGET = Budget(3.0, 1e-5)
SAMPLERS = [Everyone(), Poisson(0.2), Poisson(1.0), FixedSize(40), FixedSize(100), RoundRobin(30)]


def plan_of(
    sampler=None, population=100, bound=BOUND, *, rounds=10, budget=BUDGET, multiplier=None
):
    return central(
        sampler or Everyone(),
        population,
        bound,
        rounds=rounds,
        budget=budget,
        multiplier=multiplier,
    )


# --- calibrated noise ---


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_calibrated_plan_uses_its_budget_for_all_of_its_rounds(sampler):
    plan = plan_of(sampler)
    assert plan.permitted == 10
    assert 0.98 * BUDGET.epsilon < plan.claims(10)[0].epsilon <= BUDGET.epsilon


def test_round_robin_needs_less_noise_than_everyone():
    """A client in 3 of 10 rounds is charged three times."""
    often, seldom = plan_of(Everyone()), plan_of(RoundRobin(30))
    assert seldom.terms.charges(10) == 3
    ratio = seldom.mechanism.multiplier / often.mechanism.multiplier
    assert ratio == pytest.approx(math.sqrt(0.3), rel=5e-3)


def test_no_epsilon_and_no_multiplier_are_refused():
    with pytest.raises(BadInput, match=r"give noise\.multiplier or budget\.epsilon"):
        plan_of(budget=Budget(math.inf, 1e-5))


def test_infinite_budget_with_a_multiplier_reports_and_never_stops():
    plan = plan_of(budget=Budget(math.inf, 1e-5), multiplier=0.3)
    assert plan.permitted == 10
    assert math.isfinite(plan.claims(10)[0].epsilon)


# --- given noise ---


def test_given_multiplier_is_kept():
    plan = plan_of(multiplier=2.0, budget=Budget(100.0, 1e-5))
    assert plan.mechanism == GaussianMechanism(2.0)


def test_budget_that_the_seventh_round_would_exceed_permits_six():
    free = plan_of(multiplier=4.0, budget=Budget(math.inf, 1e-5))
    six, seven = (free.claims(n)[0].epsilon for n in (6, 7))
    assert plan_of(multiplier=4.0, budget=Budget((six + seven) / 2, 1e-5)).permitted == 6
    assert plan_of(multiplier=4.0, budget=Budget(seven, 1e-5)).permitted == 7


def test_budget_of_a_round_robin_ends_before_a_client_has_its_second_turn():
    free = plan_of(RoundRobin(30), multiplier=4.0, budget=Budget(math.inf, 1e-5))
    one, two = (free.claims(n)[0].epsilon for n in (1, 4))
    assert one < two
    tight = plan_of(RoundRobin(30), multiplier=4.0, budget=Budget((one + two) / 2, 1e-5))
    assert tight.permitted == 3


def test_multiplier_zero_is_refused():
    with pytest.raises(BadInput, match="no finite epsilon exists"):
        plan_of(multiplier=0)


@pytest.mark.parametrize("multiplier", [-1.0, math.nan, math.inf])
def test_multiplier_that_is_no_noise_is_refused(multiplier):
    with pytest.raises(BadInput, match=r"noise\.multiplier"):
        plan_of(multiplier=multiplier)


def test_contradiction_names_both_numbers_and_the_price_of_one_round():
    with pytest.raises(BadInput, match="contradict") as e:
        plan_of(multiplier=0.5, budget=Budget(1.0, 1e-5))
    assert "0.5" in str(e.value)
    assert "epsilon 1 " in str(e.value)
    assert "9.997" in str(e.value)
    assert "\n" not in str(e.value)


# --- checks ---


@pytest.mark.parametrize("delta", [0.01, 0.011, 0.5])
def test_delta_of_one_over_the_clients_or_more_is_refused(delta):
    with pytest.raises(BadInput, match="not below 1 / 100 clients"):
        plan_of(budget=Budget(1.0, delta))
    assert plan_of(budget=Budget(1.0, 0.0099)).private


@pytest.mark.parametrize("rounds", [0, -1])
def test_no_rounds_are_refused(rounds):
    with pytest.raises(BadInput, match="rounds"):
        plan_of(rounds=rounds)
    with pytest.raises(BadInput, match="rounds"):
        unprotected(Everyone(), 10, rounds=rounds)


@pytest.mark.parametrize("sampler", [FixedSize(11), RoundRobin(11)], ids=str)
def test_cohort_larger_than_the_population_is_refused(sampler):
    with pytest.raises(BadInput, match="only 10 clients"):
        plan_of(sampler, 10)
    with pytest.raises(BadInput, match="only 10 clients"):
        unprotected(sampler, 10, rounds=1)


def test_noise_without_a_bound_is_refused():
    with pytest.raises(BadInput, match="without a bound"):
        PrivacyPlan(Everyone(), 10, 1, None, GaussianMechanism(1.0), BUDGET)


@pytest.mark.parametrize(("mechanism", "budget"), [(GaussianMechanism(1.0), None), (None, BUDGET)])
def test_noise_and_budget_go_together(mechanism, budget):
    with pytest.raises(BadInput, match="both or neither"):
        PrivacyPlan(Everyone(), 10, 1, BOUND, mechanism, budget)


# --- what it says ---


@pytest.mark.parametrize(
    ("sampler", "event", "relation", "std"),
    [
        (Everyone(), Gaussian(9.0), Relation.ZERO_OUT, 4.5),
        (Poisson(0.2), PoissonSampled(0.2, Gaussian(9.0)), Relation.ADD_REMOVE, 4.5),
        (FixedSize(40), FixedSampled(40, 100, Gaussian(9.0)), Relation.REPLACE, 9.0),
        (RoundRobin(30), Gaussian(9.0), Relation.ZERO_OUT, 4.5),
    ],
    ids=str,
)
def test_noise_and_its_accounting_agree_on_the_relation(sampler, event, relation, std):
    plan = plan_of(sampler, multiplier=9.0, budget=Budget(50.0, 1e-5))
    assert plan.terms.event == event
    assert plan.terms.relation is relation
    assert plan.noise_std == std


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_divisor_is_public_and_fixed(sampler):
    assert plan_of(sampler).divisor == sampler.expected(100)


def test_claims_name_unit_trust_source_and_assumptions():
    plan = plan_of(Poisson(0.2))
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
    assert [c.accountant for c in plan.claims(3)] == [Accountant.PLD, Accountant.RDP]


def test_spent_is_an_upper_bound_for_every_round():
    plan = plan_of(multiplier=5.0, rounds=40, budget=Budget(math.inf, 1e-5))
    assert len(plan.spent) == 41
    assert all(plan.spent[n] >= plan.claims(n)[0].epsilon for n in range(41))


# --- release ---


def test_release_adds_the_plans_noise():
    plan = plan_of(FixedSize(40), multiplier=9.0, budget=Budget(50.0, 1e-5))
    total = torch.zeros(20_000, dtype=torch.float64)
    noised = plan.release(total, 1, Streams(1))
    assert float(noised.std()) == pytest.approx(9.0, rel=0.04)
    assert torch.equal(noised, plan.release(total, 1, Streams(1)))
    assert not torch.equal(noised, plan.release(total, 2, Streams(1)))
    assert not torch.equal(noised, plan.release(total, 1, Streams(2)))


def test_release_of_an_empty_round_is_noise():
    empty = torch.zeros(0, 12, dtype=torch.float64).sum(dim=0)
    assert int((plan_of().release(empty, 1, Streams(1)) == 0).sum()) == 0


# --- unprotected ---


@pytest.mark.parametrize("bound", [None, BOUND])
def test_unprotected_plan_claims_nothing(bound):
    plan = unprotected(Poisson(0.5), 10, rounds=4, bound=bound)
    assert not plan.private
    assert plan.claims(4) == ()
    assert plan.terms is None
    assert plan.permitted == 4
    assert plan.noise_std == 0
    assert plan.spent == (None,) * 5
    total = torch.ones(3, dtype=torch.float64)
    assert torch.equal(plan.release(total, 1, Streams(1)), total)
