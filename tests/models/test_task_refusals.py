"""Modules, losses and metrics that no training can use are refused by name, with one line."""

import pytest
import torch
from torch import nn

from fedveil import Task, correct, cross_entropy
from fedveil.base.errors import BadInput


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))

    def forward(self, x):
        return self.inner(x)


REFUSED = {
    "a lazy layer": (lambda: Task(nn.LazyLinear(3), cross_entropy), "no shape yet"),
    "a lazy layer inside": (
        lambda: Task(Broken(), cross_entropy),
        "'inner.1.weight' has no shape yet",
    ),
    "a lazy convolution": (
        lambda: Task(nn.Sequential(nn.LazyConv2d(3, 2)), cross_entropy),
        "'0.weight' has no shape yet",
    ),
    "a sparse embedding": (
        lambda: Task(nn.Embedding(5, 3, sparse=True), cross_entropy),
        "sparse=False",
    ),
    "a sparse bag": (
        lambda: Task(nn.EmbeddingBag(5, 3, sparse=True), cross_entropy),
        "EmbeddingBag with sparse gradients",
    ),
    "a sparse bag inside": (
        lambda: Task(nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True)), cross_entropy),
        "'0' is a",
    ),
    "no module": (lambda: Task(None, cross_entropy), "module is None"),
    "a class": (lambda: Task(nn.Linear, cross_entropy), "module is"),
    "a function": (lambda: Task(torch.relu, cross_entropy), "module is"),
    "no loss": (lambda: Task(nn.Linear(2, 3), None), "loss is None"),
    "a loss by name": (lambda: Task(nn.Linear(2, 3), "cross_entropy"), "loss is 'cross_entropy'"),
    "a text of metrics": (lambda: Task(nn.Linear(2, 3), cross_entropy, "f1"), "metrics is 'f1'"),
    "a metric without a name": (lambda: Task(nn.Linear(2, 3), cross_entropy, {1: correct}), "1"),
    "a metric that is none": (
        lambda: Task(nn.Linear(2, 3), cross_entropy, {"accuracy": None}),
        "metric 'accuracy' is None",
    ),
    "a metric called like a number of the run": (
        lambda: Task(nn.Linear(2, 3), cross_entropy, {"epsilon": correct}),
        "metric 'epsilon'",
    ),
    "a metric called loss": (
        lambda: Task(nn.Linear(2, 3), cross_entropy, {"loss": correct}),
        "metric 'loss'",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_training_can_use_is_refused(make, message):
    with pytest.raises(BadInput) as refusal:
        make()
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_bag_of_dense_gradients_is_taken():
    assert Task(nn.EmbeddingBag(5, 3), cross_entropy, {"accuracy": correct}).size == 15
