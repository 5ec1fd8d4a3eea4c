"""What a client adds to a secure sum does not depend on who else is there, to the last bit."""

import numpy as np
import pytest
import torch

from fedveil.data.federated import FederatedData
from fedveil.models.zoo import build_task
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.clip_schedules import Fixed
from fedveil.privacy.releases.central import central
from fedveil.privacy.sampling import Poisson
from fedveil.privacy.secure import planned_for, with_secure_noise
from fedveil.training.cohort import Batches
from fedveil.training.gradients.modes import Mode
from fedveil.training.session import Training
from fedveil.training.work import ClientSgd

CLIENTS, FEATURES, LENGTH = 12, 16, 20.0


@pytest.fixture(scope="module")
def data():
    """Clients of different sizes: padded side by side, one would change the others' shapes."""
    random = np.random.default_rng(3)
    truth = random.normal(size=(FEATURES, 4))
    clients = []
    for k in range(CLIENTS):
        x = random.normal(size=(40 if k == 0 else random.integers(5, 30), FEATURES))
        y = (x @ truth + 2 * random.normal(size=(len(x), 4))).argmax(axis=1)
        clients.append((f"{k}", x.astype(np.float32), y))
    return FederatedData.from_clients(clients, classes=4)


def training(data, mode=Mode.LOOPED, workers=1):
    """Long steps that make small differences large, one client after the other."""
    task = build_task("mlp", (FEATURES,), 4, seed=1, hidden=(16,))
    budget = planned_for(Budget(1.0, 1e-5))
    plan = central(Poisson(0.5), CLIENTS, Fixed(LENGTH), rounds=1, budget=budget)
    plan = with_secure_noise(plan, task.size, diagnostics=False)
    work = ClientSgd(Batches(0, steps=15), 5.0)
    return Training(task, data, plan, work, mode=mode, workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_moves_the_sum_by_its_own_row_exactly(data, workers):
    train = training(data, workers=workers)
    engine, state = train.engine, train.start()
    everyone = np.arange(CLIENTS)
    try:
        total = engine.run(train.round(1, everyone, state)).total.clone()
        for k in (0, 5):
            own = engine.run(train.round(1, everyone[[k]], state)).total.clone()
            rest = engine.run(train.round(1, np.delete(everyone, k), state)).total.clone()
            assert torch.equal(total - rest, own)
            assert 0 < float(own.norm()) <= LENGTH
    finally:
        engine.close()


def test_the_number_of_workers_changes_nothing(data):
    totals = []
    for workers in (1, 2):
        train = training(data, workers=workers)
        totals.append(
            train.engine.run(train.round(1, np.arange(CLIENTS), train.start())).total.clone()
        )
        train.engine.close()
    assert torch.equal(*totals)


def test_one_by_one_is_not_the_default(data):
    assert training(data).engine.mode is Mode.LOOPED
    assert training(data, None).engine.mode is Mode.LOOPED
    assert training(data.shortened(data.longest), None).engine.mode is Mode.VECTORISED
