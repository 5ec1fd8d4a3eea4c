"""All clients in one call by vmap: against autograd on one client or example at a time."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.privacy.clip import Clip
from fedveil.training.cohort import Batches, CohortData
from fedveil.training.gradients.trajectories import VmappedTrajectory, example_gradients

SIZES = (4, 1, 3)


class Gated(nn.Module):
    """Parameters of several shapes, one of them a scalar, and some outside of any layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.inside, self.norm = nn.Linear(6, 5), nn.LayerNorm(5)
        self.gate = nn.Parameter(torch.randn(5))
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.norm(self.inside(x)) * self.gate) * self.scale)


@pytest.fixture
def walk(make_data):
    torch.manual_seed(0)
    data, task = make_data(SIZES, (6,), 3), Task(Gated(), cross_entropy)
    cohort = CohortData(data, np.arange(len(SIZES)))
    return Walk(task, data, cohort)


class Walk:
    def __init__(self, task, data, cohort):
        self.task, self.data, self.cohort = task, data, cohort
        self.moved = 0.1 * torch.randn(len(SIZES), task.size)
        self.batch = Batches(size=0, steps=1).for_round(cohort.ids, cohort.sizes, 1, None).batch(0)

    def start(self, rows=False):
        start = self.task.parameters.expand(len(SIZES), -1) if rows else self.task.parameters
        return VmappedTrajectory(self.task, start, self.cohort)

    def gradients(self, k, flat):
        """Autograd's, of client k's records one by one."""
        own = range(self.data.offsets[k], self.data.offsets[k + 1])
        for i in own:
            at = flat.clone().requires_grad_()
            x, y = torch.tensor(self.data.x[i : i + 1]), torch.tensor(self.data.y[i : i + 1])
            yield torch.autograd.grad(self.task.losses(self.task.named(at), x, y).sum(), at)[0]


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("away", [False, True])
def test_means_are_those_of_one_client_after_the_other(walk, rows, away):
    moved = walk.moved if away else None
    found = walk.start(rows).mean_update(moved, walk.batch)
    for k in range(len(SIZES)):
        flat = walk.task.parameters + (walk.moved[k] if away else 0.0)
        expected = torch.stack(list(walk.gradients(k, flat))).mean(dim=0)
        assert torch.allclose(found[k], expected, atol=1e-6)


@pytest.mark.parametrize("away", [False, True])
def test_every_example_is_clipped_by_itself(walk, away):
    moved, clip = walk.moved if away else None, 0.8
    found = walk.start().clipped_sum(moved, walk.batch, Clip(clip))
    for k in range(len(SIZES)):
        flat = walk.task.parameters + (walk.moved[k] if away else 0.0)
        each = walk.gradients(k, flat)
        expected = sum(g * min(1.0, clip / float(g.norm())) for g in each)
        assert torch.allclose(found[k], expected, atol=1e-5)


def test_a_record_that_overflows_counts_as_zero(walk):
    before = walk.start().clipped_sum(None, walk.batch, Clip(0.5))
    walk.cohort.x[0, 3] = math.inf
    found = walk.start().clipped_sum(None, walk.batch, Clip(0.5))
    assert torch.isfinite(found).all()
    assert float((found - before).norm()) <= 0.5
    assert torch.equal(found[1:], before[1:])


class Written(TorchDispatchMode):
    """Counts the numbers that operations give."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.numbers += sum(o.numel() for o in tree_leaves(out) if isinstance(o, torch.Tensor))
        return out


def test_work_does_not_grow_with_the_number_of_parameters_times_their_size():
    """Cut out of one vector inside of `grad`, each of 80 would cost a row of all of them."""
    layers = [nn.Linear(30, 30) for _ in range(40)]
    task = Task(nn.Sequential(*layers, nn.Linear(30, 3)), cross_entropy)
    x, y = torch.randn(8, 30), torch.zeros(8, dtype=torch.int64)
    with Written() as written:
        rows = example_gradients(task, task.parameters, x, y)
    assert rows.shape == (8, task.size)
    assert written.numbers < 20 * rows.numel()
