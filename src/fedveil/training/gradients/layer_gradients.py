"""Formulas for the single-example gradients of one layer, each as small as the layer allows.

A formula needs the layer's inputs and the loss's gradients at its outputs (`errors`). Each form of
gradient knows the squared length of every example's gradient, in float64, and adds the scaled sum
over the examples to the parameters' places. Axis 0 is the example everywhere. A layer that anybody
could have changed (a subclass, a hook, another `forward`, a weight that is computed) has none.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any, Self

import torch
from torch import nn

from fedveil.models.vmap_layers import Product
from fedveil.privacy.clip import row_norms
from fedveil.training.gradients.trajectories import is_unmodified

Places = dict[str, torch.Tensor]
Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d

_CANCELLING = 64.0
_NORMAL = torch.finfo(torch.float32).tiny
_FEW_CHANNELS = 8

_WIDENED, _WRITTEN = 100, 40
"""Cost of turning a number into float64, and of writing, measuring and scaling one in a product.

In multiplications, estimated. They decide how lengths are computed, not what they are.
"""


def without_subnormals(values: torch.Tensor) -> torch.Tensor:
    """Zeros for numbers so small that float32 rounds them by more than the clip leaves room for.

    A large factor would make the rounding of such a number longer than the clip.
    """
    return torch.hardshrink(values, _NORMAL)


@dataclass(frozen=True)
class OuterProducts:
    """sum over t of error[t] x input[t]': a linear layer's steps, or a convolution's patches.

    Attributes:
        inputs: [B, T, i].
        errors: [B, T, o].
        has_bias: Whether the layer has a bias.
        input_products: Inner products of all pairs of inputs [B, T, T], if known more cheaply.
        weight_shape: Shape of an error times an input, if it is not the parameter's.
        order: The axis of `weight_shape` that each of the parameter's axes is.
    """

    inputs: torch.Tensor
    errors: torch.Tensor
    has_bias: bool
    input_products: torch.Tensor | None = None
    weight_shape: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    @cached_property
    def squares(self) -> torch.Tensor:
        """Squared lengths, float64 [B]."""
        inputs, errors = self._products
        squares = (inputs * errors).sum(dim=(1, 2)).clamp_min(0)
        if not self.has_bias:
            return squares
        return squares + self.errors.sum(dim=1, dtype=torch.float64).square().sum(dim=1)

    @property
    def cancels(self) -> bool:
        """Whether the steps of an example are far longer than their sum.

        The sum over all steps and examples would then round by more than the example is long.
        """
        if self.inputs.shape[1] == 1:
            return False
        a, e = (products.diagonal(dim1=1, dim2=2).sqrt() for products in self._products)
        rough = (a * e).sum(dim=1).square()
        rough += e.sum(dim=1).square() if self.has_bias else 0.0
        return bool((rough > _CANCELLING**2 * self.squares).any())

    @cached_property
    def _products(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inner products of all pairs of inputs, and of all pairs of errors, float64 [B, T, T]."""
        if self.inputs.shape[1] == 1:
            a, e = (row_norms(v[:, 0]).square()[:, None, None] for v in (self.inputs, self.errors))
            return a, e
        errors = self.errors.double()
        inputs = self.input_products
        if inputs is None:
            wide = self.inputs.double()
            inputs = torch.bmm(wide, wide.mT)
        return inputs, torch.bmm(errors, errors.mT)

    @property
    def stored_numbers(self) -> int:
        """How many numbers this keeps in memory."""
        return self.inputs.numel() + self.errors.numel()

    def multiplied(self) -> "FullGradients":
        """The same, one gradient per example."""
        weight = torch.bmm(self.errors.mT, self.inputs)
        if self.weight_shape is not None:
            weight = weight.view(-1, *self.weight_shape)
        return FullGradients(weight, self.errors.sum(dim=1) if self.has_bias else None, self.order)

    def zeroed(self, bad: torch.Tensor) -> Self:
        """The same with zeros for the examples marked in `bad` [B]."""
        bad = bad[:, None, None]
        products = self.input_products
        return replace(
            self,
            inputs=torch.where(bad, 0.0, self.inputs),
            errors=torch.where(bad, 0.0, self.errors),
            input_products=None if products is None else torch.where(bad, 0.0, products),
        )

    def add_scaled_(self, places: Places, scale: torch.Tensor) -> None:
        """places[parameter] += sum over examples of scale [B] x gradient."""
        errors = without_subnormals(self.errors * scale[:, None, None]).flatten(0, 1)
        if self.weight_shape is None or self.order is None:
            place = places["weight"].view(errors.shape[1], -1)
            place.addmm_(errors.T, self.inputs.flatten(0, 1))
        else:
            total = torch.mm(errors.T, self.inputs.flatten(0, 1))
            places["weight"] += total.view(self.weight_shape).permute(self.order)
        if self.has_bias:
            places["bias"] += errors.sum(dim=0)


@dataclass(frozen=True)
class FullGradients:
    """One gradient per example.

    Attributes:
        weight: [B, ...] in the order of the parameter's numbers.
        bias: [B, o], None without a bias.
        order: The axis of `weight` that each of the parameter's axes is, if they differ.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    order: tuple[int, ...] | None = None

    @cached_property
    def squares(self) -> torch.Tensor:
        square = row_norms(self.weight.flatten(1)).square()
        return square if self.bias is None else square + self.bias.double().square().sum(dim=1)

    @property
    def stored_numbers(self) -> int:
        return self.weight.numel()

    def zeroed(self, bad: torch.Tensor) -> Self:
        weight = self.weight.clone()
        weight[bad] = 0.0
        bias = None if self.bias is None else torch.where(bad[:, None], 0.0, self.bias)
        return replace(self, weight=weight, bias=bias)

    def add_scaled_(self, places: Places, scale: torch.Tensor) -> None:
        total = torch.mv(self.weight.flatten(1).T, scale)
        place = places["weight"]
        if self.order is not None:
            total = total.view(self.weight.shape[1:]).permute(self.order)
        place += total.reshape(place.shape)
        if self.bias is not None:
            places["bias"] += torch.mv(self.bias.T, scale)


@dataclass(frozen=True)
class EmbeddingGradients:
    """Rows of a table that were looked up: tokens [B, T], errors [B, T, d]."""

    tokens: torch.Tensor
    errors: torch.Tensor

    @cached_property
    def squares(self) -> torch.Tensor:
        same = self.tokens[:, :, None] == self.tokens[:, None, :]
        e = self.errors.double()
        return torch.where(same, torch.bmm(e, e.mT), 0.0).sum(dim=(1, 2)).clamp_min(0)

    @property
    def cancels(self) -> bool:
        """Whether the errors of an example are far longer than their sum."""
        rough = self.errors.double().norm(dim=2).sum(dim=1).square()
        return bool((rough > _CANCELLING**2 * self.squares).any())

    @property
    def stored_numbers(self) -> int:
        return self.errors.numel()

    def zeroed(self, bad: torch.Tensor) -> Self:
        return replace(self, errors=torch.where(bad[:, None, None], 0.0, self.errors))

    def add_scaled_(self, places: Places, scale: torch.Tensor) -> None:
        errors = (self.errors * scale[:, None, None]).flatten(0, 1)
        places["weight"].index_add_(0, self.tokens.flatten(), errors)

    def multiplied(self, table: torch.Size) -> FullGradients:
        """The same with a whole table for each example."""
        weight = self.errors.new_zeros(len(self.tokens), *table)
        rows = torch.arange(len(weight))[:, None].expand_as(self.tokens)
        weight.index_put_((rows, self.tokens), self.errors, accumulate=True)
        return FullGradients(weight, None)


Gradient = OuterProducts | FullGradients | EmbeddingGradients
"""The gradients of B examples for the parameters of one layer."""


def has_formula(layer: nn.Module) -> bool:
    """Whether `layer_gradient` has a formula for this layer as it is configured."""
    if not is_unmodified(layer):
        return False
    match layer:
        case Product():
            return True
        case nn.Embedding():
            plain = layer.max_norm is None and not layer.scale_grad_by_freq
            return type(layer) is nn.Embedding and plain
    own = {name for name, _ in layer.named_parameters(recurse=False)}
    plain_types = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return type(layer) in plain_types and own <= {"weight", "bias"}


def parameter_names(name: str, layer: nn.Module) -> dict[str, str]:
    """The module's names for the parameters of the layer `name`, by the layer's own names."""
    if isinstance(layer, Product):
        name, own = name.rpartition(".")[0], layer.names
    else:
        own = {p: p for p, _ in layer.named_parameters(recurse=False)}
    return {p: f"{name}.{given}" if name else given for p, given in own.items()}


@contextmanager
def detached_parameters(layers: dict[str, nn.Module]) -> Iterator[None]:
    """Inside, these layers compute with parameters that have no gradient."""
    handles = []
    for layer in layers.values():
        saved: dict[str, Any] = {}
        handles.append(layer.register_forward_pre_hook(partial(_detach, saved)))
        handles.append(layer.register_forward_hook(partial(_restore, saved)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _detach(saved: dict[str, Any], layer: nn.Module, args: tuple[Any, ...]) -> Any:
    if isinstance(layer, Product):
        return args[0], *(None if given is None else given.detach() for given in args[1:])
    saved.update(layer._parameters)
    for name, value in saved.items():
        layer._parameters[name] = None if value is None else value.detach()
    return args


def _restore(saved: dict[str, Any], layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
    layer._parameters.update(saved)


def layer_gradient(
    layer: nn.Module, inputs: Sequence[torch.Tensor], errors: Sequence[torch.Tensor]
) -> Gradient:
    """The gradient of a layer that has a formula, and that was used once or more.

    `inputs` and `errors` are those of each use. Several images that belong to one example are
    several uses of their layer.
    """
    match layer:
        case nn.Linear() | Product():
            bias = "bias" in layer.names if isinstance(layer, Product) else layer.bias is not None
            a = _joined([h.reshape(len(h), -1, layer.in_features) for h in inputs])
            e = _joined([g.reshape(len(g), -1, layer.out_features) for g in errors])
            outer = OuterProducts(a, e, bias)
            pairs = _pairs_are_cheaper(a.shape[1], layer.in_features, layer.out_features)
            return outer if pairs and not outer.cancels else outer.multiplied()
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            sides = layer.weight.ndim - 1
            return _conv_gradient(layer, _images(inputs, sides), _images(errors, sides))
        case nn.Embedding():
            count, table = len(inputs[0]), layer.weight.shape
            tokens = _joined([t.reshape(count, -1) for t in inputs])
            error = _joined([e.reshape(count, -1, table[1]) for e in errors])
            if layer.padding_idx is not None:
                error = torch.where((tokens == layer.padding_idx)[..., None], 0.0, error)
            lookups = EmbeddingGradients(tokens, error)
            return lookups.multiplied(table) if lookups.cancels else lookups
    raise AssertionError(f"no formula for {type(layer).__name__}")


def _joined(uses: list[torch.Tensor]) -> torch.Tensor:
    """Several uses [B, T, ...] of a layer as one with all their steps."""
    return uses[0] if len(uses) == 1 else torch.cat(uses, dim=1)


def _images(values: Sequence[torch.Tensor], sides: int) -> list[torch.Tensor]:
    """One tensor [B, channels, ...] for every image of an example."""
    return [
        image
        for v in values
        for image in v.reshape(len(v), -1, *v.shape[v.ndim - sides :]).unbind(1)
    ]


def _pairs_are_cheaper(steps: int, inputs: int, outputs: int, fields: int = 1) -> bool:
    """Whether lengths from all pairs of steps are less work than a product for each example.

    Of an image's patches, the pairs of its `fields` times fewer numbers are enough.
    """
    pairs = steps * (inputs // fields + outputs) * (2 * steps + _WIDENED)
    pairs += 4 * steps * steps * fields
    return steps == 1 or pairs <= _WRITTEN * inputs * outputs


def _conv_gradient(
    layer: Conv, inputs: list[torch.Tensor], errors: list[torch.Tensor]
) -> FullGradients | OuterProducts:
    """One per example where many positions share few weights, from all pairs otherwise."""
    positions = sum(e[0, 0].numel() for e in errors)
    width = layer.weight[0].numel()
    bias = layer.bias is not None
    image = type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros"
    once = image and len(inputs) == 1 and layer.stride == (1, 1)
    fields = prod(layer.kernel_size) if once else 1
    uses = list(zip(inputs, errors, strict=True))
    if layer.groups == 1 and _pairs_are_cheaper(positions, width, layer.out_channels, fields):
        rows, shape, order = _patch_rows, None, None
        if image:
            rows, order = _patch_rows_channels_last, (0, 3, 1, 2)
            shape = (layer.out_channels, *layer.kernel_size, layer.in_channels)
        a = _joined([rows(layer, a, e) for a, e in uses])
        e = _joined([e.flatten(2).mT for e in errors])
        products = _patch_products(layer, inputs[0], errors[0]) if once else None
        outer = OuterProducts(a, e, bias, products, shape, order)
        return outer.multiplied() if outer.cancels else outer
    shifted = image and not isinstance(layer.padding, str) and layer.in_channels >= _FEW_CHANNELS
    shifted = shifted and layer.stride == (1, 1) and layer.dilation == (1, 1)
    multiply = _by_shifts if shifted else _by_patches
    weights = [multiply(layer, a, e) for a, e in uses]
    weight = weights[0] if len(weights) == 1 else torch.stack(weights).sum(dim=0)
    summed = None
    if bias:
        summed = torch.stack([e.flatten(2).sum(dim=2) for e in errors]).sum(dim=0)
    return FullGradients(weight, summed, (3, 2, 0, 1) if shifted else None)


def _by_shifts(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """One product per position of the kernel, on shifted views of the flattened padded image.

    Errors get the padded image's row length, with zeros at the end of each row, so that input and
    error positions stay a constant distance apart and nothing is copied per kernel position.
    Returns [B, height, width, in, out].
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


def _patch_products(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The inner products of all pairs of patches that outputs saw, in float64 [B, T, T].

    Two patches meet pixel by pixel, so theirs is a sum over the kernel of inner products of two
    pixels of the image. Padding is zero and adds nothing.
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


def _patch_rows(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The patch that each output saw, [B, positions, inputs x kernel]."""
    patches = _patches(layer, a, error)
    sides = error.ndim - 2
    patches = patches.movedim(tuple(range(-sides, 0)), tuple(range(1, 1 + sides)))
    return patches.reshape(len(a), prod(error.shape[2:]), -1)


def _patch_rows_channels_last(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The same [B, positions, kernel x inputs], copied a pixel's channels at a time."""
    padded = nn.functional.pad(a, layer._reversed_padding_repeated_twice)
    padded = padded.permute(0, 2, 3, 1).contiguous()
    example, *sides, _ = padded.stride()
    within, between = _strides(layer, sides)
    patches = padded.as_strided(
        (len(a), *error.shape[2:], *layer.kernel_size, a.shape[1]), (example, *between, *within, 1)
    )
    return patches.reshape(len(a), prod(error.shape[2:]), -1)


def _patches(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The input that each weight met at each output: a view [B, inputs, *kernel, *positions]."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = nn.functional.pad(a, layer._reversed_padding_repeated_twice, mode=mode).contiguous()
    example, channel, *sides = padded.stride()
    within, between = _strides(layer, sides)
    return padded.as_strided(
        (*a.shape[:2], *layer.kernel_size, *error.shape[2:]), (example, channel, *within, *between)
    )


def _strides(layer: Conv, sides: list[int]) -> tuple[list[int], list[int]]:
    """Strides between the pixels of a patch, and between patches. `sides`: those of an image."""
    within = [d * s for d, s in zip(layer.dilation, sides, strict=True)]
    between = [t * s for t, s in zip(layer.stride, sides, strict=True)]
    return within, between
