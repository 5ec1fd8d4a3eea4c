"""From a recipe to its plan: every word of clip, noise and budget arrives, and is accounted."""

import math

import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import Fixed, Poly, Quantile
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe

SMALL = ("data.clients=40", "rounds=10", "engine.workers=1", "engine.mode=looped")
LOUD = ("noise.multiplier=5.0", "budget.epsilon=inf", "budget.delta=1e-3")


def plan_of(name, *settings):
    return build(load_recipe(name, [*SMALL, *settings])).plan


# --- clips ---


RULES = {
    "clip.value=0.5": Fixed(0.5),
    "clip.kind=poly clip.value=0.5 clip.power=2.0": Poly(0.5, 2.0, 10, 0.0005),
    "clip.kind=poly clip.value=0.5 clip.power=2.0 clip.floor=0.1": Poly(0.5, 2.0, 10, 0.1),
    "clip.kind=quantile clip.value=0.5 clip.quantile=0.7 clip.lr=0.3 clip.bit_noise=9.0": (
        Quantile(0.5, 0.7, 0.3, 9.0)
    ),
}


@pytest.mark.parametrize("settings", RULES)
def test_the_bound_is_the_one_that_was_asked_for(settings):
    assert plan_of("central", *LOUD, *settings.split()).clip_schedule == RULES[settings]


def test_bits_have_noise_in_proportion_to_a_cohort_unless_told_otherwise():
    adaptive = ("clip.kind=quantile", "clip.value=0.5", "noise.multiplier=0.5")
    turns = ("sample.kind=round-robin", "sample.size=10")
    assert plan_of("central", *LOUD[1:], *adaptive, *turns).clip_schedule.noise == 10 / 20


@pytest.mark.parametrize("kind", ["fixed", "poly"])
def test_a_norm_arrives(kind):
    decay = ("clip.power=1.0",) if kind == "poly" else ()
    settings = (f"clip.kind={kind}", "clip.value=0.5", "clip.norm=l1", *decay)
    assert plan_of("norm-bound", "sample.size=5", *settings).clip_schedule.norm is Norm.L1


def test_a_median_arrives():
    histogram = ("clip.kind=median", "clip.value=0.5", "clip.low=-9", "clip.high=3")
    more = ("clip.every=3", "clip.epsilon=9.0", "clip.delta=1e-4", "clip.monotone=true")
    settings = (*LOUD, "sample.size=5", "sample.max_participations=none", *histogram, *more)
    schedule = plan_of("ldp-sgd", *settings, "clip.cap=2.0").clip_schedule
    assert (schedule.value, schedule.low, schedule.high, schedule.every) == (0.5, -9, 3, 3)
    assert (schedule.monotone, schedule.cap) == (True, 2.0)
    assert (schedule.budget.epsilon, schedule.budget.delta) == (9.0, 1e-4)


def test_ranges_arrive_layer_by_layer():
    settings = ("clip.adaptive=true", "clip.growth=1.5", "shuffle=none", "clip.radius=0.25")
    plan = plan_of("ldp-fl", *settings, "noise.epsilon=0.5", "client.epochs=1")
    assert plan.release.ranges == Ranges(0.0, 0.25, (640, 10), True, Perturb.UPDATE, 1.5)
    assert plan.release.mechanism.epsilon == 0.5


def test_a_bound_per_gradient_is_that_of_its_own_round():
    """With decaying learning rates the first round reaches furthest."""
    decay = ("client.lr=none", "client.mu=1.0", "client.gamma=4.0", "client.steps=3")
    plan = plan_of("dp-fedavg-gaussian", *LOUD, "sample.size=5", *decay)
    for round in (1, 2, 5):
        rates = [2 / ((round - 1) * 3 + step + 4) for step in range(3)]
        clip = plan.clip_schedule.clip(2.0, round)
        assert (clip.value, clip.gradient) == (pytest.approx(2.0 * sum(rates)), 2.0)


# --- noise and budgets ---


CALIBRATED = {
    "central": ("sample.kind=all",),
    "ldp-sgd": ("sample.size=5", "sample.max_participations=none"),
    "dp-fedavg": ("sample.size=8", "data.statistics=public"),
    "dp-sgd": ("sample.size=8", "sample.max_participations=none", "client.rate=1.0"),
}


@pytest.mark.parametrize(
    ("name", "source"),
    [(name, "seeded") for name in CALIBRATED] + [(name, "secure") for name in [*CALIBRATED][:3]],
)
def test_noise_is_the_least_that_lets_all_rounds_fit(name, source):
    settings = (*CALIBRATED[name], "budget.epsilon=5.0")
    plan = plan_of(name, *settings, "budget.delta=1e-4", f"noise.source={source}")
    assert (plan.rounds, plan.permitted) == (10, 10)
    claim = plan.claims(10)[0]
    assert 0.98 * 5.0 <= claim.epsilon <= 5.0
    wanted = 0.0 if claim.accountant == "pure" else 1e-4
    assert claim.delta == pytest.approx(wanted, abs=1e-9)
    assert claim.delta <= 1e-4


def test_a_secure_histogram_and_reports_keep_to_their_delta():
    histogram = ("clip.kind=median", "clip.value=0.5", "clip.low=-9", "clip.high=3")
    more = ("clip.every=3", "clip.epsilon=9.0", "clip.delta=1e-4", "noise.source=secure")
    settings = (*LOUD, "sample.size=5", "sample.max_participations=none", *histogram, *more)
    claims = plan_of("ldp-sgd", *settings).claims(10)
    assert max(claim.delta for claim in claims) <= 1e-3


def test_dp_sgd_is_accounted_as_the_recipe_says():
    settings = ("client.rate=0.2", "client.steps=3", "clip.value=0.5", *LOUD, "sample.size=5")
    plan = plan_of("dp-sgd", *settings, "budget.delta=1e-4", "sample.max_participations=none")
    (line,) = plan.lines
    assert (line.event.rate, line.event.event.multiplier, line.per) == (0.2, 5.0, 3)
    assert plan.clip(plan.first_state(None), 1).value == 0.5


@pytest.mark.parametrize(("nominal", "relation"), [("none", "zero-out"), ("40", "add-remove")])
def test_a_nominal_size_is_what_hides_sizes(nominal, relation):
    settings = (f"client.nominal={nominal}", "server.weights=uniform", *LOUD, "budget.delta=1e-4")
    plan = plan_of("dp-sgd", *settings, "sample.size=5", "sample.max_participations=none")
    assert plan.lines[0].relation == relation


def test_a_shuffled_round_waits_for_the_dishonest_too():
    plan = plan_of("ldp-fl", "shuffle.minimum=30", "shuffle.dishonest=7", "client.epochs=1")
    assert plan.lines[0].event.reports == 30
    assert plan.release.channel.minimum == 37


def test_a_shuffled_claim_hides_behind_the_minimum_that_was_asked_for():
    plan = plan_of("ldp-fl", "shuffle.minimum=30", "client.epochs=1")
    assert plan.lines[0].event.reports == 30
    assert plan.release.channel.minimum == 30


def test_clients_are_dealt_to_their_budgets_in_equal_numbers():
    settings = ("budget.epsilon=none", "budget.epsilons=[2.0, 20.0, 5.0]", "budget.delta=1e-3")
    plan = plan_of("ldp-sgd", *settings, "sample.size=5", "sample.max_participations=none")
    members = [line.members for line in plan.lines]
    assert sorted(members) == [13, 13, 14]
    noises = [line.event.multiplier for line in plan.lines]
    assert noises == sorted(noises)
    found = [int((plan.release.multipliers == noise).sum()) for noise in noises]
    assert found == members


def test_a_published_claim_is_about_the_papers_unit():
    settings = ("budget.as_published=true", "noise.c2=1.0", "budget.delta=1e-3", "sample.size=8")
    first, *_ = plan_of("dp-fedavg-gaussian", *settings).claims(10)
    assert (first.unit, first.as_published) == ("record", True)
    update = ("clip.each=update", "noise.c2=none", "budget.as_published=true")
    first, *_ = plan_of("dp-fedavg-gaussian", *update, "sample.size=8").claims(10)
    assert (first.unit, first.as_published) == ("client", True)


# --- what does not go together ---


SECURE = "noise.source=secure"
TURNS = ("sample.size=5", "sample.max_participations=none")
REFUSED = {
    "a checkpoint is written after each": ("central", (*LOUD, SECURE, "engine.checkpoint=2")),
    "budget.as_published is for simulations": (
        "dp-fedavg",
        ("budget.as_published=true", SECURE, "sample.size=5", "budget.epsilon=5.0"),
    ),
    "clip on the whole update": ("central", (*LOUD, "clip.each=gradient", "client.steps=2")),
    "needs l1": ("dp-fedavg", (*LOUD, "clip.norm=l2", "sample.size=5")),
    "needs l2": ("dp-fedavg-gaussian", (*LOUD, "clip.norm=l1", "sample.size=5")),
    "a capped cohort": (
        "central",
        (*LOUD, "sample.kind=fixed", "sample.size=5", "sample.max_participations=3"),
    ),
    "publishing somebody outright": ("central", (*LOUD, "budget.delta=0.03")),
    "would exceed the clip": ("central", (*LOUD, "server.weights=examples")),
    "which the weights would tell": ("ldp-sgd", (*LOUD, *TURNS, "server.weights=examples")),
    "momentum": ("dp-fedavg-gaussian", (*LOUD, "sample.size=5", "client.momentum=0.5")),
    "no proximal term": ("dp-fedavg", (*LOUD, "sample.size=5", "client.proximal=0.5")),
    "no Adam": ("dp-fedavg-gaussian", (*LOUD, "sample.size=5", "client.optimizer=adam")),
    "publishing one outright": (
        "dp-sgd",
        ("data.clients=40", "budget.delta=1e-3", "noise.multiplier=5.0", *TURNS),
    ),
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_would_break_a_claim_is_refused(told):
    name, settings = REFUSED[told]
    more = ("client.epochs=none",) if "client.steps=2" in settings else ()
    with pytest.raises(BadInput, match=told):
        plan_of(name, *settings, *more)


def test_infinite_budgets_report_and_never_stop():
    plan = plan_of("central", *LOUD)
    assert plan.permitted == 10
    assert not math.isinf(plan.claims(10)[0].epsilon)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "central",
            ["noise.multiplier=0"],
            r"^noise\.multiplier is 0: .*noise\.kind = 'none'",
        ),
        ("central", ["budget.epsilon=inf"], r"^give noise\.multiplier or budget\.epsilon"),
        ("central", ["clip.norm=l1"], r"^clip\.norm is l1 .* set clip\.norm = 'l2'"),
        ("priv-unit", ["clip.norm=l1"], r"^clip\.norm is l1 and noise\.kind 'priv-unit' needs l2"),
    ],
)
def test_an_argument_that_a_plan_refuses_is_called_by_its_key(name, settings, message):
    with pytest.raises(BadInput, match=message):
        build(load_recipe(name, settings))
