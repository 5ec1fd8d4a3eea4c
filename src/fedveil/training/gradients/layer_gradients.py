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
from fedveil.privacy.noise.grid import STEPS_AT_ONCE, Steps
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


_COLUMNS = 1 << 10


def slot_squares(rows: torch.Tensor) -> torch.Tensor:
    """The squared L2 length of each row of [B, ...], float64 [B].

    Every row is added up by itself, in the same order: no bit depends on how many rows there are or
    on where a row is, which `row_norms` does not promise.
    """
    squares = torch.zeros(len(rows), dtype=torch.float64)
    for columns in torch.split(rows.flatten(1), _COLUMNS, dim=1):
        squares += columns.to(torch.float64, copy=True).square_().sum(dim=1)
    return squares


def without_subnormals(values: torch.Tensor) -> torch.Tensor:
    """`values` with zeros for subnormal numbers.

    Float32 rounds subnormal numbers by more than the clip leaves room for: times a large factor,
    the rounding would be longer than the clip.
    """
    return torch.hardshrink(values, _NORMAL)


@dataclass(frozen=True)
class OuterProducts:
    """Gradients that are sums over t of error[t] x input[t]', not written out.

    They are those of a linear layer's steps, or of a convolution's patches.

    Attributes:
        inputs: [B, T, i].
        errors: [B, T, o].
        has_bias: Whether the layer has a bias.
        input_products: Inner products of all pairs of inputs, float64 [B, T, T]. None to compute
            them.
        weight_shape: Shape to which an error times an input is reshaped, None for the parameter's.
        order: Permutation of the axes of `weight_shape` that gives the parameter's axes, or None.
    """

    inputs: torch.Tensor
    errors: torch.Tensor
    has_bias: bool
    input_products: torch.Tensor | None = None
    weight_shape: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    @cached_property
    def squares(self) -> torch.Tensor:
        """The squared length of each example's gradient, float64 [B]."""
        inputs, errors = self._products
        squares = (inputs * errors).sum(dim=(1, 2)).clamp_min(0)
        if not self.has_bias:
            return squares
        return squares + self.errors.sum(dim=1, dtype=torch.float64).square().sum(dim=1)

    @property
    def cancels(self) -> bool:
        """Whether in some example the terms are together far longer than their sum.

        The sum over all terms and examples would then round by more than the example is long.
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
        """The number of numbers that these gradients keep in memory."""
        return self.inputs.numel() + self.errors.numel()

    def full_gradients(self) -> "FullGradients":
        """The same gradients, written out for each example."""
        weight = torch.bmm(self.errors.mT, self.inputs)
        if self.weight_shape is not None:
            weight = weight.view(-1, *self.weight_shape)
        return FullGradients(weight, self.errors.sum(dim=1) if self.has_bias else None, self.order)

    def without(self, bad: torch.Tensor) -> Self:
        """A copy with zeros for the examples marked in the mask `bad`, bool [B]."""
        bad = bad[:, None, None]
        products = self.input_products
        return replace(
            self,
            inputs=torch.where(bad, 0.0, self.inputs),
            errors=torch.where(bad, 0.0, self.errors),
            input_products=None if products is None else torch.where(bad, 0.0, products),
        )

    def sliced(self, some: slice) -> Self:
        """A copy with some of the examples, at the beginning of a cache line."""
        products = self.input_products
        return replace(
            self,
            inputs=self.inputs[some].clone(),
            errors=self.errors[some].clone(),
            input_products=None if products is None else products[some].clone(),
        )

    def add_scaled_(self, places: Places, scale: torch.Tensor) -> None:
        """Add the sum over examples of scale [B] x gradient to the tensors in `places`, in place.

        The keys of `places` are the layer's own names, "weight" and "bias".
        """
        errors = without_subnormals(self.errors * scale[:, None, None]).flatten(0, 1)
        if self.weight_shape is None or self.order is None:
            place = places["weight"].view(errors.shape[1], -1)
            place.addmm_(errors.T, self.inputs.flatten(0, 1))
        else:
            total = torch.mm(errors.T, self.inputs.flatten(0, 1))
            places["weight"] += total.view(self.weight_shape).permute(self.order)
        if self.has_bias:
            places["bias"] += errors.sum(dim=0)

    @property
    def each_number(self) -> list[torch.Tensor]:
        """Tensors [B, ...] from which each example's `add_steps_` follows."""
        return [self.inputs, self.errors, self._input_squares]

    @cached_property
    def _input_squares(self) -> torch.Tensor:
        """The squared length of each example's input of a single use, float64 [B]."""
        return slot_squares(self.inputs)

    @property
    def slot_squares(self) -> torch.Tensor:
        """The squared length of each example's gradient, by itself, float64 [B]. T must be 1."""
        errors = slot_squares(self.errors)
        product = self._input_squares * errors
        return product + errors if self.has_bias else product

    def add_steps_(self, places: Places, steps: Steps) -> None:
        """Add the sum of the first `len(steps)` examples' gradients, in steps, to `places`.

        In place, and only for a single use (T is 1). The keys of `places` are "weight" and "bias".
        The gradient of example b is multiplied by `steps.factors[b]` and rounded towards zero.
        Products are formed for a block of outputs at a time, which stays in the cache. So that
        nothing overflows, an input is divided by its length, and its error multiplied by it.
        """
        inputs, errors = self.inputs[: len(steps), 0], self.errors[: len(steps), 0]
        lengths = self._input_squares[: len(steps)].sqrt()
        shares = torch.where(lengths > 0, 1 / lengths, 0.0)[:, None]
        units = (inputs.double() * shares).to(steps.dtype)
        scaled = (errors.double() * (steps.factors * lengths)[:, None]).to(steps.dtype)
        place = places["weight"].view(scaled.shape[1], -1)
        outputs = max(1, STEPS_AT_ONCE // max(1, units.numel()))
        for rows, some in zip(
            torch.split(place, outputs), torch.split(scaled, outputs, dim=1), strict=True
        ):
            rows += steps.added(some[:, :, None] * units[:, None, :])
        if self.has_bias:
            steps.add_(places["bias"], errors)


@dataclass(frozen=True)
class FullGradients:
    """Gradients that are written out for each example.

    Attributes:
        weight: [B, ...], in the order of the parameter's numbers unless `order` is given.
        bias: [B, o], None without a bias.
        order: Permutation of the axes of `weight` (without B) that gives the parameter's axes, or
            None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    order: tuple[int, ...] | None = None

    @cached_property
    def squares(self) -> torch.Tensor:
        """The squared length of each example's gradient, float64 [B]."""
        square = row_norms(self.weight.flatten(1)).square()
        return square if self.bias is None else square + self.bias.double().square().sum(dim=1)

    @property
    def stored_numbers(self) -> int:
        """The number of numbers that these gradients keep in memory, biases not counted."""
        return self.weight.numel()

    @property
    def each_number(self) -> list[torch.Tensor]:
        """Tensors [B, ...] from which each example's `add_steps_` follows."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def slot_squares(self) -> torch.Tensor:
        """The squared length of each example's gradient, computed by itself, float64 [B]."""
        square = slot_squares(self.weight)
        return square if self.bias is None else square + slot_squares(self.bias)

    def add_steps_(self, places: Places, steps: Steps) -> None:
        """Add the gradients of the first `len(steps)` examples, in whole steps, to `places`.

        In place. The keys of `places` are the layer's own names, "weight" and "bias".
        """
        place = places["weight"]
        if self.order is None:
            steps.add_(place, self.weight)
        else:
            total = place.new_zeros(self.weight.shape[1:])
            steps.add_(total, self.weight)
            place += total.permute(self.order).reshape(place.shape)
        if self.bias is not None:
            steps.add_(places["bias"], self.bias)

    def sliced(self, some: slice) -> Self:
        """A copy with some of the examples, at the beginning of a cache line."""
        bias = None if self.bias is None else self.bias[some].clone()
        return replace(self, weight=self.weight[some].clone(), bias=bias)

    def without(self, bad: torch.Tensor) -> Self:
        """A copy with zeros for the examples marked in the mask `bad`, bool [B]."""
        weight = self.weight.clone()
        weight[bad] = 0.0
        bias = None if self.bias is None else torch.where(bad[:, None], 0.0, self.bias)
        return replace(self, weight=weight, bias=bias)

    def add_scaled_(self, places: Places, scale: torch.Tensor) -> None:
        """Add the sum over examples of scale [B] x gradient to the tensors in `places`, in place.

        The keys of `places` are the layer's own names, "weight" and "bias".
        """
        total = torch.mv(self.weight.flatten(1).T, scale)
        place = places["weight"]
        if self.order is not None:
            total = total.view(self.weight.shape[1:]).permute(self.order)
        place += total.reshape(place.shape)
        if self.bias is not None:
            places["bias"] += torch.mv(self.bias.T, scale)


@dataclass(frozen=True)
class EmbeddingGradients:
    """Gradients of an embedding table, not written out.

    Attributes:
        tokens: The rows of the table that each example looked up, [B, T].
        errors: The gradients of the losses at what was looked up, [B, T, d].
    """

    tokens: torch.Tensor
    errors: torch.Tensor

    @cached_property
    def squares(self) -> torch.Tensor:
        """The squared length of each example's gradient, float64 [B]."""
        same = self.tokens[:, :, None] == self.tokens[:, None, :]
        e = self.errors.double()
        return torch.where(same, torch.bmm(e, e.mT), 0.0).sum(dim=(1, 2)).clamp_min(0)

    @property
    def cancels(self) -> bool:
        """Whether in some example the errors are together far longer than their sum."""
        rough = self.errors.double().norm(dim=2).sum(dim=1).square()
        return bool((rough > _CANCELLING**2 * self.squares).any())

    @property
    def stored_numbers(self) -> int:
        """The number of numbers that these gradients keep in memory."""
        return self.errors.numel()

    def sliced(self, some: slice) -> Self:
        """A copy with some of the examples, at the beginning of a cache line."""
        return replace(self, tokens=self.tokens[some].clone(), errors=self.errors[some].clone())

    def without(self, bad: torch.Tensor) -> Self:
        """A copy with zeros for the examples marked in the mask `bad`, bool [B]."""
        return replace(self, errors=torch.where(bad[:, None, None], 0.0, self.errors))

    def add_scaled_(self, places: Places, scale: torch.Tensor) -> None:
        """Add the sum over examples of scale [B] x gradient to `places["weight"]`, in place."""
        errors = (self.errors * scale[:, None, None]).flatten(0, 1)
        places["weight"].index_add_(0, self.tokens.flatten(), errors)

    @property
    def each_number(self) -> list[torch.Tensor]:
        """Tensors [B, ...] from which each example's `add_steps_` follows."""
        return [self.tokens, self.errors]

    @property
    def slot_squares(self) -> torch.Tensor:
        """The squared length of each example's gradient, computed by itself, float64 [B].

        Only after `summed_by_row`.
        """
        return slot_squares(self.errors)

    def add_steps_(self, places: Places, steps: Steps) -> None:
        """Add the gradients of the first `len(steps)` examples, in whole steps.

        To `places["weight"]`, in place. Only after `summed_by_row`.
        """
        errors, tokens = self.errors[: len(steps)], self.tokens[: len(steps)]
        whole = steps.cut(errors.flatten(1)).view(-1, errors.shape[2])
        places["weight"].index_add_(0, tokens.flatten(), whole.to(places["weight"].dtype))

    def summed_by_row(self) -> "EmbeddingGradients":
        """The same gradients, in which each row of the table has an error at its first use only.

        A row that an example looked up several times has the sum of the errors there. At the later
        uses the error is zero.
        """
        same = self.tokens[:, :, None] == self.tokens[:, None, :]
        first = ~same.tril(-1).any(dim=2)
        each = (same & first[:, :, None]).to(self.errors.dtype)
        return replace(self, errors=torch.bmm(each, self.errors))

    def full_gradients(self, table: torch.Size) -> FullGradients:
        """The same gradients, with a whole table of shape `table` for each example."""
        weight = self.errors.new_zeros(len(self.tokens), *table)
        rows = torch.arange(len(weight))[:, None].expand_as(self.tokens)
        weight.index_put_((rows, self.tokens), self.errors, accumulate=True)
        return FullGradients(weight, None)


Gradient = OuterProducts | FullGradients | EmbeddingGradients
"""The gradients of B examples for the parameters of one layer."""


def has_formula(layer: nn.Module) -> bool:
    """Whether `layer_gradient` has a formula for this layer as it is configured.

    False for subclasses of PyTorch's layers and for layers with hooks or a `forward` of their own.
    """
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
    """The parameters of a layer: its own names, such as "weight", to the module's names.

    `name` is the layer's name in the module, such as "0", which gives {"weight": "0.weight"}.
    """
    if isinstance(layer, Product):
        name, own = name.rpartition(".")[0], layer.names
    else:
        own = {p: p for p, _ in layer.named_parameters(recurse=False)}
    return {p: f"{name}.{given}" if name else given for p, given in own.items()}


@contextmanager
def detached_parameters(layers: dict[str, nn.Module]) -> Iterator[None]:
    """Context manager: the given layers compute with parameters that get no gradient."""
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
    """A hook before a layer's forward pass: detach its parameters, and save them in `saved`.

    Returns the arguments of the forward pass.
    """
    if isinstance(layer, Product):
        return args[0], *(None if given is None else given.detach() for given in args[1:])
    saved.update(layer._parameters)
    for name, value in saved.items():
        layer._parameters[name] = None if value is None else value.detach()
    return args


def _restore(saved: dict[str, Any], layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
    """A hook after a layer's forward pass: put the saved parameters back."""
    layer._parameters.update(saved)


def layer_gradient(
    layer: nn.Module,
    inputs: Sequence[torch.Tensor],
    errors: Sequence[torch.Tensor],
    *,
    written: bool = False,
) -> Gradient:
    """The single-example gradients of a layer that has a formula.

    `inputs` and `errors` hold one tensor, with the examples first, for each use of the layer.
    Several images that belong to one example count as several uses. AssertionError for a layer
    without a formula (`has_formula`). With `written` they are ready for `add_steps_`, and computed
    in the same way whatever the examples hold: `FullGradients`, outer products of a single use, or
    lookups that are summed by row.
    """
    match layer:
        case nn.Linear() | Product():
            bias = "bias" in layer.names if isinstance(layer, Product) else layer.bias is not None
            a = _join_uses([h.reshape(len(h), -1, layer.in_features) for h in inputs])
            e = _join_uses([g.reshape(len(g), -1, layer.out_features) for g in errors])
            outer = OuterProducts(a, e, bias)
            if written:
                return outer if a.shape[1] == 1 else outer.full_gradients()
            pairs = _pairs_are_cheaper(a.shape[1], layer.in_features, layer.out_features)
            return outer if pairs and not outer.cancels else outer.full_gradients()
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            sides = layer.weight.ndim - 1
            return _conv_gradient(layer, _images(inputs, sides), _images(errors, sides), written)
        case nn.Embedding():
            count, table = len(inputs[0]), layer.weight.shape
            tokens = _join_uses([t.reshape(count, -1) for t in inputs])
            error = _join_uses([e.reshape(count, -1, table[1]) for e in errors])
            if layer.padding_idx is not None:
                error = torch.where((tokens == layer.padding_idx)[..., None], 0.0, error)
            lookups = EmbeddingGradients(tokens, error)
            if written and tokens.shape[1] ** 2 <= table.numel():
                return lookups.summed_by_row()
            return lookups.full_gradients(table) if written or lookups.cancels else lookups
    raise AssertionError(f"no formula for {type(layer).__name__}")


def _join_uses(uses: list[torch.Tensor]) -> torch.Tensor:
    """Several uses [B, T, ...] of a layer as one use [B, sum of T, ...]."""
    return uses[0] if len(uses) == 1 else torch.cat(uses, dim=1)


def _images(values: Sequence[torch.Tensor], sides: int) -> list[torch.Tensor]:
    """Values of several uses as tensors [B, channels, ...], one per image of an example.

    `sides` is the number of axes of one image, channels included.
    """
    return [
        image
        for v in values
        for image in v.reshape(len(v), -1, *v.shape[v.ndim - sides :]).unbind(1)
    ]


def _pairs_are_cheaper(steps: int, inputs: int, outputs: int, fields: int = 1) -> bool:
    """Whether lengths from all pairs of steps are less work than a product per example.

    `inputs` and `outputs` are the lengths of a step's input and error. With `fields` above 1, an
    input is a patch of that many pixels, and the pairs are computed from pixels.
    """
    pairs = steps * (inputs // fields + outputs) * (2 * steps + _WIDENED)
    pairs += 4 * steps * steps * fields
    return steps == 1 or pairs <= _WRITTEN * inputs * outputs


def _conv_gradient(
    layer: Conv, inputs: list[torch.Tensor], errors: list[torch.Tensor], written: bool
) -> FullGradients | OuterProducts:
    """The single-example gradients of a convolution, from the inputs and errors of its uses.

    Written out if `written` or where many positions share few weights, else as outer products.
    """
    positions = sum(e[0, 0].numel() for e in errors)
    width = layer.weight[0].numel()
    bias = layer.bias is not None
    image = type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros"
    once = image and len(inputs) == 1 and layer.stride == (1, 1)
    fields = prod(layer.kernel_size) if once else 1
    uses = list(zip(inputs, errors, strict=True))
    pairs = layer.groups == 1 and not written
    if pairs and _pairs_are_cheaper(positions, width, layer.out_channels, fields):
        rows, shape, order = _patch_rows, None, None
        if image:
            rows, order = _patch_rows_channels_last, (0, 3, 1, 2)
            shape = (layer.out_channels, *layer.kernel_size, layer.in_channels)
        a = _join_uses([rows(layer, a, e) for a, e in uses])
        e = _join_uses([e.flatten(2).mT for e in errors])
        products = _patch_products(layer, inputs[0], errors[0]) if once else None
        outer = OuterProducts(a, e, bias, products, shape, order)
        return outer.full_gradients() if outer.cancels else outer
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
    """Each example's gradient, [B, height, width, in, out], by one product per kernel position.

    `a` are the images and `error` the errors of one use. Only for stride 1, dilation 1 and zero
    padding. The factors are shifted views of the flattened padded image. Errors get the padded
    image's row length, with zeros at the end of each row, so that input and error positions stay a
    constant distance apart and nothing is copied per kernel position.
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
    """The inner products of all pairs of patches of an image, float64 [B, T, T] for T outputs.

    The product of two patches is a sum over the kernel of products of two pixels. Padding is zero
    and adds nothing. Only for stride 1 and zero padding.
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
    """Each example's gradient [B, weights], flat in the parameter's order.

    One product per group of errors and the patches that each output saw.
    """
    count, groups = len(a), layer.groups
    patches = _patches(layer, a, error)
    patches = patches.reshape(count * groups, -1, prod(error.shape[2:]))
    errors = error.reshape(count * groups, -1, patches.shape[2])
    return torch.bmm(errors, patches.mT).view(count, -1)


def _patch_rows(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The patch of the input that each output saw, [B, positions, inputs x kernel]."""
    patches = _patches(layer, a, error)
    sides = error.ndim - 2
    patches = patches.movedim(tuple(range(-sides, 0)), tuple(range(1, 1 + sides)))
    return patches.reshape(len(a), prod(error.shape[2:]), -1)


def _patch_rows_channels_last(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The patch of the image that each output saw, [B, positions, kernel x inputs].

    Only for images with zero padding. It is copied a pixel's channels at a time.
    """
    padded = nn.functional.pad(a, layer._reversed_padding_repeated_twice)
    padded = padded.permute(0, 2, 3, 1).contiguous()
    example, *sides, _ = padded.stride()
    within, between = _strides(layer, sides)
    patches = padded.as_strided(
        (len(a), *error.shape[2:], *layer.kernel_size, a.shape[1]), (example, *between, *within, 1)
    )
    return patches.reshape(len(a), prod(error.shape[2:]), -1)


def _patches(layer: Conv, a: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The input of each weight at each output, [B, inputs, *kernel, *positions].

    It is a view of the padded input.
    """
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = nn.functional.pad(a, layer._reversed_padding_repeated_twice, mode=mode).contiguous()
    example, channel, *sides = padded.stride()
    within, between = _strides(layer, sides)
    return padded.as_strided(
        (*a.shape[:2], *layer.kernel_size, *error.shape[2:]), (example, channel, *within, *between)
    )


def _strides(layer: Conv, sides: list[int]) -> tuple[list[int], list[int]]:
    """(strides within a patch, strides between patches), one number per side of the image.

    `sides` are the strides of the padded image along its sides.
    """
    within = [d * s for d, s in zip(layer.dilation, sides, strict=True)]
    between = [t * s for t, s in zip(layer.stride, sides, strict=True)]
    return within, between
