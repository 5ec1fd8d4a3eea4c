"""Local work on a cohort: from the round's model to one update per client, as rows [K, P]."""

from dataclasses import dataclass

import torch

from fedveil.base.checks import POSITIVE, shown
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, known_as
from fedveil.privacy.clip import Clipped
from fedveil.privacy.rows import Norm
from fedveil.training.batches import Batches
from fedveil.training.directions import Adam, Directions, check_directions
from fedveil.training.dp_sgd import ClientDpSgd
from fedveil.training.rates import RateSchedule, check_rate_schedule, scheduled
from fedveil.training.reports import Spanned
from fedveil.training.turn import Turn, clip_rows_


@dataclass(frozen=True)
class OneGradient:
    """FedSGD: the update is minus the full-batch gradient at the round's model."""

    @property
    def identity(self) -> Stated:
        return (("work", "gradient"),)

    def visits(self, records: int) -> int:
        """How many records a client with `records` of them looks at in a round."""
        return records

    def at_once(self, records: int) -> int:
        """How many of them in one step."""
        return records

    def whole(self, records: int) -> bool:
        """Whether every step is the mean over all records of a client with `records` of them."""
        return True

    def updates(self, turn: Turn) -> Clipped:
        """One gradient per client, clipped when there is a clip."""
        cohort = turn.cohort
        batch = Batches(size=0, steps=1).of(cohort.ids, cohort.sizes, turn.number, turn.streams)
        walk = turn.gradients.walk(turn.start, cohort, spanned=False)
        return clip_rows_(walk.mean(None, batch.at(0)).neg_(), turn.clip)


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
class ClientSgd:
    """FedAvg: SGD from the round's model; the update is where it ended minus where it began.

    With a clip on the update it is projected onto the ball around the *round's* model after
    every batch (Naseri et al., algorithm 1, line 21 as it must be read); with a clip per gradient
    every gradient is clipped instead (Fu et al.). `clipped` tells whether either was active in any
    step. `decay`, when given, replaces the learning rate; `schedule` changes it over the rounds.
    `proximal` times what the client has moved is added to every gradient (FedProx). With `adam`
    weight decay is decoupled (AdamW).
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
            ("batches", self.batches),
            ("lr", self.lr),
            ("momentum", self.momentum),
            ("weight_decay", self.weight_decay),
            ("decay", self.decay),
            ("proximal", self.proximal),
            ("adam", self.adam),
            ("schedule", self.schedule),
        )

    def __post_init__(self) -> None:
        if not isinstance(self.batches, Batches):
            raise BadInput(f"batches is {shown(self.batches)}: use Batches(size, epochs or steps)")
        POSITIVE.check("lr", self.lr)
        check_directions(self)
        if self.decay is not None and not isinstance(self.decay, Decay):
            raise BadInput(f"decay is {shown(self.decay)}: use Decay(mu, gamma), or None")
        check_rate_schedule(self.schedule)
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
        """The sum of the learning rates of `round`, which is what a clip per gradient needs.

        Only for a fixed number of plain steps: with anything else than gradients in them, the
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
        """The same as Fu et al. have it: all steps with the learning rate of the very first."""
        return (self.batches.steps or 1) * self.rate(0, 1)

    def visits(self, records: int) -> int:
        """How many records a client with `records` of them looks at in a round."""
        if self.batches.epochs is not None:
            return self.batches.epochs * records
        return (self.batches.steps or 1) * self.at_once(records)

    def at_once(self, records: int) -> int:
        """How many of them in one step."""
        return min(self.batches.size or records, records)

    def whole(self, records: int) -> bool:
        """Whether every step is the mean over all records of a client with `records` of them."""
        return self.at_once(records) == records

    def updates(self, turn: Turn) -> Clipped | Spanned:
        """Run every client's local steps side by side."""
        clip, cohort = turn.clip, turn.cohort
        batches = self.batches.of(cohort.ids, cohort.sizes, turn.number, turn.streams)
        linear = not self.weight_decay and self.adam is None
        spanned = linear and (clip is None or clip.norm is Norm.L2)
        walk = turn.gradients.walk(turn.start, cohort, spanned=spanned)
        per_gradient = None if clip is None else clip.per_gradient
        per_update = None if clip is None or per_gradient is not None else clip
        plain = per_gradient is None and self.plain
        directions = Directions(turn.start, self)
        moved: torch.Tensor | None = None
        clipped = torch.zeros(len(cohort), dtype=torch.bool)
        for step in range(batches.steps):
            batch, rate = batches.at(step), self.rate(step, turn.number)
            if plain:
                moved = walk.descend_(moved, batch, rate)
            else:
                direction = walk.mean(moved, batch)
                if per_gradient is not None:
                    lengths = walk.norms(direction, per_gradient.norm)
                    clipped |= clip_rows_(direction, per_gradient, lengths).clipped
                if not self.plain:
                    direction = batch.without_idle_(directions.of_(direction, moved))
                moved = (
                    direction.mul_(-rate) if moved is None else moved.sub_(direction, alpha=rate)
                )
            if per_update is not None:
                lengths = walk.norms(moved, per_update.norm)
                clipped |= clip_rows_(moved, per_update, lengths).clipped
        if moved is None:
            raise AssertionError("local SGD takes at least one step")
        if turn.summed and walk.spanned:
            return Spanned(walk, moved, clipped)
        final = clip_rows_(walk.rows(moved), clip)
        return Clipped(final.rows, final.norms, clipped | final.clipped)


ClientWork = OneGradient | ClientSgd | ClientDpSgd


def is_own_work(work: ClientWork) -> bool:
    """Whether it is known that a client's update depends on no other client in the block."""
    return type(work) in (OneGradient, ClientSgd, ClientDpSgd)
