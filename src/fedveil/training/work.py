"""Local work of a cohort: from the round's model to one update per client, as rows [K, P]."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from fedveil.base.checks import FRACTION, NOT_NEGATIVE, POSITIVE, shown
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, known_as, named_values
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.clip import Clipped, Norm
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.noise.streams import KeySource, bits
from fedveil.privacy.release import NoisySteps
from fedveil.training.cohort import Batch, Batches, CohortData, Draws, FullBatch
from fedveil.training.reports import ClientBatch, DualUpdates, clip_rows_
from fedveil.training.server import RateSchedule, RateShape, check_rate_schedule, scheduled

__all__ = [
    "Adam",
    "ClientWork",
    "Decay",
    "OneGradient",
    "RateSchedule",
    "RateShape",
]


@dataclass(frozen=True)
class OneGradient:
    """FedSGD: the update is minus the full-batch gradient at the round's model."""

    @property
    def identity(self) -> Stated:
        return (("work", "gradient"),)

    def records_per_round(self, records: int) -> int:
        """How many records a client with `records` of them uses in a round."""
        return records

    def records_per_step(self, records: int) -> int:
        """How many records such a client uses in one step."""
        return records

    def full_batches(self, records: int) -> bool:
        """Whether every step of such a client is the mean over all of its records."""
        return True

    def updates(self, clients: ClientBatch) -> Clipped:
        """One gradient per client, clipped if there is a clip."""
        cohort, round = clients.cohort, clients.round
        draws = Draws(round.streams, round.number, cohort.ids, 0)
        batch = FullBatch(cohort.sizes, cohort.longest, draws)
        trajectory = clients.gradients.trajectory(round.start, cohort, spanned=False)
        return clip_rows_(trajectory.mean(None, batch).neg_(), round.clip)


@dataclass(frozen=True)
class Decay:
    """2 / (mu (k + gamma)) in local iteration k, counted over all rounds (Fu et al., Theorem 3)."""

    mu: float
    gamma: float

    @property
    def identity(self) -> Stated:
        return (("rates", "decay"), ("mu", self.mu), ("gamma", self.gamma))

    def __post_init__(self) -> None:
        POSITIVE.check("mu", self.mu)
        POSITIVE.check("gamma", self.gamma)

    def rate(self, iteration: int) -> float:
        return 2 / (self.mu * (iteration + self.gamma))


@dataclass(frozen=True)
class Adam:
    """Adam in place of plain steps (Kingma and Ba 2015). Its moments start at zero in every round.

    Attributes:
        beta1: Share of the first moment that is kept from step to step.
        beta2: Share of the second moment that is kept.
        floor: Added to the root of the second moment.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    floor: float = 1e-8

    @property
    def identity(self) -> Stated:
        return (("direction", "adam"), *named_values(self, "beta1", "beta2", "floor"))

    def __post_init__(self) -> None:
        FRACTION.check("beta1", self.beta1)
        FRACTION.check("beta2", self.beta2)
        POSITIVE.check("floor", self.floor)


@dataclass(frozen=True)
class ClientSgd:
    """FedAvg: SGD from the round's model. The update is the final minus the initial model.

    With a clip on the update it is projected onto the ball around the *round's* model after
    every batch (Naseri et al., algorithm 1, line 21 as it must be read). With a clip per gradient
    every gradient is clipped instead (Fu et al.). `clipped` tells whether either was active in any
    step.

    Attributes:
        batches: The records of each local step.
        lr: Learning rate.
        momentum: Share of the last step that is added to the next.
        weight_decay: Times the model, added to every gradient. With `adam` it is decoupled (AdamW).
        decay: Replaces the learning rate.
        proximal: Times the distance from the round's model, added to every gradient (FedProx).
        adam: Replaces plain steps.
        schedule: Changes the learning rate over the rounds.
    """

    batches: Batches
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: Decay | None = None
    proximal: float = 0.0
    adam: Adam | None = None
    schedule: RateSchedule | None = None

    @property
    def identity(self) -> Stated:
        return (
            ("work", "sgd"),
            *named_values(
                self,
                "batches",
                "lr",
                "momentum",
                "weight_decay",
                "decay",
                "proximal",
                "adam",
                "schedule",
            ),
        )

    def __post_init__(self) -> None:
        if not isinstance(self.batches, Batches):
            raise BadInput(f"batches is {shown(self.batches)}: use Batches(size, epochs or steps)")
        _check_steps(self)
        if self.decay is not None and not isinstance(self.decay, Decay):
            raise BadInput(f"decay is {shown(self.decay)}: use Decay(mu, gamma), or None")
        if self.decay is not None and self.schedule is not None:
            raise BadArgument(
                "{decay} says what the learning rate is in every step: leave {schedule} out",
                "decay",
                "schedule",
            )

    @property
    def plain(self) -> bool:
        """Whether a step is the learning rate times a gradient, and nothing else."""
        return not (self.momentum or self.weight_decay or self.proximal) and self.adam is None

    def rate(self, step: int, round: int) -> float:
        """The learning rate of local step `step` (from 0) in `round` (from 1)."""
        if self.decay is None:
            return scheduled(self.lr, self.schedule, round)
        return self.decay.rate((round - 1) * (self.batches.steps or 1) + step)

    @known_as("reach")
    def reach(self, round: int) -> float:
        """The sum of the learning rates of `round`: the factor of a clip per gradient.

        Only for a fixed number of plain steps: with anything but gradients in them, the update is
        not a sum of clipped gradients.
        """
        if self.batches.steps is None or not self.plain:
            raise BadInput(
                "clip.each = 'gradient' needs client.steps, no momentum, no weight decay, no "
                "proximal term and no Adam: clip the update instead (clip.each = 'update')"
            )
        return sum(self.rate(step, round) for step in range(self.batches.steps))

    @known_as("published reach")
    def published_reach(self, round: int) -> float:
        """The same as Fu et al. have it: all steps with the learning rate of the very first."""
        return (self.batches.steps or 1) * self.rate(0, 1)

    def records_per_round(self, records: int) -> int:
        """How many records a client with `records` of them uses in a round."""
        if self.batches.epochs is not None:
            return self.batches.epochs * records
        return (self.batches.steps or 1) * self.records_per_step(records)

    def records_per_step(self, records: int) -> int:
        """How many records such a client uses in one step."""
        return min(self.batches.size or records, records)

    def full_batches(self, records: int) -> bool:
        """Whether every step of such a client is the mean over all of its records."""
        return self.records_per_step(records) == records

    def updates(self, clients: ClientBatch) -> Clipped | DualUpdates:
        """Take every client's local steps, all clients side by side."""
        round, cohort = clients.round, clients.cohort
        clip = round.clip
        batches = self.batches.for_round(cohort.ids, cohort.sizes, round.number, round.streams)
        linear = not self.weight_decay and self.adam is None
        spanned = linear and (clip is None or clip.norm is Norm.L2)
        trajectory = clients.gradients.trajectory(round.start, cohort, spanned=spanned)
        per_gradient = None if clip is None else clip.per_gradient
        per_update = None if clip is None or per_gradient is not None else clip
        directions, plain = Directions(round.start, self), self.plain
        moved: torch.Tensor | None = None
        clipped = torch.zeros(len(cohort), dtype=torch.bool)
        for step in range(batches.steps):
            batch, rate = batches.batch(step), self.rate(step, round.number)
            if per_gradient is None and plain:
                moved = trajectory.descend_(moved, batch, rate)
            else:
                gradient = trajectory.mean(moved, batch)
                if per_gradient is not None:
                    lengths = trajectory.norms(gradient, per_gradient.norm)
                    clipped |= clip_rows_(gradient, per_gradient, lengths).clipped
                if not plain:
                    gradient = batch.zero_idle_(directions.next_(gradient, moved))
                moved = gradient.mul_(-rate) if moved is None else moved.sub_(gradient, alpha=rate)
            if per_update is not None:
                lengths = trajectory.norms(moved, per_update.norm)
                clipped |= clip_rows_(moved, per_update, lengths).clipped
        if moved is None:
            raise AssertionError("local SGD takes at least one step")
        if clients.only_sum and trajectory.spanned:
            return DualUpdates(trajectory, moved, clipped)
        final = clip_rows_(trajectory.rows(moved), clip)
        return Clipped(final.rows, final.norms, clipped | final.clipped)


@dataclass(frozen=True)
class ClientDpSgd:
    """DP-SGD from the round's model (Abadi et al. 2016; Naseri, algorithm 2).

    `noisy` comes from the plan: `ClientDpSgd(plan.steps, lr=0.1)`. One step: every record joins
    with its rate. The sum of the joined records' clipped gradients, plus N(0, (multiplier C)^2),
    is divided by rate x n, where n is the client's public number of records, or the nominal one.
    Momentum, weight decay, a proximal term, Adam and a schedule are those of `ClientSgd`. They see
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
            *named_values(self, "lr", "momentum", "weight_decay", "proximal", "adam", "schedule"),
        )

    def __post_init__(self) -> None:
        if not isinstance(self.noisy, NoisySteps):
            raise BadInput(
                f"DP-SGD with steps {self.noisy!r}: its rate, steps and noise are the plan's; make "
                "it as ClientDpSgd(plan.steps, lr=...)"
            )
        _check_steps(self)

    def records_per_round(self, records: int) -> int:
        """How many records a client with `records` of them uses in a round, on average."""
        return self.noisy.steps * self.records_per_step(records)

    def records_per_step(self, records: int) -> int:
        """How many records such a client uses in one step, on average."""
        return max(1, math.ceil(self.noisy.rate * records))

    def full_batches(self, records: int) -> bool:
        """Never: examples are clipped one by one."""
        return False

    def updates(self, clients: ClientBatch) -> Clipped:
        """Take every client's steps, all clients side by side. The rows are private already."""
        start, clip = clients.round.start, clients.round.clip
        if clip is None:
            raise AssertionError("DP-SGD needs a clip on each example's gradient")
        round, streams = clients.round.number, clients.round.streams
        cohort, noisy = clients.cohort, self.noisy
        mechanism = GaussianMechanism(noisy.multiplier)
        sensitivity = clip.sensitivity(Relation.ADD_REMOVE)
        scales = np.full(len(cohort), noisy.multiplier * sensitivity)
        sizes = np.full(len(cohort), noisy.nominal) if noisy.nominal else cohort.sizes
        divisor = torch.from_numpy(noisy.rate * sizes.astype(np.float64)).float()[:, None]
        trajectory = clients.gradients.trajectory(start, cohort, spanned=False)
        directions, rate = Directions(start, self), scheduled(self.lr, self.schedule, round)
        moved: torch.Tensor | None = None
        for step in range(noisy.steps):
            batch = self.batch(cohort, round, step, streams)
            total = trajectory.clipped_sum(moved, batch, clip)
            mechanism.add_(total, scales, streams.keys("step-noise", round, cohort.ids, step))
            direction = directions.next_(total.div_(divisor), moved).mul_(-rate)
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


ClientWork = OneGradient | ClientSgd | ClientDpSgd


def is_builtin_work(work: ClientWork) -> bool:
    """Whether a work is fedveil's own: a client's update then depends on no other client."""
    return type(work) in (OneGradient, ClientSgd, ClientDpSgd)


def _check_steps(work: ClientSgd | ClientDpSgd) -> None:
    """Refuse invalid numbers of a client's steps, and momentum together with Adam."""
    POSITIVE.check("lr", work.lr)
    FRACTION.check("momentum", work.momentum)
    NOT_NEGATIVE.check("weight_decay", work.weight_decay)
    NOT_NEGATIVE.check("proximal", work.proximal)
    if work.adam is not None and not isinstance(work.adam, Adam):
        raise BadInput(f"adam is {shown(work.adam)}: use Adam(beta1, beta2, floor), or None")
    if work.adam is not None and work.momentum:
        raise BadArgument(
            "{momentum} has no effect on adam, which has beta1: leave it out", "momentum"
        )
    check_rate_schedule(work.schedule)


class Directions:
    """The directions of K clients' local steps in one round, rows [K, width].

    direction = gradient + proximal x (model - round's model) + weight_decay x model, then momentum.
    Adam comes before weight decay, which is then decoupled (AdamW): the moments do not scale it.
    Rows may be coordinates in a span if there is neither weight decay nor Adam.

    All of it is computed from gradients and public numbers. Where the gradients are private
    already, as those of DP-SGD are, so are the directions.
    """

    def __init__(self, start: torch.Tensor, work: ClientSgd | ClientDpSgd) -> None:
        """`start` is the round's model, [P] or [K, P]."""
        self._start, self._work = start, work
        self._velocity: torch.Tensor | None = None
        self._moments: tuple[torch.Tensor, torch.Tensor] | None = None
        self._steps = 0

    def next_(self, gradient: torch.Tensor, moved: torch.Tensor | None) -> torch.Tensor:
        """The direction of the next step from `moved`, computed in place of `gradient`."""
        work = self._work
        if work.proximal and moved is not None:
            gradient.add_(moved, alpha=work.proximal)
        if work.adam is not None:
            gradient = self._adapted_(gradient, work.adam)
        if work.weight_decay:
            here = self._start if moved is None else self._start + moved
            gradient.add_(here, alpha=work.weight_decay)
        if work.momentum:
            before = 0 if self._velocity is None else work.momentum * self._velocity
            self._velocity = gradient + before
            return self._velocity.clone()
        return gradient

    def _adapted_(self, gradient: torch.Tensor, adam: Adam) -> torch.Tensor:
        """The first moment over the root of the second, both unbiased, in place of `gradient`."""
        if self._moments is None:
            self._moments = torch.zeros_like(gradient), torch.zeros_like(gradient)
        first, second = self._moments
        self._steps += 1
        first.mul_(adam.beta1).add_(gradient, alpha=1 - adam.beta1)
        second.mul_(adam.beta2).addcmul_(gradient, gradient, value=1 - adam.beta2)
        torch.div(second, 1 - adam.beta2**self._steps, out=gradient)
        gradient.sqrt_().add_(adam.floor)
        return torch.div(first, gradient, out=gradient).div_(1 - adam.beta1**self._steps)
