"""Forms of the single-example gradients of one layer, each as small as the layer allows.

Each form knows the squared length of every example's gradient, in float64, and adds the scaled sum
over the examples to the parameters' places. Axis 0 is the example everywhere.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from fedveil.privacy.rows import row_norms

Places = dict[str, torch.Tensor]

_CANCELLING = 64.0
_NORMAL = torch.finfo(torch.float32).tiny


class Gradient(Protocol):
    """The gradients of B examples for the parameters of one layer."""

    @property
    def squares(self) -> torch.Tensor:
        """Squared lengths, float64 [B]."""
        ...

    @property
    def held(self) -> int:
        """How many numbers this keeps in memory."""
        ...

    def without(self, bad: torch.Tensor) -> "Gradient":
        """The same with zeros for the examples marked in `bad` [B]."""
        ...

    def add_scaled_(self, places: Places, scale: torch.Tensor) -> None:
        """places[parameter] += sum over examples of scale [B] x gradient."""
        ...


def without_subnormals(values: torch.Tensor) -> torch.Tensor:
    """Zeros for numbers so small that float32 rounds them by more than the clip leaves room for.

    A large factor would make the rounding of such a number longer than the clip.
    """
    return torch.hardshrink(values, _NORMAL)


@dataclass(frozen=True)
class Outer:
    """sum over t of error[t] x input[t]': inputs [B, T, i], errors [B, T, o].

    A linear layer's steps, or the patches that a convolution saw. `alike` [B, T, T], when given,
    are the inner products of all pairs of inputs, as the caller found them more cheaply.
    `shape`, when given, is that of an error times an input, and `order` says which of its axes each
    of the parameter's axes is.
    """

    inputs: torch.Tensor
    errors: torch.Tensor
    bias: bool
    alike: torch.Tensor | None = None
    shape: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    @cached_property
    def squares(self) -> torch.Tensor:
        inputs, errors = self._pairs
        return (inputs * errors).sum(dim=(1, 2)).clamp_min(0) + self._bias_squares

    @property
    def cancels(self) -> bool:
        """Whether the steps of an example are far longer than their sum.

        The sum over all steps and examples would then round by more than the example is long.
        """
        if self.inputs.shape[1] == 1:
            return False
        a, e = (pairs.diagonal(dim1=1, dim2=2).sqrt() for pairs in self._pairs)
        rough = (a * e).sum(dim=1).square()
        rough += e.sum(dim=1).square() if self.bias else 0.0
        return bool((rough > _CANCELLING**2 * self.squares).any())

    @cached_property
    def _pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The inner products of all pairs of inputs and of all pairs of errors, [B, T, T]."""
        if self.inputs.shape[1] == 1:
            a, e = (row_norms(v[:, 0]).square()[:, None, None] for v in (self.inputs, self.errors))
            return a, e
        return _products(self.inputs) if self.alike is None else self.alike, _products(self.errors)

    @property
    def _bias_squares(self) -> torch.Tensor | float:
        if not self.bias:
            return 0.0
        summed = self.errors.sum(dim=1, dtype=torch.float64)
        return summed.square().sum(dim=1)

    @property
    def held(self) -> int:
        return self.inputs.numel() + self.errors.numel()

    @property
    def product(self) -> "Full":
        """The same, multiplied out."""
        weight = torch.bmm(self.errors.mT, self.inputs)
        if self.shape is not None:
            weight = weight.view(-1, *self.shape)
        return Full(weight, self.errors.sum(dim=1) if self.bias else None, self.order)

    def without(self, bad: torch.Tensor) -> "Outer":
        here = bad[:, None, None]
        return replace(
            self,
            inputs=torch.where(here, 0.0, self.inputs),
            errors=torch.where(here, 0.0, self.errors),
            alike=None if self.alike is None else torch.where(here, 0.0, self.alike),
        )

    def add_scaled_(self, places: Places, scale: torch.Tensor) -> None:
        errors = without_subnormals(self.errors * scale[:, None, None]).flatten(0, 1)
        if self.shape is None or self.order is None:
            place = places["weight"].view(errors.shape[1], -1)
            place.addmm_(errors.T, self.inputs.flatten(0, 1))
        else:
            total = torch.mm(errors.T, self.inputs.flatten(0, 1))
            places["weight"] += total.view(self.shape).permute(self.order)
        if self.bias:
            places["bias"] += errors.sum(dim=0)


@dataclass(frozen=True)
class Full:
    """Gradients written out: weight [B, ...] in the order of the parameter's numbers, bias [B, o].

    `order`, when given, says which axis of `weight` each of the parameter's axes is.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    order: tuple[int, ...] | None = None

    @cached_property
    def squares(self) -> torch.Tensor:
        square = row_norms(self.weight.flatten(1)).square()
        return square if self.bias is None else square + self.bias.double().square().sum(dim=1)

    @property
    def held(self) -> int:
        return self.weight.numel()

    def without(self, bad: torch.Tensor) -> "Full":
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

    @property
    def held(self) -> int:
        return self.errors.numel()

    def without(self, bad: torch.Tensor) -> "Looked":
        return replace(self, errors=torch.where(bad[:, None, None], 0.0, self.errors))

    def add_scaled_(self, places: Places, scale: torch.Tensor) -> None:
        errors = (self.errors * scale[:, None, None]).flatten(0, 1)
        places["weight"].index_add_(0, self.tokens.flatten(), errors)

    def written_out(self, table: torch.Size) -> Full:
        """The same with a whole table for each example."""
        weight = self.errors.new_zeros(len(self.tokens), *table)
        rows = torch.arange(len(weight))[:, None].expand_as(self.tokens)
        return Full(weight.index_put_((rows, self.tokens), self.errors, accumulate=True), None)


def _products(steps: torch.Tensor) -> torch.Tensor:
    """The inner products of all pairs of steps [B, T, i] of an example, in float64 [B, T, T]."""
    wide = steps.double()
    return torch.bmm(wide, wide.mT)


def cheaper(steps: int, inputs: int, outputs: int, fields: int = 1) -> bool:
    """Whether lengths from all pairs of steps are less work than a product for each example.

    Of an image's patches, the pairs of its `fields` times fewer numbers are enough.
    """
    pairs = steps * (inputs // fields + outputs) * (2 * steps + _WIDENED)
    pairs += 4 * steps * steps * fields
    return steps == 1 or pairs <= _WRITTEN * inputs * outputs


_WIDENED, _WRITTEN = 100, 40
"""What it costs to turn a number into float64, and to write, measure and scale one in a product.

In multiplications, by estimate: it decides how lengths are computed, not what they are.
"""


def joined_uses(uses: list[torch.Tensor]) -> torch.Tensor:
    """Several uses [B, T, ...] of a layer as one with all their steps."""
    return uses[0] if len(uses) == 1 else torch.cat(uses, dim=1)
