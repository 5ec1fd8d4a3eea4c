"""What a module is beside its parameters' values, so that a pass that changes it is noticed."""

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import nn

Snapshot = dict[str, object]

_DEEPEST = 4
_CACHES = ("_flat_weights", "_flat_weight_refs")
"""torch's recurrent layers keep references to their own weights in these."""


def snapshot(module: nn.Module) -> Snapshot:
    """Every attribute of every layer by its name, in a form that can be compared.

    A tensor is the object it is, its values, and how often it was written to, so that a write that
    changes no value yet shows as well. Generators are their states. State in closures and globals
    is not seen: `models.trial` looks for its effects.

    >>> layer = nn.Linear(2, 2)
    >>> before = snapshot(layer)
    >>> layer.seen = 3
    >>> difference(before, snapshot(layer))
    'seen'
    """
    found: Snapshot = {}
    for place, layer in module.named_modules():
        prefix = f"{place}." if place else ""
        for name, value in vars(layer).items():
            if name in ("_parameters", "_buffers"):
                found |= {f"{prefix}{key}": _token(v, 0) for key, v in value.items()}
            elif name == "_modules":
                found[f"{prefix}{name}"] = [(key, id(child)) for key, child in value.items()]
            elif not (name in _CACHES and isinstance(layer, nn.RNNBase)):
                found[f"{prefix}{name}"] = _token(value, 0)
    return found


def difference(before: Snapshot, after: Snapshot) -> str | None:
    """The name of the first attribute that is not as it was; None if all are."""
    for name in {**before, **after}:
        if before.get(name, _token) != after.get(name, _token):
            return name
    return None


def _token(value: Any, depth: int) -> object:
    """Something that is equal for a value that was not changed."""
    match value:
        case None | bool() | int() | str() | bytes():
            return value
        case float() | complex():
            return repr(value)  # NaN is not equal to itself
        case torch.Tensor():
            return id(value), value._version, _values(value)
        case torch.Generator():
            return _digest(value.get_state().numpy().tobytes())
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case random.Random():
            return value.getstate()
        case np.ndarray():
            return id(value), value.shape, _digest(value.tobytes())
        case nn.Module():
            return id(value), (snapshot(value) if depth else None)  # one that is not registered
    if depth >= _DEEPEST:
        return id(value)
    match value:
        case dict():
            return [(repr(key), _token(v, depth + 1)) for key, v in value.items()]
        case set() | frozenset():
            return sorted(map(repr, value))
    if hasattr(value, "__iter__") and hasattr(value, "__len__"):  # lists, tuples, deques
        return [type(value), *(_token(v, depth + 1) for v in value)]
    inside = getattr(value, "__dict__", None) if not isinstance(value, type) else None
    if isinstance(inside, dict) and not callable(value):
        return id(value), _token(inside, depth + 1)
    return id(value)


def _values(tensor: torch.Tensor) -> bytes | None:
    """Written through `.data` a tensor does not count as written to."""
    if tensor.device.type != "cpu" or tensor.is_sparse:
        return None
    return _digest(tensor.detach().flatten().view(torch.uint8).numpy().tobytes())


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
