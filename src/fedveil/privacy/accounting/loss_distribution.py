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
from scipy.special import gammaln

Values = np.ndarray[Any, Any]

_TAIL = 1e-15
"""The mass that a composition may leave out of its window; it counts as an infinite loss."""

_ORDERS = 20
"""Chernoff bounds on either side of the window; more are hardly tighter."""

_ROUNDING = 2.0**-46
"""What a release may add to the relative error of a mass: hundreds of times what it does."""


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

    def repeated(self, count: int, delta: float) -> "LossDistribution":
        """The loss of `count` independent releases, exact to float64 where `delta` is passed.

        A transform is wrong by about 1e-16 of the *largest* of its results for each release, which
        at a million releases is more than many a delta. So masses are tilted first, each by
        e^(tilt loss), until the largest are those in the tail of about `delta`, and back after.
        What of the bulk is then below the window counts as the window's lowest loss.
        """
        tilt = self._tilt(count, delta)
        tilted = self._tilted(tilt)
        low, high = tilted._window(count)
        size = next_fast_len(max(high - low + 1, len(self.masses)), real=True)
        found = _masses(rfft(tilted.masses, size) ** count, size)
        start = low % size  # the transform wraps around
        kept = np.concatenate((found[start:], found[:start]))[: high - low + 1]
        back = count * self._log_mgf(tilt) - tilt * np.arange(low, high + 1)
        masses = np.minimum(kept * np.exp(np.minimum(back, 700.0)), 1.0)
        masses *= 1 + count * _ROUNDING
        masses[0] += max(0.0, 1 - float(masses.sum()))
        infinite = _TAIL * math.exp(min(0.0, back[-1])) - math.expm1(
            count * math.log1p(-self.infinite)
        )
        return LossDistribution(self.interval, self.lower * count + low, masses, infinite)

    def beside(self, other: "LossDistribution") -> "LossDistribution":
        """The loss of this release and an independent other one on the same grid."""
        length = len(self.masses) + len(other.masses) - 1
        size = next_fast_len(length, real=True)
        found = _masses(rfft(self.masses, size) * rfft(other.masses, size), size)[:length]
        infinite = self.infinite + other.infinite - self.infinite * other.infinite + _TAIL
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

    def _log_mgf(self, order: float) -> float:
        """The log of the moment generating function, places being counted from the lowest."""
        places = np.arange(len(self.masses))
        moment = float(self.masses @ np.exp(order * places))
        return math.log(moment) if moment > 0 else -math.inf

    @cached_property
    def _log_mgfs(self) -> dict[float, float]:
        """At orders around 0 in both directions."""
        sizes = np.concatenate((2.0 ** np.arange(-14, 0), np.arange(1, _ORDERS + 1)))
        orders = np.concatenate((sizes, -sizes)) / len(self.masses)
        return {float(order): self._log_mgf(float(order)) for order in orders}

    def _tilt(self, count: int, delta: float) -> float:
        """The order whose Chernoff bound on the loss that `delta` passes is the least."""
        return min(
            (order for order in self._log_mgfs if order > 0),
            key=lambda order: (count * self._log_mgfs[order] - math.log(delta)) / order,
        )

    def _tilted(self, order: float) -> "LossDistribution":
        """Masses times e^(order place), summing to 1."""
        places = np.arange(len(self.masses))
        masses = self.masses * np.exp(order * places - self._log_mgf(order))
        return LossDistribution(self.interval, self.lower, masses, 0.0)

    def _window(self, count: int) -> tuple[int, int]:
        """Places, counted from `count` times the lowest, that hold all but `_TAIL` of the mass."""
        low, high = 0, (len(self.masses) - 1) * count
        for order, log_mgf in self._log_mgfs.items():
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


def coin_losses(eps0: float, count: int, interval: float) -> LossDistribution:
    """Of `count` reports with odds e^eps0: each eps0 with the odds for it, -eps0 otherwise.

    Both are rounded up to the grid; how many there are of each is binomial, without a transform.
    """
    low, high = math.ceil(-eps0 / interval), math.ceil(eps0 / interval)
    told = np.arange(count + 1)
    log = gammaln(count + 1) - gammaln(told + 1) - gammaln(count - told + 1)
    log += told * -math.log1p(math.exp(-eps0)) + (count - told) * -math.log1p(math.exp(eps0))
    masses = np.zeros(count * (high - low) + 1)
    np.add.at(masses, told * (high - low), np.exp(log))
    return LossDistribution(interval, count * low, masses, _TAIL)


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
