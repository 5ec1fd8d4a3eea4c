"""What makes two trainings the same: their parts in a form that can be compared and hashed."""

import hashlib
from dataclasses import fields, is_dataclass
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
import torch

_WORDS = ("assumptions",)
"""Fields that are told to people and decide nothing."""


def identity(value: Any) -> str:
    """The same text for equal parts, in every process; functions and unknown objects by their type.

    >>> from fedveil.privacy.sampling import Poisson
    >>> identity((Poisson(0.5), 3))
    '(Poisson(rate=0.5),3)'
    """
    match value:
        case Enum():
            return f"{type(value).__name__}.{value.name}"
        case None | bool() | int() | float() | str() | Fraction():
            return repr(value)
        case list() | tuple():
            return f"({','.join(map(identity, value))})"
        case torch.Tensor():
            return identity(value.detach().numpy())
        case np.ndarray():
            content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
            return f"{value.dtype.str}{value.shape}{content}"
    if is_dataclass(value) and not isinstance(value, type):
        told = [
            f"{field.name}={identity(getattr(value, field.name))}"
            for field in fields(value)
            if field.init and field.name not in _WORDS
        ]
        return f"{type(value).__name__}({','.join(told)})"
    return type(value).__name__


def seed_of(*parts: Any) -> int:
    """A number of 128 bits that other parts do not have."""
    return int(hashlib.sha256(identity(parts).encode()).hexdigest()[:32], 16)
