"""Single-example gradients of one layer, from what it saw and what came back to it.

Each form knows the squared length of every example's gradient, in float64, and adds the scaled sum
over the examples to the parameters' places. Axis 0 is the example everywhere.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import nn

from fedveil.models.unrolled import Product

Places = dict[str, torch.Tensor]

_FEW_CHANNELS = 8
_CANCELLING = 64.0
_NORMAL = torch.finfo(torch.float32).tiny


class Gradient(Protocol):
    """The gradients of B examples for the parameters of one layer."""

    @property
    def squares(self) -> torch.Tensor:
        """Squared lengths, float64 [B]."""
        ...

    def without(self, bad: torch.Tensor) -> "Gradient":
        """The same with zeros for the examples marked in `bad` [B]."""
        ...

    def add_scaled_(self, places: Places, scale: torch.Tensor) -> None:
        """places[parameter] += sum over examples of scale [B] x gradient."""
        ...


def known(layer: nn.Module) -> bool:
    """Whether `gradient_of` has a formula for this layer as it is configured."""
    match layer:
        case nn.Linear():
            return type(layer) is nn.Linear
        case nn.Conv2d():
            plain = layer.groups == 1 and layer.padding_mode == "zeros"
            return type(layer) is nn.Conv2d and plain and not isinstance(layer.padding, str)
        case nn.Embedding():
            plain = layer.max_norm is None and not layer.scale_grad_by_freq
            return type(layer) is nn.Embedding and plain
    return isinstance(layer, Product)


def names_of(name: str, layer: nn.Module) -> dict[str, str]:
    """What the module calls the parameters that the formula of a known layer is about."""
    if isinstance(layer, Product):
        name, own = name.rpartition(".")[0], layer.names
    else:
        own = {p: p for p, _ in layer.named_parameters(recurse=False)}
    return {p: f"{name}.{given}" if name else given for p, given in own.items()}


def gradient_of(
    layer: nn.Module, inputs: list[torch.Tensor], errors: list[torch.Tensor]
) -> Gradient:
    """The gradient of a known layer that was used once or more; `errors` are at its outputs."""
    match layer:
        case nn.Linear():
            return _outer(layer, inputs, errors, bias=layer.bias is not None)
        case Product():
            return _outer(layer, inputs, errors, bias="bias" in layer.names)
        case nn.Conv2d():
            return _full(layer, inputs, errors)
        case nn.Embedding():
            return _looked(layer, inputs, errors)
    raise AssertionError(f"no formula for {type(layer).__name__}")


def without_subnormals(values: torch.Tensor) -> torch.Tensor:
    """Zeros for numbers so small that float32 rounds them by more than the clip leaves room for.

    A large factor would make the rounding of such a number longer than the clip.
    """
    return torch.hardshrink(values, _NORMAL)


@dataclass(frozen=True)
class Outer:
    """sum over t of error[t] x input[t]': linear layers; inputs [B, T, i], errors [B, T, o]."""

    inputs: torch.Tensor
    errors: torch.Tensor
    bias: bool

    @cached_property
    def squares(self) -> torch.Tensor:
        a, e = self.inputs.double(), self.errors.double()
        if a.shape[1] == 1:
            weight = a.square().sum(dim=(1, 2)) * e.square().sum(dim=(1, 2))
        else:
            weight = (torch.bmm(a, a.mT) * torch.bmm(e, e.mT)).sum(dim=(1, 2)).clamp_min(0)
        return weight + e.sum(dim=1).square().sum(dim=1) if self.bias else weight

    @property
    def cancels(self) -> bool:
        """Whether the steps of an example are far longer than their sum.

        The sum over all steps and examples would then round by more than the example is long.
        """
        if self.inputs.shape[1] == 1:
            return False
        e = self.errors.double().norm(dim=2)
        rough = (self.inputs.double().norm(dim=2) * e).sum(dim=1).square()
        rough += e.sum(dim=1).square() if self.bias else 0.0
        return bool((rough > _CANCELLING**2 * self.squares).any())

    def without(self, bad: torch.Tensor) -> "Outer":
        here = bad[:, None, None]
        return replace(
            self,
            inputs=torch.where(here, 0.0, self.inputs),
            errors=torch.where(here, 0.0, self.errors),
        )

    def add_scaled_(self, places: Places, scale: torch.Tensor) -> None:
        errors = without_subnormals(self.errors * scale[:, None, None]).flatten(0, 1)
        places["weight"].addmm_(errors.T, self.inputs.flatten(0, 1))
        if self.bias:
            places["bias"] += errors.sum(dim=0)


@dataclass(frozen=True)
class Full:
    """Gradients written out, [B, ...] with the axes `order` of the parameter."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    order: tuple[int, ...]

    @cached_property
    def squares(self) -> torch.Tensor:
        square = self.weight.flatten(1).double().square_().sum(dim=1)
        return square if self.bias is None else square + self.bias.double().square().sum(dim=1)

    def without(self, bad: torch.Tensor) -> "Full":
        weight = self.weight.clone()
        weight[bad] = 0.0
        bias = None if self.bias is None else torch.where(bad[:, None], 0.0, self.bias)
        return replace(self, weight=weight, bias=bias)

    def add_scaled_(self, places: Places, scale: torch.Tensor) -> None:
        total = torch.mv(self.weight.flatten(1).T, scale).view(self.weight.shape[1:])
        places["weight"] += total.permute(self.order)
        if self.bias is not None:
            places["bias"] += torch.mv(self.bias.T, scale)


@dataclass(frozen=True)
class Looked:
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

    def without(self, bad: torch.Tensor) -> "Looked":
        return replace(self, errors=torch.where(bad[:, None, None], 0.0, self.errors))

    def add_scaled_(self, places: Places, scale: torch.Tensor) -> None:
        errors = (self.errors * scale[:, None, None]).flatten(0, 1)
        places["weight"].index_add_(0, self.tokens.flatten(), errors)


def _outer(
    layer: nn.Linear | Product,
    inputs: list[torch.Tensor],
    errors: list[torch.Tensor],
    *,
    bias: bool,
) -> Outer | Full:
    """Multiplied out where that is less work than comparing all pairs of steps, or rounds less."""
    a = torch.cat([h.reshape(len(h), -1, layer.in_features) for h in inputs], dim=1)
    e = torch.cat([g.reshape(len(g), -1, layer.out_features) for g in errors], dim=1)
    pairs = a.shape[1] ** 2 * (layer.in_features + layer.out_features)
    product = a.shape[1] * layer.in_features * layer.out_features
    outer = Outer(a, e, bias)
    if a.shape[1] > 1 and (2 * pairs > product or outer.cancels):
        return Full(torch.bmm(e.mT, a), e.sum(dim=1) if bias else None, (0, 1))
    return outer


def _looked(
    layer: nn.Embedding, inputs: list[torch.Tensor], errors: list[torch.Tensor]
) -> Looked | Full:
    """Written out where an example's errors cancel each other."""
    count, table = len(inputs[0]), layer.weight.shape
    tokens = torch.cat([t.reshape(count, -1) for t in inputs], dim=1)
    error = torch.cat([e.reshape(count, -1, table[1]) for e in errors], dim=1)
    if layer.padding_idx is not None:
        error = torch.where((tokens == layer.padding_idx)[..., None], 0.0, error)
    looked = Looked(tokens, error)
    if not looked.cancels:
        return looked
    weight = error.new_zeros(count, *table)
    rows = torch.arange(count)[:, None].expand_as(tokens)
    return Full(weight.index_put_((rows, tokens), error, accumulate=True), None, (0, 1))


def _full(layer: nn.Conv2d, inputs: list[torch.Tensor], errors: list[torch.Tensor]) -> Full:
    """Convolutions share few weights among many positions: their gradients are written out."""
    shifted = layer.stride == (1, 1) and layer.dilation == (1, 1)
    by_shifts = shifted and layer.in_channels >= _FEW_CHANNELS
    multiply = _by_shifts if by_shifts else _by_patches
    products = [multiply(layer, a, e) for a, e in zip(inputs, errors, strict=True)]
    weight = products[0] if len(products) == 1 else torch.stack(products).sum(dim=0)
    bias = None
    if layer.bias is not None:
        bias = torch.stack([e.sum(dim=(2, 3)) for e in errors]).sum(dim=0)
    # [B, height, width, in, out] of the shifts, [B, in x height x width, out] of the patches
    order = (3, 2, 0, 1) if by_shifts else (3, 0, 1, 2)
    return Full(weight, bias, order)


def _by_shifts(layer: nn.Conv2d, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """One product per position of the kernel, on shifted views of the flattened padded image.

    Errors get the padded image's row length, with zeros at the end of each row, so that input and
    error positions stay a constant distance apart and nothing is copied per kernel position.
    """
    count, channels, height, width = a.shape
    outputs, rows, columns = error.shape[1:]
    (up, left), (tall, wide) = _margin(layer), layer.kernel_size
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


def _by_patches(layer: nn.Conv2d, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """One product with the patches that each output saw."""
    (up, left), (tall, wide) = _margin(layer), layer.kernel_size
    (down, right), (far, apart) = layer.stride, layer.dilation
    padded = nn.functional.pad(a, (left, left, up, up)).contiguous()
    count, channels = a.shape[:2]
    rows, columns = error.shape[2:]
    b, c, y, x = padded.stride()
    patches = padded.as_strided(
        (count, channels, tall, wide, rows, columns),
        (b, c, far * y, apart * x, down * y, right * x),
    ).reshape(count, channels * tall * wide, rows * columns)
    errors = error.permute(0, 2, 3, 1).reshape(count, rows * columns, -1)
    product = torch.bmm(patches, errors)
    return product.view(count, channels, tall, wide, -1)


def _margin(layer: nn.Conv2d) -> tuple[int, int]:
    if isinstance(layer.padding, str):
        raise AssertionError("padding by name is not known here")
    return layer.padding[0], layer.padding[1]
