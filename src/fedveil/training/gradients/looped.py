"""One client after the other, by ordinary autograd on its real records only.

Convolutions run channels-last where the module can, and a batch is computed in pieces that stay in
the cache: the gradient of a mean is a sum, so this changes rounding and nothing else.
"""

import sys

import torch
from torch import nn

from fedveil.base.inputs import mapped, taken
from fedveil.models.task import Features, Named, Task
from fedveil.privacy.clip import Clip
from fedveil.privacy.rows import Norm, add_weighted_, row_norms
from fedveil.training.batches import Batch
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.per_example import ClippedExamples

_IMAGES = 32
_RECORDS = 1024


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
        """`x`, `y` are a few records, for a look at how the module treats them.

        Where the records of a batch see each other (`mixes`), it is never cut into pieces. Where
        they are clipped one by one (`private`), the look is taken now.
        """
        self._task = task
        task.look(x, y)
        self._examples = ClippedExamples(task, x, y)
        if private:
            self._examples.look()
        images = any(isinstance(m, nn.modules.conv._ConvNd) for m in task.layers.values())
        self._piece = sys.maxsize if mixes else _IMAGES if images else _RECORDS

    @property
    def forks(self) -> bool:
        """Whether the model's own code runs."""
        return bool(self._task.forks)

    def walk(self, start: torch.Tensor, cohort: CohortData, *, spanned: bool) -> "LoopedWalk":
        """A walk in the parameters themselves."""
        return LoopedWalk(self._task, self._examples, self._piece, start, cohort)


class LoopedWalk:
    """Parameters of one client at a time, in one buffer."""

    def __init__(
        self,
        task: Task,
        examples: ClippedExamples,
        piece: int,
        start: torch.Tensor,
        cohort: CohortData,
    ) -> None:
        self._task, self._examples, self._piece = task, examples, piece
        self._start, self._cohort = start, cohort
        self._here = torch.empty_like(start)
        self.width, self.spanned = task.size, False

    def mean(self, moved: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """Autograd writes each client's gradient straight into its row."""
        out = torch.zeros(len(self._cohort), self.width)
        self._add_gradients_(out, moved, batch, 1.0)
        return out

    def descend_(self, moved: torch.Tensor | None, batch: Batch, rate: float) -> torch.Tensor:
        """Autograd steps straight along the gradient, which has no row of its own."""
        out = torch.zeros(len(self._cohort), self.width) if moved is None else moved
        self._add_gradients_(out, moved, batch, -rate)
        return out

    def clipped_sum(self, moved: torch.Tensor | None, batch: Batch, clip: Clip) -> torch.Tensor:
        """Norms from what each layer sees and sends back, where its kind is known."""
        out = torch.zeros(len(self._cohort), self.width)
        for k in range(len(out)):
            x, y = batch.real(self._cohort, k)
            if len(y):
                keys = self._keys(batch, k)
                self._examples.add_clipped_(out[k], self._parameters(moved, k), x, y, clip, keys)
        return out

    def norms(self, moved: torch.Tensor, norm: Norm) -> torch.Tensor:
        return row_norms(moved, norm)

    def rows(self, moved: torch.Tensor) -> torch.Tensor:
        return moved

    def add_weighted_(
        self, total: torch.Tensor, moved: torch.Tensor, weights: torch.Tensor
    ) -> None:
        add_weighted_(total, moved, weights)

    def _keys(self, batch: Batch, k: int) -> torch.Tensor | None:
        """The keys of client k's records, where the module drops."""
        return batch.real_keys(k) if self._task.drops else None

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
            x, y = batch.real(self._cohort, k)
            if len(y) == 0:
                continue
            keys = self._keys(batch, k)
            named, beside = self._leaves(self._parameters(moved, k), row)
            for a in range(0, len(y), self._piece):
                piece = slice(a, a + self._piece)
                with torch.enable_grad():
                    records = mapped(self._examples.layout, taken(x, piece))
                    own = None if keys is None else keys[piece]
                    losses = self._task.losses(named, records, y[piece], own)
                    loss = losses.sum() * (factor / len(y))
                torch.autograd.backward(loss)
            for place, leaf in beside:
                if leaf.grad is not None:
                    place += leaf.grad

    def _leaves(
        self, flat: torch.Tensor, row: torch.Tensor
    ) -> tuple[Named, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Parameters whose gradients accumulate in `row`; and those that must do it elsewhere.

        Kernels may lie channels-last, and torch wants their gradients to lie as they do. Autograd
        gives such a leaf its first gradient as it was computed, and adds further ones to it.
        """
        leaves, beside = {}, []
        places = self._task.named(row)
        for name, value in self._task.named(flat).items():
            leaf = self._examples.layout(value.detach()).requires_grad_()
            if leaf.stride() == value.stride():
                leaf.grad = places[name]
            else:
                beside.append((places[name], leaf))
            leaves[name] = leaf
        return leaves, beside
