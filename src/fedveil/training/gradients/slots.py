"""Slots: whether a row of a block is a function of its own slot alone, tried to the last bit.

Secure noise covers what one slot adds to a sum *given* the other rows, so these must not move in
any bit with what the slot holds (docs/proofs/secure-side-by-side.md).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fedveil.base.inputs import mapped, taken

AWAY = 0.03
"""How far from the first parameters kernels are tried as well, as a standard deviation."""


def slots_are_independent(
    bits: Callable[..., torch.Tensor], contents: list[Any], generator: torch.Generator
) -> bool:
    """Whether no bit of a slot's row changes when other slots hold something else.

    Tried with zeros, other random contents, contents 10^4 times as large and NaN: each in a random
    half of the slots, and then in the other half, while the rest keep theirs.

    Args:
        bits: Returns the rows' bits, whole numbers [slots, ...], for contents like `contents`.
        contents: Random contents of the slots: tensors [slots, ...], or dictionaries of them.
        generator: Draws further random contents, and the halves.
    """
    base = bits(*contents)
    slots = len(base)
    rest: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.zeros_like,
        lambda values: random_like(values, slots, generator),
        lambda values: 1e4 * values if values.is_floating_point() else values.flip(0),
        lambda values: values * math.nan if values.is_floating_point() else values.flip(0),
    ]
    for change in rest:
        half = torch.randperm(slots, generator=generator) < slots // 2
        for kept in (half, ~half):
            others = partial(_replace_others, change=change, kept=kept)
            changed: list[Any] = [mapped(others, part) for part in contents]
            if not torch.equal(bits(*changed)[kept], base[kept]):
                return False
    return True


def slots_are_alike(bits: Callable[..., torch.Tensor], contents: list[Any]) -> bool:
    """Whether contents have the same bits in whichever slot they are.

    Tried by moving all contents by one slot and by half of the slots, and in reverse order. `bits`
    and `contents` are as in `slots_are_independent`.
    """
    base = bits(*contents)
    orders = [torch.arange(len(base)).roll(1), torch.arange(len(base)).roll(len(base) // 2)]
    orders.append(orders[0].flip(0))
    for order in orders:
        moved: list[Any] = [taken(part, order) for part in contents]
        if not torch.equal(bits(*moved), base[order]):
            return False
    return True


def random_like(values: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` random rows of the kind of `values`: normals, or whole numbers that occur in them."""
    if values.is_floating_point():
        return torch.randn(count, *values.shape[1:], generator=generator).to(values.dtype)
    places = torch.randint(values.numel(), (count, *values.shape[1:]), generator=generator)
    return values.reshape(-1)[places]


def _replace_others(
    own: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], kept: torch.Tensor
) -> torch.Tensor:
    """change(own) [B, ...], but with the contents of `own` in the slots that `kept` [B] marks."""
    others = change(own).clone()
    others[kept] = own[kept]
    return others
