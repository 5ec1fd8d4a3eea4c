"""Snapshots of modules: whatever a pass leaves behind makes a difference, and nothing else does."""

import collections
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.models.memory import common_generators, difference, keeps_nothing, snapshot
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import Fixed, PerGradient, Poly
from fedveil.training.cohort import Batches
from fedveil.training.server import RateSchedule, RateShape
from fedveil.training.work import Adam, ClientSgd, Decay, OneGradient


class Holder:
    def __init__(self):
        self.count = 0


class Beside(list):
    """A list that keeps something beside its items."""


class Empty:
    """Something that can be counted and gone through, and keeps nothing in its items."""

    def __len__(self):
        return 0

    def __iter__(self):
        return iter(())


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
        self.beside, self.empty = Beside(), Empty()
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
    "beside": lambda m: setattr(m.beside, "seen", 1),
    "empty": lambda m: setattr(m.empty, "seen", 1),
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


def test_a_draw_from_a_common_generator_is_a_change():
    np.random.random()  # the first draw changes all words, later ones only the place of the next
    for name, draw in (
        ("torch's generator", lambda: torch.rand(1)),
        ("NumPy's generator", lambda: np.random.random()),
        ("NumPy's generator", lambda: np.random.seed(3)),
    ):
        before = common_generators()
        assert difference(before, common_generators()) is None
        draw()
        assert difference(before, common_generators()) == name


def test_a_draw_from_another_generator_in_the_common_place_is_a_change():
    usual = np.random.get_bit_generator()
    before = common_generators()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        between = common_generators()
        np.random.random()
        assert difference(between, common_generators()) == "NumPy's generator"
    finally:
        np.random.set_bit_generator(usual)
    assert difference(before, between) == "NumPy's generator"
    assert difference(before, common_generators()) is None


class OwnBatches(Batches):
    """Somebody else's, which sees clients and their sizes."""


class Poses(ClientSgd):
    """Somebody else's, which says that it is ours."""

    __module__ = ClientSgd.__module__


class PosesToo(ClientSgd):
    __module__ = "fedveil.nowhere"


def own_reach(round):
    return 1.0


SGD = ClientSgd(Batches(0, steps=1), lr=0.1)
OURS = [
    None,
    Fixed(1.0, Norm.L1),
    Poly(1.0, 0.5, 10, 0.01),
    PerGradient(Fixed(1.0), SGD.reach),
    OneGradient(),
    SGD,
    ClientSgd(Batches(2, steps=2), 0.1, decay=Decay(1.0, 2.0)),
    ClientSgd(Batches(2, epochs=1), 0.1, adam=Adam(), schedule=RateSchedule(RateShape.COSINE, 9)),
]
changed = ClientSgd(Batches(0, steps=1), lr=0.1)
object.__setattr__(changed, "rate", own_reach)
OTHERS = [
    Holder(),
    nn.Linear(1, 1),
    ClientSgd(OwnBatches(0, steps=1), lr=0.1),
    Poses(Batches(0, steps=1), lr=0.1),
    PosesToo(Batches(0, steps=1), lr=0.1),
    changed,
    PerGradient(Fixed(1.0), own_reach),
    PerGradient(Fixed(1.0), ClientSgd(OwnBatches(0, steps=1), lr=0.1).reach),
]


def test_parts_of_our_own_keep_nothing_and_others_may():
    assert [part for part in OURS if not keeps_nothing(part)] == []
    assert [part for part in OTHERS if keeps_nothing(part)] == []
