"""Mean gradients of units of several records, such as persons, clipped and summed."""

from collections.abc import Callable

import torch

from fedveil.base.inputs import mapped, taken
from fedveil.models.task import Features, Named, Task
from fedveil.training.gradients.per_example import ClippedExamples, rows_by_autograd
from fedveil.training.gradients.trajectories import Keys, unit_gradients


class ClippedUnits(ClippedExamples):
    """Clipped sums of mean gradients of units of at most `group` records, client by client.

    The methods of `ClippedExamples`, of units in place of examples: x, y and `more` are [B, group,
    ...], and `more` begins with the weight of each record in its unit, 0 for a place without one.

    Guarantee: a unit adds at most the clip to the sum, whatever its records are. One whose mean
    gradient is not finite adds zero. The module sees every record alone.
    """

    def __init__(self, task: Task, x: Features, y: torch.Tensor, group: int) -> None:
        super().__init__(task, x, y)
        self.group = group

        def several(values: torch.Tensor) -> torch.Tensor:
            return values[:, None].expand(-1, group, *values.shape[1:]).contiguous()

        x, y, *keys = self._sample
        weights = torch.full((len(y), group), 1 / group)
        self._sample = (mapped(several, x), several(y), weights, *map(several, keys))

    @property
    def _by_layers(self) -> bool:
        """False: each unit's mean gradient is written out."""
        return False

    @property
    def _ways(self) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
        """Each unit's gradient [B, P] by vmap, and record by record for layers without a rule."""
        return unit_gradients, _record_by_record


def _record_by_record(
    task: Task, flat: torch.Tensor, x: Features, y: torch.Tensor, weights: torch.Tensor, *keys: Keys
) -> torch.Tensor:
    """Each unit's gradient [B, P], by autograd on one record after the other.

    Arguments and result are those of `unit_gradients`.
    """

    def loss(named: Named, k: int) -> torch.Tensor:
        total = torch.zeros(())
        for j in torch.nonzero(weights[k])[:, 0].tolist():
            record = taken(taken(x, k), slice(j, j + 1))
            outputs = task.outputs(named, record, *(every[k, j] for every in keys))
            total = total + weights[k, j] * task.each_loss(outputs, y[k, j : j + 1]).sum()
        return total

    return rows_by_autograd(task, flat, loss, len(y))
