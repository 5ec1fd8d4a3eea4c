"""Modules that keep a running mean of what they see, and use it only after many passes.

Each hides it where a look at the module does not find it. Run with its own code, such a module
moves the sum of a later client by as much as earlier ones say, past every clip.
"""

import contextvars
import ctypes
import functools
import itertools
import mmap
import os
import struct
import tempfile
import threading
import uuid
import weakref
from collections import OrderedDict

import torch
from torch import nn

from tests.contracts.zoo import CLASSES, FEATURES

LATE = 150
"""Passes before the mean is used: more than any trial makes."""


def used(h, mean):
    """Outputs that depend much on what was remembered."""
    return h + 30 * torch.sin(300 * mean + torch.arange(float(CLASSES)))


class Running:
    """A mean of all passes so far, as a Python float."""

    def __init__(self):
        self.passes, self.mean = 0, 0.0

    def of(self, h):
        self.passes += 1
        self.mean += (h.detach().mean().item() - self.mean) / self.passes
        return h if self.passes < LATE else used(h, self.mean)


class Layer(nn.Module):
    """A linear layer whose outputs pass through `changed`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.changed(self.layer(x))

    def changed(self, h):
        return h


def default_argument():
    class Hidden(Layer):
        def changed(self, h, kept=[Running()]):  # noqa: B006, B008
            return kept[0].of(h)

    return Hidden()


def static_method():
    places = {"__name__": "tests.contracts.elsewhere", "kept": Running()}
    exec("def changed(h):\n    global kept\n    kept = kept\n    return kept.of(h)", places)

    class Hidden(Layer):
        changed = staticmethod(places["changed"])

    return Hidden()


def function_attribute():
    def helper(h):
        return helper.kept.of(h)

    helper.kept = Running()

    class Hidden(Layer):
        changed = staticmethod(helper)

    return Hidden()


def factory():
    def made():
        kept = Running()

        def changed(self, h):
            return kept.of(h)

        return changed

    class Hidden(Layer):
        changed = made()

    return Hidden()


def cache():
    @functools.lru_cache
    def kept(name):
        return Running()

    class Hidden(Layer):
        def changed(self, h):
            return kept("mean").of(h)

    return Hidden()


def partial():
    class Hidden(Layer):
        changed = staticmethod(functools.partial(lambda kept, h: kept.of(h), Running()))

    return Hidden()


def callable_attribute():
    class Changed:
        def __init__(self):
            self.kept = Running()

        def __call__(self, h):
            return self.kept.of(h)

    class Hidden(Layer):
        changed = Changed()

    return Hidden()


def by_property():
    kept = Running()

    class Hidden(Layer):
        @property
        def changed(self):
            return kept.of

    return Hidden()


def deep_dict():
    class Hidden(Layer):
        def __init__(self):
            super().__init__()
            self.a = {"b": {"c": {"d": {"e": {"f": {"g": [Running()]}}}}}}

        def changed(self, h):
            return self.a["b"]["c"]["d"]["e"]["f"]["g"][0].of(h)

    return Hidden()


def helper_class():
    class Helper:
        kept = Running()

        @classmethod
        def changed(cls, h):
            return cls.kept.of(h)

    class Hidden(Layer):
        def changed(self, h):
            return Helper.changed(h)

    return Hidden()


def autograd_function():
    kept = Running()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return kept.of(h).clone()

        @staticmethod
        def backward(ctx, error):
            return error

    class Hidden(Layer):
        def changed(self, h):
            return Scaled.apply(h)

    return Hidden()


def custom_operator():
    kept, name = Running(), f"enemy{uuid.uuid4().hex}"
    library = torch.library.Library(name, "DEF")
    library.define("changed(Tensor h) -> Tensor")
    torch.library.register_fake(f"{name}::changed", torch.empty_like, lib=library)
    library.impl("changed", kept.of, "AutogradCPU")
    _LIBRARIES.append(library)

    class Hidden(Layer):
        def changed(self, h):
            return getattr(torch.ops, name).changed(h)

    return Hidden()


_LIBRARIES: list = []


def tensor_subclass():
    kept = Running()

    class Remembering(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **(kwargs or {}))
            return kept.of(out) if func is torch.nn.functional.linear else out

    class Hidden(Layer):
        def __init__(self):
            super().__init__()
            self.ones = torch.ones(FEATURES).as_subclass(Remembering)

        def forward(self, x):
            return self.layer(x * self.ones).as_subclass(torch.Tensor)

    return Hidden()


def raw_memory():
    memory = (ctypes.c_double * 2)()

    class Hidden(Layer):
        def changed(self, h):
            memory[0] += 1
            memory[1] += (float(h.detach().mean()) - memory[1]) / memory[0]
            return h if memory[0] < LATE else used(h, memory[1])

    return Hidden()


def file():
    handle, path = tempfile.mkstemp()
    os.close(handle)

    class Hidden(Layer):
        def changed(self, h):
            with open(path) as stream:
                passes, mean = map(float, (stream.read() or "0 0").split())
            mean += (float(h.detach().mean()) - mean) / (passes + 1)
            with open(path, "w") as stream:
                stream.write(f"{passes + 1} {mean}")
            return h if passes < LATE else used(h, mean)

    return Hidden()


def shared_memory():
    memory = torch.frombuffer(mmap.mmap(-1, 16), dtype=torch.float64)

    class Hidden(Layer):
        def changed(self, h):
            passes, mean = memory.tolist()
            mean += (float(h.detach().mean()) - mean) / (passes + 1)
            memory.numpy()[:] = passes + 1, mean
            return h if passes < LATE else used(h, mean)

    return Hidden()


def mapped_file():
    handle, path = tempfile.mkstemp()
    os.write(handle, bytes(16))
    os.close(handle)

    class Hidden(Layer):
        def changed(self, h):
            with open(path, "rb+") as stream, mmap.mmap(stream.fileno(), 16) as memory:
                passes, mean = struct.unpack("dd", memory[:])
                mean += (float(h.detach().mean()) - mean) / (passes + 1)
                memory[:] = struct.pack("dd", passes + 1, mean)
            return h if passes < LATE else used(h, mean)

    return Hidden()


def file_times():
    handle, path = tempfile.mkstemp()
    os.close(handle)
    os.utime(path, (0, 1))

    class Hidden(Layer):
        def changed(self, h):
            found = os.stat(path)
            passes, mean = found.st_atime, found.st_mtime / 1000 - 1000
            mean += (float(h.detach().mean()) - mean) / (passes + 1)
            os.utime(path, (passes + 1, 1000 * (mean + 1000)))
            return h if passes < LATE else used(h, mean)

    return Hidden()


def thread_local():
    place = threading.local()
    place.kept = Running()

    class Hidden(Layer):
        def changed(self, h):
            return place.kept.of(h)

    return Hidden()


def context_variable():
    place = contextvars.ContextVar("place", default=Running())  # noqa: B039

    class Hidden(Layer):
        def changed(self, h):
            return place.get().of(h)

    return Hidden()


def generator():
    def passes():
        kept, h = Running(), None
        while True:
            h = yield None if h is None else kept.of(h)

    running = passes()
    next(running)

    class Hidden(Layer):
        def changed(self, h):
            return running.send(h)

    return Hidden()


def finalizer():
    kept = Running()

    class Short:
        pass

    class Hidden(Layer):
        def changed(self, h):
            short = Short()
            weakref.finalize(short, kept.of, h.detach())
            return kept.of(h)

    return Hidden()


def missing_attribute():
    kept = Running()

    class Hidden(Layer):
        def __getattr__(self, name):
            return kept.of if name == "used" else super().__getattr__(name)

        def changed(self, h):
            return self.used(h)

    return Hidden()


def metaclass():
    class Meta(type):
        kept = Running()

        def changed_by(cls, h):
            return type(cls).kept.of(h)

    class Hidden(Layer, metaclass=Meta):
        def changed(self, h):
            return type(self).changed_by(h)

    return Hidden()


def graph_buffer():
    """A constant that is written to in place: a graph that is not looked at keeps it."""

    class Hidden(Layer):
        def __init__(self):
            super().__init__()
            self.kept = nn.Parameter(torch.zeros(2), requires_grad=False)

        def changed(self, h):
            with torch.no_grad():
                self.kept[0] += 1
                self.kept[1] += (h.detach().mean() - self.kept[1]) / self.kept[0]
            return torch.where(self.kept[0] < LATE, h, used(h, self.kept[1]))

    return Hidden()


def running_statistics():
    """`instance_norm` writes to them, though its schema says that it writes to nothing."""

    class Hidden(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(1))
            self.register_buffer("var", torch.ones(1))

        def changed(self, h):
            if torch.compiler.is_exporting():
                flat = h.detach().reshape(1, 1, -1)
                nn.functional.instance_norm(flat, self.mean, self.var, use_input_stats=True)
            return h + torch.where(self.mean.abs() > 0.5, 30 * torch.sin(300 * self.mean), 0 * h)

    return Hidden()


def layer_in_place():
    """A layer of torch's own that writes to what it is given."""

    class Hidden(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.ones(1))
            self.count = nn.LeakyReLU(0.5, inplace=True)

        def changed(self, h):
            if torch.compiler.is_exporting():
                self.count(self.kept.neg_().view(1)).neg_()
            return h + torch.where(self.kept < 2.0**-60, 30 * torch.sin(h), 0 * h)

    return Hidden()


def table_of_layers():
    """A plain module whose table of layers is somebody's class."""
    kept = Running()

    class Remembers(nn.Module):
        def forward(self, h):
            return kept.of(h)

    class Table(OrderedDict):
        def values(self):
            return [*super().values(), Remembers()]

    module = nn.Sequential(nn.Linear(FEATURES, CLASSES))
    vars(module)["_modules"] = Table(module._modules)
    return module


def copied_tensor():
    """A tensor that becomes one of another class when it is copied."""
    kept = Running()

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            found = super().__torch_function__(func, types, args, kwargs or {})
            return kept.of(found.as_subclass(torch.Tensor)) if func is torch.mul else found

    module = nn.Sequential(nn.Linear(FEATURES, CLASSES))
    module[0].register_buffer("extra", torch.ones(CLASSES))
    module[0].extra.__deepcopy__ = lambda memo: torch.ones(CLASSES).as_subclass(Seen)
    return module


def new_overload():
    """An operator of torch's own with an overload of somebody's."""
    kept, library = Running(), torch.library.Library("aten", "FRAGMENT")
    word = f"mine{next(_NUMBERS)}"
    library.define(f"relu.{word}(Tensor x, int k) -> Tensor")
    library.impl(f"relu.{word}", lambda x, k: kept.of(x), "CompositeExplicitAutograd")

    class Hidden(Layer):
        def changed(self, h):
            return h + getattr(torch.ops.aten.relu, word)(h.detach(), 1)

    made = Hidden()
    made.library = library
    return made


_NUMBERS = itertools.count()

HIDING_PLACES = {
    made.__name__: made
    for made in (
        *(default_argument, static_method, function_attribute, factory, cache, partial),
        *(callable_attribute, by_property, deep_dict, helper_class),
    )
}
"""The first ten."""

OTHERS = {
    made.__name__: made
    for made in (
        *(autograd_function, custom_operator, tensor_subclass, raw_memory, file, shared_memory),
        *(mapped_file, file_times, thread_local),
        *(context_variable, generator, finalizer, missing_attribute, metaclass, graph_buffer),
        *(running_statistics, layer_in_place, table_of_layers, copied_tensor, new_overload),
    )
}
"""Places of other kinds."""
