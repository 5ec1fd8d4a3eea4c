"""Clip schedules: the clip of each round, and how an adaptive clip changes.

An adaptive schedule collects a statistic of the clients (how many updates were short enough, how
long they were). It declares the statistic and its noise (`ClipStatistic`), and sees only the noisy
sum. A clip changes for the next round only.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fedveil.base.checks import (
    BIT_EPSILON,
    BUDGET,
    CLIP,
    CLIP_EVERY,
    CLIP_FLOOR,
    NOT_NEGATIVE,
    POSITIVE,
    POWER,
    QUANTILE,
    ROUNDS,
    SMALLEST_FLOOR,
    one_of,
)
from fedveil.base.errors import BadArgument
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.events import Gaussian
from fedveil.privacy.clip import Clip, Clipped, Norm
from fedveil.privacy.clip_statistic import ClipStatistic

__all__ = [
    "Clip",
    "ClipSchedule",
    "ClipStatistic",
    "Clipped",
    "Fixed",
    "Lengths",
    "Median",
    "Norm",
    "PerGradient",
    "Poly",
    "Quantile",
]


@dataclass(frozen=True)
class Lengths:
    """What a schedule may know of clients.

    Attributes:
        norms: The lengths of their updates before the clip, [K].
        clipped: Which of them were clipped, [K].
    """

    norms: torch.Tensor
    clipped: torch.Tensor

    def of_client(self, client: int) -> "Lengths":
        """The lengths of one client."""
        only = slice(client, client + 1)
        return Lengths(self.norms[only], self.clipped[only])


class ClipSchedule(ABC):
    """Which clip is in force in which round. Subclasses need `first_value` and `clip`.

    An adaptive schedule also has a `statistic`, which each client reports
    (`client_statistic`), and a `next_value`, which depends on the noisy sum of the reports.
    """

    @property
    def norm(self) -> Norm | None:
        """The norm in which updates are clipped, or None if the schedule clips nothing."""
        return Norm.L2

    @property
    def statistic(self) -> ClipStatistic | None:
        """The statistic that clients report beside their updates, None if there is none."""
        return None

    @abstractmethod
    def first_value(self) -> float:
        """The clip value before the first round."""

    @abstractmethod
    def clip(self, value: float, round: int) -> Clip:
        """The clip in force in `round`."""

    def client_statistic(self, lengths: Lengths, round: int) -> torch.Tensor:
        """The statistic of each client of a block, float64 [K, width]. It never leaves raw."""
        return torch.zeros(len(lengths.norms), 0, dtype=torch.float64)

    def next_value(self, value: float, noisy: torch.Tensor, expected: float, round: int) -> float:
        """The clip value of the next round, from the noisy sum of the clients' statistics.

        `expected` is the expected number of clients.
        """
        return value

    def value_limits(self, round: int) -> tuple[float, float]:
        """The least and the greatest possible clip value in `round`, whatever clients reported.

        Sites use it: they do not see how the value changed.
        """
        return self.first_value(), self.first_value()

    def rates_allowed(self, round: int) -> float | None:
        """The largest sum of the learning rates of `round`, None if they are free."""
        return None

    @property
    def needs_raw_gradients(self) -> bool:
        """Whether the statistic needs the norms of gradients that nothing has clipped."""
        return False

    def settled(self, turns: Callable[[int], int]) -> "ClipSchedule":
        """The schedule with calibrated noise, where its statistic has a budget of its own.

        `turns(every)` is the largest number of reporting rounds, one in `every`, of one client.
        """
        return self

    # The adaptive state of a training, of which the clip value is the usual form.

    def first_state(self, params: torch.Tensor) -> torch.Tensor:
        """The adaptive state before the first round, float64, for the first model `params`."""
        return torch.tensor([self.first_value()], dtype=torch.float64)

    def clip_for(self, state: torch.Tensor, round: int) -> Clip | None:
        """The clip of `round` in the adaptive state `state`, None if nothing is clipped."""
        return self.clip(float(state[0]), round)

    def next_state(
        self,
        state: torch.Tensor,
        noisy: torch.Tensor | None,
        expected: float,
        before: torch.Tensor,
        after: torch.Tensor,
        round: int,
    ) -> torch.Tensor:
        """The adaptive state of the next round.

        Args:
            state: The present state.
            noisy: The noisy sum of the clients' statistics, None if they reported none.
            expected: The expected number of clients.
            before: The model before this round, which is public.
            after: The model after this round, which is public.
            round: The number of this round.
        """
        if noisy is None:
            return state
        value = self.next_value(float(state[0]), noisy, expected, round)
        return torch.tensor([value], dtype=torch.float64)

    def reachable(
        self, state: torch.Tensor, params: torch.Tensor, first: torch.Tensor, round: int
    ) -> bool:
        """Whether `state` is possible in `round` for the model `params`.

        `first` is the model of the first round.
        """
        if state.shape != (1,):
            return False
        least, most = self.value_limits(round)
        return least <= float(state[0]) <= most


@dataclass(frozen=True)
class Fixed(ClipSchedule):
    """The same clip in every round."""

    value: float
    norm: Norm = Norm.L2

    @property
    def identity(self) -> Stated:
        return (("clip", "fixed"), ("value", self.value), ("norm", self.norm))

    def __post_init__(self) -> None:
        _check_clip(self.value, self.norm)

    def first_value(self) -> float:
        return self.value

    def clip(self, value: float, round: int) -> Clip:
        return Clip(value, self.norm)


@dataclass(frozen=True)
class Poly(ClipSchedule):
    """C_0 (1 - (t - 1)/T)^power in round t of T, never below `floor`.

    Data-independent, so it costs nothing. The published schedule ends at exactly 0, where a
    release says nothing and std / clip is undefined: hence the floor.

    | edge | behaviour |
    |---|---|
    | power < 0 | BadInput: the clip would grow without limit |
    | power 0 | a fixed clip |
    | floor above the start | BadInput |
    """

    value: float
    power: float
    rounds: int
    floor: float
    norm: Norm = Norm.L2

    @property
    def identity(self) -> Stated:
        return (("clip", "poly"), *named_values(self, "value", "power", "rounds", "floor", "norm"))

    def __post_init__(self) -> None:
        _check_clip(self.value, self.norm)
        NOT_NEGATIVE.check("power", self.power)
        ROUNDS.check("rounds", self.rounds)
        CLIP_FLOOR.check("floor", self.floor)
        if self.floor > self.value:
            raise BadArgument(
                f"{{floor}} is {self.floor}: a number from {SMALLEST_FLOOR} to {{value}}, "
                f"{self.value}, is needed",
                "floor",
                "value",
            )

    def first_value(self) -> float:
        return self.value

    def clip(self, value: float, round: int) -> Clip:
        share = max(0.0, 1 - (round - 1) / self.rounds)
        return Clip(max(self.floor, value * share**self.power), self.norm)


@dataclass(frozen=True)
class PerGradient(ClipSchedule):
    """Clip every local gradient by `inner`, and the update by that times `reach`.

    `reach(round)` is the sum of the round's learning rates (Fu et al.: Xi = zeta sum(eta)).
    """

    inner: Fixed | Poly
    reach: Callable[[int], float]

    @property
    def identity(self) -> Stated:
        return (("clip", "per-gradient"), ("inner", self.inner), ("reach", self.reach))

    @property
    def norm(self) -> Norm:
        return self.inner.norm

    def rates_allowed(self, round: int) -> float:
        return self.reach(round)

    def first_value(self) -> float:
        return self.inner.first_value()

    def clip(self, value: float, round: int) -> Clip:
        gradient = self.inner.clip(value, round)
        return Clip(gradient.value * self.reach(round), gradient.norm, gradient.value)


_LEAST, _MOST, _LARGEST_STEP = 1e-12, 1e12, 3.0
"""The range of a quantile clip, and the logarithm of the largest factor by which it moves in a
round."""


@dataclass(frozen=True)
class Quantile(ClipSchedule):
    """Follow the `target` quantile of update norms (Andrew et al. 2021), geometrically.

    Client k's bit is 1 when its update needed no clipping. With b the noisy share of ones,
    C <- C exp(-lr (b - target)). Three ways to keep the bits private, which differ in who adds
    the noise; the releases account for them:

    - central: bits centred to +-1/2 (sensitivity 1/2), summed, noised with std `noise` by the
      trusted server in one joint release with the updates;
    - curator: the same sum, noised by a trusted party of its own, composed with the reports;
    - local (`flip` > 0): each client reports its bit through randomised response of epsilon
      `flip`; the server de-biases the sum, and `noise` is 0.

    | edge | behaviour |
    |---|---|
    | target outside (0, 1) | BadInput |
    | empty cohort | the share is pure noise; the clip moves all the same |
    | clip far outside norms | moves by a factor e^(-lr (b - target)) a round, at most e^3 |
    """

    value: float
    target: float
    lr: float = 0.2
    noise: float = 0.0
    flip: float = 0.0

    @property
    def identity(self) -> Stated:
        return (("clip", "quantile"), *named_values(self, "value", "target", "lr", "noise", "flip"))

    def __post_init__(self) -> None:
        CLIP.check("value", self.value)
        QUANTILE.check("target", self.target)
        POSITIVE.check("lr", self.lr)
        NOT_NEGATIVE.check("noise", self.noise)
        BIT_EPSILON.check("flip", self.flip)
        if (self.noise > 0) == (self.flip > 0):
            raise BadArgument(
                f"{{noise}} is {self.noise} and {{flip}} {self.flip}: give exactly one, positive",
                "noise",
                "flip",
            )

    def first_value(self) -> float:
        return self.value

    def clip(self, value: float, round: int) -> Clip:
        return Clip(value)

    @property
    def statistic(self) -> ClipStatistic:
        return ClipStatistic(
            width=1,
            norm_bound=0.5,
            noise=self.noise,
            flip=self.flip,
            word="bits",
            description="the clients' bits (was the update within the clip?)",
            key="noise",
            setting=self.noise,
            remedy="raise it",
        )

    def client_statistic(self, lengths: Lengths, round: int) -> torch.Tensor:
        """Centred bits [K, 1]."""
        return 0.5 - (lengths.clipped != 0).to(torch.float64)[:, None]

    def next_value(self, value: float, noisy: torch.Tensor, expected: float, round: int) -> float:
        share = float(noisy[0]) / expected + 0.5
        step = max(-_LARGEST_STEP, min(_LARGEST_STEP, -self.lr * (share - self.target)))
        return max(_LEAST, min(_MOST, value * math.exp(step)))

    def value_limits(self, round: int) -> tuple[float, float]:
        """As `ClipSchedule.value_limits`: a step changes the clip by a factor of at most e^3.

        One more factor is for a rounded product.
        """
        if round == 1:
            return self.value, self.value
        factor = math.exp(min(_LARGEST_STEP * round, 300.0))
        return (
            max(min(_LEAST, self.value), self.value / factor),
            min(max(_MOST, self.value), self.value * factor),
        )


@dataclass(frozen=True)
class Median(ClipSchedule):
    """Set the clip to the median of the clients' norms, from a noisy histogram (Abadi's rule).

    Clients send the norm of their unclipped gradient to a trusted curator (an enclave could take
    that role), which counts them in bins fixed in advance, with edges 2^low ... 2^high, adds
    Gaussian noise of std `noise` to every count and publishes the counts, every `every` rounds.
    The plan sets `noise` so that all histograms together stay within `budget`. The clip becomes
    the upper edge of the bin in which the noisy cumulative count passes half.

    Tracking can run away under local noise: a larger clip means more noise, worse gradients and
    larger norms. `monotone` lets the clip only fall; `cap` limits it.

    | edge | behaviour |
    |---|---|
    | low >= high, every < 1, cap below 2^low or the start | BadInput |
    | norm outside the bins | counted in the first or last one |
    | all noisy counts negative | the clip stays |
    """

    value: float
    low: int
    high: int
    every: int
    budget: Budget
    monotone: bool = False
    cap: float = math.inf
    noise: float = 0.0

    @property
    def identity(self) -> Stated:
        return (
            ("clip", "median"),
            *named_values(self, "value", "low", "high", "every"),
            ("budget", (self.budget.epsilon, self.budget.delta)),
            *named_values(self, "monotone", "cap", "noise"),
        )

    def __post_init__(self) -> None:
        CLIP.check("value", self.value)
        POWER.check("low", self.low)
        POWER.check("high", self.high)
        CLIP_EVERY.check("every", self.every)
        BUDGET.check("cap", self.cap)
        if not self.low < self.high:
            raise BadArgument(
                f"{{low}} and {{high}} are {self.low} and {self.high}: powers of two with "
                "-60 <= low < high <= 60 are needed",
                "low",
                "high",
            )
        if not self.cap >= max(self.value, 2.0**self.low):
            raise BadArgument(
                f"{{cap}} is {self.cap}: at least {{value}} and 2^{{low}} are needed",
                "cap",
                "value",
                "low",
            )

    @property
    def statistic(self) -> ClipStatistic:
        """One count per bin: (0, 2^low], (2^low, 2^(low+1)], ..., (2^(high-1), inf)."""
        return ClipStatistic(
            width=self.high - self.low + 1,
            norm_bound=1.0,
            nonnegative=True,
            noise=self.noise,
            every=self.every,
            word="norms",
            description="the clients' gradient norms in bins",
            key="clip_epsilon",
            setting=self.budget.epsilon,
            remedy="lower it",
        )

    @property
    def needs_raw_gradients(self) -> bool:
        return True

    def settled(self, turns: Callable[[int], int]) -> ClipSchedule:
        """With the noise that keeps all its histograms within its own budget.

        No amplification, composed over all refreshes in which one client can take part.
        """
        reach = self.statistic.sensitivity(Relation.REPLACE)
        multiplier = least_noise(Gaussian, turns(self.every), self.budget, Relation.REPLACE)
        return replace(self, noise=reach * multiplier)

    def first_value(self) -> float:
        return self.value

    def clip(self, value: float, round: int) -> Clip:
        return Clip(value)

    def client_statistic(self, lengths: Lengths, round: int) -> torch.Tensor:
        """One-hot rows [K, width]: the bin of each client's norm."""
        counts = torch.zeros(len(lengths.norms), self.statistic.width, dtype=torch.float64)
        edges = torch.tensor([2.0**e for e in range(self.low, self.high)], dtype=torch.float64)
        return counts.scatter_(1, torch.bucketize(lengths.norms, edges)[:, None], 1.0)

    def next_value(self, value: float, noisy: torch.Tensor, expected: float, round: int) -> float:
        counts = noisy.clamp_min(0)
        if float(counts.sum()) == 0:
            return value
        half = int((counts.cumsum(0) < counts.sum() / 2).sum())
        median = min(2.0 ** (self.low + half), self.cap)
        return min(value, median) if self.monotone else median

    def value_limits(self, round: int) -> tuple[float, float]:
        if round == 1:
            return self.value, self.value
        most = self.value if self.monotone else max(self.value, min(2.0**self.high, self.cap))
        return min(self.value, 2.0**self.low), most


def is_own_schedule(schedule: ClipSchedule) -> bool:
    """Whether what it watches of a client is known not to depend on others in the block."""
    return type(schedule) in (Fixed, Poly, PerGradient, Quantile, Median)


def _check_clip(value: float, norm: Norm) -> None:
    CLIP.check("value", value)
    one_of("norm", norm, Norm)
