"""DP-SGD inside every client: each example's gradient clipped, noise on every step."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from fedveil.base.checks import POSITIVE
from fedveil.base.errors import BadInput
from fedveil.base.identity import Stated
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.clip import Clipped
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.noise.streams import KeySource, bits
from fedveil.privacy.noisy_steps import NoisySteps
from fedveil.training.batches import Batch, Draws
from fedveil.training.cohort import CohortData
from fedveil.training.directions import Adam, Directions, check_directions
from fedveil.training.rates import RateSchedule, check_rate_schedule, scheduled
from fedveil.training.turn import Turn, clip_rows_


@dataclass(frozen=True)
class ClientDpSgd:
    """DP-SGD from the round's model (Abadi et al. 2016; Naseri, algorithm 2).

    `noisy` comes from the plan: `ClientDpSgd(plan.steps, lr=0.1)`. One step: every record joins
    with its rate; the sum of the joined records' clipped gradients, plus N(0, (multiplier C)^2),
    is divided by rate x n, where n is the client's public number of records, or the nominal one.
    Momentum, weight decay, a proximal term, Adam and a schedule are those of `ClientSgd`; they see
    that noisy gradient and nothing else of the records.

    Guarantee: one step is `PoissonSampled(rate, Gaussian(multiplier))` about one record, under
    zero-out (n public) or add-remove (nominal). Nothing divides by the realised batch.

    | edge | behaviour |
    |---|---|
    | empty batch | a step of noise alone |
    | lr not positive | BadInput |
    | no clip | cannot be: a plan without one is refused |
    """

    noisy: NoisySteps
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0
    adam: Adam | None = None
    schedule: RateSchedule | None = None

    @property
    def identity(self) -> Stated:
        return (
            ("work", "dp-sgd"),
            ("steps", self.noisy),
            ("lr", self.lr),
            ("momentum", self.momentum),
            ("weight_decay", self.weight_decay),
            ("proximal", self.proximal),
            ("adam", self.adam),
            ("schedule", self.schedule),
        )

    def __post_init__(self) -> None:
        if not isinstance(self.noisy, NoisySteps):
            raise BadInput(
                f"DP-SGD with steps {self.noisy!r}: its rate, steps and noise are the plan's; make "
                "it as ClientDpSgd(plan.steps, lr=...)"
            )
        POSITIVE.check("lr", self.lr)
        check_directions(self)
        check_rate_schedule(self.schedule)

    def visits(self, records: int) -> int:
        """How many records a client with `records` of them looks at in a round, on average."""
        return self.noisy.steps * self.at_once(records)

    def at_once(self, records: int) -> int:
        """How many of them in one step."""
        return max(1, math.ceil(self.noisy.rate * records))

    def whole(self, records: int) -> bool:
        """Never: examples are clipped one by one."""
        return False

    def updates(self, turn: Turn) -> Clipped:
        """Run every client's steps side by side; the rows are private already."""
        if turn.clip is None:
            raise AssertionError("DP-SGD needs a clip on each example's gradient")
        cohort, round, streams, noisy = turn.cohort, turn.number, turn.streams, self.noisy
        mechanism = GaussianMechanism(noisy.multiplier)
        sensitivity = turn.clip.sensitivity(Relation.ADD_REMOVE)
        scales = np.full(len(cohort), noisy.multiplier * sensitivity)
        sizes = np.full(len(cohort), noisy.nominal) if noisy.nominal else cohort.sizes
        divisor = torch.from_numpy(noisy.rate * sizes.astype(np.float64)).float()[:, None]
        walk = turn.gradients.walk(turn.start, cohort, spanned=False)
        directions, rate = Directions(turn.start, self), scheduled(self.lr, self.schedule, round)
        moved: torch.Tensor | None = None
        for step in range(noisy.steps):
            total = walk.clipped_sum(moved, self.batch(cohort, round, step, streams), turn.clip)
            mechanism.add_(total, scales, streams.keys("step-noise", round, cohort.ids, step))
            direction = directions.of_(total.div_(divisor), moved).mul_(-rate)
            moved = direction if moved is None else moved.add_(direction)
        if moved is None:
            raise AssertionError("DP-SGD takes at least one step")
        return clip_rows_(moved, None)

    def batch(self, cohort: CohortData, round: int, step: int, streams: KeySource) -> Batch:
        """Poisson batches, moved to the front and padded to the longest of the cohort.

        A record joins with the rate, or up to 2^-53 less where that has more digits.
        """
        words = bits(streams.keys("records", round, cohort.ids, step), cohort.longest)
        drawn = (words >> np.uint64(11)) < np.uint64(math.floor(self.noisy.rate * 2.0**53))
        joined = drawn & (np.arange(cohort.longest) < cohort.sizes[:, None])
        width = max(1, int(joined.sum(axis=1).max(initial=0)))
        index = np.argsort(~joined, axis=1, kind="stable")[:, :width]
        mask = np.take_along_axis(joined, index, axis=1)
        draws = Draws(streams, round, cohort.ids, step)
        return Batch(torch.from_numpy(index), torch.from_numpy(mask.astype(np.float32)), draws)
