"""Chains of linear layers, batches of ragged clients, and how close two results have to be."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedveil.privacy.noise.streams import Streams
from fedveil.training.cohort import Batch

WIDE = 24
STREAMS, ROUND = Streams(5), 2

ACTIVATIONS = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "leaky": lambda: nn.LeakyReLU(0.2),
    "elu": lambda: nn.ELU(1.5),
    "gelu": nn.GELU,
    "gelu-tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": lambda: nn.Softplus(2.0),
    "relu-in-place": lambda: nn.ReLU(inplace=True),
    "leaky-in-place": lambda: nn.LeakyReLU(0.2, inplace=True),
    "elu-in-place": lambda: nn.ELU(inplace=True),
    "silu-in-place": lambda: nn.SiLU(inplace=True),
    "two": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Tanh()),
}


def brier(outputs, targets):
    return (outputs.softmax(-1) - torch.eye(outputs.shape[-1])[targets]).square().sum(-1)


def smooth(outputs, targets):
    return functional.smooth_l1_loss(outputs.squeeze(-1), targets, reduction="none")


def chain(outputs=3, hidden=(5,), after=nn.Tanh, bias=True, inputs=WIDE):
    layers = []
    for width in hidden:
        layers += [nn.Linear(inputs, width, bias=bias), after()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs, bias=bias))


def whole(walk, idle=()):
    """All records of every client that is not idle."""
    cohort = walk._cohort
    mask = torch.from_numpy(np.arange(cohort.x.shape[1]) < cohort.sizes[:, None]).float()
    mask[list(idle)] = 0
    return Batch(None, mask)


def some(walk):
    """Mini-batches: padding repeats real records, and the last client is idle."""
    index = torch.tensor([[3, 0, 6, 5], [0, 0, 0, 0], [1, 3, 3, 1], [9, 2, 4, 0], [0, 1, 2, 0]])
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    return Batch(index, mask)


BATCHES = {"whole": whole, "idle": lambda walk: whole(walk, [1, 4]), "some": some}


def away(walk, size=0.2):
    generator = torch.Generator().manual_seed(6)
    return size * torch.randn(len(walk._cohort), walk.width, generator=generator)


def assert_close(actual, expected, tolerance=1e-5):
    scale = float(expected.double().norm())
    assert scale > 0
    assert float((actual.double() - expected.double()).norm()) <= tolerance * scale
