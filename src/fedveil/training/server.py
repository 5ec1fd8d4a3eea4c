"""Server optimisers, and learning rates over the rounds: functions of the round alone."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import torch

from fedveil.base.checks import FRACTION, POSITIVE, ROUNDS, WARMUP, one_of, shown
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, named_values
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


class Weights(StrEnum):
    """How clients count in the mean."""

    UNIFORM = "uniform"
    EXAMPLES = "examples"


@dataclass(frozen=True)
class ServerState:
    """The server's state after some rounds. How often clients took part is in the ledger.

    Attributes:
        round: The number of finished rounds.
        params: The model, [P].
        memory: What the optimiser remembers, by name.
        adaptive_state: The clip value, or the ranges, of the next round.
    """

    round: int
    params: torch.Tensor
    memory: dict[str, torch.Tensor]
    adaptive_state: torch.Tensor


class ServerOptimizer(Protocol):
    """The server's optimizer. What it remembers between rounds is in the state's `memory`."""

    def step(self, state: ServerState, mean: torch.Tensor) -> ServerState:
        """The state after one more round, along the mean update (float64 [P])."""
        ...


@dataclass(frozen=True)
class SgdServer:
    """params += lr x velocity, velocity = momentum x velocity + mean update: FedAvgM.

    `schedule` changes lr from round to round, here and below.
    """

    lr: float = 1.0
    momentum: float = 0.0
    schedule: RateSchedule | None = None

    @property
    def identity(self) -> Stated:
        return (("server", "sgd"), *named_values(self, "lr", "momentum", "schedule"))

    def __post_init__(self) -> None:
        POSITIVE.check("lr", self.lr)
        FRACTION.check("momentum", self.momentum)
        check_rate_schedule(self.schedule)

    def step(self, state: ServerState, mean: torch.Tensor) -> ServerState:
        """One round's step along the mean update (float64 [P])."""
        memory = state.memory
        if self.momentum:
            mean = mean + self.momentum * memory.get("velocity", torch.zeros_like(mean))
            memory = {"velocity": mean}
        return _moved(state, mean, memory, scheduled(self.lr, self.schedule, state.round + 1))


@dataclass(frozen=True)
class AdamServer:
    """Adam on the mean update, seen as minus a gradient (Reddi et al. 2021)."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    floor: float = 1e-3
    schedule: RateSchedule | None = None

    @property
    def identity(self) -> Stated:
        return (
            ("server", "adam"),
            *named_values(self, "lr", "beta1", "beta2", "floor", "schedule"),
        )

    def __post_init__(self) -> None:
        _check_moments(self)
        check_rate_schedule(self.schedule)

    def step(self, state: ServerState, mean: torch.Tensor) -> ServerState:
        """One round's step along the mean update (float64 [P])."""
        zero = torch.zeros_like(mean)
        first = self.beta1 * state.memory.get("first", zero) + (1 - self.beta1) * mean
        second = self.beta2 * state.memory.get("second", zero) + (1 - self.beta2) * mean**2
        rounds = state.round + 1
        rate = scheduled(self.lr, self.schedule, rounds)
        unbiased = first / (1 - self.beta1**rounds)
        scale = (second / (1 - self.beta2**rounds)).sqrt() + self.floor
        return _moved(state, rate * unbiased / scale, {"first": first, "second": second})


@dataclass(frozen=True)
class YogiServer:
    """FedYogi (Reddi et al. 2021): Adam whose second moment never changes by more than
    (1 - beta2) x mean^2, in either direction. As published, it starts from floor^2 and nothing is
    corrected for its start.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    floor: float = 1e-3
    schedule: RateSchedule | None = None

    @property
    def identity(self) -> Stated:
        return (
            ("server", "yogi"),
            *named_values(self, "lr", "beta1", "beta2", "floor", "schedule"),
        )

    def __post_init__(self) -> None:
        _check_moments(self)
        check_rate_schedule(self.schedule)

    def step(self, state: ServerState, mean: torch.Tensor) -> ServerState:
        """One round's step along the mean update (float64 [P])."""
        first = state.memory.get("first", torch.zeros_like(mean))
        second = state.memory.get("second", torch.full_like(mean, self.floor**2))
        first = self.beta1 * first + (1 - self.beta1) * mean
        second = second - (1 - self.beta2) * mean**2 * torch.sign(second - mean**2)
        rate = scheduled(self.lr, self.schedule, state.round + 1)
        by = rate * first / (second.sqrt() + self.floor)
        return _moved(state, by, {"first": first, "second": second})


@dataclass(frozen=True)
class AdagradServer:
    """FedAdagrad (Reddi et al. 2021): steps over the root of floor^2 plus all squared means."""

    lr: float = 0.01
    floor: float = 1e-3
    schedule: RateSchedule | None = None

    @property
    def identity(self) -> Stated:
        return (("server", "adagrad"), *named_values(self, "lr", "floor", "schedule"))

    def __post_init__(self) -> None:
        POSITIVE.check("lr", self.lr)
        POSITIVE.check("floor", self.floor)
        check_rate_schedule(self.schedule)

    def step(self, state: ServerState, mean: torch.Tensor) -> ServerState:
        """One round's step along the mean update (float64 [P])."""
        second = state.memory.get("second", torch.full_like(mean, self.floor**2)) + mean**2
        rate = scheduled(self.lr, self.schedule, state.round + 1)
        return _moved(state, rate * mean / (second.sqrt() + self.floor), {"second": second})


def _moved(
    state: ServerState, along: torch.Tensor, memory: dict[str, torch.Tensor], rate: float = 1.0
) -> ServerState:
    """The state moved by rate x along, float64 [P], of which only a piece is held at a time."""
    params = torch.empty_like(state.params)
    pieces = (torch.split(each, BLOCK) for each in (params, state.params, along))
    for new, old, by in zip(*pieces, strict=True):
        new.copy_(by.mul(rate).add_(old))
    return replace(state, round=state.round + 1, params=params, memory=memory)


def _check_moments(server: AdamServer | YogiServer) -> None:
    POSITIVE.check("lr", server.lr)
    FRACTION.check("beta1", server.beta1)
    FRACTION.check("beta2", server.beta2)
    POSITIVE.check("floor", server.floor)
