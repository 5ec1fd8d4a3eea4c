"""Which trainings a module's weights come from, as far as this process has seen them.

A module is known by itself and by its tensors: a copy, a part or a larger module with the same
values has the same trainings behind it.
"""

import hashlib
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import torch
from torch import nn

Claim = Callable[[], object]
"""Computes what a training claims, None for nothing: it is asked only when it is shown."""

_TRAININGS: WeakKeyDictionary[nn.Module, dict[str, Claim]] = WeakKeyDictionary()
_TENSORS: dict[bytes, dict[str, Claim]] = {}

_FEW = 4
"""Tensors of fewer numbers, or of one value, are equal by chance."""

_BEFORE = "the model's first weights come from an earlier training, "
_AFTER = ": it adds to this claim for whoever took part in both"


def note_training(module: nn.Module, training: str, claim: Claim) -> None:
    """Record that a training has moved the weights of a module, and what it claims so far."""
    _TRAININGS.setdefault(module, {})[training] = claim


def note_weights(module: nn.Module) -> None:
    """Record the tensors of a module that trainings have moved, as they are now."""
    behind = _TRAININGS.get(module, {})
    for tensor in module.parameters() if behind else ():
        if tensor.requires_grad and (digest := _digest(tensor)) is not None:
            _TENSORS.setdefault(digest, {}).update(behind)


def note_copy(module: nn.Module, original: nn.Module) -> None:
    """Record that a module has the weights of another."""
    if original in _TRAININGS:
        _TRAININGS[module] = dict(_TRAININGS[original])


def trainings_of(module: nn.Module) -> tuple[str, ...]:
    """The claims of all trainings that the weights of a module come from."""
    behind = dict(_TRAININGS.get(module, {}))
    for tensor in (*module.parameters(), *module.buffers()) if _TENSORS else ():
        behind |= _TENSORS.get(_digest(tensor) or b"", {})
    claims = [claim() for claim in behind.values()]
    return tuple("which claims nothing" if claim is None else str(claim) for claim in claims)


def adding(claim: str) -> str:
    """The assumption that names an earlier training's claim."""
    return f"{_BEFORE}{claim}{_AFTER}"


def earlier(assumptions: Iterable[str]) -> list[str]:
    """The claims of earlier trainings that a claim names among its assumptions."""
    named = [text for text in assumptions if text.startswith(_BEFORE) and text.endswith(_AFTER)]
    return [text[len(_BEFORE) : -len(_AFTER)] for text in named]


def _digest(tensor: torch.Tensor) -> bytes | None:
    """A digest of a tensor's values, None for few numbers or one repeated value."""
    values = tensor.detach()
    if values.is_meta or values.numel() < _FEW or bool((values == values.flatten()[0]).all()):
        return None
    return hashlib.sha256(values.float().contiguous().numpy().tobytes()).digest()
