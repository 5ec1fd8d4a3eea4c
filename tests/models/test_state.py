"""Snapshots of modules: whatever a pass leaves behind makes a difference, and nothing else does."""

import collections
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.models.state import difference, snapshot


class Holder:
    def __init__(self):
        self.count = 0


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("buffer", torch.zeros(2))
        self.number, self.flag, self.nothing, self.nan = 1, True, None, math.nan
        self.words, self.table, self.group = ["a"], {"k": [1, 2]}, {1, 2}
        self.recent = collections.deque([1], maxlen=3)
        self.tensor, self.tensors = torch.zeros(2), [torch.zeros(2)]
        self.array, self.object = np.zeros(2), Holder()
        self.hidden = [nn.Linear(2, 2)]
        self.torch_random = torch.Generator().manual_seed(0)
        self.numpy_random, self.python_random = np.random.default_rng(0), random.Random(0)


CHANGES = {
    "number": lambda m: setattr(m, "number", 2),
    "flag": lambda m: setattr(m, "flag", False),
    "nothing": lambda m: setattr(m, "nothing", 0.0),
    "new": lambda m: setattr(m, "new", 1),
    "words": lambda m: m.words.append("b"),
    "table": lambda m: m.table["k"].append(3),
    "group": lambda m: m.group.add(3),
    "recent": lambda m: m.recent.append(2),
    "tensor": lambda m: m.tensor.add_(0.0),
    "tensors": lambda m: m.tensors[0].add_(1.0),
    "array": lambda m: m.array.__setitem__(0, 1.0),
    "object": lambda m: setattr(m.object, "count", 1),
    "hidden": lambda m: setattr(m.hidden[0], "seen", 1),
    "torch_random": lambda m: torch.rand(1, generator=m.torch_random),
    "numpy_random": lambda m: m.numpy_random.random(),
    "python_random": lambda m: m.python_random.random(),
    "buffer": lambda m: m.buffer.add_(1.0),
    "layer.weight": lambda m: m.layer.weight.mul_(1.0),
    "layer.bias": lambda m: m.layer.bias.data.add_(1.0),
    "layer.extra": lambda m: setattr(m.layer, "extra", 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name):
    module = Holds()
    before = snapshot(module)
    with torch.no_grad():
        CHANGES[name](module)
    assert difference(before, snapshot(module)) == name


def test_a_tensor_put_in_the_place_of_an_equal_one_is_a_change():
    module = Holds()
    before = snapshot(module)
    module.tensor = torch.zeros(2)
    assert difference(before, snapshot(module)) == "tensor"


def test_passes_of_modules_without_memory_make_no_difference():
    for module, x in (
        (Holds(), None),
        (nn.LSTM(3, 2), torch.ones(4, 2, 3)),
        (nn.GRU(3, 2), torch.ones(4, 2, 3)),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), torch.ones(3, 2, 4)),
    ):
        before = snapshot(module)
        if x is not None:
            module(x)
        assert difference(before, snapshot(module)) is None
