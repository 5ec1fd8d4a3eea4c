"""Local work of a cohort: from the round's model to one update per client, as rows [K, P]."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.checks import NOT_NEGATIVE, POSITIVE, shown
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, known_as, named_values, stated
from fedveil.privacy.accounting.claims import Relation, Unit
from fedveil.privacy.clip import Clipped, Norm
from fedveil.privacy.noise.mechanisms import GaussianMechanism, add_to_sum_
from fedveil.privacy.noise.rotation import RotatedGrid, Rounding
from fedveil.privacy.noise.streams import KeySource, bits
from fedveil.privacy.release import NoisySteps
from fedveil.training.cohort import Batch, Batches, CohortData, Draws, FullBatch
from fedveil.training.gradients.trajectories import LocalTrajectory
from fedveil.training.reports import ClientBatch, DualUpdates, clip_rows_
from fedveil.training.server import RateSchedule, RateShape, check_optimizer, scheduled

__all__ = ["Adam", "ClientWork", "Decay", "OneGradient", "RateSchedule", "RateShape", "SiteSum"]


@dataclass(frozen=True)
class OneGradient:
    """FedSGD: the update is minus the full-batch gradient at the round's model."""

    identity = stated("work", "gradient")

    def records_per_round(self, records: int) -> int:
        """The records that a client with `records` records uses in a round: all of them."""
        return records

    def records_per_step(self, records: int) -> int:
        """The records that a client with `records` records uses in one step: all of them."""
        return records

    def updates(self, clients: ClientBatch) -> Clipped:
        """Minus each client's full-batch gradient, [K, P], clipped if the round has a clip."""
        cohort, round = clients.cohort, clients.round
        draws = Draws(round.streams, round.number, cohort.ids, 0)
        batch = FullBatch(cohort.sizes, cohort.longest, draws)
        trajectory = clients.gradients.trajectory(round.start, cohort, spanned=False)
        return clip_rows_(trajectory.mean_update(None, batch).neg_(), round.clip)


@dataclass(frozen=True)
class Decay:
    """A learning rate that falls with the local iterations k, counted over all rounds.

    It is 2 / (mu (k + gamma)) (Fu et al., Theorem 3).
    """

    mu: float
    gamma: float

    identity = stated("rates", "decay", "mu", "gamma")

    def __post_init__(self) -> None:
        """Raise BadInput unless both are positive numbers."""
        POSITIVE.check("mu", self.mu)
        POSITIVE.check("gamma", self.gamma)

    def rate(self, iteration: int) -> float:
        """The learning rate of `iteration` k, counted from 0 over all rounds."""
        return 2 / (self.mu * (iteration + self.gamma))


@dataclass(frozen=True)
class Adam:
    """Adam in place of plain steps (Kingma and Ba 2015). Moments start at zero in each round.

    Attributes:
        beta1: Share of the first moment that is kept from step to step.
        beta2: Share of the second moment that is kept.
        floor: Added to the root of the second moment.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    floor: float = 1e-8

    identity = stated("direction", "adam", "beta1", "beta2", "floor")

    def __post_init__(self) -> None:
        """Raise BadInput unless the betas are in [0, 1) and the floor is positive."""
        check_optimizer(self)


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
        """Identity pairs: ("work", "sgd"), then (name, value) of every field, also if None."""
        return (
            ("work", "sgd"),
            *named_values(self, "batches", "lr", "momentum", "weight_decay", "decay"),
            *named_values(self, "proximal", "adam", "schedule"),
        )

    def __post_init__(self) -> None:
        """Raise BadInput for a field of a wrong type or out of range.

        Momentum together with Adam is refused, and so is `decay` together with `schedule` or with
        batches of whole epochs, which have no common number of steps per round.
        """
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
        if self.decay is not None and self.batches.steps is None:
            raise BadArgument(
                "{decay} counts local steps: give batches of {steps}", "decay", "steps"
            )

    @property
    def plain(self) -> bool:
        """Whether a step is the learning rate times a gradient, and nothing else.

        False with momentum, weight decay, a proximal term or Adam.
        """
        return not (self.momentum or self.weight_decay or self.proximal) and self.adam is None

    def rate(self, step: int, round: int) -> float:
        """The learning rate of local step `step` (from 0) in `round` (from 1).

        With `decay` it is that of iteration (round - 1) x `batches.steps` + step.
        """
        if self.decay is None or self.batches.steps is None:
            return scheduled(self.lr, self.schedule, round)
        return self.decay.rate((round - 1) * self.batches.steps + step)

    @known_as("reach")
    def reach(self, round: int) -> float:
        """The sum of the learning rates of `round` (from 1): the factor of a clip per gradient.

        Raises BadInput unless the number of steps is fixed and steps are plain: otherwise the
        update is not a sum of clipped gradients.
        """
        if self.batches.steps is None or not self.plain:
            raise BadInput(
                "clip.each = 'gradient' needs client.steps, no momentum, no weight decay, no "
                "proximal term and no Adam: clip the update instead (clip.each = 'update')"
            )
        return sum(self.rate(step, round) for step in range(self.batches.steps))

    @known_as("published reach")
    def published_reach(self, round: int) -> float:
        """The reach as Fu et al. compute it: all steps have the learning rate of the very first.

        `round` has no effect. Without a fixed number of steps it is one step's rate.
        """
        return (self.batches.steps or 1) * self.rate(0, 1)

    def records_per_round(self, records: int) -> int:
        """The records that a client with `records` records uses in a round, counting repeats."""
        if self.batches.epochs is not None:
            return self.batches.epochs * records
        return (self.batches.steps or 1) * self.records_per_step(records)

    def records_per_step(self, records: int) -> int:
        """The most records that a client with `records` records uses in one step."""
        return min(self.batches.size or records, records)

    def updates(self, clients: ClientBatch) -> Clipped | DualUpdates:
        """The updates of all clients after their local steps, computed side by side.

        `DualUpdates` if only their sum is used and the trajectory has a span. Otherwise rows [K,
        P].
        """
        round, cohort = clients.round, clients.cohort
        clip = round.clip
        batches = self.batches.for_round(
            cohort.ids, cohort.sizes, round.number, round.streams, cohort.longest
        )
        linear = not self.weight_decay and self.adam is None
        spanned = linear and (clip is None or clip.norm is Norm.L2)
        trajectory = clients.gradients.trajectory(round.start, cohort, spanned=spanned)
        per_gradient = None if clip is None else clip.per_gradient
        per_update = None if clip is None or per_gradient is not None else clip
        directions = None if self.plain else Directions(round.start, self)
        moved: torch.Tensor | None = None
        clipped = torch.zeros(len(cohort), dtype=torch.bool)
        for step in range(batches.steps):
            batch, rate = batches.batch(step), self.rate(step, round.number)
            if per_gradient is None and directions is None:
                moved = trajectory.descend_(moved, batch, rate)
            else:
                gradient = trajectory.mean_update(moved, batch)
                if per_gradient is not None:
                    lengths = trajectory.norms(gradient, per_gradient.norm)
                    clipped |= clip_rows_(gradient, per_gradient, lengths).clipped
                if directions is not None:
                    gradient = batch.zero_idle_(directions.next_(gradient, moved))
                moved = gradient.mul_(-rate) if moved is None else moved.sub_(gradient, alpha=rate)
            if per_update is not None:
                lengths = trajectory.norms(moved, per_update.norm)
                clipped |= clip_rows_(moved, per_update, lengths).clipped
        assert moved is not None, "local SGD takes at least one step"
        if clients.only_sum and trajectory.spanned:
            return DualUpdates(trajectory, moved, clipped)
        bounds = None
        if trajectory.spanned and round.streams.secure and clip is not None:
            bounds = trajectory.norms(moved, clip.norm)  # the server measures rows again
        final = clip_rows_(trajectory.update_rows(moved), clip, bounds)
        return Clipped(final.rows, final.norms, clipped | final.clipped)


@dataclass(frozen=True)
class ClientDpSgd:
    """DP-SGD from the round's model (Abadi et al. 2016; Naseri, algorithm 2).

    `noisy` comes from the plan: `ClientDpSgd(plan.noisy_steps, lr=0.1)`. One step: every record
    joins with its rate. The sum of the joined records' clipped gradients, plus
    N(0, (multiplier C)^2), is divided by rate x n, where n is the client's public number of
    records, or the nominal one. If the plan's unit is a person, people join, and the mean of a
    person's gradients is clipped.
    Momentum, weight decay, a proximal term, Adam and a schedule are those of `ClientSgd`. They see
    that noisy gradient and nothing else of the records.

    Guarantee: one step is `noisy.event(multiplier)` about one record or person, under zero-out (n
    public) or add-remove (nominal). Nothing divides by the realised batch.

    | edge | behaviour |
    |---|---|
    | empty batch | a step of noise alone |
    | lr not positive | BadInput |
    | no clip | cannot be: a plan without one is refused |
    | secure noise | each record's row on the grid, by itself (docs/proofs/secure-dp-sgd.md) |
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
        """Identity pairs: ("work", "dp-sgd"), ("steps", noisy), then (name, value) of the others.

        The others are all other fields, also if they are None.
        """
        return (
            ("work", "dp-sgd"),
            ("steps", self.noisy),
            *named_values(self, "lr", "momentum", "weight_decay", "proximal", "adam", "schedule"),
        )

    def __post_init__(self) -> None:
        if not isinstance(self.noisy, NoisySteps):
            raise BadInput(
                f"DP-SGD with steps {self.noisy!r}: its rate, steps and noise are the plan's; make "
                "it as ClientDpSgd(plan.noisy_steps, lr=...)"
            )
        if self.noisy.rotated is not None:
            raise BadInput(
                "DP-SGD with sums of fewer than 64 bits: these are for sums of sites, which a "
                "server decodes; make the work as SiteSum(plan.noisy_steps)"
            )
        _check_steps(self)

    def records_per_round(self, records: int) -> int:
        """The number of steps times `records_per_step`."""
        return self.noisy.steps * self.records_per_step(records)

    def records_per_step(self, records: int) -> int:
        """The mean number of a client's `records` that join a step, rounded up, at least 1."""
        return max(1, math.ceil(self.noisy.rate * records))

    def updates(self, clients: ClientBatch) -> Clipped:
        """The updates [K, P] of all clients, computed side by side, noise included.

        They are not clipped again. AssertionError for a round without a clip.
        """
        start = clients.round.start
        round, cohort, noisy = clients.round.number, clients.cohort, self.noisy
        sizes = np.full(len(cohort), noisy.nominal) if noisy.nominal else units_of(noisy, cohort)
        divisor = torch.from_numpy(noisy.rate * sizes.astype(np.float64)).float()[:, None]
        trajectory = clients.gradients.trajectory(start, cohort, spanned=False)
        directions, rate = Directions(start, self), scheduled(self.lr, self.schedule, round)
        moved: torch.Tensor | None = None
        for step in range(noisy.steps):
            batch = noisy_batch(noisy, clients, step)
            total = noisy_sum(noisy, clients, trajectory, moved, batch, step).float()
            direction = directions.next_(total.div_(divisor), moved).mul_(-rate)
            moved = direction if moved is None else moved.add_(direction)
        assert moved is not None, "DP-SGD takes at least one step"
        return clip_rows_(moved, None)


@dataclass(frozen=True)
class SiteSum:
    """Minus the noisy sum of clipped gradients of a site's sampled records.

    Gradients are those at the round's model. `noisy` comes from the plan:
    `SiteSum(plan.noisy_steps)`. The server adds the sites' sums and divides by the expected number
    of records. If the plan's unit is a person, people are sampled, and the mean of a person's
    gradients is clipped.

    Guarantee: a report is `noisy.event(multiplier)` about one record or person of the site, under
    zero-out. With secure noise it is a multiple of the grid, in float64. With Skellam noise it is
    in rotated coordinates, and the channel decodes the sum.

    | edge | behaviour |
    |---|---|
    | nobody joins | noise alone |
    | more than one step | BadInput |
    """

    noisy: NoisySteps

    @property
    def identity(self) -> Stated:
        """Identity pairs: ("work", "site-sum"), ("steps", noisy)."""
        return (("work", "site-sum"), ("steps", self.noisy))

    def __post_init__(self) -> None:
        if not isinstance(self.noisy, NoisySteps) or self.noisy.steps != 1:
            raise BadInput(
                f"a site's sum with steps {self.noisy!r}: its rate and noise are the plan's; make "
                "it as SiteSum(plan.noisy_steps)"
            )

    def records_per_round(self, records: int) -> int:
        """The mean number of a site's `records` that join, rounded up and at least 1."""
        return max(1, math.ceil(self.noisy.rate * records))

    def records_per_step(self, records: int) -> int:
        """The same as `records_per_round`, since a round is one step."""
        return self.records_per_round(records)

    def updates(self, clients: ClientBatch) -> Clipped:
        """Minus each site's noisy sum, [K, P], which is not clipped again.

        With secure noise K must be 1, and the sum is float64.
        """
        batch = noisy_batch(self.noisy, clients, 0)
        assert batch.index is not None, "a batch of sampled records has their places"
        few = clients.cohort.gather(batch.index)
        trajectory = clients.gradients.trajectory(clients.round.start, few, spanned=False)
        total = noisy_sum(self.noisy, clients, trajectory, None, batch.gathered(), 0)
        return clip_rows_(total.neg_(), None)


def noisy_sum(
    noisy: NoisySteps,
    clients: ClientBatch,
    trajectory: LocalTrajectory,
    moved: torch.Tensor | None,
    batch: Batch,
    step: int,
) -> torch.Tensor:
    """The sums of the clients' sampled, clipped single-example gradients with noise, [K, P].

    AssertionError for a round without a clip.

    Guarantee: one Poisson-sampled Gaussian per client, of `noisy.multiplier` clips. Seeded sums are
    float32. With secure noise there is one client, and its sum is a multiple of the grid, float64
    (docs/proofs/secure-dp-sgd.md).

    Args:
        noisy: How records join, and the noise in clips.
        clients: The clients and the round.
        trajectory: The clients' local training.
        moved: How far each client is from the round's model, None at the start.
        batch: The records that joined, from `noisy_batch`.
        step: The number of the local step.
    """
    round, cohort = clients.round, clients.cohort
    assert round.clip is not None, "single-example gradients need a clip"
    if noisy.rotated is not None:
        return _rotated_sum(noisy, noisy.rotated, clients, trajectory, batch)
    mechanism = GaussianMechanism(noisy.multiplier)
    scale = noisy.multiplier * round.clip.sensitivity(Relation.ADD_REMOVE)
    keys = round.streams.keys("step-noise", round.number, cohort.ids, step)
    if not round.streams.secure:
        total = trajectory.clipped_sum(moved, batch, round.clip)
        mechanism.add_(total, np.full(len(cohort), scale), keys)
        return total
    grid = mechanism.grid(scale, trajectory.width)
    exact = trajectory.clipped_sum_on_grid(moved, batch, round.clip, grid)
    add_to_sum_(mechanism, exact, scale, keys)
    return exact[None, :]


def _rotated_sum(
    noisy: NoisySteps,
    grid: RotatedGrid,
    clients: ClientBatch,
    trajectory: LocalTrajectory,
    batch: Batch,
) -> torch.Tensor:
    """The sum of one client's rotated, rounded gradients with Skellam noise, float64 [1, P].

    Guarantee: docs/proofs/skellam.md. One Poisson-sampled Skellam release of `noisy.multiplier`
    sensitivities. Raises BadInput for seeded noise. Arguments are those of `noisy_sum`.
    """
    round = clients.round
    if not round.streams.secure or round.clip is None:
        raise BadInput(
            "sums of fewer than 64 bits have secure noise only: make the plan secure "
            "(noise.source = 'secure'), or leave sum.bits out"
        )
    rounding = Rounding(grid, round.number)
    exact = trajectory.clipped_sum_on_grid(None, batch, round.clip, rounding)
    steps = grid.report_grid.quantise(exact).numpy()
    grid.add_noise_(steps, noisy.multiplier)
    return grid.report_grid.dequantise(torch.from_numpy(steps))[None, :]


def noisy_batch(noisy: NoisySteps, clients: ClientBatch, step: int) -> Batch:
    """The batch of the records that join local step `step`, first in each client's row.

    If people join, it has all records of each of them, side by side. With secure noise each has as
    many places as the cap, whoever else joined. With seeded noise it has no more places than
    the records of the person with most.
    """
    round, cohort = clients.round, clients.cohort
    batch = poisson_batch(noisy, cohort, round.number, step, round.streams)
    if noisy.unit is Unit.RECORD:
        return batch
    group = noisy.group
    if not round.streams.secure:  # seeded shapes may depend on records
        group = min(group, int(cohort.data.person_index.record_counts.max()))
    return cohort.records_of(batch, group)


def units_of(noisy: NoisySteps, cohort: CohortData) -> npt.NDArray[np.int64]:
    """How many units each client has that may join, [K]: records, or people."""
    return cohort.people if noisy.unit is Unit.PERSON else cohort.sizes


def poisson_batch(
    noisy: NoisySteps, cohort: CohortData, round: int, step: int, streams: KeySource
) -> Batch:
    """The batch of the records, or persons, that join step `step`, each with the noisy rate.

    They come first in each row, in ascending order. Rows are as long as the longest of the cohort,
    and at least 1. Which of the two the index has, `noisy.unit` says.
    """
    joined = _joined(noisy, cohort, round, step, streams)
    width = max(1, int(joined.sum(axis=1).max(initial=0)))
    index = np.argsort(~joined, axis=1, kind="stable")[:, :width]
    mask = np.take_along_axis(joined, index, axis=1)
    draws = Draws(streams, round, cohort.ids, step)
    return Batch(torch.from_numpy(index), torch.from_numpy(mask.astype(np.float32)), draws)


def _joined(
    noisy: NoisySteps, cohort: CohortData, round: int, step: int, streams: KeySource
) -> npt.NDArray[np.bool_]:
    """Which records, or persons, of each client join a step, [K, longest].

    A unit joins with the rate, or up to 2^-53 less where that has more digits.
    """
    units, of_persons = units_of(noisy, cohort), noisy.unit is Unit.PERSON
    longest = int(units.max(initial=1)) if of_persons else cohort.longest
    purpose = "persons" if of_persons else "records"
    words = bits(streams.keys(purpose, round, cohort.ids, step), longest)
    drawn = (words >> np.uint64(11)) < np.uint64(math.floor(noisy.rate * 2.0**53))
    joined: npt.NDArray[np.bool_] = drawn & (np.arange(longest) < units[:, None])
    return joined


ClientWork = OneGradient | ClientSgd | ClientDpSgd | SiteSum

BUILTIN_WORK = (OneGradient, ClientSgd, ClientDpSgd, SiteSum)
"""The exact classes of work in which a client's update depends on no other client."""

WORK_PARTS = (Decay, Adam, RateSchedule)
"""The exact classes of parts of such work, beside its batches."""


def _check_steps(work: ClientSgd | ClientDpSgd) -> None:
    """Raise BadInput for fields of local work out of range, and for momentum together with Adam."""
    check_optimizer(work)
    NOT_NEGATIVE.check("weight_decay", work.weight_decay)
    NOT_NEGATIVE.check("proximal", work.proximal)
    if work.adam is not None and not isinstance(work.adam, Adam):
        raise BadInput(f"adam is {shown(work.adam)}: use Adam(beta1, beta2, floor), or None")
    if work.adam is not None and work.momentum:
        raise BadArgument("{momentum} has no effect on adam, which has beta1: omit it", "momentum")


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
        """The direction [K, width] of the next step, from the mean gradients at start + `moved`.

        `gradient` is overwritten, and may be the result. `moved` is None in the first step. Call it
        once per step: momentum and Adam's moments are updated.
        """
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
        """Adam's direction: the first moment over the root of the second plus floor, both unbiased.

        Updates the moments, and returns `gradient`, overwritten.
        """
        if self._moments is None:
            self._moments = torch.zeros_like(gradient), torch.zeros_like(gradient)
        first, second = self._moments
        self._steps += 1
        first.mul_(adam.beta1).add_(gradient, alpha=1 - adam.beta1)
        second.mul_(adam.beta2).addcmul_(gradient, gradient, value=1 - adam.beta2)
        torch.div(second, 1 - adam.beta2**self._steps, out=gradient)
        gradient.sqrt_().add_(adam.floor)
        return torch.div(first, gradient, out=gradient).div_(1 - adam.beta1**self._steps)
