"""Learning rates over the rounds: warm-up and decay, functions of the round alone."""

import math
from dataclasses import dataclass
from enum import StrEnum

from fedveil.base.checks import FRACTION, ROUNDS, WARMUP, one_of, shown
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, named_values


class RateShape(StrEnum):
    """How a learning rate falls."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    STEP = "step"


@dataclass(frozen=True)
class RateSchedule:
    """The factor of a learning rate in each of `rounds` rounds, from public numbers only.

    It grows in equal steps over `warmup` rounds, is 1 in the round after them, and falls from there
    on, with p the share of the other rounds that are over:

    | shape | factor |
    |---|---|
    | CONSTANT | 1 |
    | LINEAR | floor + (1 - floor) (1 - p) |
    | COSINE | floor + (1 - floor) (1 + cos(pi p)) / 2 |
    | STEP | 1; 0.1 from p = 1/2 on; 0.01 from p = 3/4 on; not below floor |

    Guarantee: above 0 and at most 1 in every round, so that no round is without steps.

    | edge | behaviour |
    |---|---|
    | warmup not below rounds, floor outside [0, 1) | BadInput |
    | a floor under CONSTANT | BadInput: it has no effect |

    >>> schedule = RateSchedule(RateShape.LINEAR, rounds=6, warmup=2)
    >>> [round(schedule.factor(t), 2) for t in range(1, 7)]
    [0.33, 0.67, 1.0, 0.75, 0.5, 0.25]
    """

    shape: RateShape
    rounds: int
    warmup: int = 0
    floor: float = 0.0

    @property
    def identity(self) -> Stated:
        return (("rates", self.shape), *named_values(self, "rounds", "warmup", "floor"))

    def __post_init__(self) -> None:
        one_of("shape", self.shape, RateShape)
        ROUNDS.check("rounds", self.rounds)
        WARMUP.check("warmup", self.warmup)
        FRACTION.check("floor", self.floor)
        if self.warmup >= self.rounds:
            raise BadArgument(
                f"{{warmup}} is {self.warmup} of {self.rounds} rounds: leave some after it",
                "warmup",
            )
        if self.floor and self.shape is RateShape.CONSTANT:
            raise BadArgument(
                "{floor} has no effect on a constant learning rate: leave it out", "floor"
            )

    def factor(self, round: int) -> float:
        """Of `round`, counted from 1."""
        if round <= self.warmup:
            return round / (self.warmup + 1)
        over = (min(round, self.rounds) - 1 - self.warmup) / (self.rounds - self.warmup)
        match self.shape:
            case RateShape.CONSTANT:
                return 1.0
            case RateShape.LINEAR:
                return self.floor + (1 - self.floor) * (1 - over)
            case RateShape.COSINE:
                return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * over)) / 2
            case RateShape.STEP:
                return max(self.floor, 1.0 if over < 0.5 else 0.1 if over < 0.75 else 0.01)


def scheduled(lr: float, schedule: RateSchedule | None, round: int) -> float:
    """The learning rate of `round`, counted from 1."""
    return lr if schedule is None else lr * schedule.factor(round)


def check_rate_schedule(schedule: object) -> None:
    """Refuse what is neither a schedule nor None."""
    if schedule is not None and not isinstance(schedule, RateSchedule):
        raise BadInput(f"schedule is {shown(schedule)}: use RateSchedule(shape, rounds), or None")


def check_rounds(rounds: int, **parts: object) -> None:
    """Refuse parts of a training whose learning rate is for another number of rounds."""
    for name, part in parts.items():
        schedule = getattr(part, "schedule", None)
        if isinstance(schedule, RateSchedule) and schedule.rounds != rounds:
            raise BadInput(
                f"the {name}'s learning rate is for {schedule.rounds} rounds and the plan has "
                f"{rounds}: make its schedule for those"
            )
