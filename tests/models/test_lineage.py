"""First weights: claims take them as public, or name the training that they come from."""

import numpy as np
from torch import nn

import fedveil as fv
from fedveil.models.lineage import note_copy, note_training, trainings_of

PUBLIC = "the model's first weights are public: they were not learnt from these clients"


def data():
    random = np.random.default_rng(0)
    clients = [
        (f"c{k}", random.normal(size=(6, 3)).astype(np.float32), random.integers(2, size=6))
        for k in range(20)
    ]
    return fv.FederatedData.from_clients(clients, classes=2)


def training(task, seed=0):
    plan = fv.central(fv.Everyone(), 20, fv.Fixed(1.0), rounds=2, budget=fv.Budget(4, 1e-3))
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
