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
    """Inside, dropout takes its masks from `key`, an int64 scalar.

    `key` may be one of a batch under vmap. `calls` counts what was dropped, which is the place of a
    mask in the pass: the key of one pass serves all its layers.
    """

    def __init__(self, key: torch.Tensor | None) -> None:
        super().__init__()
        self._key = key
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keyed, given = _KEYED.get(func), kwargs or {}
        out = NotImplemented if keyed is None else keyed(self, func, *args, **given)
        return func(*args, **given) if out is NotImplemented else out

    def dropped(self, kind: str, x: torch.Tensor, p: float) -> torch.Tensor:
        """The numbers x [B, ...] after dropout of a kind. Without a key, x itself."""
        shape, fill = _KINDS[kind]
        kept = self.kept(shape(x), p)
        return x if kept is None else fill(x, kept, p)

    def kept(self, shape: tuple[int, ...], p: float) -> torch.Tensor | None:
        """The mask of numbers that stay, bool of this shape. None without a key.

        Each is kept with 1 - p, to within 2^-32.
        """
        self.calls += 1
        if self._key is None:
            return None
        place, count = self.calls - 1, math.prod(shape)
        found: torch.Tensor = _Mask.apply(self._key, place, count, p)  # type: ignore[no-untyped-call]
        return found.view(shape)


class _Mask(torch.autograd.Function):
    """keys [...] -> masks [..., count]: a row of bits per key, whatever vmap makes of the keys."""

    @staticmethod
    def forward(keys: torch.Tensor, place: int, count: int, p: float) -> torch.Tensor:
        own = words_at(keys.numpy().view(np.uint64), np.array(place))
        words = words_at(own[..., None], np.arange(-(-count // 2)))
        halves = words.view(np.uint32)[..., :count]
        below = min(math.floor((1 - p) * 2.0**_HALF), 2**_HALF - 1)
        return torch.from_numpy(halves < np.uint32(below))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, ...]:
        return None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], keys: torch.Tensor, place: int, count: int, p: float
    ) -> tuple[torch.Tensor, int]:
        keys = keys.movedim(in_dims[0], 0)
        found: torch.Tensor = _Mask.apply(keys, place, count, p)  # type: ignore[no-untyped-call]
        return found, 0


Shape = Callable[[torch.Tensor], tuple[int, ...]]
"""The shape of a mask for these numbers."""

Fill = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(numbers, what is kept of them, p) -> the numbers after."""


def _every(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _channels(x: torch.Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], *(1 for _ in x.shape[2:]))


def _zeros(x: torch.Tensor, kept: torch.Tensor, p: float) -> torch.Tensor:
    return x * (kept.to(x.dtype) / (1 - p)) if p < 1 else x * 0


def _saturated(x: torch.Tensor, kept: torch.Tensor, p: float) -> torch.Tensor:
    """Alpha dropout: what is dropped gets SELU's limit, and mean and variance stay."""
    if p == 1:
        return x * 0
    scale: float = ((1 - p) * (1 + p * _ALPHA**2)) ** -0.5
    kept = kept.to(x.dtype)
    return (x * kept - _ALPHA * (1 - kept)) * scale + scale * _ALPHA * p


_KINDS: dict[str, tuple[Shape, Fill]] = {
    "numbers": (_every, _zeros),
    "channels": (_channels, _zeros),
    "saturated": (_every, _saturated),
    "saturated_channels": (_channels, _saturated),
}
"""What a mask is drawn for, and what becomes of the numbers that are dropped."""


def _like(kind: str, *, training: bool = False, batched: int = 0) -> Any:
    """A function of torch's with keyed masks. `training` is its default for that argument.

    Numbers with fewer than `batched` dimensions have no axis for the batch.
    """

    def keyed(
        mode: Dropout,
        func: Any,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = training,
        inplace: bool = False,
    ) -> Any:
        if not training or not 0 < p <= 1:
            return NotImplemented
        given = input[None] if input.ndim < batched else input
        out = mode.dropped(kind, given, p)
        if out is given:
            return input
        out = out[0] if input.ndim < batched else out
        return input.copy_(out) if inplace or func.__name__.endswith("_") else out

    return keyed


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
    """Attention written out, since torch's draws inside of one operation."""
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
    return mode.dropped("numbers", scores.softmax(dim=-1), dropout_p) @ value


def _multi_head(mode: Dropout, func: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's own code, but for the two functions of it that draw."""

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
    functional.dropout: _like("numbers", training=True),
    functional.dropout1d: _like("channels", batched=3, training=True),
    functional.dropout2d: _like("channels", training=True),
    functional.dropout3d: _like("channels", batched=5, training=True),
    functional.alpha_dropout: _like("saturated"),
    functional.feature_alpha_dropout: _like("saturated_channels"),
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multi_head,
    torch.dropout: _like("numbers"),
    torch.dropout_: _like("numbers"),
    torch.feature_dropout: _like("channels"),
    torch.feature_dropout_: _like("channels"),
    torch.alpha_dropout: _like("saturated"),
    torch.alpha_dropout_: _like("saturated"),
    torch.feature_alpha_dropout: _like("saturated_channels"),
    torch.feature_alpha_dropout_: _like("saturated_channels"),
}
