"""The functions that a round spends its time in, one by one, on one core.

make bench-micro
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from ours import data_of, training_of
from pytest_benchmark.fixture import BenchmarkFixture
from work import WORK

from fedveil.privacy.clip import Clip, add_weighted_, row_norms
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.training.cohort import Batch, CohortData
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.gradients.trajectories import LocalTrajectory


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def trajectory_of(item: str, mode: Mode, clients: int) -> tuple[LocalTrajectory, Batch]:
    training = training_of(WORK[item], 1)
    cohort = CohortData(training.data, np.arange(clients))
    gradients = gradients_of(training.task, mode, training.data)
    trajectory = gradients.trajectory(
        training.task.parameters, cohort, spanned=not WORK[item].batch
    )
    return trajectory, Batch(None, torch.ones(cohort.y.shape))


def test_gathering_500_clients_of_80_records(benchmark: BenchmarkFixture) -> None:
    data = data_of(WORK["a-1"])
    assert benchmark(lambda: CohortData(data, np.arange(0, 5_000, 10)).x).shape == (500, 80, 10)


@pytest.mark.parametrize(
    ("item", "mode", "clients"),
    [
        ("a-1", Mode.VECTORISED, 500),
        ("c-1", Mode.VECTORISED, 25),
        ("c-1", Mode.LOOPED, 1),
        ("b", Mode.LOOPED, 1),
    ],
)
def test_one_local_step(benchmark: BenchmarkFixture, item: str, mode: Mode, clients: int) -> None:
    trajectory, batch = trajectory_of(item, mode, clients)
    moved = trajectory.mean(None, batch).mul_(-1e-3)
    assert benchmark(trajectory.mean, moved, batch).shape == moved.shape


def test_bounding_64_examples_of_a_convolutional_network(benchmark: BenchmarkFixture) -> None:
    trajectory, _ = trajectory_of("d", Mode.LOOPED, 1)
    batch = Batch(torch.arange(64)[None], torch.ones(1, 64))
    moved = trajectory.clipped_sum(None, batch, Clip(1.0)).mul_(-1e-3)
    assert benchmark(trajectory.clipped_sum, moved, batch, Clip(1.0)).norm() <= 64


@pytest.mark.parametrize("shape", [(500, 11), (25, 159_010), (1, 10_000_000)])
def test_norms_and_sums_of_rows(benchmark: BenchmarkFixture, shape: tuple[int, int]) -> None:
    rows, total = torch.ones(shape), torch.zeros(shape[1], dtype=torch.float64)
    weights = torch.ones(shape[0], dtype=torch.float64)

    def both() -> torch.Tensor:
        add_weighted_(total, rows, weights)
        return row_norms(rows)

    assert torch.allclose(benchmark(both), torch.tensor(float(shape[1])).double().sqrt())


def test_a_durable_charge(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    plan = training_of(WORK["a-1"], 100_000).plan
    ledger = Ledger.create(
        tmp_path / "ledger.db", LedgerRun({"run": "benchmark"}, plan.lines, plan.permitted, 5_000)
    )
    rounds = iter(range(1, 100_001))
    benchmark.pedantic(lambda: ledger.charge(next(rounds), np.arange(500)), rounds=200)
    assert ledger.charged() == 200
    ledger.close()
