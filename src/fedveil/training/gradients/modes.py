"""The two execution modes: clients one after the other, or all in one call.

Looped, a client is computed by ordinary autograd on its real records only. Convolutions run
channels-last where the module can, and a batch is computed in pieces that stay in the cache: the
gradient of a mean is a sum, so this changes rounding and nothing else.
"""

import sys
from enum import StrEnum

import numpy as np
import torch
from torch import nn

from fedveil.base.inputs import mapped, taken
from fedveil.data.federated import FederatedData
from fedveil.models.task import Features, Named, Task
from fedveil.models.trial import with_labels
from fedveil.privacy.clip import Clip
from fedveil.training.cohort import Batch, CohortData, tensors
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
    """How a cohort is computed: all clients in one call, or one after the other."""

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
    """The gradients of `task` over `data` in the given mode.

    Args:
        full_batches: All batches are full.
        mixes: The records of a batch see each other.
        private: Examples are clipped one by one. The method is then chosen now, not in the first
            round.
    """
    if mode is Mode.VECTORISED:
        return Vectorised(task, data, full_batches=full_batches)
    x, y = data.examples(_FEW)
    few = np.arange(_FEW) % len(y)
    labels = with_labels(torch.from_numpy(y[few]))
    return Looped(task, tensors(taken(x, few)), labels, mixes=mixes, private=private)


class Vectorised:
    """All clients in one call: batched algebra for a chain of linear layers, vmap otherwise."""

    forks = False  # a module that cannot be captured is computed client by client

    def __init__(self, task: Task, data: FederatedData, *, full_batches: bool = False) -> None:
        self._task = task
        flatten, self._layers = linear_chain(task)
        quadratic = full_batches and uses_quadratics(task, data)
        self._quadratics = Quadratics.of_data(data) if quadratic else None
        if not self._layers:
            x, y = data.examples(1)
            task.look(tensors(x), torch.from_numpy(y))
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
        """A trajectory from `start`, [P] or [K, P]."""
        if not self._algebra:
            return VmappedTrajectory(self._task, start, cohort)
        if self._quadratics is not None:
            return QuadraticTrajectory(self._task, self._layers, start, cohort, self._quadratics)
        if spanned and 2 * cohort.longest <= self._layers[0].in_features:
            return DualTrajectory(self._task, self._layers, start, cohort)
        return StackedTrajectory(self._task, self._layers, start, cohort)


class Looped:
    """One client after the other."""

    def __init__(
        self,
        task: Task,
        x: Features,
        y: torch.Tensor,
        *,
        mixes: bool = False,
        private: bool = False,
    ) -> None:
        """`x`, `y` are sample records to try the module on.

        With `mixes` a batch is never cut into pieces. With `private` the method of clipping
        examples is chosen now.
        """
        self._task = task
        task.look(x, y)
        self._examples = ClippedExamples(task, x, y)
        if private:
            self._examples.prepare()
        images = any(isinstance(m, nn.modules.conv._ConvNd) for m in task.named_layers.values())
        self._piece = sys.maxsize if mixes else _IMAGES if images else _RECORDS

    @property
    def forks(self) -> bool:
        """Whether the model's own code runs."""
        return bool(self._task.forks)

    def trajectory(
        self, start: torch.Tensor, cohort: CohortData, *, spanned: bool
    ) -> LocalTrajectory:
        """A trajectory of parameters."""
        return LoopedTrajectory(self._task, self._examples, self._piece, start, cohort)


class LoopedTrajectory(LocalTrajectory):
    """Parameters of one client at a time, in one buffer."""

    def __init__(
        self,
        task: Task,
        examples: ClippedExamples,
        piece: int,
        start: torch.Tensor,
        cohort: CohortData,
    ) -> None:
        super().__init__(task, start, cohort)
        self._examples, self._piece = examples, piece
        self._here = torch.empty_like(start)

    def mean(self, moved: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """Autograd writes each client's gradient straight into its row."""
        out = torch.zeros(len(self._cohort), self.width)
        self._add_gradients_(out, moved, batch, 1.0)
        return out

    def descend_(self, moved: torch.Tensor | None, batch: Batch, rate: float) -> torch.Tensor:
        """Autograd steps straight along the gradient, which is never stored."""
        out = torch.zeros(len(self._cohort), self.width) if moved is None else moved
        self._add_gradients_(out, moved, batch, -rate)
        return out

    def clipped_sum(self, moved: torch.Tensor | None, batch: Batch, clip: Clip) -> torch.Tensor:
        """Norms from each layer's inputs and errors, where it has a formula."""
        out = torch.zeros(len(self._cohort), self.width)
        for k, row in enumerate(out):
            x, y = batch.client_records(self._cohort, k)
            if len(y):
                keys = self._keys(batch, k)
                self._examples.add_clipped_(row, self._parameters(moved, k), x, y, clip, keys)
        return out

    def _keys(self, batch: Batch, k: int) -> torch.Tensor | None:
        """The dropout keys of client k's records, None if the module has no dropout."""
        return batch.dropout_keys[k][batch.mask[k] > 0] if self._task.drops else None

    def _parameters(self, moved: torch.Tensor | None, k: int) -> torch.Tensor:
        """Client k's parameters: always a copy, which a module may spoil for that client alone."""
        if moved is None:
            return self._here.copy_(self._start)
        return torch.add(self._start, moved[k], out=self._here)

    def _add_gradients_(
        self, rows: torch.Tensor, moved: torch.Tensor | None, batch: Batch, factor: float
    ) -> None:
        """rows += factor x gradients at `moved`, which may be the rows themselves."""
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
                    own = None if keys is None else keys[piece]
                    losses = self._task.losses(named, records, y[piece], own)
                    loss = losses.sum() * (factor / len(y))
                torch.autograd.backward(loss)
            for place, leaf in separate:
                if leaf.grad is not None:
                    place += leaf.grad

    def _leaves(
        self, flat: torch.Tensor, row: torch.Tensor
    ) -> tuple[Named, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Parameters whose gradients accumulate in `row`, and (place, leaf) of the others.

        Kernels may lie channels-last, and torch wants their gradients to lie as they do. Autograd
        gives such a leaf its first gradient as it was computed, and adds further ones to it.
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
