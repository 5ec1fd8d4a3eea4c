"""Privacy loss distributions on a grid: of sampled Gaussians and coins, composed, read at a delta.

The algorithms are those of dp-accounting (Doroshenko et al. 2022, arXiv 2207.04380, for the grid;
Koskela et al. 2020, arXiv 1906.03049, for the composition by FFT), on arrays throughout: a
calibration asks for dozens of compositions.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import gammaln, log_ndtr, ndtr, ndtri

Values = np.ndarray[Any, Any]

_Sketch = tuple[Values, Values]
"""Places, and the mass at each."""

_TAIL = 1e-15
"""The mass that a composition may leave out of its window; it counts as an infinite loss."""

_LEAST, _DOUBLINGS = 2.0**-14, 23
"""Of the orders of Chernoff bounds: from 2^-14 to 2^9 over the length of the longest part."""

_BLOCKS = 1024
"""Of a distribution, where only bounds on its moments are asked for."""

_NO_EXP = 650.0
"""Beyond, e^-loss loses its digits; below minus that no answer lies."""

_ROUNDING = 2.0**-48
"""What a release may add to the error of a mass, relative to the largest: 16 last digits."""

_GAUSSIAN_TAIL = 0.5 * math.exp(-50)
"""Of the Gaussian, left out at either end: it counts as an infinite loss."""

_NO_SINH = 300.0
"""Beyond, arsinh(e^x) is x + log 2 to the last digit, and e^x nears the end of the floats."""

_NO_WEIGHT = 1e-30
"""Below, a number of units that take part is left out of the mixture, to count as infinite."""

_NEWTON, _CLOSE = 100, 1e-13
"""Steps at most, and the last one's size relative to the place."""


@dataclass(frozen=True, eq=False)
class LossDistribution:
    """A distribution of privacy losses on a grid.

    Guarantee: rounding is upwards, so that `epsilon` is never less than the true one by more than
    the rounding of float64 sums (about 1e-15 of mass).

    Attributes:
        interval: The spacing of the grid.
        lower: The lowest loss, in intervals.
        masses: The probabilities of the losses lower x interval, (lower + 1) x interval, ...
        infinite: The probability of an infinite loss.
        log_mgfs: A cache of `_summed_log_mgfs`.
    """

    interval: float
    lower: int
    masses: Values
    infinite: float

    @classmethod
    def from_deltas(cls, interval: float, lower: int, deltas: Values) -> "LossDistribution":
        """The least distribution with the hockey-stick divergences `deltas` at its own losses.

        deltas[k] is the divergence at epsilon = (lower + k) x interval. Between these the profile
        is the chord, which lies above the true one: it is convex in e^epsilon. What is above the
        last loss counts as infinite, what is below the first as the first.
        """
        deltas = np.minimum.accumulate(deltas)
        steps = np.diff(deltas)
        masses = np.append(steps, 0.0)
        masses[1:] -= steps * math.exp(interval)
        masses /= math.expm1(interval)
        masses[0] += 1 - deltas[0]
        return cls(interval, lower, np.maximum(0.0, masses), float(deltas[-1]))

    @cached_property
    def sketch(self) -> _Sketch:
        """The distribution of the places 0, 1, ... of the losses, on about a thousand of them.

        Each mass goes to the two ends of its block, in shares that keep its mean: expectations of
        convex functions, such as moment generating functions, only grow.
        """
        block = -(-len(self.masses) // _BLOCKS)
        rows = np.append(self.masses, np.zeros(-len(self.masses) % block)).reshape(-1, block)
        right = rows @ (np.arange(block) / block)
        masses = np.append(rows.sum(axis=1) - right, 0.0)
        masses[1:] += right
        some = masses > 0
        return block * np.flatnonzero(some), masses[some]

    def epsilon(self, delta: float) -> float:
        """The least epsilon >= 0 at which the hockey-stick divergence is at most `delta`.

        Masses are summed from the largest loss down, `upper` under one of the two worlds and
        `lower` under the other. With the masses of the first k losses the divergence is delta at
        log((upper - delta) / lower), and that is the answer if the next loss is not above it.

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
        with np.errstate(divide="ignore", invalid="ignore"):
            if losses[0] <= _NO_EXP:
                log_lower = np.log(np.cumsum(masses * np.exp(np.minimum(-losses, _NO_EXP))))
            else:
                log_lower = np.logaddexp.accumulate(np.log(masses) - losses)
            roots = np.log(upper - delta) - log_lower
            reached = roots[:-1] >= losses[1:]
        first = int(np.argmax(reached)) if reached.any() else len(losses) - 1
        return float(roots[first]) if roots[first] > 0 else 0.0


Parts = list[tuple[LossDistribution, int]]
"""Releases on one grid, and how many there are of each."""


def compose(parts: Parts, delta: float) -> LossDistribution:
    """The loss distribution of independent releases on one grid, exact to float64 at `delta`.

    A transform is wrong by about 1e-16 of the *largest* of its results for each release, which at a
    million releases is more than many a delta. So masses are tilted first, each by e^(tilt loss),
    until the largest are those in the tail of about `delta`, and back after. What of the bulk is
    then below the window counts as the window's lowest loss.

    Args:
        parts: Loss distributions, and how many releases there are of each.
        delta: Where the result is going to be read.
    """
    count, log_delta = sum(n for _, n in parts), math.log(delta)
    sketches = [(d.sketch, n) for d, n in parts]
    longest = max(len(d.masses) for d, _ in parts)
    orders = _LEAST / longest * 2.0 ** np.arange(0, _DOUBLINGS + 0.5, 0.5)

    # The tilt: the order whose Chernoff bound on the loss that `delta` passes is about the least
    bounds = (_log_mgf(sketches, orders) - log_delta) / orders
    tilt, log_moment, tilted = float(orders[np.argmin(bounds)]), 0.0, []
    for d, n in parts:
        masses = d.masses * np.exp(tilt * np.arange(len(d.masses)))
        moment = float(masses.sum())
        tilted.append((masses / moment, n))
        log_moment += n * math.log(moment)

    # The window: places, counted from the lowest, that hold all but `_TAIL` of the tilted mass
    low, high = 0, sum((len(d.masses) - 1) * n for d, n in parts)
    excess = math.log(2 / _TAIL) - log_moment
    high = min(high, math.ceil(np.min((_log_mgf(sketches, tilt + orders) + excess) / orders)))
    low = max(low, math.floor(np.max((_log_mgf(sketches, tilt - orders) + excess) / -orders)))

    size = next_fast_len(high - low + 1, real=True)
    powers = []
    for masses, n in tilted:  # on a circle of `size` places, where sums of losses are going anyway
        laps = np.append(masses, np.zeros(-len(masses) % size)).reshape(-1, size)
        powers.append(rfft(laps.sum(axis=0), size) ** n)
    wrapped = np.maximum(irfft(np.prod(powers, axis=0), size), 0.0)  # the transform wraps around
    start = low % size
    window = np.concatenate((wrapped[start:], wrapped[:start]))[: high - low + 1]
    window += count * _ROUNDING * (window + window.max())
    back = log_moment - tilt * np.arange(low, high + 1)
    masses = np.minimum(window * np.exp(np.minimum(back, 700.0)), 1.0)
    masses[0] += max(0.0, 1 - float(masses.sum()))
    above = _TAIL * math.exp(min(700.0, float(back[-1])))
    infinite = above - math.expm1(sum(n * math.log1p(-d.infinite) for d, n in parts))
    lower = sum(n * d.lower for d, n in parts) + low
    return LossDistribution(parts[0][0].interval, lower, masses, infinite)


def _log_mgf(sketches: list[tuple[_Sketch, int]], orders: Values) -> Values:
    """An upper bound on the log of the moment generating function of a sum of places, by order."""
    total = np.zeros(len(orders))
    for (places, masses), n in sketches:
        powers = np.multiply.outer(orders, places)
        largest = powers.max(axis=1)
        total += n * (largest + np.log(np.exp(powers - largest[:, None]) @ masses))
    return total


def coin_losses(eps0: float, count: int, interval: float) -> LossDistribution:
    """The loss distribution of `count` reports with odds e^eps0, on a grid of `interval`.

    Each loss is eps0 with these odds, otherwise -eps0. How many there are of each is binomial,
    without a transform, and their sum is rounded up to the grid. Numbers beyond ten standard
    deviations, less than 1e-20 of the mass, count as an infinite loss above and as the lowest one
    below.
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
    """The width of the range of losses that `coin_losses` needs, from above."""
    return 2 * eps0 * min(count, 10 * math.sqrt(count) + 100)


# --- one Poisson-sampled Gaussian release, for one unit or more ---

_Mixture = tuple[tuple[float, float], ...]
"""(positive weight, by how much N(0, noise^2) is moved)."""


@lru_cache(maxsize=16)
def add_remove_losses(
    rate: float, noise: float, interval: float, units: int = 1
) -> tuple[LossDistribution, ...]:
    """The loss distributions of `units` units that take part with `rate`, against none at all.

    There are two, one for each direction: (units removed, units added). At rate 1 they are the
    same, and there is one. Each unit moves the sum by 1, in which unit `noise` is the standard
    deviation, and all of them the same way: the number that takes part is binomial, and the sum is
    a mixture of Gaussians (docs/proofs/units.md). Cached, because budgets ask for many counts of
    it.

    | edge | behaviour |
    |---|---|
    | one unit | the cutoffs in closed form |
    | rate 1 | one Gaussian, moved by `units` |
    | so many take part that the probability is below 1e-30 | an infinite loss |
    """
    if rate == 1:
        weights, left_out = [(units, 1.0)], 0.0
    elif units == 1:
        weights, left_out = [(0, 1 - rate), (1, rate)], 0.0
    else:
        weights, left_out = _binomial(units, rate)
    up = tuple((weight, float(j)) for j, weight in weights)
    down = tuple((weight, -moved) for weight, moved in up)
    nobody: _Mixture = ((1.0, 0.0),)
    end = -noise * float(ndtri(_GAUSSIAN_TAIL))
    steps = _grid(down, nobody, noise, (-end - units, end), interval)
    cutoffs = -_place(steps * interval, up, noise**2, units)
    removed = _distribution(down, nobody, noise, steps, interval, cutoffs, left_out)
    if rate == 1:
        return (removed,)
    steps = _grid(nobody, up, noise, (-end, end + units), interval)
    cutoffs = _place(-(steps * interval), up, noise**2, units)
    return removed, _distribution(nobody, up, noise, steps, interval, cutoffs)


@lru_cache(maxsize=16)
def replacement_losses(rate: float, noise: float, interval: float) -> tuple[LossDistribution, ...]:
    """The loss distribution of a client that moves the sum by 1, against one that moves it by -1.

    A tuple of one: the other direction is its mirror image. The client takes part with probability
    `rate`, and `noise` is the standard deviation. The loss is at least l up to the place (arsinh(-a
    sinh(l / 2)) - l / 2) variance, a = e^(1 / 2 variance) (1 - rate) / rate. Cached.
    """
    end = -noise * float(ndtri(_GAUSSIAN_TAIL))
    absent = ((1 - rate, 0.0),) if rate < 1 else ()
    one, other = (*absent, (rate, -1.0)), (*absent, (rate, 1.0))
    steps = _grid(one, other, noise, (-end - 1, end), interval)
    half, variance = steps * interval / 2, noise**2
    if rate == 1:
        cutoffs = -half * variance
    else:
        with np.errstate(divide="ignore", over="ignore"):
            size = np.abs(half)
            log_sinh = size + np.log(-np.expm1(-2 * size)) - math.log(2)
            power = 1 / (2 * variance) + math.log1p(-rate) - math.log(rate) + log_sinh
            arsinh = np.where(power > _NO_SINH, power + math.log(2), np.arcsinh(np.exp(power)))
        cutoffs = (-np.sign(half) * arsinh - half) * variance
    return (_distribution(one, other, noise, steps, interval, cutoffs),)


def _grid(
    upper: _Mixture, lower: _Mixture, noise: float, ends: tuple[float, float], interval: float
) -> Values:
    """The losses, as consecutive integers in steps of `interval`, that occur between two places.

    The loss is log(density of `upper` / density of `lower`) and falls with the place. `ends` are
    the two places, the lower one first.
    """
    losses = []
    for place in ends:
        logs = []
        for mixture in (upper, lower):
            powers = []
            for weight, moved in mixture:
                powers.append(math.log(weight) + (place * moved - moved**2 / 2) / noise**2)
            logs.append(float(np.logaddexp.reduce(powers)))
        losses.append(logs[0] - logs[1])
    return np.arange(math.floor(losses[1] / interval), math.ceil(losses[0] / interval) + 1)


def _distribution(
    upper: _Mixture,
    lower: _Mixture,
    noise: float,
    steps: Values,
    interval: float,
    cutoffs: Values,
    left_out: float = 0.0,
) -> LossDistribution:
    """The loss distribution of two mixtures of N(0, noise^2) and the same moved.

    Each divergence is evaluated at its cutoff, where it is largest over all cutoffs: what a
    cutoff's last digit is wrong by counts squared.

    Args:
        upper: The mixture that is observed.
        lower: The mixture that it is compared with.
        noise: The standard deviation of both.
        steps: The losses of the grid, in steps of `interval`.
        interval: The step of the grid.
        cutoffs: For every loss the place up to which it is at least that; infinite, where it is so
            everywhere or nowhere.
        left_out: Mass of the upper mixture that is in none of its parts. Its loss is infinite.
    """
    scaled, losses = cutoffs / noise, steps * interval
    above, log_below = np.full_like(scaled, left_out), np.full_like(scaled, -np.inf)
    with np.errstate(invalid="ignore"):
        for weight, moved in upper:
            above += weight * ndtr(scaled - moved / noise)
        for weight, moved in lower:
            log_below = np.logaddexp(log_below, math.log(weight) + log_ndtr(scaled - moved / noise))
    deltas = np.clip(above - np.exp(losses + log_below), 0.0, 1.0)
    return LossDistribution.from_deltas(interval, int(steps[0]), deltas)


def _binomial(units: int, rate: float) -> tuple[list[tuple[int, float]], float]:
    """(pairs (j, probability that j of `units` take part), probability of all j left out).

    Large j with probabilities below 1e-30 are left out. `rate` is below 1.
    """
    every = [
        math.exp(
            math.lgamma(units + 1) - math.lgamma(j + 1) - math.lgamma(units - j + 1)
            + j * math.log(rate) + (units - j) * math.log1p(-rate)
        )
        for j in range(units + 1)
    ]  # fmt: skip
    last = max(1, max(j for j, weight in enumerate(every) if weight >= _NO_WEIGHT))
    kept = [(j, weight) for j, weight in enumerate(every[: last + 1]) if weight]
    return kept, math.fsum(every[last + 1 :])


def _place(losses: Values, joined: _Mixture, variance: float, units: int) -> Values:
    """The x where log(sum over j of w_j e^((j x - j^2 / 2) / variance)) is each of `losses`.

    `joined` are the pairs (w_j, j). Minus infinity where the loss is at most log w_0: no place has
    so little. For one unit this is 1/2 + variance log(1 + (e^loss - 1) / rate). For more, without
    the part of j = 0, which does not depend on x, the sum's logarithm is convex and no steeper or
    flatter than its parts: Newton's method from the right falls to the root.
    """
    if units == 1:
        rate = joined[-1][0]
        with np.errstate(divide="ignore", over="ignore"):
            inner = np.maximum(np.expm1(losses) / rate, -1.0)
            logs = np.where(losses > _NO_SINH, losses - math.log(rate), np.log1p(inner))
        return np.asarray(0.5 + variance * logs)
    parts = [(math.log(weight), moved) for weight, moved in joined if moved]
    none = next((math.log(weight) for weight, moved in joined if not moved), -math.inf)
    places = np.full_like(losses, -np.inf)
    some = losses > none
    wanted = losses[some] + np.log(-np.expm1(none - losses[some]))
    x = np.min([(wanted - log) * (variance / j) + j / 2 for log, j in parts], axis=0)
    for _ in range(_NEWTON):
        powers = [log + (j * x - j * j / 2) / variance for log, j in parts]
        top = np.max(powers, axis=0)
        shares = [np.exp(power - top) for power in powers]
        total = np.sum(shares, axis=0)
        slope = sum(share * j for share, (_, j) in zip(shares, parts, strict=True)) / total
        step = (top + np.log(total) - wanted) * (variance / slope)
        x -= step
        if not np.any(np.abs(step) > _CLOSE * (1 + np.abs(x))):
            break
    places[some] = x
    return places
