"""Odd modules that people bring: those that are to be trained, and those that are to be refused."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.contracts.zoo import CLASSES, FEATURES, Changed, Tied, Used, frozen

TALLY = {"passes": 0, "mean": torch.zeros(CLASSES)}
"""What a module may keep where nobody looks."""


def linear():
    return nn.Linear(FEATURES, CLASSES)


class Named(nn.Module):
    """Layers in a ModuleDict and a ParameterList, one of which no forward pass uses."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"first": nn.Linear(FEATURES, 4), "last": nn.Linear(4, CLASSES)})
        self.shifts = nn.ParameterList([torch.zeros(4), torch.ones(4)])
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.parts["last"](torch.tanh(self.parts["first"](x) + self.shifts[0]))


class Loose(nn.Module):
    """A forward pass of any arguments."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


class Constant(nn.Module):
    """A weight that is a buffer, and a bias that learns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.linspace(-1, 1, FEATURES * CLASSES).view(FEATURES, -1))
        self.bias = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, x):
        return x @ self.weight + self.bias


class Complex(nn.Module):
    """A complex parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


class Half(nn.Module):
    """Parameters of 16 bits, which learn in 32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=torch.bfloat16))

    def forward(self, x):
        return x @ self.weight.float()


class Doubled(nn.Module):
    """Parameters of 64 bits."""

    def __init__(self):
        super().__init__()
        self.layer = linear().double()

    def forward(self, x):
        return self.layer(x.to(self.layer.weight.dtype)).float()


class Clamped(nn.Module):
    """Writes to its own parameter in every pass."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        self.layer.weight.data.clamp_(-0.1, 0.1)
        return self.layer(x)


class Shared(nn.Module):
    """Keeps something in an attribute of its class."""

    seen: list = []

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        self.seen.append(x.detach().mean())
        return self.layer(x)


class Checkpointed(nn.Module):
    """Computes its layers once more in the backward pass."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


class Hooked(nn.Module):
    """A hook that keeps records."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = linear(), []
        self.layer.register_forward_hook(lambda _, given, out: self.kept.append(given[0].detach()))

    def forward(self, x):
        return self.layer(x)


class Chunked(nn.Module):
    """Sees a batch in two halves."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        return torch.cat([self.layer(part) for part in x.split(2)])


class Outside(nn.Module):
    """Computes with a layer that it has not registered."""

    def __init__(self):
        super().__init__()
        self.layer, self.hidden = linear(), [nn.Linear(CLASSES, CLASSES)]

    def forward(self, x):
        return self.hidden[0](self.layer(x))


class Adaptive(nn.Module):
    """As many steps as a record is long: control flow that depends on data."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(FEATURES, FEATURES), linear()

    def forward(self, x):
        if bool(x.abs().mean() > 0.8):
            x = torch.tanh(self.layer(x))
        return self.head(x)


class ByRecord(Adaptive):
    """The same, decided for each record by itself."""

    def forward(self, x):
        deep = (x.abs().mean(1) > 0.8)[:, None]
        return self.head(torch.where(deep, torch.tanh(self.layer(x)), x))


def counted(m, h):
    m.calls += 1
    return h


def cached(m, h):
    if m.cache is None:
        m.cache = h.detach().mean(0)
    return h - m.cache


def grown(m, h):
    m.seen.append(h.detach())
    return h


def tallied(m, h):
    TALLY["mean"] = 0.5 * TALLY["mean"] + h.detach().mean(0)
    return h - TALLY["mean"]


def late(m, h):
    """Uses what it has kept in a global only after more passes than any trial makes."""
    TALLY["passes"] += 1
    TALLY["mean"] = h.detach().mean(0)
    return h if TALLY["passes"] < 10_000 else h - TALLY["mean"]


def item(m, h):
    return h * (1 + h.detach().mean(1).max().item())


class InPlace(nn.Module):
    """Writes to the records that it is given."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        x.sub_(x.mean(1, keepdim=True)).mul_(0.5)
        return self.layer(x)


def scripted():
    return torch.jit.script(nn.Sequential(linear(), nn.Tanh()))


def compiled():
    return torch.compile(linear())


def changed(function, **attributes):
    return lambda: Changed(function, **attributes)


def normed(**options):
    return lambda: nn.Sequential(linear(), nn.BatchNorm1d(CLASSES, **options))


def own_draw(m, h):
    return h * torch.rand(CLASSES, generator=m.generator)


TRAINED = {
    "checkpointed": (Checkpointed, False),
    "module dict, parameter list, unused layer": (Named, False),
    "any arguments": (Loose, False),
    "weight as a buffer": (Constant, False),
    "parameters of 64 bits": (Doubled, False),
    "chunks of a batch": (Chunked, False),
    "a choice for each record": (ByRecord, False),
    "a layer used twice": (Used, False),
    "tied weights": (Tied, True),
    "frozen base": (lambda: frozen("0.weight", "0.bias"), False),
    "parametrised weight norm": (lambda: nn.utils.parametrizations.weight_norm(linear()), False),
    "orthogonal weights": (
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(FEATURES, FEATURES)),
        False,
    ),
}
"""(how it is made, whether its records are tokens): in both modes as plain autograd has it."""

ALONE = {
    "batch softmax": changed(lambda m, h: h.softmax(0)),
    "batch centring": changed(lambda m, h: h - h.mean(0)),
    "a little of the batch": changed(lambda m, h: h + 1e-5 * h.mean(0)),
    "batch sorted": changed(lambda m, h: h.sort(0).values),
    "size of the batch": changed(lambda m, h: h * len(h)),
    "item of the batch": changed(item),
    "largest of the batch": changed(lambda m, h: h / h.detach().abs().max()),
    "control flow by the batch": Adaptive,
    "through numpy": changed(lambda m, h: h + torch.from_numpy(h.detach().numpy())),
}
"""Clients are computed one by one; together they are refused."""

REFUSED = {
    "batch norm": (normed(), "BatchNorm1d"),
    "batch norm without statistics": (normed(track_running_stats=False), "one record at a time"),
    "batch norm in eval mode": (lambda: normed()().eval(), "BatchNorm1d"),
    "instance norm with statistics": (
        lambda: nn.Sequential(nn.InstanceNorm1d(1, track_running_stats=True), linear()),
        "InstanceNorm|running_mean|fit",
    ),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(linear()), "_u' of the"),
    "counter": (changed(counted, calls=0), "'calls'"),
    "cache": (changed(cached, cache=None), "'cache'"),
    "growing list": (changed(grown, seen=[]), "'seen'"),
    "global state": (changed(tallied), "two gradients|'function'"),
    "global state that is used late": (changed(late), "'function'"),
    "state in a class": (Shared, "'class seen'"),
    "hook that keeps records": (Hooked, "'kept'|hooks"),
    "draws from torch": (changed(lambda m, h: h * torch.rand(CLASSES)), "draws random"),
    "draws from numpy": (changed(lambda m, h: h * float(np.random.rand())), "draws random"),
    "draws from random": (changed(lambda m, h: h * random.random()), "draws random"),
    "draws of its own": (changed(own_draw, generator=torch.Generator()), "'generator'"),
    "randomised relu": (lambda: nn.Sequential(linear(), nn.RReLU()), "'1' is a RReLU"),
    "gumbel": (changed(lambda m, h: functional.gumbel_softmax(h)), "draws random"),
    "writes to its records": (InPlace, "two gradients"),
    "writes to a parameter": (Clamped, "'layer.weight' of the model is written to"),
    "computes with what is not its own": (Outside, "not among its parameters"),
    "lazy": (lambda: nn.LazyLinear(CLASSES), "no shape yet"),
    "complex parameters": (Complex, "complex64: floating point is needed"),
    "no gradient": (changed(lambda m, h: functional.one_hot(h.argmax(-1), CLASSES) * 1.0), "grad"),
    "detached": (changed(lambda m, h: h.detach()), "grad"),
    "tuple": (changed(lambda m, h: (h, h)), "returned a tuple"),
    "scripted": (scripted, "Jit"),
    "compiled": (compiled, "'forward' of the model|copied"),
    "switches its mode": (changed(lambda m, h: (m.train(not m.training), h)[1]), "'training'"),
    "weights by a hook": (lambda: nn.utils.weight_norm(linear()), "cannot be copied"),
}
"""(how it is made, what the one line says)."""
