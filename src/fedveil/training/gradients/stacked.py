"""Chains of linear layers as batched algebra: the vectorised walk of regressions and MLPs.

The clients' weights lie side by side and each layer is one batched product. Where a client has
few records, the first layer's weights are not copied per client at all: every step it takes is
a combination of its own records, so its coordinates in their span are enough (the dual form).
"""

from functools import cached_property

import torch
from torch.func import grad, vmap

from fedveil.base.inputs import single
from fedveil.models.metrics import cross_entropy, squared_error
from fedveil.models.task import Task
from fedveil.privacy.clip import ROUNDING, Clip
from fedveil.privacy.rows import Norm, add_weighted_, row_norms
from fedveil.training.batches import Batch
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.forms import without_subnormals
from fedveil.training.gradients.linear_chain import Layer
from fedveil.training.gradients.vmapped import VmappedWalk

_SMALL = 4096


class StackedWalk:
    """Parameters of all clients side by side, [K, P]; one batched product per layer."""

    def __init__(
        self, task: Task, layers: tuple[Layer, ...], start: torch.Tensor, cohort: CohortData
    ) -> None:
        self._task, self._layers, self._start, self._cohort = task, layers, start, cohort
        self.width, self.spanned = task.size, False

    @cached_property
    def _x(self) -> torch.Tensor:
        return single(self._cohort.x).flatten(2)

    def mean(self, moved: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """The chain rule, written out layer by layer."""
        rows = self._combine(*self._chain_rule(moved, batch, batch.weights), batch)
        return batch.without_idle_(rows)

    def descend_(self, moved: torch.Tensor | None, batch: Batch, rate: float) -> torch.Tensor:
        gradient = self.mean(moved, batch)
        return gradient.mul_(-rate) if moved is None else moved.add_(gradient, alpha=-rate)

    def clipped_sum(self, moved: torch.Tensor | None, batch: Batch, clip: Clip) -> torch.Tensor:
        """An example's gradient is an outer product per layer, whose length needs no product."""
        if clip.norm is not Norm.L2:
            general = VmappedWalk(self._task, self._start, self._cohort)
            return general.clipped_sum(moved, batch, clip)
        inputs, errors = self._chain_rule(moved, batch, batch.mask)
        square = torch.zeros(batch.mask.shape, dtype=torch.float64)
        for layer, h, e in zip(self._layers, inputs, errors, strict=True):
            square += (_squares(h) + (layer.bias is not None)) * _squares(e)
        norms = square.sqrt()
        scale = (clip.value * (1 - ROUNDING) / norms).clamp_max(1.0).to(torch.float32)[..., None]
        scale = without_subnormals(scale)
        finite = torch.isfinite(norms)[..., None]
        if not bool(finite.all()):
            inputs = [torch.where(finite, h, 0.0) for h in inputs]
            errors = [torch.where(finite, e, 0.0) for e in errors]
            scale = torch.where(finite, scale, 0.0)
        return self._combine(inputs, [without_subnormals(e * scale) for e in errors], batch)

    def norms(self, moved: torch.Tensor, norm: Norm) -> torch.Tensor:
        return row_norms(moved, norm)

    def rows(self, moved: torch.Tensor) -> torch.Tensor:
        return moved

    def add_weighted_(
        self, total: torch.Tensor, moved: torch.Tensor, weights: torch.Tensor
    ) -> None:
        add_weighted_(total, moved, weights)

    def _chain_rule(
        self, moved: torch.Tensor | None, batch: Batch, weights: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Each layer's inputs [K, B, i] and the weighted loss's gradient at its outputs."""
        inputs, before, after = [self._first_input(batch)], [], []
        with torch.enable_grad():
            for i, layer in enumerate(self._layers):
                z = self._product(i, inputs[i], moved, batch)
                if layer.bias is not None:
                    z = z + self._part(layer.bias, layer.outputs, moved)[..., None, :]
                before.append(z.detach().requires_grad_())
                after.append(before[i] if layer.after is None else layer.after(before[i]))
                inputs.append(after[i].detach())
        error = _loss_gradient(self._task, inputs.pop(), batch.chosen(self._cohort.y), weights)
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
        """The gradients behind each layer's inputs and errors, as rows."""
        out = torch.empty(len(self._cohort), self.width)
        for i, layer in enumerate(self._layers):
            self._put_weight_gradient(i, inputs[i], errors[i], batch, out)
            if layer.bias is not None:
                at = self._at(layer.bias)
                out[:, at : at + layer.outputs] = errors[i].sum(dim=1)
        return out

    def _first_input(self, batch: Batch) -> torch.Tensor:
        return batch.chosen(self._x)

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
        layer, at = self._layers[i], self._at(self._layers[i].weight)
        place = out[:, at : at + layer.inputs * layer.outputs]
        place = place.view(len(out), layer.outputs, layer.inputs)
        if layer.inputs * layer.outputs < _SMALL:
            place.copy_(torch.bmm(error.mT, h))  # many small products are slow into strided rows
        else:
            torch.bmm(error.mT, h, out=place)

    def _weight(self, i: int, moved: torch.Tensor | None) -> torch.Tensor:
        """[o, i] where all are at one start, [K, o, i] otherwise."""
        layer = self._layers[i]
        w = self._part(layer.weight, layer.inputs * layer.outputs, moved)
        return w.view(*w.shape[:-1], layer.outputs, layer.inputs)

    def _part(self, place: int, size: int, moved: torch.Tensor | None) -> torch.Tensor:
        """Parameters place : place + size, [size] where all are at one start, or [K, size]."""
        part = self._start[..., place : place + size]
        return part if moved is None else part + moved[:, self._at(place) : self._at(place) + size]

    def _at(self, place: int) -> int:
        """Where a parameter of the vector lies in a row."""
        return place


class DualWalk(StackedWalk):
    """The first layer's weights as W0 + A' X: coordinates A [K, n, o] instead of [K, o, i].

    A row is A, then all other parameters in their order. Lengths follow from the Gram matrix of
    a client's records: |A' X|^2 = <A, (X X') A>, in float64; where its terms cancel each other,
    they are bounds from above.
    """

    def __init__(
        self, task: Task, layers: tuple[Layer, ...], start: torch.Tensor, cohort: CohortData
    ) -> None:
        super().__init__(task, layers, start, cohort)
        first = layers[0]
        self._span = self._x.shape[1] * first.outputs
        self._first = torch.matmul(self._x, self._weight(0, None).mT)
        self.width, self.spanned = self._span + task.size - first.inputs * first.outputs, True

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
            raise AssertionError("a walk in the span knows L2 lengths only")
        a = self._coordinates(moved).double()
        inside = (a * torch.bmm(self._wide_gram, a)).sum(dim=(1, 2)).clamp_min_(0)
        largest = a.square().sum(dim=(1, 2)) * self._wide_gram.diagonal(dim1=1, dim2=2).sum(dim=1)
        cancelled = (sum(self._wide.shape[1:]) + 2) * 2.0**-51  # twice what float64 may round by
        return (inside + cancelled * largest + row_norms(moved[:, self._span :]) ** 2).sqrt()

    def rows(self, moved: torch.Tensor) -> torch.Tensor:
        first = self._layers[0]
        end = first.weight + first.inputs * first.outputs
        out = torch.empty(len(moved), self._task.size)
        weight = out[:, first.weight : end].view(len(out), first.outputs, first.inputs)
        torch.bmm(self._coordinates(moved).mT, self._x, out=weight)
        out[:, : first.weight] = moved[:, self._span : self._span + first.weight]
        out[:, end:] = moved[:, self._span + first.weight :]
        return out

    def add_weighted_(
        self, total: torch.Tensor, moved: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """One product over all records of all clients; no client's weights are written out."""
        first = self._layers[0]
        end = first.weight + first.inputs * first.outputs
        a = self._coordinates(moved).double() * weights[:, None, None]
        product = torch.mm(a.flatten(0, 1).T, self._wide.flatten(0, 1))
        total[first.weight : end] += product.flatten()
        rest = torch.zeros(len(total) - len(product.flatten()), dtype=torch.float64)
        add_weighted_(rest, moved[:, self._span :], weights)
        total[: first.weight] += rest[: first.weight]
        total[end:] += rest[first.weight :]

    def _coordinates(self, moved: torch.Tensor) -> torch.Tensor:
        a = moved[:, : self._span]
        return a.view(len(moved), self._x.shape[1], self._layers[0].outputs)

    def _first_input(self, batch: Batch) -> torch.Tensor:
        return self._x  # never looked at: the first layer works on coordinates

    def _product(
        self, i: int, h: torch.Tensor, moved: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        if i > 0:
            return super()._product(i, h, moved, batch)
        if moved is None:
            return batch.chosen(self._first)
        return batch.chosen(torch.baddbmm(self._first, self._gram, self._coordinates(moved)))

    def _put_weight_gradient(
        self, i: int, h: torch.Tensor, error: torch.Tensor, batch: Batch, out: torch.Tensor
    ) -> None:
        if i > 0:
            super()._put_weight_gradient(i, h, error, batch, out)
        else:
            self._coordinates(out).copy_(batch.scattered(error, self._x.shape[1]))

    def _at(self, place: int) -> int:
        first = self._layers[0]
        removed = first.inputs * first.outputs if place > first.weight else 0
        return self._span + place - removed


def _loss_gradient(
    task: Task, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted losses' gradient at the outputs [K, B, o], written out where it is known."""
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
