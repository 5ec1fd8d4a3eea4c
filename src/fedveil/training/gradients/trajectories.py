"""Local trajectories of K clients: the interface, and the general implementation by vmap."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.func import grad, vmap

from fedveil.base.inputs import mapped, taken
from fedveil.models.task import Features, Named, Task
from fedveil.privacy.clip import Clip, Norm, add_weighted_, row_norms
from fedveil.privacy.noise.grid import Grid
from fedveil.privacy.noise.rotation import Rounding
from fedveil.training.cohort import Batch, CohortData

Keys = torch.Tensor
"""One dropout key per record, [B]. Passed only if the module has dropout."""

_EXAMPLES = 1 << 26


class LocalTrajectory(ABC):
    """The local steps of K clients from the round's model, each on its own records.

    `moved` [K, width] is each client's distance from the start, None if all are still there. Rows
    are parameters, or coordinates in the span of the clients' gradients. Both are linear, so that
    steps, momentum and scaling are the same arithmetic. Implementations agree up to rounding.

    Attributes:
        width: Length of a row.
        spanned: Whether rows are coordinates. If not, they are parameters, [K, P].
    """

    spanned = False

    def __init__(self, task: Task, start: torch.Tensor, cohort: CohortData) -> None:
        """`start` is one model [P], or [K, P] if the implementation computes side by side."""
        self._task, self._start, self._cohort = task, start, cohort
        self.width = task.size

    @abstractmethod
    def mean_update(self, moved: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """The gradient of each client's mean loss, [K, width]. Zero for an idle client."""

    def descend_(self, moved: torch.Tensor | None, batch: Batch, rate: float) -> torch.Tensor:
        """Compute moved - rate x mean gradient, [K, width].

        `moved` is overwritten and returned, unless it is None.
        """
        gradient = self.mean_update(moved, batch)
        return gradient.mul_(-rate) if moved is None else moved.add_(gradient, alpha=-rate)

    @abstractmethod
    def clipped_sum(self, moved: torch.Tensor | None, batch: Batch, clip: Clip) -> torch.Tensor:
        """The sum of each client's single-example gradients, every one clipped, [K, P].

        Only where rows are parameters, not coordinates. In a batch of units of several records it
        is the mean gradient of each unit's records that is clipped.

        Guarantee: adding or removing one record, or unit, moves a row by at most the clip. One
        whose gradient is not finite counts as zero.
        """

    def clipped_sum_on_grid(
        self, moved: torch.Tensor | None, batch: Batch, clip: Clip, grid: Grid | Rounding
    ) -> torch.Tensor:
        """The sum of one client's single-example gradients, each clipped and cut to the grid.

        In a batch of units of several records, of the mean gradients of the units. Exact, float64
        [P]. Cutting rounds towards zero. With a `Rounding`, each is rotated and rounded at random.
        Gradients that are not finite count as zero. AssertionError unless the trajectory is looped
        and has one client.

        Guarantee: a record's term is a function of the parameters and of that record, to the last
        bit, and no longer than the clip (docs/proofs/secure-dp-sgd.md).
        """
        raise AssertionError("exact sums are for one client at a time")

    def norms(self, moved: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The norms of rows as parameters, float64 [K]. Not finite where a row is not."""
        return row_norms(moved, norm)

    def update_rows(self, moved: torch.Tensor) -> torch.Tensor:
        """The rows [K, width] as parameters, [K, P]. May be `moved` itself."""
        return moved

    def add_weighted_(
        self, total: torch.Tensor, moved: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Add the rows `moved`, as parameters and times `weights` [K], to `total` (float64 [P]).

        In place, and computed in float64.
        """
        add_weighted_(total, moved, weights)


class Gradients(Protocol):
    """A way to compute gradients, which makes the trajectories of one execution mode."""

    @property
    def forks(self) -> bool:
        """Whether the model's own code has to run, so that each client is computed in a fork."""
        ...

    def trajectory(
        self, start: torch.Tensor, cohort: CohortData, *, spanned: bool
    ) -> LocalTrajectory:
        """A trajectory of the clients of `cohort` from `start`, [P] or, vectorised, also [K, P].

        `spanned` allows rows to be coordinates. Only L2 norms and sums of gradients may then be
        used.
        """
        ...


class VmappedTrajectory(LocalTrajectory):
    """The trajectories of any module that vmap can compute. Rows are parameters, [K, P]."""

    def mean_update(self, moved: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """The gradient of each client's mean loss, [K, P]. Zero for an idle client."""

        def loss(
            named: Named, x: Features, y: torch.Tensor, weights: torch.Tensor, *keys: Keys
        ) -> torch.Tensor:
            return (self._task.losses(named, x, y, *keys) * weights).sum()

        here = self._start if moved is None else self._start + moved
        x, y, *keys = self._records(batch)
        given = x, y, batch.weights, *keys
        each: Callable[..., Named] = vmap(
            grad(loss), in_dims=(None if here.ndim == 1 else 0, *(0 for _ in given))
        )
        return batch.zero_idle_(self._task.flattened(each(self._task.named(here), *given)))

    def clipped_sum(self, moved: torch.Tensor | None, batch: Batch, clip: Clip) -> torch.Tensor:
        """The sum of each client's single-example gradients, every one clipped, [K, P].

        Every example's gradient is written out, a few clients at a time.
        """
        given: tuple[Features, ...] = self._records(batch)
        loss, mask = _example_loss(self._task), batch.mask
        if batch.group > 1:
            loss, mask = _unit_loss(self._task), batch.by_unit(mask).amax(dim=2)
            x, y, *keys = (mapped(batch.by_unit, part) for part in given)
            given = (x, y, batch.unit_weights, *keys)
        gradients, (clients, units) = vmap(_row_gradients(loss)), mask.shape
        params = (self._start if moved is None else self._start + moved).expand(clients, -1)
        out = torch.zeros(clients, self.width)
        step = max(1, _EXAMPLES // (self.width * max(1, units)))
        for a in range(0, clients, step):
            here = slice(a, a + step)
            own = (taken(part, here) for part in given)
            rows = self._task.flattened(gradients(self._task.named(params[here]), *own))
            clipped = clip_or_zero_(rows.flatten(0, 1), clip).view_as(rows)
            out[here] = torch.einsum("kbp,kb->kp", clipped, mask[here])
        return out

    def _records(self, batch: Batch) -> tuple[Features, torch.Tensor, *tuple[torch.Tensor, ...]]:
        """(x, y) of a step, [K, B, ...], or (x, y, keys [K, B]) if the module has dropout."""
        x, y = mapped(batch.select, self._cohort.x), batch.select(self._cohort.y)
        self._task.ready(taken(x, 0), y[0])
        return (x, y, batch.dropout_keys) if self._task.drops else (x, y)


def example_gradients(
    task: Task, flat: torch.Tensor, x: Features, y: torch.Tensor, *keys: Keys
) -> torch.Tensor:
    """The gradient of each example's loss at the parameters `flat` [P], by vmap: rows [B, P]."""
    return task.flattened(_row_gradients(_example_loss(task))(task.named(flat), x, y, *keys))


def unit_gradients(task: Task, flat: torch.Tensor, *units: Features) -> torch.Tensor:
    """The gradient at `flat` [P] of each unit's loss, a weighted sum over its records, [B, P].

    By vmap over the units, and over the records of each: the module sees every record alone.

    Args:
        task: The model and its loss.
        flat: The parameters.
        units: x and y, the units' records [B, group, ...], the weight of each record in its unit
            [B, group], and the records' dropout keys [B, group], if the module has dropout.
    """
    return task.flattened(_row_gradients(_unit_loss(task))(task.named(flat), *units))


def _example_loss(task: Task) -> Callable[..., torch.Tensor]:
    """A function from (named parameters, x, y, *key) of one record to its loss."""

    def loss(named: Named, x: Features, y: torch.Tensor, *key: torch.Tensor) -> torch.Tensor:
        return task.each_loss(task.outputs(named, taken(x, None), *key), y[None])[0]

    return loss


def _unit_loss(task: Task) -> Callable[..., torch.Tensor]:
    """A function from (named parameters, x, y, weights, *keys) of one unit to its loss."""
    one = _example_loss(task)

    def loss(
        named: Named, x: Features, y: torch.Tensor, weights: torch.Tensor, *keys: torch.Tensor
    ) -> torch.Tensor:
        return (vmap(partial(one, named))(x, y, *keys) * weights).sum()

    return loss


def _row_gradients(loss: Callable[..., torch.Tensor]) -> Callable[..., Named]:
    """A function from named parameters and rows of the other arguments of `loss` to gradients.

    Its result maps a parameter's name to the gradient of each row's loss, [B, *shape].
    """

    def rows(named: Named, *given: Features) -> Named:
        every: Callable[..., Named] = vmap(grad(loss), in_dims=(None, *(0 for _ in given)))
        return every(named, *given)

    return rows


def clip_or_zero_(rows: torch.Tensor, clip: Clip) -> torch.Tensor:
    """Clip the rows [B, P] in place and return them. A row that is not finite becomes zero."""
    norms = row_norms(rows, clip.norm)
    finite = torch.isfinite(norms)
    if not bool(finite.all()):
        rows[~finite] = 0.0
        norms = torch.where(finite, norms, 0.0)
    return clip.apply_(rows, norms).rows


def is_unmodified(module: nn.Module) -> bool:
    """Whether a module has no hooks and no `forward` set on the instance.

    Submodules are not checked.
    """
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return not any(hooks) and "forward" not in vars(module)
