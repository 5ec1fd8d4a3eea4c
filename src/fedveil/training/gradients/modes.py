"""The two execution modes: clients one after the other, or all in one call.

Looped, a client is computed by ordinary autograd on its real records only. Convolutions run
channels-last where the module can, and a batch is computed in pieces that stay in the cache: the
gradient of a mean is a sum, so this changes rounding and nothing else.
"""

import sys
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fedveil.base.inputs import mapped, taken
from fedveil.data.federated import FederatedData
from fedveil.models.task import Features, Named, Task
from fedveil.models.trial import with_labels
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.grid import Grid
from fedveil.privacy.noise.rotation import Rounding
from fedveil.training.cohort import Batch, CohortData
from fedveil.training.gradients.clipped_units import ClippedUnits
from fedveil.training.gradients.least_squares import (
    Quadratics,
    QuadraticTrajectory,
    uses_quadratics,
)
from fedveil.training.gradients.linear_chains import DualTrajectory, StackedTrajectory, linear_chain
from fedveil.training.gradients.per_example import ClippedExamples
from fedveil.training.gradients.trajectories import Gradients, LocalTrajectory, VmappedTrajectory

_FEW = 2
_IMAGES, _RECORDS = 32, 1024


class Mode(StrEnum):
    """How a cohort is computed: VECTORISED, all clients in one call, or LOOPED, one by one."""

    VECTORISED = "vectorised"
    LOOPED = "looped"


def gradients_of(
    task: Task,
    mode: Mode,
    data: FederatedData,
    *,
    full_batches: bool = False,
    mixes: bool = False,
    private: bool = False,
) -> Gradients:
    """The way to compute gradients of `task` over `data` in the given mode.

    Args:
        task: The model and its loss.
        mode: The execution mode.
        data: The clients' records. Example records for trials of the module come from it.
        full_batches: Whether every batch has all records of its clients.
        mixes: Whether the records of a batch see each other.
        private: Whether examples are clipped one by one. The method is then chosen now, not in the
            first round.
    """
    if mode is Mode.VECTORISED:
        return Vectorised(task, data, full_batches=full_batches)
    x, y = data.examples(_FEW)
    few = np.arange(_FEW) % len(y)
    labels = with_labels(torch.from_numpy(y[few]))
    sample = mapped(torch.tensor, taken(x, few))
    return Looped(task, sample, labels, mixes=mixes, private=private)


class Vectorised:
    """Gradients of all clients in one call.

    By batched algebra for a chain of linear layers, by vmap otherwise. `full_batches` is as in
    `gradients_of`.
    """

    forks = False  # a module that cannot be captured is computed client by client

    def __init__(self, task: Task, data: FederatedData, *, full_batches: bool = False) -> None:
        self._task = task
        flatten, self._layers = linear_chain(task)
        quadratic = full_batches and uses_quadratics(task, data)
        self._quadratics = Quadratics.of_data(data) if quadratic else None
        if not self._layers:
            x, y = data.examples(1)
            task.look(mapped(torch.tensor, x), torch.from_numpy(y))
        # whether records are vectors of real numbers when they reach the first layer
        self._algebra = (
            bool(self._layers)
            and not isinstance(data.x, dict)
            and data.x.dtype.kind == "f"
            and (data.x.ndim == 2 or (flatten and data.x.ndim > 2))
        )

    def trajectory(
        self, start: torch.Tensor, cohort: CohortData, *, spanned: bool
    ) -> LocalTrajectory:
        """A trajectory of the clients of `cohort` from `start`, [P] or [K, P].

        With `spanned` its rows may be coordinates, if clients have few records.
        """
        if not self._algebra:
            return VmappedTrajectory(self._task, start, cohort)
        if self._quadratics is not None:
            return QuadraticTrajectory(self._task, self._layers, start, cohort, self._quadratics)
        if spanned and 2 * cohort.longest <= self._layers[0].in_features:
            return DualTrajectory(self._task, self._layers, start, cohort)
        return StackedTrajectory(self._task, self._layers, start, cohort)


class Looped:
    """Gradients of one client after the other, by ordinary autograd."""

    def __init__(
        self, task: Task, x: Features, y: torch.Tensor, *, mixes: bool, private: bool
    ) -> None:
        """Try the module on the example records `x`, `y`.

        With `mixes` a batch is never cut into pieces. With `private` the method of clipping
        examples is chosen now.
        """
        self.task = task
        task.look(x, y)
        self.examples = ClippedExamples(task, x, y)
        if private:
            self.examples.prepare()
        self._sample, self._units = (x, y), dict[int, ClippedUnits]()
        images = any(isinstance(m, nn.modules.conv._ConvNd) for m in task.named_layers.values())
        self.piece = sys.maxsize if mixes else _IMAGES if images else _RECORDS

    def clip_examples(self, group: int) -> ClippedExamples:
        """The object that clips and sums gradients: of single records if `group` is 1.

        Otherwise of units of at most `group` records. Made once for each `group`.
        """
        if group == 1:
            return self.examples
        if group not in self._units:
            self._units[group] = ClippedUnits(self.task, *self._sample, group)
        return self._units[group]

    @property
    def forks(self) -> bool:
        """Whether the model's own code runs, so that each client has to be computed in a fork."""
        return bool(self.task.forks)

    def trajectory(
        self, start: torch.Tensor, cohort: CohortData, *, spanned: bool
    ) -> LocalTrajectory:
        """A trajectory from the model `start` [P]. Its rows are parameters, whatever `spanned`."""
        return LoopedTrajectory(self, start, cohort)


class LoopedTrajectory(LocalTrajectory):
    """The trajectory of clients that are computed one at a time, in one buffer."""

    def __init__(self, looped: Looped, start: torch.Tensor, cohort: CohortData) -> None:
        super().__init__(looped.task, start, cohort)
        self._looped, self._examples, self._piece = looped, looped.examples, looped.piece
        self._here = torch.empty_like(start)

    def mean_update(self, moved: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """The gradient of each client's mean loss, [K, P]. Zero for an idle client.

        Autograd writes each client's gradient straight into its row.
        """
        out = torch.zeros(len(self._cohort), self.width)
        self._add_gradients_(out, moved, batch, 1.0)
        return out

    def descend_(self, moved: torch.Tensor | None, batch: Batch, rate: float) -> torch.Tensor:
        """Compute moved - rate x mean gradient, [K, P].

        `moved` is overwritten and returned, unless it is None. Autograd adds to the rows directly.
        """
        out = torch.zeros(len(self._cohort), self.width) if moved is None else moved
        self._add_gradients_(out, moved, batch, -rate)
        return out

    def clipped_sum(self, moved: torch.Tensor | None, batch: Batch, clip: Clip) -> torch.Tensor:
        """The sum of each client's single-example gradients, every one clipped, [K, P].

        Norms follow from each layer's inputs and errors, where it has a formula.
        """
        out = torch.zeros(len(self._cohort), self.width)
        for k, row in enumerate(out):
            x, y, *more = self._given(batch, k)
            if len(y):
                flat = self._parameters(moved, k)
                self._looped.clip_examples(batch.group).add_clipped_(row, flat, x, y, clip, *more)
        return out

    def clipped_sum_on_grid(
        self, moved: torch.Tensor | None, batch: Batch, clip: Clip, grid: Grid | Rounding
    ) -> torch.Tensor:
        """The sum of one client's gradients, each clipped and cut to the grid, float64 [P].

        They are computed in slots of pieces of public sizes. AssertionError for several clients.
        """
        if len(self._cohort) != 1:
            raise AssertionError("exact sums are for one client at a time")
        x, y, *more = self._given(batch, 0)
        examples = self._looped.clip_examples(batch.group)
        return examples.sum_on_grid(self._parameters(moved, 0), x, y, clip, grid, *more)

    def _given(self, batch: Batch, k: int) -> list[Any]:
        """[x, y, ...] of the records of client k in a batch, or of its units with their weights.

        The list ends with dropout keys if the module has dropout. Empty places are left out.
        """
        if batch.group == 1:
            return [*batch.client_records(self._cohort, k), *self._keys(batch, k)]
        used, units = self._units(batch, k)
        return [mapped(partial(_rows, used), part) for part in units]

    def _units(self, batch: Batch, k: int) -> tuple[torch.Tensor, list[Any]]:
        """(mask of client k's units that have records, [x, y, weights, ...] of all its units).

        The mask is bool [B], the others are [B, group, ...]. The list ends with dropout keys if the
        module has dropout.
        """

        def own(values: torch.Tensor) -> torch.Tensor:
            chosen = values[k] if batch.index is None else values[k][batch.index[k]]
            return batch.by_unit(chosen[None])[0]

        weights, keys = batch.unit_weights[k], list[torch.Tensor]()
        if self._task.drops:
            keys = [batch.by_unit(batch.dropout_keys)[k]]
        x, y = mapped(own, self._cohort.x), own(self._cohort.y)
        return weights.sum(dim=1) > 0, [x, y, weights, *keys]

    def _keys(self, batch: Batch, k: int) -> list[torch.Tensor]:
        """The dropout keys of client k's records, [] if the module has no dropout."""
        return [batch.dropout_keys[k][batch.mask[k] > 0]] if self._task.drops else []

    def _parameters(self, moved: torch.Tensor | None, k: int) -> torch.Tensor:
        """The parameters [P] of client k, in a buffer that the next call overwrites.

        Always a copy, so that a module may spoil them for that client alone.
        """
        if moved is None:
            return self._here.copy_(self._start)
        return torch.add(self._start, moved[k], out=self._here)

    def _add_gradients_(
        self, rows: torch.Tensor, moved: torch.Tensor | None, batch: Batch, factor: float
    ) -> None:
        """Add factor x the gradient of each client's mean loss to its row of `rows`, in place.

        The gradient is that at the start plus `moved`, or at the start if it is None. Rows of
        clients without records in the batch stay as they are. `rows` may be `moved` itself.
        """
        for k, row in enumerate(rows):
            x, y = batch.client_records(self._cohort, k)
            if len(y) == 0:
                continue
            keys = self._keys(batch, k)
            named, separate = self._leaves(self._parameters(moved, k), row)
            for a in range(0, len(y), self._piece):
                piece = slice(a, a + self._piece)
                with torch.enable_grad():
                    records = mapped(self._examples.layout, taken(x, piece))
                    own = [every[piece] for every in keys]
                    losses = self._task.losses(named, records, y[piece], *own)
                    loss = losses.sum() * (factor / len(y))
                torch.autograd.backward(loss)
            for place, leaf in separate:
                if leaf.grad is not None:
                    place += leaf.grad

    def _leaves(
        self, flat: torch.Tensor, row: torch.Tensor
    ) -> tuple[Named, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Leaves for autograd: all parameters by name, and pairs (place in `row`, leaf) of some.

        The gradients of the pairs' leaves must be added to their places by the caller. All other
        gradients accumulate in `row` [P]. The pairs are kernels that lie channels-last in memory,
        whose gradients torch wants to lie in the same way.
        """
        leaves, separate = {}, []
        places = self._task.named(row)
        for name, value in self._task.named(flat).items():
            leaf = self._examples.layout(value.detach()).requires_grad_()
            if leaf.stride() == value.stride():
                leaf.grad = places[name]
            else:
                separate.append((places[name], leaf))
            leaves[name] = leaf
        return leaves, separate


def _rows(used: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The rows of values [B, ...] that the mask `used`, bool [B], marks."""
    return values[used]
