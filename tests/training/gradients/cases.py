"""A task, records for it, and the clipped sum of their gradients one after the other."""

import numpy as np
import pytest
import torch

from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.privacy.clip import Norm
from fedveil.training.gradients.per_example import ClippedExamples
from tests.training.gradients.modules import VOCABULARY

RECORDS = 5
SLOW_UNDER_VMAP = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


class Case:
    """A task off its starting point, and records for it; the module's own code runs."""

    def __init__(self, task, x, y):
        task = task.by_own_code()
        self.task, self.x, self.y = task, x, y
        self.clips = ClippedExamples(task, x[:3], y[:3])
        self.flat = task.parameters + 0.05 * torch.randn(task.size)

    def gradient(self, k):
        flat = self.flat.clone().requires_grad_()
        losses = self.task.losses(self.task.named(flat), self.x[k : k + 1], self.y[k : k + 1])
        return torch.autograd.grad(losses.sum(), flat)[0].double()

    def by_hand(self, clip):
        """One gradient after the other, each scaled to the clip if it is longer."""
        order = 1 if clip.norm is Norm.L1 else 2
        total = torch.zeros(self.task.size, dtype=torch.float64)
        for k in range(len(self.x)):
            gradient = self.gradient(k)
            total += gradient * min(1.0, clip.value / float(gradient.norm(order)))
        return total

    def middle(self, order=2):
        """A clip that cuts some of the records and not others."""
        norms = [float(self.gradient(k).norm(order)) for k in range(len(self.x))]
        assert min(norms) < np.mean(norms) < max(norms)
        return float(np.mean(norms))

    def sum(self, clip, keep=None):
        row = torch.zeros(self.task.size)
        keep = slice(None) if keep is None else keep
        self.clips.add_clipped_(row, self.flat, self.x[keep], self.y[keep], clip)
        return row


def make(module, shape, records=RECORDS):
    torch.manual_seed(3)
    if shape == "words":
        x = torch.randint(VOCABULARY, (records, 4))
    else:
        x = torch.randn(records, *((shape, 6) if isinstance(shape, int) else shape))
    return Case(Task(module(), cross_entropy), x, torch.randint(3, (records,)))


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
