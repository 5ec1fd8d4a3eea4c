"""Dropout by keys: the mask of a record is a function of the record's key and the place.

torch's dropout draws from a generator that all records and all clients share. Here every record has
a key, which says what is dropped of it in each call, so that a round can be repeated and a record's
gradient is its own: the same beside other records, beside other clients, in a worker and alone.

Guarantee: given the keys, a record's outputs are a function of parameters and record. So whatever
clips its gradient, or its client's update, bounds it for every choice of masks, and a claim holds
as it does without dropout: masks are drawn without a look at the records, all alike, and hide
nothing. It does not matter who knows them; they need not be secure, and are not noise.

| edge | behaviour |
|---|---|
| p = 0, or not training | torch's own: nothing is drawn |
| p = 1 | zeros |
| no key | nothing is dropped: the module as it is measured |
| another function that draws | torch's own, which `models.trial` refuses |
"""

import math
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedveil.base.identity import words_at

_HALF = 32
_ALPHA = 1.7580993408473766
"""What SELU tends to: scale x alpha (Klambauer et al. 2017)."""


class Dropout(TorchFunctionMode):
    """Mode in which torch's dropout functions take their masks from `key`, an int64 scalar.

    `key` may be one of a batch under vmap. `calls` counts the masks of a pass, and is the place of
    the next one: the key of one pass serves all its layers.
    """

    def __init__(self, key: torch.Tensor | None) -> None:
        """Set the key. Without one nothing is dropped, and calls are counted all the same."""
        super().__init__()
        self._key = key
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, or our keyed form of it if it drops. Returns its result."""
        keyed, given = _KEYED.get(func), kwargs or {}
        out = NotImplemented if keyed is None else keyed(self, func, *args, **given)
        return func(*args, **given) if out is NotImplemented else out

    def drop(self, kind: str, x: torch.Tensor, p: float) -> torch.Tensor:
        """The numbers x [B, ...] after dropout. Without a key, x itself.

        `kind` is "numbers", "channels", "saturated" or "saturated_channels" (alpha dropout). `p` is
        the probability with which a number is dropped.
        """
        shape, fill = _KINDS[kind]
        kept = self.draw_mask(shape(x), p)
        return x if kept is None else fill(x, kept, p)

    def draw_mask(self, shape: tuple[int, ...], p: float) -> torch.Tensor | None:
        """The mask of the numbers that stay, bool of this shape, None without a key.

        `p` is the probability with which a number is dropped, to within 2^-32. Each call has
        another place, and counts as one.
        """
        self.calls += 1
        if self._key is None:
            return None
        place, count = self.calls - 1, math.prod(shape)
        found: torch.Tensor = _Mask.apply(self._key, place, count, p)  # type: ignore[no-untyped-call]
        return found.view(shape)


class _Mask(torch.autograd.Function):
    """keys [...] -> masks [..., count]: a row of bits per key, also for keys that vmap batches."""

    @staticmethod
    def forward(keys: torch.Tensor, place: int, count: int, p: float) -> torch.Tensor:
        """Masks [..., count] of keys [...]: True with probability 1 - p, by key and place.

        One 64-bit word decides two entries of a mask.
        """
        own = words_at(keys.numpy().view(np.uint64), np.array(place))
        words = words_at(own[..., None], np.arange(-(-count // 2)))
        halves = words.view(np.uint32)[..., :count]
        below = min(math.floor((1 - p) * 2.0**_HALF), 2**_HALF - 1)
        return torch.from_numpy(halves < np.uint32(below))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Masks have no gradient."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, ...]:
        """No argument has a gradient."""
        return None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], keys: torch.Tensor, place: int, count: int, p: float
    ) -> tuple[torch.Tensor, int]:
        """(masks of a batch of keys, 0): one row for each key, on the first axis."""
        keys = keys.movedim(in_dims[0], 0)
        found: torch.Tensor = _Mask.apply(keys, place, count, p)  # type: ignore[no-untyped-call]
        return found, 0


Shape = Callable[[torch.Tensor], tuple[int, ...]]
"""The shape of a mask for these numbers."""

Fill = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(numbers, what is kept of them, p) -> the numbers after."""


def _number_mask_shape(x: torch.Tensor) -> tuple[int, ...]:
    """The shape of a mask with a bit for every number: that of x."""
    return tuple(x.shape)


def _channel_mask_shape(x: torch.Tensor) -> tuple[int, ...]:
    """The shape of a mask with a bit for every channel of x [B, channels, ...]: 1 on other axes."""
    return (*x.shape[:2], *(1 for _ in x.shape[2:]))


def _drop_to_zero(x: torch.Tensor, kept: torch.Tensor, p: float) -> torch.Tensor:
    """Plain dropout: zeros where `kept` is False, the other numbers times 1 / (1 - p).

    All 0 at p = 1.
    """
    return x * (kept.to(x.dtype) / (1 - p)) if p < 1 else x * 0


def _drop_to_limit(x: torch.Tensor, kept: torch.Tensor, p: float) -> torch.Tensor:
    """Alpha dropout: dropped numbers become SELU's limit, then mean and variance are restored.

    All 0 at p = 1.
    """
    if p == 1:
        return x * 0
    scale: float = ((1 - p) * (1 + p * _ALPHA**2)) ** -0.5
    kept = kept.to(x.dtype)
    return (x * kept - _ALPHA * (1 - kept)) * scale + scale * _ALPHA * p


_KINDS: dict[str, tuple[Shape, Fill]] = {
    "numbers": (_number_mask_shape, _drop_to_zero),
    "channels": (_channel_mask_shape, _drop_to_zero),
    "saturated": (_number_mask_shape, _drop_to_limit),
    "saturated_channels": (_channel_mask_shape, _drop_to_limit),
}
"""By kind of dropout: (shape of the mask, what becomes of the numbers that are dropped)."""


def _drop(
    kind: str,
    learning: bool,
    batched: int,
    mode: Dropout,
    func: Any,
    input: torch.Tensor,
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
) -> Any:
    """The result of a dropout function of torch's, with keyed masks.

    NotImplemented if it drops nothing: not training, or p outside (0, 1]. torch's own function then
    runs. `input` itself if there is no key.

    Args:
        kind: A key of `_KINDS`.
        learning: The default for `training` of torch's function.
        batched: Numbers with fewer dimensions have no axis for the batch.
        mode: The mode that draws the masks.
        func: torch's function.
        input, p, training, inplace: Its arguments. The result is written into `input` if `inplace`
            is true or the function's name ends with "_".
    """
    if not (learning if training is None else training) or not 0 < p <= 1:
        return NotImplemented
    given = input[None] if input.ndim < batched else input
    out = mode.drop(kind, given, p)
    if out is given:
        return input
    out = out[0] if input.ndim < batched else out
    return input.copy_(out) if inplace or func.__name__.endswith("_") else out


def _attention(
    mode: Dropout,
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention in plain operations with keyed dropout: torch's draws inside of one operation.

    NotImplemented without dropout: torch's own function then runs.
    """
    if not dropout_p:
        return NotImplemented
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~ones.tril(), -math.inf)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return mode.drop("numbers", scores.softmax(dim=-1), dropout_p) @ value


def _multi_head(mode: Dropout, func: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of torch's multi-head attention, with its two functions that draw keyed.

    They are replaced in a copy of the function's globals.
    """

    def ours(drawing: Any) -> Callable[..., Any]:
        return lambda *a, **k: mode.__torch_function__(drawing, (), a, k)

    replaced = {
        "has_torch_function": lambda _: False,
        "scaled_dot_product_attention": ours(functional.scaled_dot_product_attention),
        "dropout": ours(functional.dropout),
    }
    names = {**func.__globals__, **replaced}
    own = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__)
    return own(*args, **kwargs)


_KEYED: dict[Any, Callable[..., Any]] = {
    functional.dropout: partial(_drop, "numbers", True, 0),
    functional.dropout1d: partial(_drop, "channels", True, 3),
    functional.dropout2d: partial(_drop, "channels", True, 0),
    functional.dropout3d: partial(_drop, "channels", True, 5),
    functional.alpha_dropout: partial(_drop, "saturated", False, 0),
    functional.feature_alpha_dropout: partial(_drop, "saturated_channels", False, 0),
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multi_head,
    torch.dropout: partial(_drop, "numbers", False, 0),
    torch.dropout_: partial(_drop, "numbers", False, 0),
    torch.feature_dropout: partial(_drop, "channels", False, 0),
    torch.feature_dropout_: partial(_drop, "channels", False, 0),
    torch.alpha_dropout: partial(_drop, "saturated", False, 0),
    torch.alpha_dropout_: partial(_drop, "saturated", False, 0),
    torch.feature_alpha_dropout: partial(_drop, "saturated_channels", False, 0),
    torch.feature_alpha_dropout_: partial(_drop, "saturated_channels", False, 0),
}
