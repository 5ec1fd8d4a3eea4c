"""From a recipe to objects: what the data depend on, and what may be built once for many seeds."""

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson, RoundRobin
from fedveil.runs.build import build, resolve_recipe
from fedveil.runs.recipe import load_recipe
from fedveil.training.cohort import Batches
from fedveil.training.gradients.modes import Mode
from fedveil.training.server import (
    AdagradServer,
    AdamServer,
    RateSchedule,
    RateShape,
    SgdServer,
    Weights,
    YogiServer,
)
from fedveil.training.work import Adam, ClientDpSgd, ClientSgd

SMALL = ["data.clients=20", "rounds=2", "engine.workers=1"]


def recipe(*settings):
    return load_recipe("central", [*SMALL, *settings])


def test_the_runs_seed_divides_the_records_unless_the_data_have_their_own():
    first, second = (recipe(f"seed={seed}").load_data() for seed in (1, 2))
    assert not np.array_equal(first.x, second.x)
    first, second = (recipe(f"seed={seed}", "data.seed=7").load_data() for seed in (1, 2))
    assert np.array_equal(first.x, second.x)
    assert np.array_equal(first.x, recipe("seed=7").load_data().x)


def test_records_may_be_drawn_with_replacement_and_clients_shortened():
    data = recipe("data.resample=5000", "data.most_records=30").load_data()
    assert (data.clients, int(data.sizes.min()), int(data.sizes.max())) == (20, 30, 30)
    assert len(np.unique(data.x, axis=0)) < len(data.x)


@pytest.mark.parametrize("setting", ["data.resample=0", "data.most_records=0"])
def test_no_records_are_refused(setting):
    with pytest.raises(BadInput, match="at least one record"):
        recipe(setting).load_data()


def test_data_and_plan_may_be_given():
    """A plan does not depend on the seed; the model's first weights do where they are random."""
    whole = recipe("seed=3")
    data, plan = whole.load_data(), build(recipe("seed=4")).plan
    given, built = build(whole, data=data, plan=plan), build(whole)
    assert given.data is data
    assert given.plan is plan
    assert torch.equal(given.start().params, built.start().params)
    assert given.plan.release.multiplier == built.plan.release.multiplier


# --- every word of a recipe arrives ---


def built(name, *settings):
    return build(load_recipe(name, ["engine.workers=1", *settings]))


SAMPLERS = {
    "sample.rate=0.3": Poisson(0.3),
    "sample.kind=fixed sample.size=7": FixedSize(7),
    "sample.kind=round-robin sample.size=7": RoundRobin(7),
    "sample.kind=all": Everyone(),
}


@pytest.mark.parametrize("settings", SAMPLERS)
def test_the_sampler_is_the_one_that_was_asked_for(settings):
    loud = ("noise.multiplier=5.0", "budget.epsilon=inf")
    sampler = built("central", *SMALL, *loud, *settings.split()).plan.sampler
    assert sampler == SAMPLERS[settings]


def test_a_cap_arrives():
    settings = ("sample.size=5", "sample.max_participations=3", "rounds=3", "data.clients=20")
    assert built("ldp-sgd", *settings).plan.sampler == FixedSize(5, 3)


def test_local_work_is_the_one_that_was_asked_for():
    more = (
        "client.epochs=3",
        "client.batch=7",
        "client.momentum=0.25",
        "client.weight_decay=0.125",
    )
    work = built("fedavg", *SMALL, *more, "sample.size=5", "client.lr=0.5").work
    assert work == ClientSgd(Batches(7, epochs=3), 0.5, momentum=0.25, weight_decay=0.125)
    steps = ("client.epochs=none", "client.steps=4", "client.lr=none", "client.mu=2.0")
    work = built("fedavg", *SMALL, *steps, "client.gamma=8.0", "sample.size=5").work
    assert work.batches == Batches(0, steps=4)
    assert [work.rate(step, round) for round in (1, 2) for step in (0, 3)] == [
        2 / (2 * (k + 8)) for k in (0, 3, 4, 7)
    ]


def test_proximal_term_and_adam_are_those_that_were_asked_for():
    few = (*SMALL, "sample.size=5", "client.lr=0.5", "client.epochs=1")
    work = built("fedavg", *few, "client.proximal=0.25").work
    assert work == ClientSgd(Batches(0, epochs=1), 0.5, proximal=0.25)
    work = built("fedavg", *few, "client.optimizer=adam", "client.weight_decay=0.5").work
    assert work == ClientSgd(Batches(0, epochs=1), 0.5, weight_decay=0.5, adam=Adam())
    own = ("client.optimizer=adam", "client.beta1=0.5", "client.beta2=0.75", "client.floor=0.125")
    assert built("fedavg", *few, *own).work.adam == Adam(0.5, 0.75, 0.125)
    assert built("fedavg", *few, "client.optimizer=sgd").work == built("fedavg", *few).work


def test_steps_of_dp_sgd_are_those_that_were_asked_for():
    few = (*SMALL, "sample.size=5", "client.lr=0.5")
    more = ("client.momentum=0.25", "client.weight_decay=0.5", "client.proximal=0.125")
    training = built("dp-sgd", *few, *more)
    assert training.work == ClientDpSgd(training.plan.noisy_steps, 0.5, 0.25, 0.5, 0.125)
    training = built("dp-sgd", *few, "client.optimizer=adam", "client.beta2=0.75")
    assert training.work == ClientDpSgd(training.plan.noisy_steps, 0.5, adam=Adam(beta2=0.75))


SCHEDULES = {
    "schedule=linear": RateSchedule(RateShape.LINEAR, 9),
    "schedule=cosine warmup=3 lr_floor=0.25": RateSchedule(RateShape.COSINE, 9, 3, 0.25),
    "schedule=step lr_floor=0.5": RateSchedule(RateShape.STEP, 9, 0, 0.5),
    "warmup=2": RateSchedule(RateShape.CONSTANT, 9, 2),
    "schedule=constant": None,
}


@pytest.mark.parametrize(("keys", "schedule"), SCHEDULES.items(), ids=SCHEDULES)
def test_learning_rates_change_as_was_asked_for(keys, schedule):
    few = ("data.clients=20", "rounds=9", "engine.workers=1", "sample.size=5")
    clients, server = ([f"{part}.{key}" for key in keys.split()] for part in ("client", "server"))
    assert built("fedavg", *few, *clients).work.schedule == schedule
    assert built("dp-sgd", *few, *clients).work.schedule == schedule
    assert built("fedavg", *few, *server).server == SgdServer(1.0, schedule=schedule)
    adam = built("fedavg", *few, *server, "server.optimizer=adam").server
    assert adam == AdamServer(0.01, schedule=schedule)


def test_noise_follows_the_learning_rate_of_a_round():
    few = (*SMALL, "sample.size=5", "client.steps=3", "client.lr=0.5", "clip.value=2.0")
    plan = built("dp-fedavg", *few, "client.schedule=linear").plan
    clips = [plan.clip(plan.first_state(torch.zeros(1)), round).value for round in (1, 2)]
    assert clips == pytest.approx([2.0 * 3 * 0.5, 2.0 * 3 * 0.25])


def test_the_server_is_the_one_that_was_asked_for():
    few = (*SMALL, "sample.size=5")
    sgd = built("fedavg", *few, "server.lr=0.5", "server.momentum=0.25")
    assert (sgd.server, sgd.weights) == (SgdServer(0.5, 0.25), Weights.EXAMPLES)
    adam = built("fedavg", *few, "server.optimizer=adam", "server.weights=uniform")
    assert (adam.server, adam.weights) == (AdamServer(0.01), Weights.UNIFORM)
    assert built("fedavg", *few).server == SgdServer(1.0)
    assert built("fedavg", *few, "server.optimizer=adam", "server.lr=0.5").server == AdamServer(0.5)


ADAPTIVE = {"adam": AdamServer, "yogi": YogiServer, "adagrad": AdagradServer}


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_servers_are_those_that_were_asked_for(name):
    few = (*SMALL, "sample.size=5", f"server.optimizer={name}")
    assert built("fedavg", *few).server == ADAPTIVE[name](0.01)
    own = {"lr": 0.5, "floor": 0.25}
    own |= {} if name == "adagrad" else {"beta1": 0.75, "beta2": 0.125}
    settings = [f"server.{key}={value}" for key, value in own.items()]
    assert built("fedavg", *few, *settings).server == ADAPTIVE[name](**own)


def test_seed_mode_chunk_and_measurements_arrive():
    engine = ("engine.mode=looped", "engine.chunk=3", "engine.memory=64")
    training = built("fedavg", *SMALL, "sample.size=5", "seed=9", *engine, "evaluate.every=2")
    assert (training.seed, training.mode, training.chunk) == (9, Mode.LOOPED, 3)
    assert (training.memory, training.workers, training.every) == (64, 1, 2)


# --- a recipe that can be repeated ---


REPEATED = {
    "one noise for all": ("central", ("rounds=2", "sample.kind=all")),
    "noise shared with bits": (
        "central",
        ("rounds=2", "sample.kind=all", "clip.kind=quantile", "clip.value=0.1"),
    ),
    "noise of groups": (
        "ldp-sgd",
        ("budget.epsilon=none", "budget.epsilons=[2.0, 20.0]", "rounds=3", "sample.size=5"),
    ),
    "Laplace": ("dp-fedavg", ("rounds=2", "sample.size=5")),
    "dp-sgd": ("dp-sgd", ("rounds=2", "sample.size=5", "client.rate=1.0")),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_a_resolved_recipe_builds_the_same_noise(kind):
    name, settings = REPEATED[kind]
    mode = ("engine.mode=looped", "engine.workers=1", "data.clients=20", "budget.delta=1e-4")
    first = load_recipe(name, [*mode, *settings])
    training = build(first)
    again = build(resolve_recipe(first, training))
    assert again.plan.release.multiplier == training.plan.release.multiplier
    assert again.plan.permitted == training.plan.permitted
    each = [getattr(t.plan.release, "multipliers", None) for t in (training, again)]
    assert np.array_equal(each[0], each[1])
    assert (each[0] is not None) == (kind == "noise of groups")
