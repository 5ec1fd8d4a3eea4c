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

_ORDERS, _LEAST = 24, 2.0**-14
"""Chernoff bounds on either side of the window, from `_LEAST` over its length to 512 over it."""

_NO_EXP = 650.0
"""Beyond, e^-loss loses its digits; below minus that no answer lies."""

_ROUNDING = 2.0**-48
"""What a release may add to the error of a mass, relative to the largest: 16 last digits."""


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
        """The loss of `count` independent releases, as `composed` has it."""
        return composed([(self, count)], delta)

    def composed_with(self, other: "LossDistribution", delta: float) -> "LossDistribution":
        """The loss of this release and an independent other one on the same grid."""
        return composed([(self, 1), (other, 1)], delta)

    def epsilon(self, delta: float) -> float:
        """The least epsilon >= 0 at which the hockey-stick divergence is at most `delta`.

        | edge | behaviour |
        |---|---|
        | more than delta at an infinite loss | infinity |
        """
        if self.infinite > delta:
            return math.inf
        last = self.lower + len(self.masses) - 1
        losses = (last - np.arange(len(self.masses))) * self.interval
        masses = self.masses[::-1]
        upper = self.infinite + np.cumsum(masses)
        with np.errstate(divide="ignore"):
            if losses[0] <= _NO_EXP:
                lower = np.log(np.cumsum(masses * np.exp(np.minimum(-losses, _NO_EXP))))
            else:
                lower = np.logaddexp.accumulate(np.log(masses) - losses)
        return _crossing(losses, upper, lower, delta)

    def _log_mgf(self, order: float) -> float:
        """The log of the moment generating function, places being counted from the lowest."""
        places = np.arange(len(self.masses))
        moment = float(self.masses @ np.exp(order * places))
        return math.log(moment) if moment > 0 else -math.inf

    @cached_property
    def _known(self) -> dict[int, dict[float, float]]:
        return {}

    def _log_mgfs(self, length: int) -> dict[float, float]:
        """At orders around 0 in both directions, each twice the one before: squares of powers.

        The orders are fractions of `length`, the masses of the longest that is composed.
        """
        if length not in self._known:
            found = self._known[length] = {}
            for sign in (1, -1):
                power = np.exp(np.arange(len(self.masses)) * (sign * _LEAST / length))
                for doubled in range(_ORDERS):
                    if doubled:
                        power *= power
                    moment = float(self.masses @ power)
                    order = sign * _LEAST * 2.0**doubled / length
                    found[order] = math.log(moment) if moment > 0 else -math.inf
        return self._known[length]

    def _tilted(self, order: float) -> "LossDistribution":
        """Masses times e^(order place), summing to 1."""
        places = np.arange(len(self.masses))
        masses = self.masses * np.exp(order * places - self._log_mgf(order))
        return LossDistribution(self.interval, self.lower, masses, 0.0)


Parts = list[tuple[LossDistribution, int]]
"""Releases on one grid, and how many there are of each."""


def composed(parts: Parts, delta: float) -> LossDistribution:
    """The loss of independent releases, exact to float64 where `delta` is passed.

    A transform is wrong by about 1e-16 of the *largest* of its results for each release, which at a
    million releases is more than many a delta. So masses are tilted first, each by e^(tilt loss),
    until the largest are those in the tail of about `delta`, and back after. What of the bulk is
    then below the window counts as the window's lowest loss.
    """
    length, count = max(len(d.masses) for d, _ in parts), sum(n for _, n in parts)
    tilt = _tilt(parts, length, delta)
    tilted = [(d._tilted(tilt), n) for d, n in parts]
    low, high = _window(tilted, length)
    size = next_fast_len(max(high - low + 1, length), real=True)
    found = _masses(np.prod([rfft(d.masses, size) ** n for d, n in tilted], axis=0), size)
    start = low % size  # the transform wraps around
    kept = np.concatenate((found[start:], found[:start]))[: high - low + 1]
    kept += count * _ROUNDING * (kept + kept.max())
    back = sum(n * d._log_mgf(tilt) for d, n in parts) - tilt * np.arange(low, high + 1)
    masses = np.minimum(kept * np.exp(np.minimum(back, 700.0)), 1.0)
    masses[0] += max(0.0, 1 - float(masses.sum()))
    above = _TAIL * math.exp(min(700.0, float(back[-1])))
    infinite = above - math.expm1(sum(n * math.log1p(-d.infinite) for d, n in parts))
    lower = sum(n * d.lower for d, n in parts) + low
    return LossDistribution(parts[0][0].interval, lower, masses, infinite)


def _tilt(parts: Parts, length: int, delta: float) -> float:
    """An order whose Chernoff bound on the loss that `delta` passes is the least, nearly."""

    def bound(order: float) -> float:
        total = sum(n * d._log_mgf(order) for d, n in parts)
        return (total - math.log(delta)) / order

    every = _log_mgfs(parts, length)
    least = {order: (total - math.log(delta)) / order for order, total in every.items()}
    best = min((order for order in least if order > 0), key=least.__getitem__)
    return min((best / math.sqrt(2), best, min(best * math.sqrt(2), max(every))), key=bound)


def _window(parts: Parts, length: int) -> tuple[int, int]:
    """Places, counted from the lowest, that hold all but `_TAIL` of the mass (Chernoff)."""
    low, high = 0, sum((len(d.masses) - 1) * n for d, n in parts)
    for order, log_mgf in _log_mgfs(parts, length).items():
        bound = (log_mgf + math.log(2 / _TAIL)) / order
        if not math.isfinite(bound):
            continue
        if order > 0:
            high = min(high, math.ceil(bound))
        else:
            low = max(low, math.floor(bound))
    return low, high


def _log_mgfs(parts: Parts, length: int) -> dict[float, float]:
    """Of the sum of all losses."""
    every = [(d._log_mgfs(length), n) for d, n in parts]
    return {order: sum(n * found[order] for found, n in every) for order in every[0][0]}


def _masses(transformed: Values, size: int) -> Values:
    """Masses from a transform, with negative rounding errors set to zero."""
    found: Values = np.maximum(irfft(transformed, size), 0.0)
    return found


def coin_losses(eps0: float, count: int, interval: float) -> LossDistribution:
    """Of `count` reports with odds e^eps0, each eps0 with the odds for it and -eps0 otherwise.

    How many there are of each is binomial, without a transform, and their sum is rounded up to the
    grid. Numbers beyond ten standard deviations, less than 1e-20 of the mass, count as an infinite
    loss above and as the lowest one below.
    """
    likely = 1 / (1 + math.exp(-eps0))
    reach = 10 * math.sqrt(count * likely * (1 - likely)) + 50
    first = max(0, math.floor(count * likely - reach))
    number = np.arange(first, min(count, math.ceil(count * likely + reach)) + 1)
    log = gammaln(count + 1) - gammaln(number + 1) - gammaln(count - number + 1)
    odds = math.log1p(math.exp(-eps0))
    log -= number * odds + (count - number) * (eps0 + odds)
    log += _ROUNDING * (gammaln(count + 1) + count * (eps0 + odds))  # of the terms above
    places = np.ceil((2 * number - count) * (eps0 / interval)).astype(np.int64)
    masses = np.zeros(int(places[-1] - places[0]) + 1)
    np.add.at(masses, places - places[0], np.exp(log))
    masses[0] += max(0.0, 1 - float(masses.sum()))
    return LossDistribution(interval, int(places[0]), masses, _TAIL)


def coin_span(eps0: float, count: int) -> float:
    """The range of the losses of so many coins."""
    return 2 * eps0 * min(count, 10 * math.sqrt(count) + 100)


def _crossing(losses: Values, upper: Values, log_lower: Values, delta: float) -> float:
    """The epsilon at which upper - e^epsilon lower is delta.

    Masses are summed from the largest loss down. With the masses of the first k losses the root is
    log((upper - delta) / lower), and it is the answer if the next loss is not above it.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        roots = np.log(upper - delta) - log_lower
        found = roots[:-1] >= losses[1:]
    first = int(np.argmax(found)) if found.any() else len(losses) - 1
    return float(roots[first]) if roots[first] > 0 else 0.0
