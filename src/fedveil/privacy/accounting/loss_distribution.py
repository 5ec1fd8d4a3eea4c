"""Privacy loss distributions on a grid: made from divergences, composed, and read at a delta.

The algorithms are those of dp-accounting (Doroshenko et al. 2022, arXiv 2207.04380, for the grid;
Koskela et al. 2020, arXiv 1906.03049, for the composition by FFT), on arrays throughout: a
calibration asks for dozens of compositions.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

Values = np.ndarray[Any, Any]

_TAIL = 1e-15
"""The mass that a composition may leave out of its window; it counts as an infinite loss."""

_ORDERS = 20
"""Chernoff bounds on either side of the window; more are hardly tighter."""


@dataclass(frozen=True, eq=False)
class LossDistribution:
    """Masses at the losses `lower`, `lower` + 1, ... times `interval`, and at an infinite loss.

    Guarantee: rounding is upwards, so that `epsilon` is never less than the true one by more than
    the rounding of float64 sums (about 1e-15 of mass).
    """

    interval: float
    lower: int
    masses: Values
    infinite: float

    @classmethod
    def connected(cls, interval: float, lower: int, deltas: Values) -> "LossDistribution":
        """The least distribution with the hockey-stick divergences `deltas` at its own losses.

        Between them the profile is the chord, which lies above the true one: it is convex in
        e^epsilon. What is above the last loss counts as infinite, what is below the first as it.
        """
        deltas = np.minimum.accumulate(deltas)
        steps = np.diff(deltas)
        masses = np.append(steps, 0.0)
        masses[1:] -= steps * math.exp(interval)
        masses /= math.expm1(interval)
        masses[0] += 1 - deltas[0]
        return cls(interval, lower, np.maximum(0.0, masses), float(deltas[-1]))

    def repeated(self, count: int) -> "LossDistribution":
        """The loss of `count` independent releases; what leaves the window counts as infinite."""
        low, high = self._window(count)
        size = next_fast_len(max(high - low + 1, len(self.masses)), real=True)
        found = _masses(rfft(self.masses, size) ** count, size)
        infinite = _TAIL - math.expm1(count * math.log1p(-self.infinite))
        start = low % size  # the transform wraps around
        kept = np.concatenate((found[start:], found[:start]))[: high - low + 1]
        return LossDistribution(self.interval, self.lower * count + low, kept, infinite)

    def beside(self, other: "LossDistribution") -> "LossDistribution":
        """The loss of this release and an independent other one on the same grid."""
        length = len(self.masses) + len(other.masses) - 1
        size = next_fast_len(length, real=True)
        found = _masses(rfft(self.masses, size) * rfft(other.masses, size), size)[:length]
        infinite = self.infinite + other.infinite - self.infinite * other.infinite
        return LossDistribution(self.interval, self.lower + other.lower, found, infinite)

    def epsilon(self, delta: float) -> float:
        """The least epsilon >= 0 at which the hockey-stick divergence is at most `delta`.

        | edge | behaviour |
        |---|---|
        | more than delta at an infinite loss | infinity |
        | losses so large that e^-loss is 0 | the loss at which delta is passed |
        """
        if self.infinite > delta:
            return math.inf
        last = self.lower + len(self.masses) - 1
        losses = (last - np.arange(len(self.masses))) * self.interval
        masses = self.masses[::-1]
        upper = self.infinite + np.cumsum(masses)
        lower = np.cumsum(masses * np.exp(np.minimum(-losses, 700.0)))  # no answer is below 0
        return _crossing(losses, upper, lower, delta)

    @cached_property
    def _log_mgfs(self) -> list[tuple[float, float]]:
        """(order, log of the moment generating function there), around 0 in both directions."""
        places = np.arange(len(self.masses)) / len(self.masses)
        found = []
        for sign in (1, -1):
            base = np.exp(sign * places)
            power = np.ones_like(base)
            for order in range(1, _ORDERS + 1):
                power *= base
                moment = float(self.masses @ power)
                log = math.log(moment) if moment > 0 else -math.inf
                found.append((sign * order / len(self.masses), log))
        return found

    def _window(self, count: int) -> tuple[int, int]:
        """Places, counted from `count` times the lowest, that hold all but `_TAIL` of the mass."""
        low, high = 0, (len(self.masses) - 1) * count
        for order, log_mgf in self._log_mgfs:
            bound = (count * log_mgf + math.log(2 / _TAIL)) / order
            if not math.isfinite(bound):
                continue
            if order > 0:
                high = min(high, math.ceil(bound))
            else:
                low = max(low, math.floor(bound))
        return low, high


def _masses(transformed: Values, size: int) -> Values:
    """Back from a transform; where its rounding left less than nothing, there is nothing."""
    found: Values = np.maximum(irfft(transformed, size), 0.0)
    return found


def two_losses(eps0: float, interval: float) -> LossDistribution:
    """Of a report with odds e^eps0: eps0 with the odds for it, -eps0 otherwise, rounded up."""
    low, high = math.ceil(-eps0 / interval), math.ceil(eps0 / interval)
    masses = np.zeros(high - low + 1)
    masses[-1] = 1 / (1 + math.exp(-eps0))
    masses[0] += 1 / (1 + math.exp(eps0))
    return LossDistribution(interval, low, masses, 0.0)


def _crossing(losses: Values, upper: Values, lower: Values, delta: float) -> float:
    """Where upper - e^epsilon lower is delta; masses are summed from the largest loss down.

    With the masses of the first k losses the root is log((upper - delta) / lower), and it is the
    answer if the next loss is not above it.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        roots = np.log((upper - delta) / lower)
        found = (upper[:-1] > delta) & (lower[:-1] > 0) & (roots[:-1] >= losses[1:])
    lost = (upper >= delta) & (lower == 0)
    first = int(np.argmax(found)) if found.any() else len(losses) - 1
    if lost[: first + 1].any():
        return max(0.0, float(losses[np.argmax(lost)]))
    if upper[first] <= lower[first] + delta:
        return 0.0
    return float(roots[first])
