"""torch's group norm where vmap is at work, with images as they lie.

Under vmap, torch copies images whose channels lie last into the other order before it norms them,
and the next convolution copies them back. A copy that a task runs norms the records of a batch as
the batch that they are; outside of vmap torch's own code is used.
"""

from math import prod
from typing import Any

import torch
from torch import nn

from fedveil.models.products import under_vmap


def norm_in_place_(module: nn.Module) -> nn.Module:
    """Give the group norms of a module, which is a copy, that form; and return it.

    >>> layer = norm_in_place_(nn.GroupNorm(2, 4))
    >>> x = torch.randn(3, 1, 4, 5, 5)
    >>> torch.allclose(torch.vmap(layer)(x)[1], layer(x[1]), atol=1e-6)
    True
    """
    for layer in module.modules():
        if type(layer) is nn.GroupNorm:
            layer.__class__ = _GroupNorm
    return module


class _GroupNorm(nn.GroupNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not under_vmap() or input.ndim < 3:
            return super().forward(input)
        out = _normed(input, self.num_groups, self.eps)[0]
        along = (-1, *[1] * (input.ndim - 2))
        if self.weight is not None:
            out = out * self.weight.view(along)
        return out if self.bias is None else out + self.bias.view(along)


class _Normed(torch.autograd.Function):
    """Group norm without weights: what it gives, and the means and scales of the groups."""

    @staticmethod
    def forward(
        x: torch.Tensor, groups: int, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.native_group_norm(_laid(x), None, None, *_sides(x), groups, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x, ctx.groups, _), (_, mean, scale) = inputs, output
        ctx.save_for_backward(x, mean, scale)
        ctx.mark_non_differentiable(mean, scale)

    @staticmethod
    def backward(ctx: Any, *errors: torch.Tensor) -> Any:
        x, mean, scale = ctx.saved_tensors
        given = (_laid(errors[0], x), _laid(x), mean, scale, None, *_sides(x), ctx.groups)
        found = torch.ops.aten.native_group_norm_backward(*given, [True, False, False])
        return found[0], None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, ...], x: torch.Tensor, groups: int, eps: float
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        every = x.movedim(in_dims[0], 0)
        found = _normed(every.flatten(0, 1), groups, eps)
        return tuple(each.view(*every.shape[:2], *each.shape[1:]) for each in found), (0, 0, 0)


def _normed(x: torch.Tensor, groups: int, eps: float) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor, ...] = _Normed.apply(x, groups, eps)  # type: ignore[no-untyped-call]
    return found


def _laid(x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """`x` in one of the two orders that the kernel takes: as it lies, or as `like` does.

    The strides of channels that lie last are written out: of a single record torch takes others.
    """
    like = x if like is None else like
    if under_vmap():
        return x
    if like.ndim != 4 or like.is_contiguous():
        return x.contiguous()
    _, channels, height, width = x.shape
    strides = (channels * height * width, 1, channels * width, channels)
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, strides)


def _sides(x: torch.Tensor) -> tuple[int, int, int]:
    """Records, channels, and how many numbers a channel has."""
    return x.shape[0], x.shape[1], prod(x.shape[2:])
