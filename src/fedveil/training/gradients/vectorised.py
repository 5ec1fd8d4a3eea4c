"""All clients in one call: which walk does it for a task and its records."""

import torch

from fedveil.data.federated import FederatedData
from fedveil.models.metrics import squared_error
from fedveil.models.task import Task
from fedveil.training.cohort import CohortData, tensors
from fedveil.training.gradients.linear_chain import chain_of
from fedveil.training.gradients.quadratic import Quadratics, QuadraticWalk
from fedveil.training.gradients.stacked import DualWalk, StackedWalk
from fedveil.training.gradients.vmapped import VmappedWalk


class Vectorised:
    """Batched algebra for a chain of linear layers, vmap otherwise."""

    def __init__(self, task: Task, data: FederatedData, *, whole: bool = False) -> None:
        """`whole`: full batches only."""
        self._task, self._data = task, data
        self._flatten, self._layers = chain_of(task)
        self._quadratics = Quadratics.of(data) if whole and quadratic(task, data) else None
        if not self._layers:
            x, y = data.examples(1)
            task.look(tensors(x), torch.from_numpy(y))

    @property
    def forks(self) -> bool:
        """Never: what cannot be captured is computed client by client."""
        return False

    def walk(
        self, start: torch.Tensor, cohort: CohortData, *, spanned: bool
    ) -> VmappedWalk | StackedWalk:
        """Batched algebra if the module is a chain of linear layers and the records fit it."""
        x = self._data.x
        if isinstance(x, dict) or not self._layers or not self._flat(x.ndim, x.dtype.kind):
            return VmappedWalk(self._task, start, cohort)
        if self._quadratics is not None:
            return QuadraticWalk(self._task, self._layers, start, cohort, self._quadratics)
        records, first = int(cohort.sizes.max(initial=1)), self._layers[0]
        if spanned and 2 * records <= first.inputs:
            return DualWalk(self._task, self._layers, start, cohort)
        return StackedWalk(self._task, self._layers, start, cohort)

    def _flat(self, dimensions: int, kind: str) -> bool:
        """Whether records are vectors of real numbers when they reach the first layer."""
        return kind == "f" and (dimensions == 2 or (self._flatten and dimensions > 2))


def quadratic(task: Task, data: FederatedData) -> bool:
    """Whether the clients' losses are kept as quadratic functions."""
    return linear_least_squares(task, data) and Quadratics.worthwhile(data)


def linear_least_squares(task: Task, data: FederatedData) -> bool:
    """Whether a loss is the squared error of a linear function of the record, with a bias."""
    _, layers = chain_of(task)
    return (
        task.loss is squared_error
        and len(layers) == 1
        and layers[0].after is None
        and layers[0].outputs == 1
        and (layers[0].weight, layers[0].bias) == (0, layers[0].inputs)
        and not isinstance(data.x, dict)
        and data.x.shape[1:] == (layers[0].inputs,)
        and data.x.dtype.kind == "f"
        and data.target.plain
    )
