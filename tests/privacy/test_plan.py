"""What training sees of any plan: checked as a whole, and doing nothing it was not asked to."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import NOT_DECIDED, Budget
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian
from fedveil.privacy.accounting.meaning import smaller
from fedveil.privacy.clip import Clip, Norm
from fedveil.privacy.clip_schedules import Fixed, Quantile
from fedveil.privacy.noise.mechanisms import GaussianMechanism, LaplaceMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan, unprotected
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.release import NoisySteps
from fedveil.privacy.releases.central import CentralNoise, central
from fedveil.privacy.releases.client_noise import ClientNoise, client_noise
from fedveil.privacy.releases.dp_sgd import DpSgdSteps
from fedveil.privacy.releases.two_point import two_point
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson, RoundRobin
from tests.asking import asked, next_state, noised

SCHEDULE = Fixed(0.5)
BUDGET = Budget(3.0, 1e-5)
IDS = np.arange(3)


def central_plan(sampler=None, population=100, *, rounds=10, budget=BUDGET, multiplier=9.0):
    sampler = sampler or Everyone()
    return central(
        sampler, population, SCHEDULE, rounds=rounds, budget=budget, multiplier=multiplier
    )


def local_plan(sampler=None, *, laplace=False, schedule=SCHEDULE, **changes):
    settings = {"rounds": 10, "budgets": (Budget(50.0, 1e-5),), "multiplier": 2.0, **changes}
    return client_noise(sampler or Everyone(), 100, schedule, laplace=laplace, **settings)


def two_point_plan(perturb=Perturb.WEIGHTS, **changes):
    ranges = Ranges(0.0, 0.5, (3, 2), True, perturb, 1.5)
    settings = {"epsilon": 1.0, "rounds": 4, "budget": Budget(math.inf, 1e-5), **changes}
    return two_point(Everyone(), 100, ranges, **settings)


def test_what_a_plan_assumes_is_in_every_claim_once():
    """A plan that says it already is itself: repetitions in step share one."""
    plan = two_point_plan(shuffled=50)
    said = plan.assuming("the moon is full")
    claims = said.claims(4)
    assert len(claims) > 2
    assert all(claim.assumptions[-1] == "the moon is full" for claim in claims)
    assert [c.epsilon for c in claims] == [c.epsilon for c in plan.claims(4)]
    assert said.assuming("the moon is full") is said
    silent = unprotected(Everyone(), 10, rounds=1)
    assert silent.assuming("anything") is silent


def test_claims_of_fewer_rounds_than_fit_hold_whoever_ended_the_run():
    made = central(Poisson(0.1), 100, Fixed(1.0), rounds=9, budget=Budget(3.0, 1e-5))
    few = replace(made, rounds=20)  # the noise is for nine
    assert few.permitted in range(9, 20)
    whole = few.lines[0].claims(few.permitted)
    assert few.claims(few.permitted) == whole
    *kept, naive = few.claims(few.permitted - 1)
    assert [claim.epsilon for claim in kept] == [claim.epsilon for claim in whole]
    assert naive == replace(few.lines[0].claims(few.permitted - 1)[0], condition=NOT_DECIDED)


# --- checks ---


@pytest.mark.parametrize("delta", [0.01, 0.011, 0.5])
def test_delta_of_one_over_the_clients_or_more_is_refused(delta):
    with pytest.raises(BadInput, match="not below 1 / 100 clients"):
        central_plan(budget=Budget(1.0, delta), multiplier=None)
    assert central_plan(budget=Budget(1.0, 0.0099), multiplier=None).private


def test_delta_of_every_line_is_checked(make_line):
    bad = make_line(covers="norms", budget=Budget(1.0, 0.2))
    with pytest.raises(BadInput, match="not below 1 / 10 clients"):
        PrivacyPlan(Everyone(), 10, 1, lines=(make_line(), bad))


@pytest.mark.parametrize("rounds", [0, -1, 1_000_001])
def test_number_of_rounds_that_cannot_be_is_refused(rounds):
    with pytest.raises(BadInput, match="rounds"):
        central_plan(rounds=rounds)
    with pytest.raises(BadInput, match="rounds"):
        unprotected(Everyone(), 10, rounds=rounds)


@pytest.mark.parametrize("sampler", [FixedSize(11), RoundRobin(11)], ids=str)
def test_cohort_larger_than_the_population_is_refused(sampler):
    with pytest.raises(BadInput, match="only 10 clients"):
        central_plan(sampler, 10)
    with pytest.raises(BadInput, match="only 10 clients"):
        unprotected(sampler, 10, rounds=1)


# --- what it says ---


def test_spent_is_an_upper_bound_for_every_round():
    plan = central_plan(multiplier=5.0, rounds=40, budget=Budget(math.inf, 1e-5))
    fixed = [plan.lines[0].claims(n)[0].epsilon for n in range(41)]
    assert all(plan.spent(n).epsilon >= fixed[n] for n in range(41))


def test_what_is_quoted_after_a_round_is_an_upper_bound_on_the_claim_of_a_run_that_ends_there():
    plan = central_plan(multiplier=5.0, rounds=40, budget=Budget(math.inf, 1e-5))
    for n in range(1, 41):
        quoted, claims = plan.claim_if_ended(n), plan.claims(n)
        assert not quoted.condition
        assert claims[0].epsilon <= quoted.epsilon <= 1.001 * claims[0].epsilon
        assert plan.spent(n).condition == ("" if n == 40 else NOT_DECIDED)
    assert plan.claim_if_ended(40) == plan.spent(40)


def test_rounds_done_again_are_in_what_is_spent_and_in_what_is_quoted():
    plan = central_plan(multiplier=5.0, rounds=40, budget=Budget(math.inf, 1e-5))
    line = plan.lines[0]
    assert plan.spent(10, extra_attempts=2).epsilon >= line.claims(12)[0].epsilon
    assert plan.spent(40, extra_attempts=2).epsilon >= line.claims(42)[0].epsilon
    assert plan.claim_if_ended(10, extra_attempts=2).epsilon == line.epsilon_if_ended(
        12, 40, extra_attempts=2
    )
    assert plan.claim_if_ended(40, extra_attempts=2).epsilon == line.epsilon_if_ended(
        42, 40, extra_attempts=2
    )


def test_what_is_quoted_after_a_round_is_of_the_line_that_is_a_guarantee(make_line):
    published, strict = make_line(as_published=True), make_line(event=Gaussian(2.0))
    plan = PrivacyPlan(Everyone(), 10, 5, lines=(published, strict))
    assert plan.spent(2).as_published
    assert plan.claim_if_ended(2).epsilon == pytest.approx(
        strict.epsilon_if_ended(2, plan.permitted), rel=1e-3
    )


def test_tightest_line_ends_the_run(make_line):
    loose = make_line(budget=Budget(100.0, 1e-5))
    tight = make_line(covers="norms", budget=Budget(loose.claims(4)[0].epsilon, 1e-5))
    plan = PrivacyPlan(Everyone(), 10, 20, lines=(loose, tight))
    assert plan.permitted == 4
    assert plan.limit == 100.0


RELEASES = {
    "central": CentralNoise(GaussianMechanism(1.0), Relation.ZERO_OUT),
    "clients": ClientNoise(GaussianMechanism(1.0), Relation.REPLACE),
    "steps": DpSgdSteps(NoisySteps(0.5, 1, 1.0), Relation.ZERO_OUT),
}


@pytest.mark.parametrize(
    ("sampler", "secret"),
    [
        (Everyone(), False),
        (Poisson(0.1), True),
        (Poisson(1.0), False),
        (FixedSize(10), True),
        (FixedSize(100), False),
        (RoundRobin(10), False),
    ],
)
def test_a_cohort_is_secret_where_the_claim_is_amplified_by_it(sampler, secret):
    assert central_plan(sampler).secret_cohort is secret
    assert not local_plan(sampler).secret_cohort
    assert not unprotected(sampler, 100, rounds=1).secret_cohort


@pytest.mark.parametrize("name", RELEASES)
def test_only_clients_that_protect_themselves_are_counted(name):
    plan = PrivacyPlan(Everyone(), 10, 1, clip_schedule=Fixed(1.0), release=RELEASES[name])
    assert plan.counted_clients == (0 if name == "central" else 10)
    assert PrivacyPlan(Everyone(), 10, 1).counted_clients == 0


@pytest.mark.parametrize("name", RELEASES)
def test_noise_without_a_bound_is_refused(name):
    with pytest.raises(BadInput, match="without a clip"):
        PrivacyPlan(Everyone(), 10, 1, release=RELEASES[name])


def test_what_is_no_release_is_refused():
    with pytest.raises(BadInput, match="a Release is needed"):
        PrivacyPlan(Everyone(), 10, 1, clip_schedule=Fixed(1.0), release=GaussianMechanism(1.0))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (central_plan(), ["Gaussian", "9", "at the server"]),
        (local_plan(), ["Gaussian", "2", "at the clients"]),
        (local_plan(laplace=True, schedule=Fixed(1.0, Norm.L1)), ["Laplace", "at the clients"]),
        (two_point_plan(), ["two-point", "epsilon 1 at delta 0 per weight (replace"]),
        (unprotected(Everyone(), 10, rounds=1), ["no noise"]),
    ],
    ids=["central", "gaussian", "laplace", "two-point", "none"],
)
def test_noise_in_a_few_words(plan, words):
    for word in words:
        assert word in plan.describe()


# --- unprotected ---


@pytest.mark.parametrize("schedule", [None, SCHEDULE])
def test_unprotected_plan_claims_nothing(schedule):
    plan = unprotected(Poisson(0.5), 10, rounds=4, schedule=schedule)
    assert not plan.private
    assert plan.claims(4) == ()
    assert plan.lines == ()
    assert plan.permitted == 4
    assert plan.limit is None
    assert plan.spent(5) is None
    total = torch.ones(3, dtype=torch.float64)
    assert torch.equal(noised(plan, total, Clip(1.0), 1, Streams(1)), total)
    assert length(plan, 3) == 0


def test_watching_clients_without_a_claim_is_refused():
    with pytest.raises(BadInput, match="watches clients"):
        unprotected(Everyone(), 10, rounds=1, schedule=Quantile(1.0, 0.5, noise=1.0))


# --- clients ---


@pytest.mark.parametrize("laplace", [False, True])
def test_client_adds_noise_for_any_two_of_its_inputs(laplace):
    """Scale = multiplier x 2 C."""
    plan = local_plan(laplace=laplace, schedule=Fixed(0.5, Norm.L1 if laplace else Norm.L2))
    rows, start = torch.zeros(3, 20_000), torch.zeros(20_000)
    plan.release.randomise_(rows, asked(plan, start, IDS, plan.first_state(start), 1, Streams(1)))
    size = rows.abs().mean() if laplace else rows.std()
    assert float(size) == pytest.approx(2.0 * 2 * 0.5, rel=0.03)
    assert len(torch.unique(rows, dim=0)) == 3
    assert isinstance(plan.release.mechanism, LaplaceMechanism if laplace else GaussianMechanism)


def test_server_adds_nothing_to_what_clients_protected():
    total, plan = torch.ones(5, dtype=torch.float64), local_plan()
    assert torch.equal(noised(plan, total, Clip(0.5), 1, Streams(1)), total)


def test_noise_of_a_client_is_a_function_of_round_and_client():
    plan, start = local_plan(), torch.zeros(30)
    moving = plan.first_state(start)
    whole, again, later = (torch.zeros(3, 30) for _ in range(3))
    plan.release.randomise_(whole, asked(plan, start, IDS, moving, 1, Streams(1)))
    plan.release.randomise_(again[:1], asked(plan, start, IDS[2:], moving, 1, Streams(1)))
    plan.release.randomise_(later, asked(plan, start, IDS, moving, 2, Streams(1)))
    assert torch.equal(again[0], whole[2])
    assert not torch.equal(later, whole)


def test_reports_are_divided_by_those_that_came():
    plan = local_plan()
    assert plan.release.divisor(7.0, 10.0) == 7.0
    assert plan.release.divisor(0.0, 10.0) == 1.0


@pytest.mark.parametrize("perturb", list(Perturb))
@pytest.mark.parametrize("shuffled", [0, 50])
def test_two_point_sum_is_that_of_updates_whatever_was_reported(perturb, shuffled):
    """A report is c +- r kappa, about the weights or the update; the sum estimates updates."""
    plan, start = two_point_plan(perturb, shuffled=shuffled), torch.linspace(-0.2, 0.2, 5)
    rows, moving = torch.full((4000, 5), 0.1), plan.first_state(start)
    plan.release.randomise_(rows, asked(plan, start, np.arange(4000), moving, 1, Streams(1)))
    reach = 0.5 * plan.release.mechanism.kappa
    assert torch.unique(rows.abs()).tolist() == pytest.approx([reach], rel=1e-5)
    total = summed(plan, rows, torch.ones(4000, dtype=torch.float64), start, moving)
    assert total.dtype is torch.float64
    limit = 5.5 * reach / math.sqrt(4000)
    assert (total / 4000).tolist() == pytest.approx([0.1] * 5, abs=limit)
    nobody = summed(plan, rows, torch.zeros(4000, dtype=torch.float64), start, moving)
    assert nobody.tolist() == [0.0] * 5


def length(plan, size):
    return plan.release.noise_length(asked(plan, torch.zeros(size), IDS), size)


def summed(plan, rows, weights, start, moving):
    total = torch.zeros(len(start), dtype=torch.float64)
    plan.release.channel.add_(total, rows, weights, asked(plan, start, IDS, moving))
    return total


def test_refused_reports_are_left_out_of_the_sum():
    for shuffled in (0, 50):
        plan, start = two_point_plan(shuffled=shuffled), torch.zeros(5)
        rows, moving = torch.zeros(60, 5), plan.first_state(start)
        plan.release.randomise_(rows, asked(plan, start, np.arange(60), moving, 1, Streams(1)))
        weights = torch.ones(60, dtype=torch.float64)
        weights[:10] = 0
        wanted = rows[10:].double().sum(dim=0)
        assert torch.allclose(summed(plan, rows, weights, start, moving), wanted, atol=1e-4)


def test_expected_length_of_the_noise():
    assert length(central_plan(), 16) == pytest.approx(4 * 4.5)
    assert length(local_plan(), 16) == pytest.approx(4 * 2.0 * math.sqrt(3))
    plan = two_point_plan()
    assert length(plan, 5) == pytest.approx(0.5 * plan.release.mechanism.kappa * math.sqrt(15))


# --- moving ---


def test_fixed_bound_and_no_bound_do_not_move():
    for plan in (central_plan(), unprotected(Everyone(), 10, rounds=1)):
        moving = plan.first_state(torch.zeros(5))
        zero = torch.zeros(5)
        assert next_state(plan, moving, torch.zeros(0), zero, zero) is moving


def test_ranges_move_with_the_released_model_only():
    plan = two_point_plan()
    after = torch.tensor([0.0, 0.1, 0.2, 0.0, 2.0])
    moved = next_state(plan, plan.first_state(after), torch.full((1,), 1e9), torch.zeros(5), after)
    assert moved.tolist() == pytest.approx([0.1, 1.0, 0.1, 0.75])


def test_watched_bits_of_a_cohort_move_the_bound():
    schedule, budgets = Quantile(0.5, 0.5, noise=1e-9), (Budget(math.inf, 1e-5),)
    plan = local_plan(FixedSize(40), schedule=schedule, budgets=budgets)
    zero = torch.zeros(5)
    watched = torch.tensor([20.0], dtype=torch.float64)
    moved = next_state(plan, plan.first_state(zero), watched, zero, zero)
    assert float(moved[0]) == pytest.approx(0.5 * math.exp(-0.2 * 0.5))
    assert plan.clip(moved, 2) == Clip(float(moved[0]))


def test_claims_with_counts_are_those_of_the_lines():
    plan = local_plan()
    counts = np.array([4, 1, 2])
    claims = plan.claims(plan.rounds, counts)
    assert claims[0].epsilon == plan.lines[0].claims(4)[0].epsilon
    assert claims[-1].epsilon == plan.lines[0].claims(2)[0].epsilon
    assert plan.lines[0].event == Gaussian(2.0)
    assert plan.release.relation is Relation.REPLACE


def test_what_is_shown_follows_the_client_that_took_part_most():
    """A cap of 3 in 9 rounds: round 9 alone says nothing about who had how many turns."""
    plan = client_noise(
        FixedSize(2, max_participations=3),
        8,
        Fixed(1.0),
        laplace=False,
        rounds=9,
        budgets=(Budget(8.0, 1e-5),),
    )
    shown = [plan.spent(9, most).epsilon for most in (1, 2, 3)]
    assert shown == [plan.spent(most).epsilon for most in (1, 2, 3)]
    assert shown[0] < shown[1] < shown[2] == plan.spent(9).epsilon


def test_a_round_done_again_is_shown_with_what_the_curator_published():
    plan = local_plan(schedule=Quantile(0.5, 0.5, noise=3.0))
    shown, claims = (
        plan.spent(10, 11, extra_attempts=1),
        plan.claims(10, np.full(100, 11), extra_attempts=1),
    )
    assert shown.epsilon == smaller(claims).epsilon
    assert shown.epsilon > epsilon(plan.lines[0].event, 11, 1e-5, Relation.REPLACE)
    assert plan.claim_if_ended(10, 11, extra_attempts=1).epsilon == claims[0].epsilon


def test_a_shuffler_counts_dishonest_reports_among_those_of_a_round():
    """A round of 3 clients never has the 2 honest and 2 dishonest reports that it waits for."""
    ranges = Ranges(0.0, 0.5, (5,), adaptive=False, perturb=Perturb.UPDATE)
    settings = {"epsilon": 1.0, "rounds": 1, "budget": Budget(math.inf, 1e-5), "shuffled": 2}
    plan = two_point(Everyone(), 3, ranges, dishonest=1, **settings)
    assert plan.release.channel.minimum == 3
    with pytest.raises(BadInput, match="a round has 3 clients"):
        two_point(Everyone(), 3, ranges, dishonest=2, **settings)


def test_a_round_that_is_charged_again_draws_other_noise():
    """On the sum and on a clip's statistic, while a replay of the same attempt draws the same."""
    schedule = Quantile(0.5, 0.5, noise=30.0)
    plan = central(
        Everyone(), 40, schedule, rounds=2, budget=Budget(math.inf, 1e-5), multiplier=2.0
    )
    first = asked(plan, torch.zeros(5), IDS)
    drawn = []
    for round in (first, replace(first, attempt=1), replace(first, attempt=1)):
        total = torch.zeros(5, dtype=torch.float64)
        plan.release.noise_(total, round)
        drawn.append(torch.cat([total, plan.noisy_statistic(torch.zeros(1).double(), round)]))
    assert int((drawn[0] == drawn[1]).sum()) == 0
    assert torch.equal(drawn[1], drawn[2])


def test_two_point_reports_are_clamped_to_the_ranges_of_their_plan():
    """Reports lie outside the release's ranges, and the adaptive state is the schedule's."""
    plan = two_point_plan()
    other = replace(plan.clip_schedule, radius=2 * plan.clip_schedule.radius)
    for schedule in (None, Fixed(1.0), other):
        with pytest.raises(BadInput, match="their clip schedule is these ranges"):
            replace(plan, clip_schedule=schedule)
