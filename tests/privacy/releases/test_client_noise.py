"""Local DP: any two inputs of a client, charged for its own turns."""

import math
import re

import numpy as np
import pytest
from scipy.optimize import brentq

from fedveil.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Accountant, Relation, Trust, Unit
from fedveil.privacy.accounting.composition import epsilon, gaussian_epsilon
from fedveil.privacy.accounting.events import (
    FuGaussian,
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    Laplace,
    PoissonSampled,
    Shuffled,
    TwoPoint,
)
from fedveil.privacy.clip_schedules import Fixed, Median, PerGradient, Poly, Quantile
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.releases.client_noise import ClientNoise, Published, client_noise
from fedveil.privacy.releases.dp_sgd import DpSgdSteps, dp_sgd
from fedveil.privacy.releases.two_point import two_point
from fedveil.privacy.rows import Norm
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson, RoundRobin

L2, L1 = Fixed(1.0), Fixed(1.0, Norm.L1)
BUDGET = Budget(3.0, 1e-5)


def plan_of(sampler=None, schedule=L2, *, laplace=False, rounds=10, population=1000, **changes):
    settings = {"budgets": (BUDGET,), **changes}
    return client_noise(
        sampler or Everyone(), population, schedule, laplace=laplace, rounds=rounds, **settings
    )


def scale(plan, round=1, client=0):
    """The noise scale of a client's report."""
    clip = plan.schedule.clip(plan.schedule.start(), round)
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
    assert plan.claims(4)[0].epsilon == epsilon(Gaussian(5.0), 4, 1e-5, Relation.REPLACE)


@pytest.mark.parametrize("sampler", [Poisson(0.01), FixedSize(10)], ids=str)
def test_sampling_amplifies_nothing_against_the_server(sampler):
    plan = plan_of(sampler, multiplier=5.0)
    assert plan.claims(4)[0].epsilon == epsilon(Gaussian(5.0), 4, 1e-5, Relation.REPLACE)


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
    with pytest.raises(BadInput, match=r"clip\.norm"):
        plan_of(schedule=schedule, laplace=laplace)


@pytest.mark.parametrize(
    "schedule", [Quantile(1.0, 0.5, noise=5.0), Median(1.0, -3, 3, 5, BUDGET)], ids=["q", "m"]
)
def test_laplace_with_an_adaptive_bound_is_refused(schedule):
    with pytest.raises(BadInput):
        plan_of(schedule=schedule, laplace=True)


def test_several_budgets_and_one_multiplier_are_refused():
    with pytest.raises(BadInput, match=r"budget\.epsilons"):
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


# --- adaptive clips ---


def through_curator(plan, releases, noise, count):
    """The epsilon of all that a client's reports and the curator's noisy sums tell together."""
    squared = releases / plan.release.multiplier**2 + count / noise**2
    return gaussian_epsilon(math.sqrt(squared), BUDGET.delta)


def test_line_against_the_server_composes_updates_and_the_curators_bits():
    """Replacing a client moves the sum of centred bits by 1: noise over sensitivity is sigma_b."""
    plan = plan_of(RoundRobin(100), Quantile(1.0, 0.5, noise=5.0), rounds=35)
    (line,) = plan.lines
    assert line.event == GaussianWithCurator(Gaussian(plan.release.multiplier), Gaussian(5.0), 4)
    assert (line.covers, line.trust, line.relation) == (
        "updates and bits",
        Trust.CURATOR,
        Relation.REPLACE,
    )
    assert any("curator" in a for a in line.assumptions)
    claim = plan.claims(35)[0]
    assert claim.epsilon == pytest.approx(through_curator(plan, 4, 5.0, 4), rel=1e-12)
    assert 0.99 * BUDGET.epsilon < claim.epsilon <= BUDGET.epsilon
    assert plan.release.multiplier > plan_of(RoundRobin(100), rounds=35).release.multiplier


def test_bits_of_capped_clients_are_capped():
    plan = plan_of(FixedSize(50, 4), Quantile(1.0, 0.5, noise=5.0), rounds=60)
    assert plan.lines[0].participations(60) == 4
    assert plan.lines[0].event.most == 4


@pytest.mark.parametrize(
    ("schedule", "word"),
    [
        (Quantile(1.0, 0.5, noise=0.5), r"clip\.bit_noise"),
        (Median(1.0, -3, 3, 5, Budget(20.0, 1e-5)), r"clip\.epsilon"),
    ],
    ids=["q", "m"],
)
def test_curator_that_alone_uses_up_the_budget_is_refused(schedule, word):
    with pytest.raises(BadInput, match=f"{word}.*budget\\.epsilon 3") as e:
        plan_of(schedule=schedule)
    assert "\n" not in str(e.value)
    with pytest.raises(BadInput, match=word):
        plan_of(schedule=schedule, multiplier=50.0, rounds=1)


def test_curator_that_barely_leaves_something_is_refused_by_name():
    """Whatever is left asks for more noise than there is."""

    def left(noise):
        return BUDGET.epsilon * (1 - 1e-12) - epsilon(Gaussian(noise), 10, 1e-5, Relation.REPLACE)

    noise = brentq(left, 1.0, 100.0, xtol=1e-13)
    assert epsilon(Gaussian(noise), 10, 1e-5, Relation.REPLACE) < BUDGET.epsilon
    with pytest.raises(BadInput, match=r"clip\.bit_noise"):
        plan_of(schedule=Quantile(1.0, 0.5, noise=noise))


def test_budget_stops_by_what_the_server_learns_from_both():
    schedule, open_ended = Quantile(1.0, 0.5, noise=4.0), Budget(math.inf, 1e-5)
    told = plan_of(schedule=schedule, multiplier=4.0, rounds=20, budgets=(open_ended,))
    limit = told.claims(9)[0].epsilon
    plan = plan_of(schedule=schedule, multiplier=4.0, rounds=20, budgets=(Budget(limit, 1e-5),))
    assert plan.permitted == 9
    assert plan_of(multiplier=4.0, rounds=20, budgets=(Budget(limit, 1e-5),)).permitted > 9


def test_every_group_composes_its_own_reports_with_the_curator():
    budgets = (Budget(2.0, 1e-5), Budget(8.0, 1e-5))
    plan = plan_of(
        schedule=Quantile(1.0, 0.5, noise=9.0), budgets=budgets, group_of=np.arange(1000) % 2
    )
    assert [line.covers for line in plan.lines] == [
        "updates and bits of 500 clients, group 2",
        "updates and bits of 500 clients, group 1",
    ]
    for line, m in zip(plan.lines, plan.release.multipliers[[1, 0]], strict=True):
        assert line.event == GaussianWithCurator(Gaussian(m), Gaussian(9.0), 10)
        assert line.trust is Trust.CURATOR
        assert 0.99 * line.budget.epsilon < line.claims(10)[0].epsilon <= line.budget.epsilon


def test_strict_reading_beside_a_published_label_composes_too():
    plan = plan_of(schedule=median(), rounds=100, published=Published())
    label, strict = plan.lines
    assert (label.covers, label.event) == ("updates", Gaussian(plan.release.multiplier))
    assert label.as_published
    curator = Gaussian(plan.schedule.noise / math.sqrt(2))
    assert strict.event == GaussianWithCurator(Gaussian(plan.release.multiplier / 2), curator, 10)
    assert (strict.covers, strict.trust) == ("updates and norms", Trust.CURATOR)
    assert strict.reading


def test_flipped_bits_are_part_of_the_report():
    plan = plan_of(schedule=Quantile(1.0, 0.5, flip=0.05))
    (line,) = plan.lines
    assert line.event == GaussianWithBit(Gaussian(plan.release.multiplier), TwoPoint(0.05))
    assert plan.release.multiplier > plan_of().release.multiplier
    assert line.trust is Trust.LOCAL
    assert plan.claims(10)[0].epsilon <= BUDGET.epsilon


def test_flipped_bits_that_use_up_the_budget_are_refused():
    with pytest.raises(BadInput, match=r"clip\.bit_epsilon 0\.3 over 10 participations"):
        plan_of(schedule=Quantile(1.0, 0.5, flip=0.3))


def median(**changes):
    settings = {"value": 1.0, "low": -4, "high": 4, "every": 10, "budget": Budget(0.8, 1e-8)}
    return Median(**{**settings, **changes})


def test_line_against_the_server_composes_updates_and_the_curators_histograms():
    """Replacing a client changes two counts by one, in at most ten histograms."""
    plan = plan_of(schedule=median(), rounds=100)
    (line,) = plan.lines
    noise = plan.schedule.noise / math.sqrt(2)
    assert line.event == GaussianWithCurator(Gaussian(plan.release.multiplier), Gaussian(noise), 10)
    assert (line.covers, line.trust) == ("updates and norms", Trust.CURATOR)
    histograms = gaussian_epsilon(math.sqrt(10) / noise, 1e-8)
    assert 0.98 * 0.8 < histograms <= 0.8
    claim = plan.claims(100)[0]
    assert claim.epsilon == pytest.approx(through_curator(plan, 100, noise, 10), rel=1e-12)
    assert 0.99 * BUDGET.epsilon < claim.epsilon <= BUDGET.epsilon
    assert plan.permitted == 100


@pytest.mark.parametrize(
    ("size", "population", "every"), [(1, 10, 10), (10, 100, 5), (3, 10, 4), (7, 20, 20)]
)
def test_histograms_that_keep_step_with_the_turns_are_all_counted(size, population, every):
    """Round robin in step with the refreshes puts one client into every histogram."""
    sampler, rounds = RoundRobin(size), 100
    plan = plan_of(sampler, median(every=every), rounds=rounds, population=population)
    concerned = np.zeros(population, dtype=np.int64)
    for round in range(1, rounds + 1):
        if plan.schedule.watched.due(round):
            concerned[sampler.cohort(population, round, Streams(1))] += 1
    event = plan.lines[0].event
    assert event.most >= concerned.max()
    histograms = gaussian_epsilon(math.sqrt(event.most) / event.curator.multiplier, 1e-8)
    assert 0.98 * 0.8 < histograms <= 0.8


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
    with pytest.raises(BadInput, match=r"c2|clip\.norm"):
        plan_of(schedule=schedule, laplace=True, published=Published(1.0))


# --- DP-SGD inside a client ---


def steps_plan(sampler=None, **changes):
    settings = {
        "rate": 0.1,
        "steps": 5,
        "nominal": None,
        "rounds": 4,
        "budget": BUDGET,
        "multiplier": 2.0,
    }
    return dp_sgd(sampler or Everyone(), 100, 0.7, **{**settings, **changes})


@pytest.mark.parametrize(("rounds", "turns"), [(1, 1), (4, 2), (10, 3)])
def test_every_step_of_every_participation_is_counted(rounds, turns):
    plan = steps_plan(RoundRobin(30), rounds=rounds)
    (line,) = plan.lines
    assert (line.per, line.participations(rounds)) == (5, turns)
    event = PoissonSampled(0.1, Gaussian(2.0))
    assert plan.claims(rounds)[0].epsilon == epsilon(event, 5 * turns, 1e-5, Relation.ZERO_OUT)


@pytest.mark.parametrize(
    ("nominal", "relation", "words"),
    [
        (None, Relation.ZERO_OUT, "numbers of records are public"),
        (5, Relation.ADD_REMOVE, "nominal number"),
    ],
)
def test_sizes_are_public_or_nominal(nominal, relation, words):
    plan = steps_plan(nominal=nominal)
    claim = plan.claims(4)[0]
    assert plan.release.relation is claim.neighbours is relation
    assert any(words in a for a in claim.assumptions)
    assert (claim.unit, claim.trust) == (Unit.RECORD, Trust.LOCAL)
    assert isinstance(plan.release, DpSgdSteps)


def test_steps_are_calibrated_to_all_of_them():
    plan = steps_plan(FixedSize(50, 3), rounds=6, rate=1.0, multiplier=None)
    assert plan.lines[0].event == Gaussian(plan.release.multiplier)
    found = epsilon(Gaussian(plan.release.multiplier), 15, 1e-5, Relation.ZERO_OUT)
    assert 0.98 * BUDGET.epsilon < found <= BUDGET.epsilon
    assert plan.permitted == 6


def test_budget_ends_between_participations():
    free = steps_plan(rate=1.0, multiplier=9.0, budget=Budget(math.inf, 1e-5))
    two = free.lines[0].claims(2)[0].epsilon
    assert steps_plan(rate=1.0, multiplier=9.0, budget=Budget(two, 1e-5)).permitted == 2


@pytest.mark.parametrize(
    ("key", "value"), [("rate", 0.0), ("rate", 1.1), ("rate", math.nan), ("steps", 0)]
)
def test_steps_that_cannot_be_are_refused(key, value):
    with pytest.raises(BadInput, match=rf"client\.{key}"):
        steps_plan(**{key: value})


# --- two-point ---

RANGES = Ranges(0.0, 0.075, (20, 4), True, Perturb.WEIGHTS)


def report_plan(sampler=None, population=1000, **changes):
    settings = {"epsilon": 1.0, "rounds": 3, "budget": Budget(math.inf, 1e-5), **changes}
    return two_point(sampler or FixedSize(100, 2), population, RANGES, **settings)


def test_four_readings_of_the_same_reports_stand_side_by_side():
    """24 weights in at most 2 of 3 rounds are 48 reports about one client."""
    plan = report_plan(shuffled=100)
    shuffled, exact, pure, weight = plan.claims(3)
    replaced = Relation.REPLACE
    event = Shuffled(TwoPoint(1.0), 100)
    assert shuffled.epsilon == epsilon(event, 48, 1e-5, replaced)
    assert exact.epsilon == epsilon(TwoPoint(1.0), 48, 1e-5, replaced, Accountant.BINOMIAL)
    assert (pure.epsilon, pure.delta) == (48.0, 0.0)
    assert weight.epsilon == 1.0
    assert shuffled.epsilon < exact.epsilon < pure.epsilon
    assert [c.trust for c in (shuffled, exact, pure)] == [
        Trust.SHUFFLED,
        Trust.LOCAL,
        Trust.LOCAL,
    ]
    assert [c.unit for c in (shuffled, exact, pure)] == [Unit.CLIENT] * 3
    assert (weight.unit, weight.as_published) == (Unit.WEIGHT, True)
    assert "not a guarantee" in str(weight)
    assert any("shuffler" in a for a in shuffled.assumptions)
    assert any("100 honest reports" in a for a in shuffled.assumptions)
    assert plan.release.minimum == 100
    assert [line.reading for line in plan.lines] == [False, True, True]


def test_without_a_shuffler_there_is_no_shuffled_claim():
    plan = report_plan()
    exact, pure, weight = plan.claims(3)
    assert (exact.accountant, pure.accountant) == (Accountant.BINOMIAL, Accountant.PURE)
    assert weight.as_published
    assert {line.trust for line in plan.lines} == {Trust.LOCAL}
    assert [line.reading for line in plan.lines] == [False, True]
    assert plan.release.minimum == 0


def test_clients_are_charged_for_their_own_rounds():
    plan = report_plan(FixedSize(100, 3), shuffled=50)
    counts = np.zeros(1000, dtype=np.int64)
    counts[:300] = 1
    counts[0] = 2
    worst = plan.claims(3, counts)[0]
    event = Shuffled(TwoPoint(1.0), 50)
    assert worst.epsilon == epsilon(event, 2 * 24, 1e-5, Relation.REPLACE)
    assert worst.holds_for == "the client that took part most"


def test_published_epsilon_is_of_one_weight_in_one_round_however_many_there_are():
    assert [report_plan(FixedSize(10, 9), rounds=r).claims(r)[-1].epsilon for r in (1, 9)] == [1, 1]


@pytest.mark.parametrize("sampler", [FixedSize(100, 2), Poisson(0.1), RoundRobin(100)], ids=str)
def test_more_honest_reports_than_clients_are_refused(sampler):
    report_plan(sampler, shuffled=100)
    with pytest.raises(BadInput, match=r"shuffle\.minimum is 101"):
        report_plan(sampler, shuffled=101)


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan, math.inf])
def test_report_without_an_epsilon_is_refused(eps):
    with pytest.raises(BadInput, match=r"noise\.epsilon"):
        report_plan(epsilon=eps)


@pytest.mark.parametrize("shuffled", [0, 100])
def test_budget_that_one_round_exceeds_is_refused_with_its_price(shuffled):
    free = report_plan(shuffled=shuffled)
    claim = free.lines[0].claims(1)[0]
    price = claim.epsilon
    with pytest.raises(BadInput, match=re.escape(f"costs {claim.short}")):
        report_plan(shuffled=shuffled, budget=Budget(0.9 * price, 1e-5))
    assert report_plan(shuffled=shuffled, budget=Budget(1.1 * price, 1e-5)).permitted == 1


def test_budget_is_that_of_the_reading_that_is_charged():
    """Behind a shuffler the reading without one may exceed it."""
    free = report_plan(shuffled=100)
    whole = free.claims(3)[0].epsilon
    plan = report_plan(shuffled=100, budget=Budget(1.01 * whole, 1e-5))
    assert plan.permitted == 3
    assert plan.claims(3)[1].epsilon > plan.limit
