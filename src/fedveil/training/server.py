"""Server optimisers, and learning rates over the rounds: functions of the round alone."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import torch

from fedveil.base.checks import FRACTION, POSITIVE, ROUNDS, WARMUP, one_of, shown
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, named_values, stated
from fedveil.privacy.clip import BLOCK
from fedveil.training.aggregates import Aggregate, CoordinateMedian, Flame, Krum, TrimmedMean

__all__ = [
    "AdagradServer",
    "AdamServer",
    "Aggregate",
    "CoordinateMedian",
    "Flame",
    "Krum",
    "ServerOptimizer",
    "ServerState",
    "SgdServer",
    "TrimmedMean",
    "Weights",
    "YogiServer",
]


class RateShape(StrEnum):
    """The shapes of a learning rate over the rounds."""

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
        """Identity pairs: ("rates", shape), then (name, value) of rounds, warmup and floor."""
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
            raise BadArgument("{floor} has no effect on a constant learning rate: omit it", "floor")

    def factor(self, round: int) -> float:
        """The factor of the learning rate in `round`, counted from 1.

        Rounds after the last one have the factor of the last.
        """
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
    """The learning rate of `round`, counted from 1: `lr` times the schedule's factor.

    `lr` itself if `schedule` is None.
    """
    return lr if schedule is None else lr * schedule.factor(round)


_LIMITS = {
    "lr": POSITIVE,
    "momentum": FRACTION,
    "beta1": FRACTION,
    "beta2": FRACTION,
    "floor": POSITIVE,
}


def check_optimizer(optimizer: object) -> None:
    """Raise BadInput for a value out of range in a server's or a client's optimiser.

    Of the attributes `lr`, `momentum`, `beta1`, `beta2`, `floor` and `schedule`, those are checked
    that the optimiser has. `schedule` must be a `RateSchedule` or None.
    """
    values = vars(optimizer)
    for name, limit in _LIMITS.items():
        if name in values:
            limit.check(name, values[name])
    schedule = values.get("schedule")
    if schedule is not None and not isinstance(schedule, RateSchedule):
        raise BadInput(f"schedule is {shown(schedule)}: use RateSchedule(shape, rounds), or None")


class Weights(StrEnum):
    """The weights of clients in the mean: UNIFORM, all alike, or EXAMPLES, by number of records.

    Where people are sampled in local steps, EXAMPLES is by number of people.
    """

    UNIFORM = "uniform"
    EXAMPLES = "examples"


@dataclass(frozen=True)
class ServerState:
    """The server's state after some rounds. How often clients took part is in the ledger.

    Attributes:
        round: The number of finished rounds.
        params: The model, [P].
        memory: The optimiser's tensors, such as its moments, by name. Empty before the first step.
        adaptive_state: The clip value, or the ranges, of the next round.
    """

    round: int
    params: torch.Tensor
    memory: dict[str, torch.Tensor]
    adaptive_state: torch.Tensor


class ServerOptimizer(Protocol):
    """The server's optimiser. What it keeps between rounds is in the state's `memory`."""

    def step(self, state: ServerState, mean: torch.Tensor) -> ServerState:
        """The state after one more round, along the mean update `mean` (float64 [P]).

        Changes nothing.
        """
        ...


@dataclass(frozen=True)
class SgdServer:
    """params += lr x velocity, with velocity = momentum x velocity + mean update (FedAvgM).

    `schedule` multiplies lr by a factor that depends on the round.
    """

    lr: float = 1.0
    momentum: float = 0.0
    schedule: RateSchedule | None = None

    identity = stated("server", "sgd", "lr", "momentum", "schedule")

    def __post_init__(self) -> None:
        """Raise BadInput for a value that `check_optimizer` refuses."""
        check_optimizer(self)

    def step(self, state: ServerState, mean: torch.Tensor) -> ServerState:
        """The state after one more round, along the mean update (float64 [P]).

        With momentum, the memory holds "velocity".
        """
        memory = state.memory
        if self.momentum:
            mean = mean + self.momentum * memory.get("velocity", torch.zeros_like(mean))
            memory = {"velocity": mean}
        return _next_state(state, mean, memory, scheduled(self.lr, self.schedule, state.round + 1))


_MOMENTS = ("lr", "beta1", "beta2", "floor", "schedule")


@dataclass(frozen=True)
class _MomentServer:
    """A server optimiser with two moments of the mean update.

    Attributes:
        lr: Learning rate.
        beta1: Share of the first moment that is kept from round to round.
        beta2: Share of the second moment that is kept.
        floor: Added to the root of the second moment.
        schedule: Changes the learning rate over the rounds.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    floor: float = 1e-3
    schedule: RateSchedule | None = None

    def __post_init__(self) -> None:
        """Raise BadInput for a value that `check_optimizer` refuses."""
        check_optimizer(self)


class AdamServer(_MomentServer):
    """Adam on the mean update, seen as minus a gradient (Reddi et al. 2021)."""

    identity = stated("server", "adam", *_MOMENTS)

    def step(self, state: ServerState, mean: torch.Tensor) -> ServerState:
        """The state after one more round, along the mean update (float64 [P]).

        The memory holds the moments "first" and "second", which start at zero. The step corrects
        them for that start.
        """
        zero = torch.zeros_like(mean)
        first = self.beta1 * state.memory.get("first", zero) + (1 - self.beta1) * mean
        second = self.beta2 * state.memory.get("second", zero) + (1 - self.beta2) * mean**2
        rounds = state.round + 1
        rate = scheduled(self.lr, self.schedule, rounds)
        unbiased = first / (1 - self.beta1**rounds)
        scale = (second / (1 - self.beta2**rounds)).sqrt() + self.floor
        return _next_state(state, rate * unbiased / scale, {"first": first, "second": second})


class YogiServer(_MomentServer):
    """FedYogi (Reddi et al. 2021): Adam with a bounded change of its second moment.

    The second moment never changes by more than (1 - beta2) x mean^2, in either direction. As
    published, it starts from floor^2, and the moments are not corrected for their start.
    """

    identity = stated("server", "yogi", *_MOMENTS)

    def step(self, state: ServerState, mean: torch.Tensor) -> ServerState:
        """The state after one more round, along the mean update (float64 [P]).

        The memory holds "first", from zero, and "second", from floor^2.
        """
        first = state.memory.get("first", torch.zeros_like(mean))
        second = state.memory.get("second", torch.full_like(mean, self.floor**2))
        first = self.beta1 * first + (1 - self.beta1) * mean
        second = second - (1 - self.beta2) * mean**2 * torch.sign(second - mean**2)
        rate = scheduled(self.lr, self.schedule, state.round + 1)
        by = rate * first / (second.sqrt() + self.floor)
        return _next_state(state, by, {"first": first, "second": second})


@dataclass(frozen=True)
class AdagradServer:
    """FedAdagrad (Reddi et al. 2021).

    A step is lr x mean / (root of (floor^2 + the sum of all squared means) + floor).
    """

    lr: float = 0.01
    floor: float = 1e-3
    schedule: RateSchedule | None = None

    identity = stated("server", "adagrad", "lr", "floor", "schedule")

    def __post_init__(self) -> None:
        """Raise BadInput for a value that `check_optimizer` refuses."""
        check_optimizer(self)

    def step(self, state: ServerState, mean: torch.Tensor) -> ServerState:
        """The state after one more round, along the mean update (float64 [P]).

        The memory holds "second", the sum of floor^2 and all squared means.
        """
        second = state.memory.get("second", torch.full_like(mean, self.floor**2)) + mean**2
        rate = scheduled(self.lr, self.schedule, state.round + 1)
        return _next_state(state, rate * mean / (second.sqrt() + self.floor), {"second": second})


def _next_state(
    state: ServerState, along: torch.Tensor, memory: dict[str, torch.Tensor], rate: float = 1.0
) -> ServerState:
    """A new state after one more round, with params + rate x along and the given memory.

    `along` is float64 [P]. The old state and its parameters stay as they are.
    """
    params = torch.empty_like(state.params)
    pieces = (torch.split(each, BLOCK) for each in (params, state.params, along))
    for new, old, by in zip(*pieces, strict=True):
        new.copy_(by.mul(rate).add_(old))
    return replace(state, round=state.round + 1, params=params, memory=memory)
