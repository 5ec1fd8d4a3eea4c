"""Single-example gradients of convolutions in one, two or three dimensions."""

from math import prod

import torch
from torch import nn

from fedveil.training.gradients.forms import Full, Outer, cheaper, joined_uses

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d

_FEW_CHANNELS = 8


def convolved(layer: Conv, inputs: list[torch.Tensor], errors: list[torch.Tensor]) -> Full | Outer:
    """Written out where few weights are shared by many positions; from all pairs otherwise."""
    positions = sum(e[0, 0].numel() for e in errors)
    width = layer.weight[0].numel()
    bias = layer.bias is not None
    image = type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros"
    once = image and len(inputs) == 1 and layer.stride == (1, 1)
    fields = prod(layer.kernel_size) if once else 1
    if layer.groups == 1 and cheaper(positions, width, layer.out_channels, fields):
        seen, shape, order = _seen, None, None
        if image:
            seen, order = _seen_channels_last, (0, 3, 1, 2)
            shape = (layer.out_channels, *layer.kernel_size, layer.in_channels)
        a = joined_uses([seen(layer, a, e) for a, e in zip(inputs, errors, strict=True)])
        e = joined_uses([e.flatten(2).mT for e in errors])
        alike = _alike(layer, inputs[0], errors[0]) if once else None
        outer = Outer(a, e, bias, alike, shape, order)
        return outer.product if outer.cancels else outer
    shifted = image and not isinstance(layer.padding, str) and layer.in_channels >= _FEW_CHANNELS
    shifted = shifted and layer.stride == (1, 1) and layer.dilation == (1, 1)
    multiply = _by_shifts if shifted else _by_patches
    products = [multiply(layer, a, e) for a, e in zip(inputs, errors, strict=True)]
    weight = products[0] if len(products) == 1 else torch.stack(products).sum(dim=0)
    summed = None
    if bias:
        summed = torch.stack([e.flatten(2).sum(dim=2) for e in errors]).sum(dim=0)
    return Full(weight, summed, (3, 2, 0, 1) if shifted else None)


def _by_shifts(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """One product per position of the kernel, on shifted views of the flattened padded image.

    Errors get the padded image's row length, with zeros at the end of each row, so that input and
    error positions stay a constant distance apart and nothing is copied per kernel position.
    The answer is [B, height, width, in, out].
    """
    count, channels, height, width = a.shape
    outputs, rows, columns = error.shape[1:]
    (left, _, up, _), (tall, wide) = layer._reversed_padding_repeated_twice, layer.kernel_size
    long = width + 2 * left
    padded = a.new_zeros(count, height + 2 * up + 1, long, channels)
    padded[:, up : up + height, left : left + width] = a.permute(0, 2, 3, 1)
    flat = padded.flatten(1, 2)
    errors = error.new_zeros(count, rows, long, outputs)
    errors[:, :, :columns] = error.permute(0, 2, 3, 1)
    errors = errors.flatten(1, 2)
    out = a.new_empty(count, tall, wide, channels, outputs)
    for i in range(tall):
        for j in range(wide):
            shifted = flat[:, i * long + j : i * long + j + rows * long]
            torch.bmm(shifted.mT, errors, out=out[:, i, j])
    return out


def _alike(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The inner products of all pairs of patches that outputs saw, in float64 [B, T, T].

    Two patches meet pixel by pixel, so theirs is a sum over the kernel of inner products of two
    pixels of the image; padding is zero and meets with nothing.
    """
    pixels = a.flatten(2).mT.double()
    (rows, columns), (_, _, tall, wide) = layer.dilation, a.shape
    products = torch.bmm(pixels, pixels.mT).view(-1, tall, wide, tall, wide)
    left, right, up, down = layer._reversed_padding_repeated_twice
    padded = nn.functional.pad(products, (left, right, up, down) * 2)
    high, long = error.shape[2:]
    out = padded.new_zeros(len(a), high, long, high, long)
    for i in range(0, rows * layer.kernel_size[0], rows):
        for j in range(0, columns * layer.kernel_size[1], columns):
            down_, along = slice(i, i + high), slice(j, j + long)
            out += padded[:, down_, along, down_, along]
    return out.view(len(a), high * long, high * long)


def _by_patches(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """One product per group with the patches that each output saw, in the parameter's order."""
    count, groups = len(a), layer.groups
    patches = _patches(layer, a, error)
    patches = patches.reshape(count * groups, -1, prod(error.shape[2:]))
    errors = error.reshape(count * groups, -1, patches.shape[2])
    return torch.bmm(errors, patches.mT).view(count, -1)


def _seen(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The patch that each output saw, [B, positions, inputs x kernel]."""
    patches = _patches(layer, a, error)
    sides = error.ndim - 2
    patches = patches.movedim(tuple(range(-sides, 0)), tuple(range(1, 1 + sides)))
    return patches.reshape(len(a), prod(error.shape[2:]), -1)


def _seen_channels_last(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The same [B, positions, kernel x inputs], copied a pixel's channels at a time."""
    padded = nn.functional.pad(a, layer._reversed_padding_repeated_twice)
    padded = padded.permute(0, 2, 3, 1).contiguous()
    example, *sides, _ = padded.stride()
    apart, along = _strides(layer, sides)
    patches = padded.as_strided(
        (len(a), *error.shape[2:], *layer.kernel_size, a.shape[1]), (example, *along, *apart, 1)
    )
    return patches.reshape(len(a), prod(error.shape[2:]), -1)


def _patches(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """What each weight met at each output: a view [B, inputs, *kernel, *outputs' sides]."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = nn.functional.pad(a, layer._reversed_padding_repeated_twice, mode=mode).contiguous()
    example, channel, *sides = padded.stride()
    apart, along = _strides(layer, sides)
    return padded.as_strided(
        (*a.shape[:2], *layer.kernel_size, *error.shape[2:]), (example, channel, *apart, *along)
    )


def _strides(layer: Conv, sides: list[int]) -> tuple[list[int], list[int]]:
    """How far apart the pixels of a patch are, and the patches: `sides` are a padded image's."""
    apart = [d * s for d, s in zip(layer.dilation, sides, strict=True)]
    along = [t * s for t, s in zip(layer.stride, sides, strict=True)]
    return apart, along
