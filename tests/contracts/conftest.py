"""Thirty clients with four records each, for what an enemy tries."""

import numpy as np
import pytest

import fedveil as fv
from tests.contracts.enemies import CLIENTS


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(CLIENTS + 1, 4, 5)).astype(np.float32)
    y = random.integers(3, size=(CLIENTS + 1, 4))
    clients = [(str(k), x[k], y[k]) for k in range(CLIENTS)]
    return fv.FederatedData.from_clients(clients, test=(x[-1], y[-1]), classes=3)
