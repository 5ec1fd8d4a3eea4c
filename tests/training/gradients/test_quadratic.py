"""Least squares by H and h: the rows that the records themselves give, and when they are kept."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.data.federated import FederatedData
from fedveil.models.metrics import squared_error
from fedveil.models.task import Task
from fedveil.privacy.clip import Clip, Norm
from fedveil.privacy.clip_schedules import Fixed, PerGradient
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import unprotected
from fedveil.privacy.sampling import RoundRobin
from fedveil.training.cohort import Batch, Batches, CohortData, FullBatch
from fedveil.training.gradients.least_squares import QuadraticTrajectory, uses_quadratics
from fedveil.training.gradients.modes import Mode, Vectorised
from fedveil.training.gradients.trajectories import VmappedTrajectory
from fedveil.training.session import Training, train
from fedveil.training.work import ClientSgd, OneGradient
from tests.asking import batch_of

FEATURES = 4


def ragged(sizes, features=FEATURES, seed=0):
    drawn = np.random.default_rng(seed)
    n = sum(sizes)
    x = drawn.normal(3.0, 2.0, (n, features)).astype(np.float32)
    y = drawn.normal(-1.0, 5.0, n).astype(np.float32)
    offsets = np.cumsum([0, *sizes])
    return FederatedData(x, y, offsets, x[:3], y[:3], 0, test_owners=np.zeros(3, dtype=int))


@pytest.fixture
def data():
    return ragged([40, 13, 25, 60, 1, 33])


@pytest.fixture
def task():
    torch.manual_seed(3)
    return Task(nn.Linear(FEATURES, 1), squared_error)


def general(task, data):
    class General(Vectorised):
        def trajectory(self, start, cohort, *, spanned):
            return VmappedTrajectory(self._task, start, cohort)

    return General(task, data)


@pytest.mark.parametrize("work", [OneGradient(), ClientSgd(Batches(0, steps=7), 0.01)], ids=str)
@pytest.mark.parametrize(
    "clip", [None, Clip(0.5), Clip(0.7, Norm.L1, gradient=10.0), Clip(1.0, gradient=20.0)]
)
def test_rows_are_those_of_the_records(task, data, work, clip):
    cohort = CohortData(data, np.array([5, 0, 4, 2]))
    start = 0.3 * torch.randn(task.size)
    ways = Vectorised(task, data, full_batches=True), general(task, data)
    assert type(ways[0].trajectory(start, cohort, spanned=True)) is QuadraticTrajectory
    found, wanted = (
        work.updates(batch_of(1, start, cohort, clip, way, Streams(1))) for way in ways
    )
    assert torch.allclose(found.rows, wanted.rows, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.clipped, wanted.clipped)


def test_records_are_not_read(task, data, monkeypatch):
    gradients = Vectorised(task, data, full_batches=True)
    monkeypatch.setattr(CohortData, "x", property(lambda _: pytest.fail("records were read")))
    cohort = CohortData(data, np.arange(6))
    done = ClientSgd(Batches(0, steps=3), 0.01).updates(
        batch_of(1, task.parameters, cohort, None, gradients, Streams(1))
    )
    assert bool(done.rows.any(dim=1).all())


def test_a_step_on_some_records_is_taken_from_the_records(task, data):
    cohort = CohortData(data, np.arange(3))
    index = torch.tensor([[0, 3], [2, 1], [5, 5]])
    batch = Batch(index, torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]))
    walk = Vectorised(task, data, full_batches=True).trajectory(
        task.parameters, cohort, spanned=True
    )
    wanted = VmappedTrajectory(task, task.parameters, cohort).mean_update(None, batch)
    assert torch.allclose(walk.mean_update(None, batch), wanted, rtol=1e-5, atol=1e-6)
    assert not walk.mean_update(None, batch)[2].any()


def test_idle_clients_have_a_gradient_of_zero(task, data):
    cohort = CohortData(data, np.arange(3))
    walk = Vectorised(task, data, full_batches=True).trajectory(
        task.parameters, cohort, spanned=True
    )
    for moved in (None, torch.ones(3, task.size)):
        found = walk.mean_update(moved, FullBatch(np.array([40, 0, 25]), 40))
        assert found.any(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("where", ["x", "y"])
def test_values_far_beyond_one_another_do_not_reach_other_clients(task, data, where):
    array = getattr(data, where).copy()
    array[:40] *= 1e15
    gradients = Vectorised(task, replace(data, **{where: array}), full_batches=True)
    plain = Vectorised(task, data, full_batches=True)
    cohort = CohortData(data, np.arange(1, 6))
    found, wanted = (
        OneGradient().updates(batch_of(1, task.parameters, cohort, None, g, Streams(1)))
        for g in (gradients, plain)
    )
    assert torch.equal(found.rows, wanted.rows)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.inner(x).abs()


@pytest.mark.parametrize(
    ("module", "loss", "sizes", "kept"),
    [
        (nn.Linear(FEATURES, 1), squared_error, [20, 30], True),
        (nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 1)), squared_error, [20, 30], True),
        (nn.Linear(FEATURES, 1), squared_error, [10, 10], False),  # the records are smaller
        (nn.Linear(FEATURES, 1, bias=False), squared_error, [20, 30], False),
        (nn.Linear(FEATURES, 1), lambda o, t: (o.squeeze(-1) - t).abs(), [20, 30], False),
        (nn.Sequential(nn.Linear(FEATURES, 1), nn.ReLU()), squared_error, [20, 30], False),
        (Wrapped(), squared_error, [20, 30], False),
    ],
)
def test_they_are_kept_for_least_squares_with_many_records(module, loss, sizes, kept):
    assert uses_quadratics(Task(module, loss), ragged(sizes)) is kept


def test_workers_and_modes_agree(task):
    data = ragged([30, 41, 25, 60, 29, 33] * 20)

    def last(mode, workers):
        work = ClientSgd(Batches(0, steps=4), 0.01)
        schedule = PerGradient(Fixed(30.0, Norm.L1), work.reach)
        plan = unprotected(RoundRobin(40), data.clients, rounds=6, schedule=schedule)
        training = Training(task, data, plan, work, mode=mode, workers=workers, chunk=10)
        *_, result = train(training)
        return result.state.params

    torch.manual_seed(3)
    start = task.parameters.clone()
    found = []
    for mode, workers in ((Mode.VECTORISED, 1), (Mode.VECTORISED, 2), (Mode.LOOPED, 1)):
        task.parameters.copy_(start)
        found.append(last(mode, workers))
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], found[2], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[0], start, atol=1e-2)
