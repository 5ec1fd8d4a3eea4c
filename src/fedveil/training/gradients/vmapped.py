"""Any module, all clients in one call, by `torch.func.vmap`: the general vectorised walk."""

from collections.abc import Callable

import torch
from torch.func import grad, vmap

from fedveil.base.inputs import taken
from fedveil.models.task import Features, Named, Task
from fedveil.privacy.clip import Clip
from fedveil.privacy.rows import Norm, add_weighted_, row_norms
from fedveil.training.batches import Batch
from fedveil.training.cohort import CohortData

Keys = torch.Tensor
"""One key per record, [B], where the module drops; none otherwise."""

_EXAMPLES = 1 << 26


class VmappedWalk:
    """Parameters of all clients side by side, [K, P]."""

    def __init__(self, task: Task, start: torch.Tensor, cohort: CohortData) -> None:
        self._task, self._start, self._cohort = task, start, cohort
        self.width, self.spanned = task.size, False

    def mean(self, moved: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """Autograd of each client's weighted losses."""

        def loss(
            named: Named, x: Features, y: torch.Tensor, weights: torch.Tensor, *keys: Keys
        ) -> torch.Tensor:
            return (self._task.losses(named, x, y, *keys) * weights).sum()

        here = self._start if moved is None else self._start + moved
        x, y = batch.of(self._cohort)
        self._task.ready(taken(x, 0), y[0])
        given = x, y, batch.weights, *self._keys(batch)
        each: Callable[..., Named] = vmap(
            grad(loss), in_dims=(None if here.ndim == 1 else 0, *(0 for _ in given))
        )
        found = each(self._task.named(here), *given)
        return batch.without_idle_(self._task.flattened(found))

    def descend_(self, moved: torch.Tensor | None, batch: Batch, rate: float) -> torch.Tensor:
        gradient = self.mean(moved, batch)
        return gradient.mul_(-rate) if moved is None else moved.add_(gradient, alpha=-rate)

    def clipped_sum(self, moved: torch.Tensor | None, batch: Batch, clip: Clip) -> torch.Tensor:
        """Every example's gradient is materialised, a few clients at a time."""
        x, y = batch.of(self._cohort)
        self._task.ready(taken(x, 0), y[0])
        given = x, y, *self._keys(batch)
        params = (self._start if moved is None else self._start + moved).expand(len(y), -1)
        out = torch.zeros(len(y), self.width)
        examples = vmap(_by_name(self._task))
        step = max(1, _EXAMPLES // (self.width * max(1, y.shape[1])))
        for a in range(0, len(y), step):
            here = slice(a, a + step)
            found = examples(self._task.named(params[here]), *(taken(part, here) for part in given))
            rows = self._task.flattened(found)
            clipped = clipped_or_zero_(rows.flatten(0, 1), clip).view_as(rows)
            out[here] = torch.einsum("kbp,kb->kp", clipped, batch.mask[here])
        return out

    def _keys(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """The records' keys, where the module drops."""
        return (batch.keys,) if self._task.drops else ()

    def norms(self, moved: torch.Tensor, norm: Norm) -> torch.Tensor:
        return row_norms(moved, norm)

    def rows(self, moved: torch.Tensor) -> torch.Tensor:
        return moved

    def add_weighted_(
        self, total: torch.Tensor, moved: torch.Tensor, weights: torch.Tensor
    ) -> None:
        add_weighted_(total, moved, weights)


def example_gradients(
    task: Task, flat: torch.Tensor, x: Features, y: torch.Tensor, *keys: Keys
) -> torch.Tensor:
    """The gradient of each example at the parameters `flat` [P]: rows [B, P]."""
    return task.flattened(_by_name(task)(task.named(flat), x, y, *keys))


def _by_name(task: Task) -> Callable[..., Named]:
    """(parameters, x, y, keys of B examples) -> the gradient of each, [B, *shape] by name."""

    def loss(named: Named, x: Features, y: torch.Tensor, *key: torch.Tensor) -> torch.Tensor:
        return task.each_loss(task.outputs(named, taken(x, None), *key), y[None])[0]

    def examples(named: Named, *given: Features) -> Named:
        every: Callable[..., Named] = vmap(grad(loss), in_dims=(None, *(0 for _ in given)))
        return every(named, *given)

    return examples


def clipped_or_zero_(rows: torch.Tensor, clip: Clip) -> torch.Tensor:
    """Clip the rows [B, P] in place; one that is not finite becomes zero."""
    norms = row_norms(rows, clip.norm)
    finite = torch.isfinite(norms)
    if not bool(finite.all()):
        rows[~finite] = 0.0
        norms = torch.where(finite, norms, 0.0)
    return clip.apply_(rows, norms).rows
