"""Local work on a cohort: from the round's model to one update per client, as rows [K, P]."""

import math
from dataclasses import dataclass

import torch

from fedveil.errors import BadInput
from fedveil.privacy.clipping import Bound, Bounded
from fedveil.privacy.randomness import Streams
from fedveil.training.batches import Batches
from fedveil.training.cohort import CohortData
from fedveil.training.dp_sgd import LocalDpSgd
from fedveil.training.gradients import Gradients


@dataclass(frozen=True)
class OneGradient:
    """FedSGD: the update is minus the full-batch gradient at the round's model."""

    def updates(
        self,
        gradients: Gradients,
        start: torch.Tensor,
        cohort: CohortData,
        bound: Bound | None,
        round: int,
        streams: Streams,
    ) -> Bounded:
        """One gradient per client, bounded when there is a bound."""
        batch = Batches(size=0, steps=1).of(cohort.ids, cohort.sizes, round, streams).at(0)
        params = start.expand(len(cohort), -1)
        return _bounded(-gradients.mean(params, cohort.x, cohort.y, batch.mask), bound)


@dataclass(frozen=True)
class Decay:
    """2 / (mu (k + gamma)) in local iteration k, counted over all rounds (Fu et al., Theorem 3)."""

    mu: float
    gamma: float

    def __post_init__(self) -> None:
        for name, value in (("mu", self.mu), ("gamma", self.gamma)):
            if not (value > 0 and math.isfinite(value)):
                raise BadInput(f"local.{name} is {value}: a positive number is needed")

    def rate(self, iteration: int) -> float:
        return 2 / (self.mu * (iteration + self.gamma))


@dataclass(frozen=True)
class LocalSgd:
    """FedAvg: SGD from the round's model; the update is where it ended minus where it began.

    With a bound on the update it is projected onto the ball around the *round's* model after
    every batch (Naseri et al., algorithm 1, line 21 as it must be read); with a bound per gradient
    every gradient is bounded instead (Fu et al.). `clipped` tells whether either was active in any
    step. `decay`, when given, replaces the constant learning rate.
    """

    batches: Batches
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: Decay | None = None

    def __post_init__(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise BadInput(f"local.lr is {self.lr}: a positive number is needed")
        if not 0 <= self.momentum < 1:
            raise BadInput(f"local.momentum is {self.momentum}: a number in [0, 1) is needed")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise BadInput(f"local.weight_decay is {self.weight_decay}: a number >= 0 is needed")

    def rate(self, step: int, round: int) -> float:
        """The learning rate of local step `step` (from 0) in `round` (from 1)."""
        if self.decay is None:
            return self.lr
        return self.decay.rate((round - 1) * (self.batches.steps or 1) + step)

    def reach(self, round: int) -> float:
        """The sum of the learning rates of `round`, which is what a bound per gradient needs.

        Only for a fixed number of steps without momentum or weight decay: with either, the update
        is not a sum of bounded gradients.
        """
        if self.batches.steps is None or self.momentum or self.weight_decay:
            raise BadInput(
                "bound.each = 'gradient' needs local.steps, no momentum and no weight decay: bound "
                "the update instead (bound.each = 'update')"
            )
        return sum(self.rate(step, round) for step in range(self.batches.steps))

    def updates(
        self,
        gradients: Gradients,
        start: torch.Tensor,
        cohort: CohortData,
        bound: Bound | None,
        round: int,
        streams: Streams,
    ) -> Bounded:
        """Run every client's local steps side by side."""
        plan = self.batches.of(cohort.ids, cohort.sizes, round, streams)
        per_gradient = None if bound is None else bound.per_gradient
        update = torch.zeros(len(cohort), len(start))
        velocity = torch.zeros_like(update) if self.momentum else None
        clipped = torch.zeros(len(cohort), dtype=torch.bool)
        for step in range(plan.steps):
            batch = plan.at(step)
            params = start + update
            x, y = batch.of(cohort)
            direction = gradients.mean(params, x, y, batch.mask)
            if per_gradient is not None:
                short = _bounded(direction, per_gradient)
                direction, clipped = short.rows, clipped | short.clipped
            if self.weight_decay:
                direction = direction + self.weight_decay * params
            if velocity is not None:
                direction = velocity = self.momentum * velocity + direction
            working = batch.mask.amax(dim=1, keepdim=True) > 0
            update = update - self.rate(step, round) * torch.where(working, direction, 0.0)
            if bound is not None and per_gradient is None:
                projected = _bounded(update, bound)
                update, clipped = projected.rows, clipped | projected.clipped
        final = _bounded(update, bound)
        return Bounded(final.rows, final.norms, clipped | final.clipped)


LocalWork = OneGradient | LocalSgd | LocalDpSgd


def _bounded(rows: torch.Tensor, bound: Bound | None) -> Bounded:
    """Bound finite rows; a client that diverged keeps its row, and the server will refuse it."""
    finite = torch.isfinite(rows).all(dim=1)
    whole = rows if bool(finite.all()) else torch.where(finite[:, None], rows, 0.0)
    if bound is None:
        norms = torch.linalg.vector_norm(whole, dim=1, dtype=torch.float64)
        return Bounded(rows, norms, torch.zeros(len(rows), dtype=torch.bool))
    bounded = bound.apply(whole)
    if whole is rows:
        return bounded
    kept = torch.where(finite[:, None], bounded.rows, rows)
    return Bounded(kept, bounded.norms, bounded.clipped)
