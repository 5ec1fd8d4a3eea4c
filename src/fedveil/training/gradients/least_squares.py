"""Least squares: a client's loss is a quadratic function, given by a few numbers.

The mean squared error of n records in w is w'Hw/2 - h'w + c with H = 2/n X'X and h = 2/n X'y. For a
client with more records than features (H, h) is worth storing: its gradient H w - h then costs
p^2 multiplications instead of 2 n p, and its records are not read in any round.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.inputs import single
from fedveil.data.federated import FederatedData
from fedveil.models.metrics import squared_error
from fedveil.models.task import Task
from fedveil.training.cohort import Batch, CohortData, FullBatch
from fedveil.training.gradients.linear_chains import LinearLayer, StackedTrajectory, linear_chain

_PIECE = 1 << 22
_MOST = 1 << 28


def is_least_squares(task: Task, data: FederatedData) -> bool:
    """Whether the loss is the squared error of a linear function of the record, with a bias."""
    _, layers = linear_chain(task)
    return (
        task.loss is squared_error
        and len(layers) == 1
        and layers[0].after is None
        and layers[0].outputs == 1
        and (layers[0].weight_index, layers[0].bias_index) == (0, layers[0].in_features)
        and not isinstance(data.x, dict)
        and data.x.shape[1:] == (layers[0].in_features,)
        and data.x.dtype.kind == "f"
        and data.target.plain
    )


def uses_quadratics(task: Task, data: FederatedData) -> bool:
    """Whether full-batch gradients of `task` come from `Quadratics`.

    They must take less memory and time than the records, and less than 256 MiB.
    """
    if not is_least_squares(task, data):
        return False
    x = single(data.x)
    width = x.shape[1] + 1
    numbers = data.clients * width * (width + 1)
    single_precision = x.dtype == np.float32 and data.y.dtype.kind == "f"
    return bool(single_precision and 8 * numbers <= min(_MOST, x.nbytes))


@dataclass(frozen=True, eq=False)
class Quadratics:
    """H and h of every client for a linear model with a bias, which comes last.

    In float64, and exact up to its rounding. They are as private as the records.

    Attributes:
        curvature: H, [clients, p, p].
        slope: h, [clients, p].
    """

    curvature: torch.Tensor
    slope: torch.Tensor

    @classmethod
    def of_data(cls, data: FederatedData) -> "Quadratics":
        """Those of `data`, which stores them for the next training."""
        if "quadratics" not in data.derived:
            data.derived["quadratics"] = cls._computed(data)
        stored: Quadratics = data.derived["quadratics"]
        return stored

    @classmethod
    def _computed(cls, data: FederatedData) -> "Quadratics":
        x = single(data.x)
        width = x.shape[1] + 1
        both = np.zeros((data.clients, width, width + 1))
        most = max(1, _PIECE // (width + 1))
        first = 0
        while first < data.clients:
            # clients first..last, whose records are few enough to be widened together
            last = int(np.searchsorted(data.offsets, data.offsets[first] + most)) - 1
            last = min(max(last, first + 1), data.clients)
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
            else:
                for k in range(first, last):
                    own = records[data.offsets[k] - a : data.offsets[k + 1] - a]
                    np.matmul(own[:, :width].T, own, out=both[k])
                    both[k] *= 2 / len(own)
            first = last
        found = torch.from_numpy(both)
        return cls(found[..., :width].contiguous(), found[..., width].contiguous())


class QuadraticTrajectory(StackedTrajectory):
    """Full batches by H w - h. Any other batch from the records, as for any linear layer."""

    def __init__(
        self,
        task: Task,
        layers: tuple[LinearLayer, ...],
        start: torch.Tensor,
        cohort: CohortData,
        quadratics: Quadratics,
    ) -> None:
        super().__init__(task, layers, start, cohort)
        self._quadratics = quadratics

    @cached_property
    def _own(self) -> tuple[torch.Tensor, torch.Tensor]:
        """H [K, p, p] and h [K, p] of the cohort."""
        owners = torch.from_numpy(self._cohort.owners)
        curvature, slope = self._quadratics.curvature, self._quadratics.slope
        return curvature.index_select(0, owners), slope.index_select(0, owners)

    @cached_property
    def _columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """H and h as [p, p, K] and [p, K]: K small products are fastest side by side."""
        curvature, slope = self._own
        return curvature.permute(1, 2, 0).contiguous(), slope.T.contiguous()

    @cached_property
    def _wide_start(self) -> npt.NDArray[np.float64]:
        """[p, 1], or [p, K] where each client has its own."""
        wide = self._start.double().numpy()
        return wide[:, None] if wide.ndim == 1 else np.ascontiguousarray(wide.T)

    def mean(self, moved: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        if not isinstance(batch, FullBatch):
            return super().mean(moved, batch)
        if moved is None and self._start.ndim == 1:
            curvature, slope = self._own
            start = self._start.double()
            gradient = torch.mv(curvature.flatten(0, 1), start).view_as(slope).sub_(slope)
        else:
            curvature, slope = self._columns
            here = self._wide_start
            if moved is not None:
                here = np.add(moved.numpy().T, here, order="C")  # adds and transposes in one go
            gradient = (curvature * torch.from_numpy(here)).sum(dim=1).sub_(slope).T
        rows = gradient.to(torch.float32, memory_format=torch.contiguous_format)
        return batch.zero_idle_(rows)
