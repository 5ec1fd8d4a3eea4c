"""Local work on a cohort: from the round's model to one update per client, as rows [K, P]."""

import math
from dataclasses import dataclass

import torch

from fedveil.errors import BadInput
from fedveil.privacy.clipping import FixedBound
from fedveil.privacy.randomness import Streams
from fedveil.training.batches import Batches
from fedveil.training.cohort import CohortData
from fedveil.training.gradients import GradientFn


@dataclass(frozen=True)
class Updates:
    """What K clients send: `rows` [K, P], and whether the bound was active for each."""

    rows: torch.Tensor
    clipped: torch.Tensor


@dataclass(frozen=True)
class OneGradient:
    """FedSGD: the update is minus the full-batch gradient at the round's model."""

    def updates(
        self,
        gradients: GradientFn,
        start: torch.Tensor,
        cohort: CohortData,
        bound: FixedBound | None,
        round: int,
        streams: Streams,
    ) -> Updates:
        """One gradient per client, bounded when there is a bound."""
        batch = Batches(size=0, steps=1).of(cohort.ids, cohort.sizes, round, streams).at(0)
        params = start.expand(len(cohort), -1)
        return _bounded(-gradients(params, cohort.x, cohort.y, batch.mask), bound)


@dataclass(frozen=True)
class LocalSgd:
    """FedAvg: SGD from the round's model; the update is where it ended minus where it began.

    With a bound, the update is projected onto the ball around the *round's* model after every
    batch (Naseri et al., algorithm 1, line 21 as it must be read), and `clipped` tells whether
    any projection was active.
    """

    batches: Batches
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise BadInput(f"local.lr is {self.lr}: a positive number is needed")
        if not 0 <= self.momentum < 1:
            raise BadInput(f"local.momentum is {self.momentum}: a number in [0, 1) is needed")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise BadInput(f"local.weight_decay is {self.weight_decay}: a number >= 0 is needed")

    def updates(
        self,
        gradients: GradientFn,
        start: torch.Tensor,
        cohort: CohortData,
        bound: FixedBound | None,
        round: int,
        streams: Streams,
    ) -> Updates:
        """Run every client's local steps side by side."""
        plan = self.batches.of(cohort.ids, cohort.sizes, round, streams)
        update = torch.zeros(len(cohort), len(start))
        velocity = torch.zeros_like(update) if self.momentum else None
        clipped = torch.zeros(len(cohort), dtype=torch.bool)
        rows = torch.arange(len(cohort))[:, None]
        for step in range(plan.steps):
            batch = plan.at(step)
            params = start + update
            x, y = cohort.x[rows, batch.index], cohort.y[rows, batch.index]
            direction = gradients(params, x, y, batch.mask)
            if self.weight_decay:
                direction = direction + self.weight_decay * params
            if velocity is not None:
                direction = velocity = self.momentum * velocity + direction
            working = batch.mask.amax(dim=1, keepdim=True)
            bounded = _bounded(update - self.lr * working * direction, bound)
            update, clipped = bounded.rows, clipped | bounded.clipped
        return Updates(update, clipped)


LocalWork = OneGradient | LocalSgd


def _bounded(rows: torch.Tensor, bound: FixedBound | None) -> Updates:
    """Bound finite rows; a client that diverged keeps its row, and the server will refuse it."""
    if bound is None:
        return Updates(rows, torch.zeros(len(rows), dtype=torch.bool))
    finite = torch.isfinite(rows).all(dim=1)
    if bool(finite.all()):
        bounded = bound.apply(rows)
        return Updates(bounded.rows, bounded.clipped)
    bounded = bound.apply(torch.where(finite[:, None], rows, 0.0))
    return Updates(torch.where(finite[:, None], bounded.rows, rows), bounded.clipped)
