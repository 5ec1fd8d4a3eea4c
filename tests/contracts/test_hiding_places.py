"""A module that remembers clients, wherever it hides that, is harmless or refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.models.trial import check_fits
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.secure import planned_for, with_secure_noise
from tests.contracts.hiding_places import HIDING_PLACES, LATE, OTHERS
from tests.contracts.test_leave_one_out import one_record_less
from tests.contracts.zoo import CLASSES, FEATURES, task

CLIENTS, RECORDS, CLIP = 6, 6, 0.1
FREE = fv.Budget(math.inf, 1e-3)
PLACES = {**HIDING_PLACES, **OTHERS}
WORK = fv.ClientSgd(fv.Batches(0, steps=LATE // 2), lr=0.05)
"""So many local steps that a module counts more passes than it waits for, in the first round."""


def data():
    """Clients that differ much from each other."""
    generator = np.random.default_rng(0)
    shift = np.repeat(3.0 * generator.normal(size=(CLIENTS, FEATURES)), RECORDS, axis=0)
    x = (generator.normal(size=shift.shape) + shift).astype(np.float32)
    y = generator.integers(CLASSES, size=len(x))
    offsets = np.arange(0, len(x) + 1, RECORDS)
    return fv.FederatedData(
        x, y, offsets, x[:6].copy(), y[:6].copy(), CLASSES, test_owners=np.zeros(6, dtype=int)
    )


def clips(moved):
    """How many clips something moves by; none if the module is refused, in one line."""
    try:
        return moved()
    except BadInput as refusal:
        if "\n" in str(refusal):
            raise
        return 0.0


def centrally(make, secure=False):
    plan = fv.central(
        *(fv.samplers.Everyone(), CLIENTS, fv.clips.Fixed(CLIP)),
        rounds=3,
        budget=FREE,
        multiplier=2.0,
    )
    made = task(make)
    if secure:
        lines = tuple(replace(line, budget=planned_for(line.budget)) for line in plan.lines)
        plan = with_secure_noise(replace(plan, lines=lines), made.size, diagnostics=True)
    return fv.Training(made, data(), plan, WORK, workers=1)


def moved_by_a_client(training):
    """How many clips the sum of a round moves by if the first client is left out."""
    everyone, run, state = np.arange(CLIENTS), training.engine.run, training.start()
    run(training.round(1, everyone, state))
    total = run(training.round(2, everyone, state)).total.clone()
    others = run(training.round(2, everyone[1:], state)).total
    return float((total - others).norm()) / CLIP


@pytest.mark.parametrize("name", PLACES)
def test_a_client_moves_the_sum_by_its_clip(name):
    assert clips(lambda: moved_by_a_client(centrally(PLACES[name]))) <= 1 + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_a_client_moves_a_sum_with_secure_noise_by_its_clip(name):
    assert clips(lambda: moved_by_a_client(centrally(PLACES[name], secure=True))) <= 1 + 1e-5


def moved_by_a_record(make):
    """How many clips a round of DP-SGD moves by if a record of another client is left out."""
    steps, nominal, lr = LATE // 4, 6, 0.05
    plan = fv.dp_sgd(
        *(fv.samplers.Everyone(), CLIENTS, CLIP),
        rate=1.0,
        steps=steps,
        nominal=nominal,
        rounds=1,
        budget=FREE,
        multiplier=1e-9,
    )
    made, work, totals = task(make), fv.ClientDpSgd(plan.noisy_steps, lr=lr), []
    for given in (data(), one_record_less(data(), 0, RECORDS - 1)):
        training = fv.Training(made, given, plan, work, workers=1, mode=fv.engines.Mode.LOOPED)
        vars(training)["streams"] = Streams(7)
        state = training.start()
        for client in range(CLIENTS - 1):
            training.engine.run(training.round(1, np.array([client]), state))
        totals.append(
            training.engine.run(training.round(1, np.array([CLIENTS - 1]), state)).total.clone()
        )
    return float((totals[0] - totals[1]).norm()) / (lr * CLIP / nominal)


@pytest.mark.parametrize("name", PLACES)
def test_a_record_of_another_client_moves_nothing_of_dp_sgd(name):
    assert clips(lambda: moved_by_a_record(PLACES[name])) <= 1e-6


def test_without_isolation_the_first_hiding_place_moves_the_sum_by_many_clips():
    """The attack works on a module's own code, so the tests above have something to find."""
    training = centrally(HIDING_PLACES["default_argument"])
    training.task.compute_in_forks("")
    assert moved_by_a_client(training) > 1.5


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "entered", [Watching, lambda: torch.autograd.graph.saved_tensors_hooks(id, id)]
)
def test_what_is_entered_after_a_training_was_made_ends_it(entered):
    training = centrally(lambda: nn.Linear(FEATURES, CLASSES))
    with entered(), pytest.raises(BadInput, match="would see every client's numbers"):
        next(iter(fv.train(training)))


def test_a_user_s_metric_sees_no_client_s_records():
    seen, given = [], data()

    def own(outputs, y):
        seen.append(outputs.detach().clone())
        return y.float()

    module = nn.Linear(FEATURES, CLASSES)
    plan = centrally(lambda: module).plan
    work = fv.ClientSgd(fv.Batches(0, steps=1), lr=0.1)
    made = fv.Training(fv.Task(module, fv.cross_entropy, {"own": own}), given, plan, work)
    check_fits(made.task, *made._trial_records(), CLASSES)
    clients = module(torch.tensor(given.x[:2]))
    assert seen
    assert not any(torch.allclose(outputs[:2], clients) for outputs in seen)
    with pytest.raises(BadInput, match="'own', a function of your own, on clients' records"):
        replace(made, clients_every=1)
