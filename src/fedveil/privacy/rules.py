"""Rules: which bound is in force in a round, and how it moves to the next.

A rule may watch the cohort (how many updates were short enough, how long they were). What it
watches is private, so a rule that watches adds its own noise and has its own terms: `watch` says
what is collected, `privacy/central.py` and `privacy/local.py` what that costs. A bound moves for
the next round only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from fedveil.checks import SMALLEST_FLOOR, check, one_of
from fedveil.errors import BadInput
from fedveil.privacy.clipping import Bound
from fedveil.privacy.mechanisms import GaussianMechanism, add_to_sum_
from fedveil.privacy.randomness import Keys, Streams, uniform_
from fedveil.privacy.rows import Norm
from fedveil.privacy.terms import Budget


class Lengths(Protocol):
    """What a rule may watch: clients' lengths before the bound, [K], and whom it has met."""

    @property
    def norms(self) -> torch.Tensor: ...
    @property
    def clipped(self) -> torch.Tensor: ...


class Rule(Protocol):
    """How the bound of a run comes about.

    `moving` is the value that moves; `width` the length of the vector that is summed over the
    cohort in a round, 0 when nothing is watched.
    """

    @property
    def norm(self) -> Norm: ...
    @property
    def width(self) -> int: ...

    def start(self) -> float:
        """The moving value before the first round."""
        ...

    def bound(self, moving: float, round: int) -> Bound:
        """The bound in force in `round`."""
        ...

    def watch(self, bounded: Lengths, round: int, keys: Keys) -> torch.Tensor:
        """What one chunk of clients contributes: float64 [K, width], to be summed."""
        ...

    def move(
        self, moving: float, watched: torch.Tensor, expected: float, round: int, streams: Streams
    ) -> float:
        """The moving value for the next round, from the cohort's sum and its public size."""
        ...


class _Unwatched:
    """A rule that looks at nobody, and therefore costs nothing."""

    width = 0

    def watch(self, bounded: Lengths, round: int, keys: Keys) -> torch.Tensor:
        return torch.zeros(len(bounded.norms), 0, dtype=torch.float64)

    def move(
        self, moving: float, watched: torch.Tensor, expected: float, round: int, streams: Streams
    ) -> float:
        return moving


@dataclass(frozen=True)
class Fixed(_Unwatched):
    """The same bound in every round."""

    value: float
    norm: Norm = Norm.L2

    def __post_init__(self) -> None:
        _check_bound(self.value, self.norm)

    def start(self) -> float:
        return self.value

    def bound(self, moving: float, round: int) -> Bound:
        return Bound(moving, self.norm)


@dataclass(frozen=True)
class Poly(_Unwatched):
    """C_0 (1 - (t - 1)/T)^power in round t of T, never below `floor`.

    Data-independent, so it costs nothing. The published schedule ends at exactly 0, where a
    release says nothing and std / bound is undefined: hence the floor.

    | edge | behaviour |
    |---|---|
    | power < 0 | BadInput: the bound would grow without limit |
    | power 0 | a fixed bound |
    | floor above the start | BadInput |
    """

    value: float
    power: float
    rounds: int
    floor: float
    norm: Norm = Norm.L2

    def __post_init__(self) -> None:
        _check_bound(self.value, self.norm)
        check("bound.power", self.power)
        check("rounds", self.rounds)
        check("bound.floor", self.floor)
        if self.floor > self.value:
            raise BadInput(
                f"bound.floor is {self.floor}: a number from {SMALLEST_FLOOR} to bound.value, "
                f"{self.value}, is needed"
            )

    def start(self) -> float:
        return self.value

    def bound(self, moving: float, round: int) -> Bound:
        share = max(0.0, 1 - (round - 1) / self.rounds)
        return Bound(max(self.floor, moving * share**self.power), self.norm)


@dataclass(frozen=True)
class PerGradient:
    """`inner` bounds every local gradient; the update is then bounded by that times `reach`.

    `reach(round)` is the sum of the round's learning rates (Fu et al.: Xi = zeta sum(eta)).
    """

    inner: Fixed | Poly
    reach: Callable[[int], float]

    @property
    def norm(self) -> Norm:
        return self.inner.norm

    @property
    def width(self) -> int:
        return 0

    def start(self) -> float:
        return self.inner.start()

    def bound(self, moving: float, round: int) -> Bound:
        gradient = self.inner.bound(moving, round)
        return Bound(gradient.value * self.reach(round), gradient.norm, gradient.value)

    def watch(self, bounded: Lengths, round: int, keys: Keys) -> torch.Tensor:
        return self.inner.watch(bounded, round, keys)

    def move(
        self, moving: float, watched: torch.Tensor, expected: float, round: int, streams: Streams
    ) -> float:
        return moving


@dataclass(frozen=True)
class Quantile:
    """Follow the `target` quantile of update norms (Andrew et al. 2021), geometrically.

    Client k's bit is 1 when its update needed no bounding. With b the noisy share of ones,
    C <- C exp(-lr (b - target)). Three ways to keep the bits private, which differ in who adds
    the noise; `privacy/central.py` accounts for the first, `privacy/local.py` for the others:

    - central: bits centred to +-1/2 (sensitivity 1/2), summed, noised with std `noise` by the
      trusted server in one joint release with the updates;
    - curator: the same sum, noised by a trusted party of its own, composed with the reports;
    - local (`flip` > 0): each client reports its bit through randomised response of epsilon
      `flip`; the server de-biases the sum, and `noise` is 0. The draw is a multiple of 2^-52,
      and 2^-22 is taken off the chance of keeping the bit, so that epsilon holds exactly.

    | edge | behaviour |
    |---|---|
    | target outside (0, 1) | BadInput |
    | empty cohort | the share is pure noise; the bound moves all the same |
    | bound far outside norms | moves by a factor e^(-lr (b - target)) a round, at most e^3 |
    """

    value: float
    target: float
    lr: float = 0.2
    noise: float = 0.0
    flip: float = 0.0

    norm = Norm.L2
    width = 1

    def __post_init__(self) -> None:
        check("bound.value", self.value)
        check("bound.quantile", self.target)
        check("bound.lr", self.lr)
        check("bound.bit_noise", self.noise)
        check("bound.bit_epsilon", self.flip)
        if (self.noise > 0) == (self.flip > 0):
            raise BadInput(
                f"bound.bit_noise is {self.noise} and bound.bit_epsilon {self.flip}: give exactly "
                "one, positive"
            )

    def start(self) -> float:
        return self.value

    def bound(self, moving: float, round: int) -> Bound:
        return Bound(moving)

    def watch(self, bounded: Lengths, round: int, keys: Keys) -> torch.Tensor:
        """Centred bits [K, 1]; in the local version flipped by the client and de-biased."""
        bits = 0.5 - (bounded.clipped != 0).to(torch.float64)[:, None]
        if not self.flip:
            return bits
        keep = 1 / (1 + math.exp(-self.flip))
        draw = uniform_(torch.empty(len(bits), 1, dtype=torch.float64), keys)
        flipped = torch.where(draw < max(0.0, 2 * keep - 1 - 2.0**-22), bits, -bits)
        return flipped / (2 * keep - 1)

    def move(
        self, moving: float, watched: torch.Tensor, expected: float, round: int, streams: Streams
    ) -> float:
        if self.noise:
            watched = _noisy(watched, self.noise, streams.keys("bits", round, np.zeros(1)))
        share = float(watched[0]) / expected + 0.5
        step = max(-3.0, min(3.0, -self.lr * (share - self.target)))
        return max(1e-12, min(1e12, moving * math.exp(step)))


@dataclass(frozen=True)
class Median:
    """Set the bound to the median of the clients' norms, from a noisy histogram (Abadi's rule).

    Clients send the norm of their unbounded gradient to a trusted curator (an enclave could take
    that role), which counts them in bins fixed in advance, with edges 2^low ... 2^high, adds
    Gaussian noise of std `noise` to every count and publishes the counts, every `every` rounds.
    The plan sets `noise` so that all histograms together stay within `budget`. The bound becomes
    the upper edge of the bin in which the noisy cumulative count passes half.

    Tracking can run away under local noise: a larger bound means more noise, worse gradients and
    larger norms. `monotone` lets the bound only fall; `cap` limits it.

    | edge | behaviour |
    |---|---|
    | low >= high, every < 1, cap below 2^low or the start | BadInput |
    | norm outside the bins | counted in the first or last one |
    | all noisy counts negative | the bound stays |
    """

    value: float
    low: int
    high: int
    every: int
    budget: Budget
    monotone: bool = False
    cap: float = math.inf
    noise: float = 0.0

    norm = Norm.L2

    def __post_init__(self) -> None:
        check("bound.value", self.value)
        check("bound.low", self.low)
        check("bound.high", self.high)
        check("bound.every", self.every)
        check("bound.cap", self.cap)
        if not self.low < self.high:
            raise BadInput(
                f"bound.low and bound.high are {self.low} and {self.high}: powers of two with "
                "-60 <= low < high <= 60 are needed"
            )
        if not self.cap >= max(self.value, 2.0**self.low):
            raise BadInput(
                f"bound.cap is {self.cap}: at least bound.value and 2^bound.low are needed"
            )

    @property
    def width(self) -> int:
        """One count per bin: (0, 2^low], (2^low, 2^(low+1)], ..., (2^(high-1), inf)."""
        return self.high - self.low + 1

    def start(self) -> float:
        return self.value

    def bound(self, moving: float, round: int) -> Bound:
        return Bound(moving)

    def due(self, round: int) -> bool:
        """Whether norms are collected in `round`: in rounds 1, every + 1, 2 every + 1, ..."""
        return (round - 1) % self.every == 0

    def watch(self, bounded: Lengths, round: int, keys: Keys) -> torch.Tensor:
        """One-hot rows [K, width]: the bin of each client's norm; zeros when not due."""
        counts = torch.zeros(len(bounded.norms), self.width, dtype=torch.float64)
        if self.due(round):
            edges = torch.tensor([2.0**e for e in range(self.low, self.high)], dtype=torch.float64)
            counts.scatter_(1, torch.bucketize(bounded.norms, edges)[:, None], 1.0)
        return counts

    def move(
        self, moving: float, watched: torch.Tensor, expected: float, round: int, streams: Streams
    ) -> float:
        if not self.due(round):
            return moving
        keys = streams.keys("norms", round, np.zeros(1))
        counts = _noisy(watched, self.noise, keys).clamp_min(0)
        if float(counts.sum()) == 0:
            return moving
        half = int((counts.cumsum(0) < counts.sum() / 2).sum())
        median = min(2.0 ** (self.low + half), self.cap)
        return min(moving, median) if self.monotone else median


def _check_bound(value: float, norm: Norm) -> None:
    check("bound.value", value)
    one_of("bound.norm", norm, Norm)


def _noisy(counts: torch.Tensor, noise: float, keys: Keys) -> torch.Tensor:
    """Counts [W], multiples of 1/2, with Gaussian noise of that standard deviation on each."""
    noisy = counts.clone()
    add_to_sum_(GaussianMechanism(noise), noisy, noise, keys)  # a sensitivity of 1 at most
    return noisy
