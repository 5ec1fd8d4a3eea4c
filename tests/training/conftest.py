"""Small federations with clients of different sizes, and one task per model family."""

import numpy as np
import pytest
import torch

from fedveil.data.federated import FederatedData
from fedveil.models.zoo import build_task
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.sampling import Everyone

SIZES = (7, 1, 4, 10, 3)
SHAPES = {
    "linear": (6,),
    "softmax": (6,),
    "mlp": (6,),
    "fu-cnn": (1, 28, 28),
    "small-cnn": (1, 28, 28),
    "vgg": (3, 32, 32),
}


def federation(sizes=SIZES, shape=(6,), classes=3, seed=0):
    """Random records of ragged clients; `classes` 0 gives numbers to predict."""
    random = np.random.default_rng(seed)

    def records(count):
        x = random.normal(size=(count, *shape)).astype(np.float32)
        if classes:
            return x, random.integers(classes, size=count)
        return x, random.normal(size=count).astype(np.float32)

    clients = [(f"client-{k}", *records(n)) for k, n in enumerate(sizes)]
    return FederatedData.from_clients(clients, test=records(20), classes=classes)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small problems: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_data():
    return federation


@pytest.fixture
def make_family():
    """(task, data) of a model family, by its name in the zoo."""

    def make(name, sizes=SIZES):
        classes = 0 if name == "linear" else 3
        data = federation(sizes, SHAPES[name], classes)
        task = build_task(name, data.record_shape, classes, seed=2, hidden=(5,))
        return task, data

    return make


@pytest.fixture
def data():
    return federation()


@pytest.fixture
def task(data):
    return build_task("softmax", data.record_shape, data.classes, seed=1, hidden=())


@pytest.fixture
def everyone():
    return Everyone()


@pytest.fixture
def open_ledger():
    """A ledger in memory for a plan."""

    def opened(plan):
        about = {"run": "test"}
        return Ledger.create(
            None, LedgerRun(about, plan.lines, plan.permitted, plan.counted_clients)
        )

    return opened
