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
    """Whether a task is linear regression: the squared error of one linear layer with a bias.

    The records must be vectors of real numbers, with one number as the target.
    """
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
        and not data.target.shape
    )


def uses_quadratics(task: Task, data: FederatedData) -> bool:
    """Whether full-batch gradients of `task` are computed from `Quadratics`.

    True for linear regression on float32 records, if the quadratics take no more memory than the
    records and at most 256 MiB.
    """
    if task.loss is not squared_error or not is_least_squares(task, data):
        return False
    x = single(data.x)
    width = x.shape[1] + 1
    numbers = data.clients * width * (width + 1)
    single_precision = x.dtype == np.float32 and data.y.dtype.kind == "f"
    return bool(single_precision and 8 * numbers <= min(_MOST, x.nbytes))


@dataclass(frozen=True, eq=False)
class Quadratics:
    """H and h of every client for a linear model with a bias, which comes last.

    In float64, up to rounding. They are as private as the records.

    Attributes:
        curvature: H, [clients, p, p].
        slope: h, [clients, p].
    """

    curvature: torch.Tensor
    slope: torch.Tensor

    @classmethod
    def of_data(cls, data: FederatedData) -> "Quadratics":
        """The quadratics of `data`, computed once and stored in `data.derived`."""
        if "quadratics" not in data.derived:
            data.derived["quadratics"] = cls._computed(data)
        stored: Quadratics = data.derived["quadratics"]
        return stored

    @classmethod
    def _computed(cls, data: FederatedData) -> "Quadratics":
        """Compute the quadratics of all clients, a few at a time."""
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
    """The trajectories of linear regression. Gradients of full batches are H w - h.

    Those of any other batch are computed from the records, as for any linear layer.
    """

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
    def _cohort_quadratics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """H [K, p, p] and h [K, p] of the cohort."""
        owners = torch.from_numpy(self._cohort.owners)
        curvature, slope = self._quadratics.curvature, self._quadratics.slope
        return curvature.index_select(0, owners), slope.index_select(0, owners)

    @cached_property
    def _clients_last(self) -> tuple[torch.Tensor, torch.Tensor]:
        """H and h of the cohort with the clients last, [p, p, K] and [p, K].

        K small products are fastest side by side.
        """
        curvature, slope = self._cohort_quadratics
        return curvature.permute(1, 2, 0).contiguous(), slope.T.contiguous()

    @cached_property
    def _wide_start(self) -> npt.NDArray[np.float64]:
        """The start in float64, [p, 1], or [p, K] where each client has its own."""
        wide = self._start.double().numpy()
        return wide[:, None] if wide.ndim == 1 else np.ascontiguousarray(wide.T)

    def mean_update(self, moved: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """The gradient of each client's mean loss, [K, P]. Zero for an idle client.

        H w - h for a `FullBatch`, computed from the records for any other batch.
        """
        if not isinstance(batch, FullBatch):
            return super().mean_update(moved, batch)
        if moved is None and self._start.ndim == 1:
            curvature, slope = self._cohort_quadratics
            start = self._start.double()
            gradient = torch.mv(curvature.flatten(0, 1), start).view_as(slope).sub_(slope)
        else:
            curvature, slope = self._clients_last
            here = self._wide_start
            if moved is not None:
                here = np.add(moved.numpy().T, here, order="C")  # adds and transposes in one go
            gradient = (curvature * torch.from_numpy(here)).sum(dim=1).sub_(slope).T
        rows = gradient.to(torch.float32, memory_format=torch.contiguous_format)
        return batch.zero_idle_(rows)
