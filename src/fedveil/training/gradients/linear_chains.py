"""Chains of linear layers as batched algebra: the vectorised trajectories of regressions and MLPs.

The clients' weights lie side by side and each layer is one batched product. Where a client has
few records, the first layer's weights are not copied per client at all: every step it takes is
a combination of its own records, so its coordinates in their span are enough (the dual form).
"""

import copy
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.func import grad, vmap

from fedveil.base.inputs import single
from fedveil.models.metrics import WeightedCrossEntropy, cross_entropy, squared_error
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
        weights: Number of weights: inputs times outputs.
        weight_index: Where its weights begin in the parameter vector.
        bias_index: Where its biases begin, None without biases.
        after: The pointwise function that follows, None if there is none.
    """

    in_features: int
    outputs: int
    weights: int
    weight_index: int
    bias_index: int | None
    after: nn.Module | None = None


def linear_chain(task: Task) -> tuple[bool, tuple[LinearLayer, ...]]:
    """The pair (whether records are flattened first, the linear layers) of a task's module.

    The layers are () if the module is anything but linear layers and pointwise functions, one after
    the other, each used once and as its class defines it.
    """
    if task.module_captured:
        return False, ()
    modules, rest = [], [task.module]
    while rest:  # the layers of nested sequences, in order
        module = rest.pop(0)
        if type(module) is nn.Sequential and is_unmodified(module):
            rest = [*module, *rest]
        else:
            modules.append(module)
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
            sizes = module.in_features, module.out_features, module.weight.numel()
            layers.append(LinearLayer(*sizes, weight, bias))
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


class StackedTrajectory(LocalTrajectory):
    """The trajectories of a chain of linear layers, with one batched product per layer.

    Rows are parameters, [K, P].
    """

    def __init__(
        self, task: Task, layers: tuple[LinearLayer, ...], start: torch.Tensor, cohort: CohortData
    ) -> None:
        super().__init__(task, start, cohort)
        self._layers = layers
        indices = (index for each in layers for index in (each.weight_index, each.bias_index))
        # by their index in the parameter vector: where in a row these parameters begin
        self._column = {index: index for index in indices if index is not None}

    @cached_property
    def _x(self) -> torch.Tensor:
        """The records as vectors, [K, n, features]."""
        return single(self._cohort.x).flatten(2)

    def mean_update(self, moved: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """The gradient of each client's mean loss, [K, width]. Zero for an idle client."""
        inputs, errors = self._chain_rule(moved, batch, batch.weights)
        return batch.zero_idle_(self._summed_gradients(inputs, errors, batch))

    def clipped_sum(self, moved: torch.Tensor | None, batch: Batch, clip: Clip) -> torch.Tensor:
        """The sum of each client's single-example gradients, every one clipped, [K, P].

        Lengths follow from each layer's inputs and errors: an example's gradient is an outer
        product per layer, which is not written out. A clip in another norm than L2, and units of
        several records, go through vmap.
        """
        if clip.norm is not Norm.L2 or batch.group > 1:
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
        errors = [without_subnormals(e * scale) for e in errors]
        return self._summed_gradients(inputs, errors, batch)

    def _chain_rule(
        self, moved: torch.Tensor | None, batch: Batch, weights: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Two lists with one tensor per layer: its inputs [K, B, i], and its errors [K, B, o].

        Errors are the gradients of the losses, times `weights` [K, B], at the layer's outputs. In
        the dual form the first layer's inputs are all records of a client and must not be used.
        """
        inputs, before, after = [self._x if self.spanned else batch.select(self._x)], [], []
        with torch.enable_grad():
            for i, layer in enumerate(self._layers):
                z = self._product(i, inputs[i], moved, batch)
                if layer.bias_index is not None:
                    z = z + self._part(layer.bias_index, (layer.outputs,), moved)[..., None, :]
                before.append(z.detach().requires_grad_())
                after.append(before[i] if layer.after is None else layer.after(before[i]))
                inputs.append(after[i].detach())
        error = _loss_gradient(self._task, inputs.pop(), batch.select(self._cohort.y), weights)
        errors = []
        for i, layer in reversed(list(enumerate(self._layers))):
            if after[i] is not before[i]:
                (error,) = torch.autograd.grad(after[i], before[i], error)
            errors.append(error)
            if i > 0:
                shape = layer.outputs, layer.in_features
                error = torch.matmul(error, self._part(layer.weight_index, shape, moved))
        return inputs, errors[::-1]

    def _summed_gradients(
        self, inputs: list[torch.Tensor], errors: list[torch.Tensor], batch: Batch
    ) -> torch.Tensor:
        """The gradients summed over each client's batch, rows [K, width].

        `inputs` and `errors` have one tensor per layer. Weights and clip factors must be in
        `errors` already.
        """
        out = torch.empty(len(self._cohort), self.width)
        for i, layer in enumerate(self._layers):
            self._put_weight_gradient(i, inputs[i], errors[i], batch, out)
            if layer.bias_index is not None:
                at = self._column[layer.bias_index]
                out[:, at : at + layer.outputs] = errors[i].sum(dim=1)
        return out

    def _product(
        self, i: int, h: torch.Tensor, moved: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """The products [K, B, o] of layer i's inputs `h` [K, B, in] and its weights at `moved`."""
        layer = self._layers[i]
        w = self._part(layer.weight_index, (layer.outputs, layer.in_features), moved)
        if w.ndim == 3 and layer.outputs == 1:
            return torch.bmm(w, h.mT).mT  # several times faster than a product with one column
        return torch.matmul(h, w.mT)

    def _put_weight_gradient(
        self, i: int, h: torch.Tensor, error: torch.Tensor, batch: Batch, out: torch.Tensor
    ) -> None:
        """Write layer i's weight gradient, summed over each client's batch, into `out`.

        `h` are the layer's inputs [K, B, in], `error` its errors [K, B, out], `out` rows [K,
        width]. Weights and clip factors must be in `error` already. `batch` is used in the dual
        form only.
        """
        layer, at = self._layers[i], self._column[self._layers[i].weight_index]
        place = out[:, at : at + layer.weights].view(len(out), layer.outputs, layer.in_features)
        if layer.weights < _SMALL:
            place.copy_(torch.bmm(error.mT, h))  # many small products are slow into strided rows
        else:
            torch.bmm(error.mT, h, out=place)

    def _part(self, index: int, shape: tuple[int, ...], moved: torch.Tensor | None) -> torch.Tensor:
        """The parameters of shape `shape` that begin at `index` of the parameter vector.

        The result is [*shape] if all clients are at one start, [K, *shape] otherwise.
        """
        size = math.prod(shape)
        part = self._start[..., index : index + size]
        if moved is not None:
            at = self._column[index]
            part = part + moved[:, at : at + size]
        return part.view(*part.shape[:-1], *shape)


class DualTrajectory(StackedTrajectory):
    """The dual form: first-layer weights are W0 + A' X, with A [K, n, o] in place of [K, o, i].

    A row is A, then all other parameters in their order. Lengths follow from the Gram matrix of a
    client's records: |A' X|^2 = <A, (X X') A>, in float64. They are upper bounds, which matters
    only where terms cancel.
    """

    spanned = True

    def __init__(
        self, task: Task, layers: tuple[LinearLayer, ...], start: torch.Tensor, cohort: CohortData
    ) -> None:
        super().__init__(task, layers, start, cohort)
        first = layers[0]
        self._begin, self._end = first.weight_index, first.weight_index + first.weights
        self._span = self._x.shape[1] * first.outputs
        for index in self._column:
            before = first.weights if index > self._begin else 0
            self._column[index] = self._span + index - before
        weight = self._part(self._begin, (first.outputs, first.in_features), None)
        self._first = torch.matmul(self._x, weight.mT)  # the first layer's outputs at the start
        self._wide = self._x.double()
        self._wide_gram = torch.bmm(self._wide, self._wide.mT)
        self._gram = self._wide_gram.float()
        self.width = self._span + task.size - first.weights

    def norms(self, moved: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Upper bounds of the L2 norms of rows as parameters, float64 [K].

        AssertionError unless L2.
        """
        if norm is not Norm.L2:
            raise AssertionError("lengths of coordinates are known in L2 only")
        a = self._coordinates(moved).double()
        inside = (a * torch.bmm(self._wide_gram, a)).sum(dim=(1, 2)).clamp_min_(0)
        largest = a.square().sum(dim=(1, 2)) * self._wide_gram.diagonal(dim1=1, dim2=2).sum(dim=1)
        cancelled = (sum(self._wide.shape[1:]) + 2) * 2.0**-51  # twice what float64 may round by
        return (inside + cancelled * largest + row_norms(moved[:, self._span :]) ** 2).sqrt()

    def update_rows(self, moved: torch.Tensor) -> torch.Tensor:
        """The rows as parameters, [K, P], computed from their coordinates."""
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
        """Add the rows `moved`, as parameters and times `weights` [K], to `total` (float64 [P]).

        In place, in float64, by one product over all records of all clients.
        """
        a = self._coordinates(moved).double() * weights[:, None, None]
        product = torch.mm(a.flatten(0, 1).T, self._wide.flatten(0, 1))
        total[self._begin : self._end] += product.flatten()
        rest = torch.zeros(len(total) - product.numel(), dtype=torch.float64)
        add_weighted_(rest, moved[:, self._span :], weights)
        total[: self._begin] += rest[: self._begin]
        total[self._end :] += rest[self._begin :]

    def _coordinates(self, moved: torch.Tensor) -> torch.Tensor:
        """The part A of rows, a view [K, n, o]."""
        a = moved[:, : self._span]
        return a.view(len(moved), self._x.shape[1], self._layers[0].outputs)

    def _product(
        self, i: int, h: torch.Tensor, moved: torch.Tensor | None, batch: Batch
    ) -> torch.Tensor:
        """The products [K, B, o] of layer i's inputs and its weights at `moved`.

        The first layer's come from the Gram matrix, and `h` is not used.
        """
        if i > 0:
            return super()._product(i, h, moved, batch)
        if moved is None:
            return batch.select(self._first)
        return batch.select(torch.baddbmm(self._first, self._gram, self._coordinates(moved)))

    def _put_weight_gradient(
        self, i: int, h: torch.Tensor, error: torch.Tensor, batch: Batch, out: torch.Tensor
    ) -> None:
        """Write the gradient of layer i's weights into the rows `out`.

        The first layer's is written as coordinates, one per record and output, and `h` is not used.
        """
        if i > 0:
            super()._put_weight_gradient(i, h, error, batch, out)
        else:
            self._coordinates(out).copy_(batch.scatter(error, self._x.shape[1]))


def _loss_gradient(
    task: Task, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The gradients of the losses, times `weights` [K, B], at the outputs: a tensor [K, B, o].

    By a formula for the squared error and the cross entropy of one target per record, by vmap for
    any other loss.
    """
    if task.loss is squared_error and targets.ndim == 2:
        return ((outputs.squeeze(-1) - targets) * (2 * weights))[..., None]
    loss_of = task.loss
    if type(loss_of) is WeightedCrossEntropy and targets.ndim == 2:
        weights = weights * torch.tensor(loss_of.weights)[targets]
    known = loss_of is cross_entropy or type(loss_of) is WeightedCrossEntropy
    if known and targets.ndim == 2:
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
    """The squared lengths of vectors along the last axis, in float64."""
    return values.double().square_().sum(dim=-1)
