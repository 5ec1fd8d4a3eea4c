"""What makes two trainings the same: their parts in a form that can be compared and hashed."""

import hashlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

_WORDS = ("assumptions",)
"""Fields that are told to people and decide nothing."""

LATER = {"later": True}
"""Metadata of a field that its class did not always have: at its default it is not told, so that
what was the same before stays the same."""

_KEPT = ("fedveil", "torch", "numpy")
"""Packages whose functions are known by their names: their versions are recorded with a run."""

_APART = ("_parameters", "_modules", "_flat_weights", "_flat_weight_refs")
"""Of a layer: its parameters and children are told apart, the others are references to them."""

_NOT_NUMPYS = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

_DEEPEST = 12


def identity(value: Any, depth: int = 0, seen: frozenset[int] = frozenset()) -> str:
    """The same text for equal parts, in every process.

    Functions are known by what they do: their code, what they close over, their defaults, and the
    constants and functions of one's own that they read by name. Objects are known by their class
    and what they hold; modules by their layers and the methods of these, not by their parameters'
    values.

    >>> from fedveil.privacy.sampling import Poisson
    >>> identity((Poisson(0.5), 3))
    '(fedveil.privacy.sampling.Poisson(rate=0.5),3)'
    """
    if depth > _DEEPEST or id(value) in seen:
        return _name(type(value))
    if isinstance(value, nn.Module | types.FunctionType):
        seen = seen | {id(value)}
    inner = partial(identity, depth=depth + 1, seen=seen)
    match value:
        case Enum():
            return f"{_name(type(value))}.{value.name}"
        case None | bool() | int() | float() | complex() | str() | bytes() | Fraction():
            return repr(value)
        case list() | tuple():
            return f"({','.join(map(inner, value))})"
        case set() | frozenset():
            return f"{{{','.join(sorted(map(inner, value)))}}}"
        case dict():
            return f"{{{','.join(f'{inner(k)}:{inner(v)}' for k, v in value.items())}}}"
        case torch.Tensor():
            return "meta" if value.is_meta else inner(_array(value.detach()))
        case np.ndarray():
            content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return f"{value.dtype.str}{value.shape}{content}"
        case type():
            return _name(value)
        case types.FunctionType():
            return _function(value, inner)
        case types.MethodType():
            return f"{inner(value.__func__)} of {inner(value.__self__)}"
        case types.CodeType():
            return f"{value.co_code.hex()}{value.co_names}{inner(value.co_consts)}"
        case nn.Module():
            classes = sorted({_own(type(layer), inner) for layer in value.modules()})
            return f"{inner(_layers(value))}{''.join(classes)}"
    if is_dataclass(value):
        told = [
            f"{field.name}={inner(getattr(value, field.name))}"
            for field in fields(value)
            if field.init and field.name not in _WORDS and not _as_before(value, field)
        ]
        return f"{_name(type(value))}({','.join(told)}){_own(type(value), inner)}"
    held, own = getattr(value, "__dict__", {}), _own(type(value), inner)
    return f"{_name(type(value))}{getattr(value, '__qualname__', '')}{inner(dict(held))}{own}"


def _as_before(value: Any, field: Field[Any]) -> bool:
    return "later" in field.metadata and bool(getattr(value, field.name) == field.default)


def seed_of(*parts: Any) -> int:
    """A number of 128 bits that other parts do not have."""
    return int(hashlib.sha256(identity(parts).encode()).hexdigest()[:32], 16)


def _own(kind: type, inner: Callable[[Any], str]) -> str:
    """What a class of one's own does, which its name does not say: it may be written again."""
    told = []
    for each in kind.__mro__:
        if each.__module__.split(".")[0] in (*_KEPT, "builtins", "typing", "enum", "abc"):
            continue
        for name, value in sorted(vars(each).items()):
            function = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
            plain = isinstance(value, bool | int | float | str | tuple) and name[:2] != "__"
            if plain or isinstance(function, types.FunctionType):
                told.append((name, function))
    return inner(told) if told else ""


def _array(value: torch.Tensor) -> Any:
    """Its values; its bytes with its type, where numpy has no such type."""
    if value.dtype in _NOT_NUMPYS:
        return str(value.dtype), value.contiguous().view(torch.uint8).numpy()
    return value.numpy()


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _function(function: types.FunctionType, inner: Callable[[Any], str]) -> str:
    name = f"{function.__module__}.{function.__qualname__}"
    if _package(function) in _KEPT and function.__closure__ is None:
        return name
    cells = [_content(cell) for cell in function.__closure__ or ()]
    parts = (function.__code__, cells, function.__defaults__, function.__kwdefaults__)
    read = {each: function.__globals__.get(each) for each in sorted(set(_names(function.__code__)))}
    told = [f"{each}={inner(value)}" for each, value in read.items() if _is_own(value)]
    return f"{name}{inner((*parts, function.__dict__))}{','.join(told)}"


def _package(function: types.FunctionType) -> str:
    return str(function.__module__).split(".")[0]


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that a function, and those inside it, look up; those of attributes among them."""
    yield from (name for name in code.co_names if name[:2] != "__")
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def _is_own(value: Any) -> bool:
    """Whether it is a constant, or a function that no package has brought."""
    if isinstance(value, types.FunctionType):
        known = _package(value) in (*_KEPT, *sys.stdlib_module_names)
        return not known and "site-packages" not in value.__code__.co_filename
    return isinstance(value, bool | int | float | str | tuple)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _layers(module: nn.Module) -> list[tuple[Any, ...]]:
    """Its layers with what they were made with, and their hooks."""
    told = []
    for place, layer in module.named_modules():
        own = {name: value for name, value in vars(layer).items() if name not in _APART}
        told.append((place, type(layer), getattr(type(layer), "forward", None), own))
    return told
