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
    """Record that a training changes the weights of a module, and how to compute its claim.

    In memory only. `training` is the name of the training, whose earlier claim is replaced.
    """
    _TRAININGS.setdefault(module, {})[training] = claim


def note_weights(module: nn.Module) -> None:
    """Record digests of a trained module's learning weights, so that copies are recognised.

    Nothing is recorded for a module without `note_training`. In memory only.
    """
    behind = _TRAININGS.get(module, {})
    for tensor in module.parameters() if behind else ():
        if tensor.requires_grad and (digest := _digest(tensor)) is not None:
            _TENSORS.setdefault(digest, {}).update(behind)


def note_copy(module: nn.Module, original: nn.Module) -> None:
    """Record that `module` has the weights of `original`, and so its trainings.

    Trainings recorded for `module` before are replaced. Nothing changes if `original` has none.
    """
    if original in _TRAININGS:
        _TRAININGS[module] = dict(_TRAININGS[original])


def trainings_of(module: nn.Module) -> tuple[str, ...]:
    """The claims, as texts, of all trainings that the weights of a module come from. () if none.

    A training without a claim is "which claims nothing". Weights are recognised by the module
    itself and by their values. Computes the claims.
    """
    behind = dict(_TRAININGS.get(module, {}))
    for tensor in (*module.parameters(), *module.buffers()) if _TENSORS else ():
        behind |= _TENSORS.get(_digest(tensor) or b"", {})
    claims = [claim() for claim in behind.values()]
    return tuple("which claims nothing" if claim is None else str(claim) for claim in claims)


def earlier_training(claim: str) -> str:
    """A sentence for a claim's assumptions that quotes the claim of an earlier training."""
    return f"{_BEFORE}{claim}{_AFTER}"


def earlier_claims(assumptions: Iterable[str]) -> list[str]:
    """The claims of earlier trainings that assumptions quote: inverse of `earlier_training`.

    Other assumptions are left out.
    """
    named = [text for text in assumptions if text.startswith(_BEFORE) and text.endswith(_AFTER)]
    return [text[len(_BEFORE) : -len(_AFTER)] for text in named]


def _digest(tensor: torch.Tensor) -> bytes | None:
    """SHA-256 of a tensor's values as float32, the same for every shape.

    None for a tensor on "meta", with fewer than four numbers, or with one repeated value.
    """
    values = tensor.detach()
    if values.is_meta or values.numel() < _FEW or bool((values == values.flatten()[0]).all()):
        return None
    return hashlib.sha256(values.float().contiguous().numpy().tobytes()).digest()
