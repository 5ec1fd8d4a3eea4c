"""One client after the other: a batch in pieces is one batch."""

import pytest
import torch
from torch import nn

from fedveil.models.metrics import cross_entropy, squared_error
from fedveil.models.task import Task
from fedveil.privacy.clip import Clip
from fedveil.training.cohort import Batches, CohortData
from fedveil.training.gradients.modes import Mode, gradients_of


def images():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 4 * 4, 3))


CASES = {
    "records": (nn.Linear(6, 1), squared_error, (6,), 0, (2500, 3, 1024, 1025)),
    "images": (images(), cross_entropy, (1, 6, 6), 3, (70, 3, 32, 33)),
}


@pytest.mark.parametrize("case", CASES)
def test_means_of_many_records_are_means(make_data, case):
    module, loss, shape, classes, sizes = CASES[case]
    data, task = make_data(sizes, shape, classes), Task(module, loss)
    cohort = CohortData(data, torch.arange(len(sizes)).numpy())
    walk = gradients_of(task, Mode.LOOPED, data).trajectory(task.parameters, cohort, spanned=False)
    batch = Batches(size=0, steps=1).for_round(cohort.ids, cohort.sizes, 1, None).batch(0)
    found = walk.mean_update(None, batch)
    moved = walk.descend_(None, batch, 0.5)
    for k in range(len(sizes)):
        at = task.parameters.clone().requires_grad_()
        own = slice(data.offsets[k], data.offsets[k + 1])
        x, y = torch.tensor(data.x[own]), torch.tensor(data.y[own])
        (expected,) = torch.autograd.grad(task.losses(task.named(at), x, y).mean(), at)
        assert torch.allclose(found[k], expected, atol=1e-5)
        assert torch.allclose(moved[k], -0.5 * expected, atol=1e-5)


class Bypass(nn.Module):
    """A convolution that nothing passes through."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Conv2d(2, 2, 3)
        self.used = nn.Linear(18, 3)

    def forward(self, x):
        return self.used(x.flatten(1))


def test_a_kernel_that_is_not_used_does_not_move(make_data):
    data, task = make_data((5, 3), (2, 3, 3), 3), Task(Bypass(), cross_entropy)
    cohort = CohortData(data, torch.arange(2).numpy())
    walk = gradients_of(task, Mode.LOOPED, data).trajectory(task.parameters, cohort, spanned=False)
    batch = Batches(size=0, steps=1).for_round(cohort.ids, cohort.sizes, 1, None).batch(0)
    for row in walk.descend_(None, batch, 0.5):
        moved = task.named(row)
        assert not moved["unused.weight"].any()
        assert moved["used.weight"].any()


@pytest.mark.parametrize("mode", Mode)
def test_frozen_weights_cost_no_memory_per_client(make_data, mode):
    module = nn.Sequential(nn.Linear(6, 500), nn.ReLU(), nn.Linear(500, 1))
    frozen = module[0].requires_grad_(False)
    data, task = make_data((5, 3, 4), (6,), 0), Task(module, squared_error)
    cohort = CohortData(data, torch.arange(3).numpy())
    walk = gradients_of(task, mode, data).trajectory(task.parameters, cohort, spanned=False)
    batch = Batches(size=0, steps=1).for_round(cohort.ids, cohort.sizes, 1, None).batch(0)
    assert walk.mean_update(None, batch).shape == (3, 501)
    assert walk.clipped_sum(None, batch, Clip(1.0)).shape == (3, 501)
    assert task.named_layers["0"].weight.data_ptr() == frozen.weight.data_ptr()
