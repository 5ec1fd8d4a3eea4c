"""Labels from updates: exact for one record, whatever the model."""

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.attacks.labels import label_shares, labels_of
from fedveil.attacks.rehearsal import Rehearsal
from fedveil.errors import BadInput
from fedveil.models.task import Task, cross_entropy
from fedveil.models.zoo import build_task
from fedveil.training.work import OneGradient

EVEN = np.full(10, 0.1)


def update(task, x, y):
    work = OneGradient()
    return Rehearsal(task, work, task.parameters.clone(), None, 1, 10).update(x, y).detach()


def without_bias():
    return Task(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10, bias=False)),
        cross_entropy,
    )


@pytest.mark.parametrize("kind", ["softmax", "mlp", "without a bias"])
def test_one_record_tells_its_label(kind):
    if kind == "without a bias":
        task = without_bias()
    else:
        task = build_task(kind, (1, 8, 8), 10, seed=3, hidden=(32,))
    x = torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for label in range(10):
        seen = update(task, x[label : label + 1], torch.tensor([label]))
        assert labels_of(label_shares(task, seen, 10), EVEN, 1).tolist() == [label]


def test_a_batch_tells_how_often_it_has_a_label():
    task = build_task("softmax", (1, 8, 8), 10, seed=3, hidden=())
    x = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for scale in (1.0, 1e-3):  # as if clipped
        seen = scale * update(task, x, torch.tensor([7, 1, 1, 9, 7, 1]))
        assert labels_of(label_shares(task, seen, 10), EVEN, 6).tolist() == [1, 1, 1, 7, 7, 9]


def test_a_model_without_a_row_per_label_is_refused():
    task = Task(nn.Linear(4, 3), cross_entropy)
    with pytest.raises(BadInput, match="one row for each of 10 labels"):
        label_shares(task, task.parameters, 10)
