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
    """Lengths of clients' updates, from which a schedule computes its statistic.

    Attributes:
        norms: The lengths of their updates before the clip, or of unclipped gradients for a
            schedule that `needs_raw_gradients`, [K].
        clipped: Which of them were clipped, [K].
    """

    norms: torch.Tensor
    clipped: torch.Tensor

    def of_client(self, client: int) -> "Lengths":
        """The lengths of client number `client` alone, as arrays of length 1."""
        only = slice(client, client + 1)
        return Lengths(self.norms[only], self.clipped[only])


class ClipSchedule(ABC):
    """Which clip is in force in which round. Subclasses need `first_value` and `clip`.

    An adaptive schedule also has a `statistic`, which each client reports
    (`client_statistic`), and a `next_value`, which depends on the noisy sum of the reports.

    Attributes:
        needs_raw_gradients: Whether the statistic needs the norms of unclipped gradients.
    """

    needs_raw_gradients = False

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
        """The clip value of the first round."""

    @abstractmethod
    def clip(self, value: float, round: int) -> Clip:
        """The clip in force in `round`, from 1, given the adaptive clip value `value`."""

    def client_statistic(self, lengths: Lengths, round: int) -> torch.Tensor:
        """The statistic of each client of a block, float64 [K, width], before noise.

        It is published as a sum with noise only, or after randomised response. Here width is 0.
        """
        return torch.zeros(len(lengths.norms), 0, dtype=torch.float64)

    def next_value(self, value: float, noisy: torch.Tensor, expected: float, round: int) -> float:
        """The clip value of the next round. Here `value`, unchanged.

        Args:
            value: The clip value of this round.
            noisy: The noisy sum of the clients' statistics [width].
            expected: The expected number of clients.
            round: The number of this round.
        """
        return value

    def value_limits(self, round: int) -> tuple[float, float]:
        """(least, greatest) possible clip value in `round`, whatever clients reported.

        Sites use it: they do not see how the value changed. Here both are the first value.
        """
        return self.first_value(), self.first_value()

    def rates_allowed(self, round: int) -> float | None:
        """The largest sum of the learning rates of `round`, None if they are free."""
        return None

    def settled(self, turns: Callable[[int], int]) -> "ClipSchedule":
        """The schedule with calibrated noise, where its statistic has a budget of its own.

        `turns(every)` is the largest number of rounds in which one client reports, if one in
        `every` rounds has reports. Here the schedule itself.
        """
        return self

    # The adaptive state of a training, of which the clip value is the usual form.

    def first_state(self, params: torch.Tensor) -> torch.Tensor:
        """The adaptive state before the first round, float64, for the first model `params` [P].

        Here [first value].
        """
        return torch.tensor([self.first_value()], dtype=torch.float64)

    def next_state(
        self,
        state: torch.Tensor,
        noisy: torch.Tensor | None,
        expected: float,
        before: torch.Tensor,
        after: torch.Tensor,
        round: int,
    ) -> torch.Tensor:
        """The adaptive state of the next round, float64.

        Here [`next_value`], or `state` without reports.

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

        `first` is the model of the first round. Here `state` is one number within `value_limits`.
        """
        if state.shape != (1,):
            return False
        least, most = self.value_limits(round)
        return least <= float(state[0]) <= most


@dataclass(frozen=True)
class _StartsAtValue(ClipSchedule):
    """A schedule whose first clip value is `value`. The clip is the value, in L2."""

    value: float

    def first_value(self) -> float:
        """The clip value of the first round: `value`."""
        return self.value

    def clip(self, value: float, round: int) -> Clip:
        """The clip at `value`, in L2, in every round."""
        return Clip(value)


@dataclass(frozen=True)
class Fixed(_StartsAtValue):
    """The same clip in every round.

    Attributes:
        value: The largest norm of an update.
        norm: The norm in which it is measured.
    """

    norm: Norm = Norm.L2

    @property
    def identity(self) -> Stated:
        """Identity pairs: clip "fixed", value, norm."""
        return (("clip", "fixed"), ("value", self.value), ("norm", self.norm))

    def __post_init__(self) -> None:
        """Raise BadArgument for a value outside [1e-20, 1e30], or a norm that is no `Norm`."""
        CLIP.check("value", self.value)
        one_of("norm", self.norm, Norm)

    def clip(self, value: float, round: int) -> Clip:
        """The clip at `value` in `self.norm`, in every round."""
        return Clip(value, self.norm)


@dataclass(frozen=True)
class Poly(_StartsAtValue):
    """C_0 (1 - (t - 1)/T)^power in round t of T, never below `floor`.

    Data-independent, so it costs nothing. The published schedule ends at exactly 0, where a
    release says nothing and std / clip is undefined: hence the floor.

    | edge | behaviour |
    |---|---|
    | power < 0 | BadInput: the clip would grow without limit |
    | power 0 | a fixed clip |
    | floor above the start | BadInput |
    """

    power: float
    rounds: int
    floor: float
    norm: Norm = Norm.L2

    @property
    def identity(self) -> Stated:
        """Identity pairs: clip "poly", value, power, rounds, floor, norm."""
        return (("clip", "poly"), *named_values(self, "value", "power", "rounds", "floor", "norm"))

    def __post_init__(self) -> None:
        """Raise BadArgument for a number outside its limits, or a norm that is no `Norm`."""
        CLIP.check("value", self.value)
        one_of("norm", self.norm, Norm)
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

    def clip(self, value: float, round: int) -> Clip:
        """The clip of `round`, from 1, where `value` is C_0. It is never below `floor`."""
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
        """Identity pairs: clip "per-gradient", inner, reach."""
        return (("clip", "per-gradient"), ("inner", self.inner), ("reach", self.reach))

    @property
    def norm(self) -> Norm:
        """The norm of the inner schedule."""
        return self.inner.norm

    def rates_allowed(self, round: int) -> float:
        """The sum of the learning rates of `round`: `reach(round)`."""
        return self.reach(round)

    def first_value(self) -> float:
        """The first clip value of a gradient."""
        return self.inner.first_value()

    def clip(self, value: float, round: int) -> Clip:
        """The clip on the update, whose `gradient` is the clip value on each gradient."""
        gradient = self.inner.clip(value, round)
        return Clip(gradient.value * self.reach(round), gradient.norm, gradient.value)


_LEAST, _MOST, _LARGEST_STEP = 1e-12, 1e12, 3.0
"""The range of a quantile clip, and the logarithm of the largest factor by which it moves in a
round."""


@dataclass(frozen=True)
class Quantile(_StartsAtValue):
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

    target: float
    lr: float = 0.2
    noise: float = 0.0
    flip: float = 0.0

    @property
    def identity(self) -> Stated:
        """Identity pairs: clip "quantile", value, target, lr, noise, flip."""
        return (("clip", "quantile"), *named_values(self, "value", "target", "lr", "noise", "flip"))

    def __post_init__(self) -> None:
        """Raise BadArgument for a number outside its limits.

        Exactly one of noise and flip must be positive.
        """
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

    @property
    def statistic(self) -> ClipStatistic:
        """Describes the clients' bits: one number each, +1/2 or -1/2, in every round."""
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
        """Each client's bit, float64 [K, 1]: 1/2 if its update needed no clipping, else -1/2."""
        return 0.5 - (lengths.clipped != 0).to(torch.float64)[:, None]

    def next_value(self, value: float, noisy: torch.Tensor, expected: float, round: int) -> float:
        """`value` times exp(-lr (share - target)), with the noisy share of updates within the clip.

        The factor is from e^-3 to e^3, the result from 1e-12 to 1e12.
        """
        share = float(noisy[0]) / expected + 0.5
        step = max(-_LARGEST_STEP, min(_LARGEST_STEP, -self.lr * (share - self.target)))
        return max(_LEAST, min(_MOST, value * math.exp(step)))

    def value_limits(self, round: int) -> tuple[float, float]:
        """(least, greatest) possible clip value in `round`. In round 1 both are the first value.

        Later they are the first value times e^(-3 round) and e^(3 round), within 1e-12 and 1e12.
        That is one factor e^3 more than steps can make, for rounding.
        """
        if round == 1:
            return self.value, self.value
        factor = math.exp(min(_LARGEST_STEP * round, 300.0))
        return (
            max(min(_LEAST, self.value), self.value / factor),
            min(max(_MOST, self.value), self.value * factor),
        )


@dataclass(frozen=True)
class Median(_StartsAtValue):
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

    low: int
    high: int
    every: int
    budget: Budget
    monotone: bool = False
    cap: float = math.inf
    noise: float = 0.0

    needs_raw_gradients = True

    @property
    def identity(self) -> Stated:
        """Identity pairs: clip "median", value, low, high, every, budget, monotone, cap, noise."""
        return (
            ("clip", "median"),
            *named_values(self, "value", "low", "high", "every"),
            ("budget", (self.budget.epsilon, self.budget.delta)),
            *named_values(self, "monotone", "cap", "noise"),
        )

    def __post_init__(self) -> None:
        """Raise BadArgument for a number outside its limits, low >= high, or too small a cap."""
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
        """Describes the histogram of clients' norms: one count per bin, every `every` rounds.

        The bins are [0, 2^low], (2^low, 2^(low+1)], ..., (2^(high-1), inf).
        """
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

    def settled(self, turns: Callable[[int], int]) -> ClipSchedule:
        """The schedule with the noise that keeps all its histograms within its own budget.

        No amplification, composed over all histograms in which one client can take part.
        """
        reach = self.statistic.sensitivity(Relation.REPLACE)
        multiplier = least_noise(Gaussian, turns(self.every), self.budget, Relation.REPLACE)
        return replace(self, noise=reach * multiplier)

    def client_statistic(self, lengths: Lengths, round: int) -> torch.Tensor:
        """One-hot rows, float64 [K, bins]: the bin of each client's norm."""
        counts = torch.zeros(len(lengths.norms), self.statistic.width, dtype=torch.float64)
        edges = torch.tensor([2.0**e for e in range(self.low, self.high)], dtype=torch.float64)
        return counts.scatter_(1, torch.bucketize(lengths.norms, edges)[:, None], 1.0)

    def next_value(self, value: float, noisy: torch.Tensor, expected: float, round: int) -> float:
        """The upper edge of the bin with the noisy median, at most `cap`.

        The last bin's edge is 2^high.

        With `monotone` it is at most `value`. If all noisy counts are negative, it is `value`.
        """
        counts = noisy.clamp_min(0)
        if float(counts.sum()) == 0:
            return value
        half = int((counts.cumsum(0) < counts.sum() / 2).sum())
        median = min(2.0 ** (self.low + half), self.cap)
        return min(value, median) if self.monotone else median

    def value_limits(self, round: int) -> tuple[float, float]:
        """(least, greatest) possible clip value in `round`. In round 1 both are the first value.

        Later the least is the smaller of 2^low and the first value. The greatest is the smaller of
        2^high and `cap`, but not below the first value. With `monotone` it is the first value.
        """
        if round == 1:
            return self.value, self.value
        most = self.value if self.monotone else max(self.value, min(2.0**self.high, self.cap))
        return min(self.value, 2.0**self.low), most


def is_own_schedule(schedule: ClipSchedule) -> bool:
    """Whether a schedule's class is one of those in this module.

    Then its statistic of a client does not depend on other clients. A subclass does not count.
    """
    return type(schedule) in (Fixed, Poly, PerGradient, Quantile, Median)
