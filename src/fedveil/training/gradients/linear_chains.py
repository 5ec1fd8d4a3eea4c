"""Chains of linear layers as batched algebra: the vectorised trajectories of regressions and MLPs.

The clients' weights lie side by side and each layer is one batched product. Where a client has
few records, the first layer's weights are not copied per client at all: every step it takes is
a combination of its own records, so its coordinates in their span are enough (the dual form).
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.func import grad, vmap

from fedveil.base.inputs import single
from fedveil.models.metrics import cross_entropy, squared_error
from fedveil.models.task import Task
from fedveil.privacy.clip import ROUNDING, Clip, Norm, add_weighted_, row_norms
from fedveil.training.cohort import Batch, CohortData
from fedveil.training.gradients.layer_gradients import without_subnormals
from fedveil.training.gradients.trajectories import (
    LocalTrajectory,
    VmappedTrajectory,
    is_unmodified,
)

_POINTWISE = (
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
)
_SMALL = 4096


@dataclass(eq=False)
class LinearLayer:
    """One linear layer of a chain.

    Attributes:
        in_features: Number of inputs.
        outputs: Number of outputs.
        weights: Number of weights.
        weight_index: Position of its weights in the parameter vector.
        bias_index: Position of its biases, None without.
        after: The pointwise function that follows, if any.
    """

    in_features: int
    outputs: int
    weight_index: int
    bias_index: int | None
    after: nn.Module | None = None

    def __post_init__(self) -> None:
        self.weights = self.in_features * self.outputs


def linear_chain(task: Task) -> tuple[bool, tuple[LinearLayer, ...]]:
    """Whether records are flattened first, and the linear layers. None if it is no such chain."""
    if task.module_captured:
        return False, ()
    modules = list(_in_order(task.module))
    names = {module: name for name, module in task.module.named_modules()}
    if not all(map(is_unmodified, modules)):
        return False, ()
    first = modules[0] if modules else None
    flatten = type(first) is nn.Flatten and (first.start_dim, first.end_dim) == (1, -1)
    layers: list[LinearLayer] = []
    covered: set[str] = set()
    for module in modules[flatten:]:
        if type(module) is nn.Linear:
            prefix = f"{names[module]}." if names[module] else ""
            own = [f"{prefix}{name}" for name, _ in module.named_parameters()]
            if not covered.isdisjoint(own) or not task.places.keys() >= set(own):
                return False, ()  # used twice, or one layer's parameter is also another's
            covered.update(own)
            weight, bias = task.places[f"{prefix}weight"], task.places.get(f"{prefix}bias")
            layers.append(LinearLayer(module.in_features, module.out_features, weight, bias))
        elif type(module) in _POINTWISE and layers:
            function = copy.copy(module)
            if hasattr(function, "inplace"):
                setattr(function, "inplace", False)  # noqa: B010
            before = layers[-1].after
            layers[-1].after = function if before is None else nn.Sequential(before, function)
        else:
            return False, ()
    if covered != set(task.places):
        return False, ()
    return flatten, tuple(layers)


def _in_order(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of nested plain `nn.Sequential`s. Any other module is one layer."""
    if type(module) is nn.Sequential and is_unmodified(module):
        for child in module:
            yield from _in_order(child)
    else:
        yield module


class StackedTrajectory(LocalTrajectory):
    """Parameters of all clients side by side, [K, P], with one batched product per layer."""

    def __init__(
        self, task: Task, layers: tuple[LinearLayer, ...], start: torch.Tensor, cohort: CohortData
    ) -> None:
        super().__init__(task, start, cohort)
        self._layers = layers

    @cached_property
    def _x(self) -> torch.Tensor:
        return single(self._cohort.x).flatten(2)

    def mean(self, moved: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """The chain rule, written out layer by layer."""
        inputs, errors = self._chain_rule(moved, batch, batch.weights)
        return batch.zero_idle_(self._combine(inputs, errors, batch))

    def clipped_sum(self, moved: torch.Tensor | None, batch: Batch, clip: Clip) -> torch.Tensor:
        """An example's gradient is an outer product per layer, whose length needs no product."""
        if clip.norm is not Norm.L2:
            general = VmappedTrajectory(self._task, self._start, self._cohort)
            return general.clipped_sum(moved, batch, clip)
        inputs, errors = self._chain_rule(moved, batch, batch.mask)
        square = torch.zeros(batch.mask.shape, dtype=torch.float64)
        for layer, h, e in zip(self._layers, inputs, errors, strict=True):
            square += (_squares(h) + (layer.bias_index is not None)) * _squares(e)
        norms = square.sqrt()
        scale = (clip.value * (1 - ROUNDING) / norms).clamp_max(1.0).to(torch.float32)[..., None]
        scale = without_subnormals(scale)
        finite = torch.isfinite(norms)[..., None]
        if not bool(finite.all()):
            inputs = [torch.where(finite, h, 0.0) for h in inputs]
            errors = [torch.where(finite, e, 0.0) for e in errors]
            scale = torch.where(finite, scale, 0.0)
        return self._combine(inputs, [without_subnormals(e * scale) for e in errors], batch)

    def _chain_rule(
        self, moved: torch.Tensor | None, batch: Batch, weights: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Each layer's inputs [K, B, i] and the weighted loss's gradient at its outputs."""
        inputs, before, after = [self._first_input(batch)], [], []
        with torch.enable_grad():
            for i, layer in enumerate(self._layers):
                z = self._product(i, inputs[i], moved, batch)
                if layer.bias_index is not None:
                    z = z + self._part(layer.bias_index, layer.outputs, moved)[..., None, :]
                before.append(z.detach().requires_grad_())
                after.append(before[i] if layer.after is None else layer.after(before[i]))
                inputs.append(after[i].detach())
        error = _loss_gradient(self._task, inputs.pop(), batch.select(self._cohort.y), weights)
        errors = []
        for i in reversed(range(len(self._layers))):
            if after[i] is not before[i]:
                (error,) = torch.autograd.grad(after[i], before[i], error)
            errors.append(error)
            if i > 0:
                error = torch.matmul(error, self._weight(i, moved))
        return inputs, errors[::-1]

    def _combine(
        self, inputs: list[torch.Tensor], errors: list[torch.Tensor], batch: Batch
    ) -> torch.Tensor:
        """The gradients that follow from each layer's inputs and errors, as rows."""
        out = torch.empty(len(self._cohort), self.width)
        for i, layer in enumerate(self._layers):
            self._put_weight_gradient(i, inputs[i], errors[i], batch, out)
            if layer.bias_index is not None:
                at = self._column(layer.bias_index)
                out[:, at : at + layer.outputs] = errors[i].sum(dim=1)
        return out

    def _first_input(self, batch: Batch) -> torch.Tensor:
        return batch.select(self._x)

    def _product(
        self, i: int, h: torch.Tensor, moved: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """Inputs times weights, [K, B, o]."""
        w = self._weight(i, moved)
        if w.ndim == 3 and self._layers[i].outputs == 1:
            return torch.bmm(w, h.mT).mT  # several times faster than a product with one column
        return torch.matmul(h, w.mT)

    def _put_weight_gradient(
        self, i: int, h: torch.Tensor, error: torch.Tensor, batch: Batch, out: torch.Tensor
    ) -> None:
        layer, at = self._layers[i], self._column(self._layers[i].weight_index)
        place = out[:, at : at + layer.weights].view(len(out), layer.outputs, layer.in_features)
        if layer.weights < _SMALL:
            place.copy_(torch.bmm(error.mT, h))  # many small products are slow into strided rows
        else:
            torch.bmm(error.mT, h, out=place)

    def _weight(self, i: int, moved: torch.Tensor | None) -> torch.Tensor:
        """[o, i] if all clients are at one start, [K, o, i] otherwise."""
        layer = self._layers[i]
        w = self._part(layer.weight_index, layer.weights, moved)
        return w.view(*w.shape[:-1], layer.outputs, layer.in_features)

    def _part(self, place: int, size: int, moved: torch.Tensor | None) -> torch.Tensor:
        """Parameters place : place + size, [size] if all clients are at one start, or [K, size]."""
        part = self._start[..., place : place + size]
        if moved is None:
            return part
        at = self._column(place)
        return part + moved[:, at : at + size]

    def _column(self, place: int) -> int:
        """Position in a row of the parameter at `place` of the vector."""
        return place


class DualTrajectory(StackedTrajectory):
    """The first layer's weights as W0 + A' X: coordinates A [K, n, o] instead of [K, o, i].

    A row is A, then all other parameters in their order. Lengths follow from the Gram matrix of
    a client's records: |A' X|^2 = <A, (X X') A>, in float64. Where its terms cancel each other,
    they are bounds from above.
    """

    spanned = True

    def __init__(
        self, task: Task, layers: tuple[LinearLayer, ...], start: torch.Tensor, cohort: CohortData
    ) -> None:
        super().__init__(task, layers, start, cohort)
        first = layers[0]
        self._begin, self._end = first.weight_index, first.weight_index + first.weights
        self._span = self._x.shape[1] * first.outputs
        self._first = torch.matmul(self._x, self._weight(0, None).mT)
        self.width = self._span + task.size - first.weights

    @cached_property
    def _wide(self) -> torch.Tensor:
        return self._x.double()

    @cached_property
    def _wide_gram(self) -> torch.Tensor:
        return torch.bmm(self._wide, self._wide.mT)

    @cached_property
    def _gram(self) -> torch.Tensor:
        return self._wide_gram.float()

    def norms(self, moved: torch.Tensor, norm: Norm) -> torch.Tensor:
        if norm is not Norm.L2:
            raise AssertionError("lengths of coordinates are known in L2 only")
        a = self._coordinates(moved).double()
        inside = (a * torch.bmm(self._wide_gram, a)).sum(dim=(1, 2)).clamp_min_(0)
        largest = a.square().sum(dim=(1, 2)) * self._wide_gram.diagonal(dim1=1, dim2=2).sum(dim=1)
        cancelled = (sum(self._wide.shape[1:]) + 2) * 2.0**-51  # twice what float64 may round by
        return (inside + cancelled * largest + row_norms(moved[:, self._span :]) ** 2).sqrt()

    def rows(self, moved: torch.Tensor) -> torch.Tensor:
        first = self._layers[0]
        out = torch.empty(len(moved), self._task.size)
        weight = out[:, self._begin : self._end].view(len(out), first.outputs, first.in_features)
        torch.bmm(self._coordinates(moved).mT, self._x, out=weight)
        out[:, : self._begin] = moved[:, self._span : self._span + self._begin]
        out[:, self._end :] = moved[:, self._span + self._begin :]
        return out

    def add_weighted_(
        self, total: torch.Tensor, moved: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """One product over all records of all clients: no client's weights are written out."""
        a = self._coordinates(moved).double() * weights[:, None, None]
        product = torch.mm(a.flatten(0, 1).T, self._wide.flatten(0, 1))
        total[self._begin : self._end] += product.flatten()
        rest = torch.zeros(len(total) - product.numel(), dtype=torch.float64)
        add_weighted_(rest, moved[:, self._span :], weights)
        total[: self._begin] += rest[: self._begin]
        total[self._end :] += rest[self._begin :]

    def _coordinates(self, moved: torch.Tensor) -> torch.Tensor:
        a = moved[:, : self._span]
        return a.view(len(moved), self._x.shape[1], self._layers[0].outputs)

    def _first_input(self, batch: Batch) -> torch.Tensor:
        return self._x  # not used: the first layer works on coordinates

    def _product(
        self, i: int, h: torch.Tensor, moved: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        if i > 0:
            return super()._product(i, h, moved, batch)
        if moved is None:
            return batch.select(self._first)
        return batch.select(torch.baddbmm(self._first, self._gram, self._coordinates(moved)))

    def _put_weight_gradient(
        self, i: int, h: torch.Tensor, error: torch.Tensor, batch: Batch, out: torch.Tensor
    ) -> None:
        if i > 0:
            super()._put_weight_gradient(i, h, error, batch, out)
        else:
            self._coordinates(out).copy_(batch.scatter(error, self._x.shape[1]))

    def _column(self, place: int) -> int:
        return self._span + place - (self._layers[0].weights if place > self._begin else 0)


def _loss_gradient(
    task: Task, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted losses' gradient at the outputs [K, B, o], by a formula for common losses."""
    if task.loss is squared_error and targets.ndim == 2:
        return ((outputs.squeeze(-1) - targets) * (2 * weights))[..., None]
    if task.loss is cross_entropy and targets.ndim == 2:
        error = outputs.softmax(dim=-1)
        error.scatter_add_(
            2, targets[..., None], error.new_full((), -1.0).expand(targets.shape)[..., None]
        )
        return error.mul_(weights[..., None])
    task.ready_loss(outputs[0], targets[0])

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return task.each_loss(outputs[None], target[None])[0]

    every: torch.Tensor = vmap(grad(loss))(outputs.flatten(0, 1), targets.flatten(0, 1))
    return every.view_as(outputs) * weights[..., None]


def _squares(values: torch.Tensor) -> torch.Tensor:
    """Squared lengths along the last axis, in float64."""
    return values.double().square_().sum(dim=-1)
