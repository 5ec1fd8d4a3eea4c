"""Whether a module or loss can remember: plain ones cannot, others are compared by snapshots.

A plain module is a tree whose layers are exactly classes of `torch.nn` or of the shipped models,
and whose attributes are numbers, words, tensors and functions of torch. Its code writes nothing
that outlives a pass, so it is run as it is. Every other module is run as a captured graph
(`models.capture`). A snapshot of a module's attributes shows whether a pass changed one.
"""

import ctypes
import hashlib
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Generator
from enum import Enum
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator
from torch import nn
from torch.nn.modules import module as hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fedveil.base.errors import BadInput
from fedveil.base.identity import cell_content, names_looked_up, without_recursion

_HOMES = ("torch.nn.modules.", "fedveil.models.")
"""Where the classes of plain layers are."""

_STATEFUL = (nn.modules.batchnorm._NormBase, nn.modules.lazy.LazyModuleMixin)
"""Classes of torch whose passes may write: running statistics, parameters without a shape."""

_RENORMED = (nn.Embedding, nn.EmbeddingBag)
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
_GLOBAL_HOOKS = tuple(name for name in vars(hooks) if name.startswith("_global_"))
_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_TENSORS = (torch.Tensor, nn.Parameter)
_ACTIVATIONS = (
    *(torch.relu, torch.tanh, torch.sigmoid, torch.selu, torch.celu, torch.softmax),
    *(nn.functional.relu, nn.functional.gelu, nn.functional.silu, nn.functional.elu),
    *(nn.functional.selu, nn.functional.celu, nn.functional.leaky_relu, nn.functional.mish),
    *(nn.functional.softplus, nn.functional.hardswish, nn.functional.relu6),
)
"""Functions that layers may hold. Others of torch's may read memory that is not initialised."""

_KEPT = ("_flat_weights", "_flat_weight_refs")
"""torch's recurrent layers keep references to their own weights in these."""


def is_plain(module: nn.Module) -> bool:
    """Whether a module runs no code but torch's and ours, and keeps nothing between passes.

    | edge | answer |
    |---|---|
    | a subclass of a layer of torch | no |
    | a hook, on a layer or on all modules | no |
    | a parametrisation | no: it changes the layer's class |
    | an attribute that hides a method, such as `forward` | no |
    | a function that is not torch's, as an activation | no |
    | a tensor of another class than torch's | no |
    | running statistics, `max_norm` | no: passes write to them |
    """
    if any(getattr(hooks, name) for name in _GLOBAL_HOOKS):
        return False
    for layer in module.modules():
        kind, held = type(layer), dict(vars(layer))
        if isinstance(layer, _STATEFUL) and getattr(layer, "running_mean", layer) is not None:
            return False
        if not (kind.__module__.startswith(_HOMES) and _is_known(kind)):
            return False
        if isinstance(layer, _RENORMED) and layer.max_norm is not None:
            return False
        if not str(getattr(kind.forward, "__module__", None)).startswith(("torch.", "fedveil.")):
            return False  # somebody has replaced the method of the class
        tables = [held.get(name) for name in ("_modules", "_parameters", "_buffers", *_HOOKS)]
        if any(type(table) not in (dict, OrderedDict, set, type(None), bool) for table in tables):
            return False  # a table of somebody's class runs its code
        if any(held.pop(name, None) for name in _HOOKS):
            return False
        held.pop("_modules")
        tensors = [*held.pop("_parameters").values(), *held.pop("_buffers").values()]
        for tensor in tensors:  # a tensor may have a class, or a `__deepcopy__`, of its own
            if tensor is not None and (type(tensor) not in _TENSORS or vars(tensor)):
                return False
            if tensor is not None and tensor._backward_hooks:
                return False
        for name in _KEPT if isinstance(layer, nn.RNNBase) else ():
            held.pop(name, None)
        hides = any(callable(getattr(kind, name, None)) for name in held)
        if hides or not all(map(_is_value, held.values())):
            return False
    return True


def is_plain_function(part: object) -> bool:
    """Whether a loss or metric is a function or metric of torch or ours, or a plain module.

    >>> is_plain_function(nn.functional.mse_loss), is_plain_function(lambda outputs, y: y)
    (True, False)
    """
    if isinstance(part, nn.Module):
        return is_plain(part) and not list(part.parameters())
    if type(part).__module__ == "fedveil.models.metrics" and _is_known(type(part)):
        return all(map(_is_value, vars(part).values()))
    if type(part) is partial:
        given = (*part.args, *part.keywords.values())
        return is_plain_function(part.func) and not part.__dict__ and all(map(_is_value, given))
    return _is_known(part)


def check_process() -> None:
    """Raise BadInput if a mode of torch's or a hook on saved tensors is active.

    It would see every client's numbers, whatever module is trained. Default devices and our own
    modes pass.
    """
    entered: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    function_modes = [
        mode
        for mode in entered
        if type(mode) is not DeviceContext
        and not (type(mode).__module__.startswith("fedveil.") and _is_known(type(mode)))
    ]
    modes = [*function_modes, *_get_current_dispatch_mode_stack()]
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        raise BadInput(
            "hooks on saved tensors are entered and would see every client's numbers: leave them "
            "before you train"
        )
    if modes:
        raise BadInput(
            f"the mode {type(modes[0]).__name__} is entered and would see every client's numbers: "
            "leave it before you train"
        )


def _is_value(value: Any) -> bool:
    """Whether an attribute's value is one that torch's and our layers do not write to.

    These are numbers, strings, types of torch, known classes and activations, and lists, tuples,
    sets and dicts of these.
    """
    if type(value) in _VALUES:
        return True
    if type(value) in (tuple, list, set):
        return all(map(_is_value, value))
    if type(value) is dict:
        return all(map(_is_value, (*value.keys(), *value.values())))
    if isinstance(value, type):
        return _is_known(value)
    return any(value is activation for activation in _ACTIVATIONS)


def _is_known(part: object) -> bool:
    """Whether a function or class is the object of its name in a module of torch or of ours."""
    if not isinstance(part, type | types.FunctionType | types.BuiltinFunctionType):
        return False
    home = str(getattr(part, "__module__", ""))
    if home.split(".")[0] not in ("torch", "fedveil"):
        return getattr(torch, part.__name__, None) is part and home in ("", "None", "torch._C")
    return getattr(sys.modules.get(home), part.__name__, None) is part


Snapshot = dict[str, object]

_Entry = tuple[Any, int, frozenset[int]]
"""(value, depth inside its attribute, ids of the modules whose layers are compared already)."""

_DEEPEST = 6
_KNOWN = frozenset(sys.stdlib_module_names | {"torch", "numpy", "fedveil"}) - {"__main__"}
"""Packages whose classes keep caches, and nothing of a client."""
_HOLDERS = (
    *(bool, int, float, complex, str, bytes, dict, list, tuple, set, deque),
    *(torch.Tensor, torch.Generator, np.ndarray, np.random.Generator, random.Random, nn.Module),
)
"""What a global may hold a record in, or draw from."""
_LEAVES = frozenset({type(None), bool, int, str, bytes})
_HOLDING = frozenset({dict, list, tuple, deque, types.FunctionType, types.MethodType})
"""Known by their type alone, since most values are of these and all are looked at with every chunk.
What is of a class derived from them is looked at more closely."""
_MT19937 = 4 * (624 + 1)
"""Bytes of NumPy's common generator: 624 words and where the next one is."""


def snapshot(part: object) -> Snapshot:
    """The attributes of a module's layers, or of a loss or work, by name, to be compared.

    Values are opaque: compare two snapshots by `difference`. A tensor is the object it is, its
    values, and how often it was written to, so that a write that changes no value yet shows as
    well. Generators are their states. Functions are what they close over and the globals they read
    by name; so are the methods of a user's layers, whose classes' attributes count as theirs. State
    elsewhere is not seen: `models.trial` looks for its effects.

    >>> layer = nn.Linear(2, 2)
    >>> before = snapshot(layer)
    >>> layer.seen = 3
    >>> difference(before, snapshot(layer))
    'seen'
    """
    if isinstance(part, nn.Module):
        tokens: Snapshot = without_recursion(_token, (part, 1, frozenset()))[1]
        return tokens
    return {type(part).__name__: without_recursion(_token, (part, 0, frozenset()))}


def keeps_nothing(part: object) -> bool:
    """Whether a part is made of our own classes, numbers and strings only, which keep nothing.

    False for lists and other containers. A part for which it is False may keep what it sees, so
    that its snapshots are compared.

    >>> keeps_nothing(1.5), keeps_nothing(nn.Linear(1, 1))
    (True, False)
    """
    kind: type = type(part)
    if kind in _LEAVES or kind is float:
        return True
    if isinstance(part, types.MethodType):
        return keeps_nothing(part.__self__)
    if not (kind.__module__.startswith("fedveil.") and _is_known(kind)):
        return False
    if not hasattr(part, "__dict__"):
        return False
    return isinstance(part, Enum) or all(map(keeps_nothing, vars(part).values()))


def common_generators() -> Snapshot:
    """The states of torch's and NumPy's global generators by name, to be compared.

    The keys are "torch's generator" and "NumPy's generator". Python's is left out: threads of other
    libraries draw from it at any time.
    """
    common = get_bit_generator()
    if type(common) is np.random.MT19937:  # looked at with every chunk; `state` takes 40 us
        kept: object = ctypes.string_at(common.ctypes.state_address, _MT19937)
    else:
        kept = repr(common.state)
    return {
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "NumPy's generator": (id(common), kept),
    }


def difference(before: Snapshot, after: Snapshot) -> str | None:
    """The name of an attribute that differs between two snapshots, None if none does.

    It is the first in the order of `before`. An attribute that one of them lacks differs.
    """
    for name in {**before, **after}:
        if before.get(name, difference) != after.get(name, difference):
            return name
    return None


def _token(entry: _Entry) -> Any:
    """A token that is equal as long as the value is not changed, or a generator that makes it.

    `entry` is (value, depth inside its attribute, ids of modules compared already). Beyond a depth
    of 6 the token is the object's id.
    """
    value, depth, modules = entry
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind not in _HOLDING:
        match value:
            case bool() | int() | str() | bytes():
                return value
            case float() | complex():
                return repr(value)  # NaN is not equal to itself
            case torch.Tensor():
                return id(value), value._version, _values(value)
            case torch.Generator():
                return _digest(value.get_state().numpy().data)
            case np.random.Generator():
                return repr(value.bit_generator.state)
            case random.Random():
                return value.getstate()
            case np.ndarray():
                return id(value), value.shape, _digest(value.tobytes())
            case nn.Module() if depth and id(value) not in modules:  # one that is not registered
                return _of_module(value, modules | {id(value)})
            case nn.Module():
                return id(value), None
    if depth >= _DEEPEST or isinstance(value, type):
        return id(value)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return _of_container(value, depth, modules)


def _of_module(module: nn.Module, modules: frozenset[int]) -> Generator[_Entry, Any, Any]:
    """Generator that makes a module's token: (its id, {"LAYER.ATTRIBUTE": token} of all layers).

    Attributes of the module itself have no layer in their name. Parameters, buffers, names of
    children, and for a user's class its slots, class attributes and globals count as attributes.
    """
    tokens: Snapshot = {}
    for place, layer in module.named_modules():
        prefix = f"{place}." if place else ""
        held: dict[str, tuple[Any, int]] = {}
        for name, value in vars(layer).items():
            if name in ("_parameters", "_buffers"):
                held |= {key: (tensor, 0) for key, tensor in value.items()}
            elif name == "_modules":
                held[name] = [(key, id(child)) for key, child in value.items()], 0
            elif not (name in _KEPT and isinstance(layer, nn.RNNBase)):
                held[name] = value, 0
        shared = {**_outside_dict(type(layer), layer), **_globals_of_methods(type(layer))}
        held |= {name: (value, 1) for name, value in shared.items()}
        for name, (value, depth) in held.items():
            tokens[f"{prefix}{name}"] = yield value, depth, modules
    return id(module), tokens


def _of_container(value: Any, depth: int, modules: frozenset[int]) -> Generator[_Entry, Any, Any]:
    """Generator that makes the token of a dict, list, method, function or object.

    It is made of the tokens of everything that the object holds, and of its id and class unless it
    is a plain container.
    """
    kind, tokens = type(value), []
    if isinstance(value, dict):
        for key, inner in value.items():
            token = yield inner, depth + 1, modules
            tokens.append((repr(key), token))
        return tokens
    if isinstance(value, types.MethodType):
        token = yield value.__self__, depth + 1, modules
        return id(value.__func__), token
    if hasattr(value, "__iter__") and hasattr(value, "__len__"):  # lists, tuples, deques
        for inner in value:
            token = yield inner, depth + 1, modules
            tokens.append(token)
        if kind in _HOLDING:
            return kind, tokens
    held: dict[str, Any] = {"dict": getattr(value, "__dict__", None)}
    held |= _outside_dict(kind, value)
    if isinstance(value, types.FunctionType):
        held["closure"] = [cell_content(cell) for cell in value.__closure__ or ()]
        held["defaults"] = value.__defaults__
        held["globals"] = _globals(value)
    inner = (yield held, depth, modules) if any(held.values()) else None
    return id(value), kind, tokens, inner


def _outside_dict(kind: type, value: Any) -> dict[str, Any]:
    """The slots of an object as "slot NAME", and a user's class attributes as "class NAME".

    Methods, properties and dunder names are left out.
    """
    own = _users_classes(kind)
    slots = [name for c in own for name in getattr(c, "__slots__", ()) if hasattr(value, name)]
    shared = {
        f"class {name}": held
        for c in own
        for name, held in vars(c).items()
        if name[:2] != "__" and not callable(held) and not hasattr(held, "__get__")
    }
    return shared | {f"slot {name}": getattr(value, name) for name in slots}


def _globals_of_methods(kind: type) -> dict[str, Any]:
    """The global variables that methods of a user's classes read, as "global NAME" -> value."""
    found: dict[str, Any] = {}
    for c in _users_classes(kind):
        for held in vars(c).values():
            if isinstance(held, types.FunctionType):
                found |= _globals(held)
    return found


@lru_cache(256)
def _users_classes(kind: type) -> tuple[type, ...]:
    """A class and its bases without those of Python, torch, NumPy and fedveil. Cached."""
    return tuple(c for c in kind.__mro__ if c.__module__.split(".")[0] not in _KNOWN)


def _globals(function: types.FunctionType, seen: frozenset[object] = frozenset()) -> dict[str, Any]:
    """The global variables that a user's function, and the functions it calls, read.

    As "global NAME" -> value. {} for functions of known or installed packages, and for code in
    `seen`.
    """
    code = function.__code__
    known = str(function.__module__).split(".")[0] in _KNOWN
    if known or code in seen or "site-packages" in code.co_filename:
        return {}
    found: dict[str, Any] = {}
    names = set(names_looked_up(code))
    places = [function.__globals__, *map(vars, _users_files(function.__globals__, names))]
    for name in sorted(names):
        for value in (place[name] for place in places if name in place):
            if isinstance(value, types.FunctionType):
                found |= _globals(value, seen | {code})
            elif _can_hold_records(value):
                found[f"global {name}"] = value
    return found


def _users_files(place: dict[str, Any], names: set[str]) -> list[types.ModuleType]:
    """The Python modules of these `names` among the globals `place` that are a user's files."""
    found = [place[name] for name in sorted(names) if isinstance(place.get(name), types.ModuleType)]
    return [
        file
        for file in found
        if file.__name__.split(".")[0] not in _KNOWN
        and "site-packages" not in str(getattr(file, "__file__", None))
    ]


def _can_hold_records(value: object) -> bool:
    """Whether a global may hold something of a record: a value, container or user's object.

    Objects of known packages, such as loggers, keep caches of their own.
    """
    if value is None or isinstance(value, type | types.ModuleType):
        return False
    return isinstance(value, _HOLDERS) or type(value).__module__.split(".")[0] not in _KNOWN


def _values(tensor: torch.Tensor) -> bytes | None:
    """SHA-256 of a tensor's bytes, None for a sparse one or one on another device.

    A write through `.data` changes the bytes and does not count as a write.
    """
    if tensor.device.type != "cpu" or tensor.is_sparse:
        return None
    return _digest(tensor.detach().flatten().view(torch.uint8).numpy().data)


def _digest(content: bytes | memoryview) -> bytes:
    """SHA-256 of some bytes: fast in hardware, and without a copy of a large model."""
    return hashlib.sha256(content).digest()
