"""DP-SGD inside every client: each example's gradient bounded, noise on every step."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from fedveil.errors import BadInput
from fedveil.privacy.claims import Relation
from fedveil.privacy.clipping import Bounded
from fedveil.privacy.mechanisms import GaussianMechanism
from fedveil.privacy.randomness import KeySource, bits
from fedveil.training.batches import Batch
from fedveil.training.cohort import CohortData
from fedveil.training.turn import Turn, bounded_


@dataclass(frozen=True)
class LocalDpSgd:
    """`steps` steps of DP-SGD from the round's model (Abadi et al. 2016; Naseri, algorithm 2).

    One step: every record joins with probability `rate`; the sum of the joined records' bounded
    gradients, plus N(0, (multiplier C)^2), is divided by rate x n, where n is the client's public
    number of records, or `nominal` for everyone.

    Guarantee: one step is `PoissonSampled(rate, Gaussian(multiplier))` about one record, under
    zero-out (n public) or add-remove (nominal). Nothing divides by the realised batch.

    | edge | behaviour |
    |---|---|
    | empty batch | a step of noise alone |
    | nominal < 1, lr not positive | BadInput |
    | no bound | cannot be: a plan without one is refused |
    """

    rate: float
    steps: int
    lr: float
    multiplier: float
    nominal: int | None = None

    def __post_init__(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise BadInput(f"local.lr is {self.lr}: a positive number is needed")
        if self.nominal is not None and self.nominal < 1:
            raise BadInput(f"local.nominal is {self.nominal}: at least 1 record is needed")

    def visits(self, records: int) -> int:
        """How many records a client with `records` of them looks at in a round, on average."""
        return self.steps * self.at_once(records)

    def at_once(self, records: int) -> int:
        """How many of them in one step."""
        return max(1, math.ceil(self.rate * records))

    def whole(self, records: int) -> bool:
        """Never: examples are bounded one by one."""
        return False

    def updates(self, turn: Turn) -> Bounded:
        """Run every client's steps side by side; the rows are private already."""
        if turn.bound is None:
            raise AssertionError("DP-SGD needs a bound on each example's gradient")
        cohort, round, streams = turn.cohort, turn.round, turn.streams
        mechanism = GaussianMechanism(self.multiplier)
        sensitivity = turn.bound.sensitivity(Relation.ADD_REMOVE)
        scales = np.full(len(cohort), self.multiplier * sensitivity)
        sizes = np.full(len(cohort), self.nominal) if self.nominal else cohort.sizes
        divisor = torch.from_numpy(self.rate * sizes.astype(np.float64)).float()[:, None]
        walk = turn.gradients.walk(turn.start, cohort, spanned=False)
        moved: torch.Tensor | None = None
        for step in range(self.steps):
            total = walk.bounded_sum(moved, self.batch(cohort, round, step, streams), turn.bound)
            mechanism.add_(total, scales, streams.keys("step-noise", round, cohort.ids, step))
            total.div_(divisor).mul_(-self.lr)
            moved = total if moved is None else moved.add_(total)
        if moved is None:
            raise AssertionError("DP-SGD takes at least one step")
        return bounded_(moved, None)

    def batch(self, cohort: CohortData, round: int, step: int, streams: KeySource) -> Batch:
        """Poisson batches, moved to the front and padded to the longest of the cohort.

        A record joins with `rate`, or up to 2^-53 less where `rate` has more digits.
        """
        words = bits(streams.keys("records", round, cohort.ids, step), cohort.x.shape[1])
        drawn = (words >> np.uint64(11)) < np.uint64(math.floor(self.rate * 2.0**53))
        joined = drawn & (np.arange(cohort.x.shape[1]) < cohort.sizes[:, None])
        width = max(1, int(joined.sum(axis=1).max(initial=0)))
        index = np.argsort(~joined, axis=1, kind="stable")[:, :width]
        mask = np.take_along_axis(joined, index, axis=1)
        return Batch(torch.from_numpy(index), torch.from_numpy(mask.astype(np.float32)))
