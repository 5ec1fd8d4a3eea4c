"""First weights: claims take them as public, or name the training that they come from."""

import copy

import numpy as np
import pytest
from torch import nn

import fedveil as fv
from fedveil.models.lineage import (
    earlier_claims,
    earlier_training,
    note_copy,
    note_training,
    trainings_of,
)

PUBLIC = "the model's first weights are public: they were not learnt from these clients"


def data():
    random = np.random.default_rng(0)
    clients = [
        (f"c{k}", random.normal(size=(6, 3)).astype(np.float32), random.integers(2, size=6))
        for k in range(20)
    ]
    return fv.FederatedData.from_clients(clients, classes=2)


def training(task, seed=0):
    plan = fv.central(
        fv.samplers.Everyone(), 20, fv.clips.Fixed(1.0), rounds=2, budget=fv.Budget(4, 1e-3)
    )
    return fv.Training(task, data(), plan, fv.ClientSgd(fv.Batches(0, steps=1), lr=0.1), seed=seed)


def test_two_trainings_of_one_task_say_so():
    task = fv.Task(nn.Linear(3, 2), fv.cross_entropy)
    first = training(task)
    assert all(PUBLIC in claim.assumptions for claim in first.plan.claims(2))
    *_, last = fv.train(first)
    for second in (training(task, 1), training(fv.Task(task.module, fv.cross_entropy), 1)):
        for claim in second.plan.claims(2):
            assert PUBLIC not in claim.assumptions
            (said,) = [text for text in claim.assumptions if "earlier training" in text]
            assert str(last.claim) in said
            assert said.endswith("it adds to this claim for whoever took part in both")
        *_, last_again = fv.train(second)
        assert last_again.round == 2
    assert len(trainings_of(task.module)) == 3


def test_buffers_are_named():
    net = nn.Sequential(nn.Linear(3, 2))
    net[0].register_buffer("scale", net[0].bias.detach().clone())
    said = fv.Task(net, fv.cross_entropy).assumptions
    assert said == (
        "the model's first weights and buffers are public: they were not learnt from these clients",
    )


def test_copies_inherit_and_modules_are_let_go():
    module, copy = nn.Linear(2, 1), nn.Linear(2, 1)
    note_copy(copy, module)
    assert trainings_of(copy) == ()
    note_training(module, "a", lambda: "claim one")
    note_training(module, "a", lambda: "claim two")
    note_training(module, "b", lambda: None)
    note_copy(copy, module)
    assert trainings_of(copy) == ("claim two", "which claims nothing")
    note_training(copy, "c", lambda: "claim three")
    assert len(trainings_of(module)) == 2


def moved():
    """A task that a training has moved, and its claim."""
    task = fv.Task(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), fv.cross_entropy)
    *_, last = fv.train(training(task))
    return task.module, str(last.claim)


@pytest.mark.parametrize(
    "made",
    [
        copy.deepcopy,
        lambda module: nn.Sequential(module, nn.Tanh()),
        lambda module: nn.Sequential(module[0], nn.Linear(4, 2)),
        lambda module: loaded(module.state_dict()),
        lambda module: frozen(copy.deepcopy(module)),
    ],
    ids=["a copy", "around it", "a layer of it", "its state", "frozen"],
)
def test_whatever_has_the_same_values_has_the_same_trainings_behind_it(made):
    module, claim = moved()
    said = fv.Task(made(module), fv.cross_entropy).assumptions
    assert any(f"an earlier training, {claim}" in text for text in said)
    assert PUBLIC not in said


def loaded(state):
    new = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    new.load_state_dict(state)
    return new


def frozen(module):
    module[0].requires_grad_(False)
    return module


def test_a_training_that_is_left_early_names_the_claim_that_counts():
    task = fv.Task(nn.Linear(3, 2), fv.cross_entropy)
    first = next(iter(fv.train(training(task))))
    assert first.claim.epsilon > first.spent().epsilon
    assert str(first.claim) in fv.Task(copy.deepcopy(task.module), fv.cross_entropy).assumptions[0]


def test_claims_that_are_named_are_found_again():
    texts = ["something else", earlier_training("epsilon 1"), earlier_training("epsilon 2")]
    assert earlier_claims(texts) == ["epsilon 1", "epsilon 2"]
