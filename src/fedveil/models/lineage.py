"""Which trainings a module's weights come from, as far as this process has seen them."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import nn

Claim = Callable[[], object]
"""Computes what a training claims, None for nothing: it is asked only when it is shown."""

_TRAININGS: WeakKeyDictionary[nn.Module, dict[str, Claim]] = WeakKeyDictionary()


def note_training(module: nn.Module, training: str, claim: Claim) -> None:
    """Record that a training has moved the weights of a module, and what it claims so far."""
    _TRAININGS.setdefault(module, {})[training] = claim


def note_copy(module: nn.Module, original: nn.Module) -> None:
    """Record that a module has the weights of another."""
    if original in _TRAININGS:
        _TRAININGS[module] = dict(_TRAININGS[original])


def trainings_of(module: nn.Module) -> tuple[str, ...]:
    """The claims of all trainings that have moved the weights of a module."""
    claims = [claim() for claim in _TRAININGS.get(module, {}).values()]
    return tuple("which claims nothing" if claim is None else str(claim) for claim in claims)
