"""Least squares: a client's loss is a quadratic function, which few numbers say whole.

The mean squared error of n records in w is w'Hw/2 - h'w + c with H = 2/n X'X and h = 2/n X'y. A
client with more records than features is worth keeping as (H, h): its gradient H w - h then costs
p^2 multiplications instead of 2 n p, and its records are not read again in any round.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.inputs import single
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.training.batches import Batch, Whole
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.linear_chain import Layer
from fedveil.training.gradients.stacked import StackedWalk

_PIECE = 1 << 22
_MOST = 1 << 28
_ROWS = torch.contiguous_format


class Quadratics:
    """(H, h) of every client of `data` for a linear model with a bias, which comes last.

    In float64, and exact up to its rounding; they say what the records say and are as private.
    """

    def __init__(self, data: FederatedData) -> None:
        """Use `of`, which computes them once per data set."""
        self._data = data
        self._curvature, self._slope = self._all()

    @classmethod
    def of(cls, data: FederatedData) -> "Quadratics":
        """Those of `data`, which keep them for the next training."""
        if "quadratics" not in data.derived:
            data.derived["quadratics"] = cls(data)
        found: Quadratics = data.derived["quadratics"]
        return found

    @staticmethod
    def worthwhile(data: FederatedData) -> bool:
        """Whether they take less memory and time than the records, and less than 256 MiB."""
        x = data.x
        if isinstance(x, dict) or x.ndim != 2 or x.dtype != np.float32 or data.y.dtype.kind != "f":
            return False
        width = x.shape[1] + 1
        numbers = data.clients * width * (width + 1)
        return bool(8 * numbers <= min(_MOST, x.nbytes))

    def at(self, ids: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """H [K, p, p] and h [K, p] of the clients `ids`."""
        chosen = torch.from_numpy(ids)
        return self._curvature.index_select(0, chosen), self._slope.index_select(0, chosen)

    def _all(self) -> tuple[torch.Tensor, torch.Tensor]:
        data, x = self._data, single(self._data.x)
        width = x.shape[1] + 1
        both = np.zeros((data.clients, width, width + 1))
        for first, last in self._pieces():
            a, b = data.offsets[first], data.offsets[last]
            records = np.ones((b - a, width + 1))
            records[:, : x.shape[1]] = x[a:b]
            records[:, width] = data.y[a:b]
            sizes = data.sizes[first:last]
            if (sizes == sizes[0]).all():
                every = records.reshape(last - first, sizes[0], width + 1)
                left = np.ascontiguousarray(every[..., :width].swapaxes(1, 2))
                np.matmul(left, every, out=both[first:last])
                both[first:last] *= 2 / sizes[0]
                continue
            for k in range(first, last):
                own = records[data.offsets[k] - a : data.offsets[k + 1] - a]
                np.matmul(own[:, :width].T, own, out=both[k])
                both[k] *= 2 / len(own)
        found = torch.from_numpy(both)
        return found[..., :width].contiguous(), found[..., width].contiguous()

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Clients first..last whose records are few enough to be widened together."""
        most = max(1, _PIECE // (single(self._data.x).shape[1] + 2))
        first = 0
        while first < self._data.clients:
            last = int(np.searchsorted(self._data.offsets, self._data.offsets[first] + most)) - 1
            last = min(max(last, first + 1), self._data.clients)
            yield first, last
            first = last


class QuadraticWalk(StackedWalk):
    """Full batches by H w - h; anything else from the records, as any linear layer."""

    def __init__(
        self,
        task: Task,
        layers: tuple[Layer, ...],
        start: torch.Tensor,
        cohort: CohortData,
        quadratics: Quadratics,
    ) -> None:
        super().__init__(task, layers, start, cohort)
        self._quadratics = quadratics

    @cached_property
    def _own(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._quadratics.at(self._cohort.owners)

    @cached_property
    def _columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """H and h as [p, p, K] and [p, K]: K small products are fastest side by side."""
        curvature, slope = self._own
        return curvature.permute(1, 2, 0).contiguous(), slope.T.contiguous()

    @cached_property
    def _wide_start(self) -> npt.NDArray[np.float64]:
        """[p, 1], or [p, K] where each has its own."""
        wide = self._start.double().numpy()
        return wide[:, None] if wide.ndim == 1 else np.ascontiguousarray(wide.T)

    def _here(self, moved: torch.Tensor | None) -> torch.Tensor:
        """Where the clients are, [p, K]; NumPy adds and transposes in one go."""
        start = self._wide_start
        return torch.from_numpy(
            start if moved is None else np.add(moved.numpy().T, start, order="C")
        )

    def mean(self, moved: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        if not isinstance(batch, Whole):
            return super().mean(moved, batch)
        if moved is None and self._start.ndim == 1:
            curvature, slope = self._own
            start = self._start.double()
            gradient = torch.mv(curvature.flatten(0, 1), start).view_as(slope).sub_(slope)
        else:
            curvature, slope = self._columns
            gradient = (curvature * self._here(moved)).sum(dim=1).sub_(slope).T
        return batch.without_idle_(gradient.to(torch.float32, memory_format=_ROWS))
