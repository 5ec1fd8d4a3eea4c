"""Privacy loss distributions on a grid: of sampled Gaussians and coins, composed, read at a delta.

The algorithms are those of dp-accounting (Doroshenko et al. 2022, arXiv 2207.04380, for the grid;
Koskela et al. 2020, arXiv 1906.03049, for the composition by FFT), on arrays throughout: a
calibration asks for dozens of compositions.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import gammaln, log_ndtr, ndtr, ndtri

Values = np.ndarray[Any, Any]

_TAIL = 1e-15
"""The mass that a composition may leave out of its window; it counts as an infinite loss."""

_ORDERS, _LEAST = 24, 2.0**-14
"""Chernoff bounds on either side of the window, from `_LEAST` over its length to 512 over it."""

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
    """Masses at the losses `lower`, `lower` + 1, ... times `interval`, and at an infinite loss.

    Guarantee: rounding is upwards, so that `epsilon` is never less than the true one by more than
    the rounding of float64 sums (about 1e-15 of mass).
    """

    interval: float
    lower: int
    masses: Values
    infinite: float
    log_mgfs: dict[int, dict[float, float]] = field(default_factory=dict, init=False, repr=False)

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

    def log_mgf(self, order: float) -> float:
        """The log of the moment generating function, places being counted from the lowest."""
        places = np.arange(len(self.masses))
        moment = float(self.masses @ np.exp(order * places))
        return math.log(moment) if moment > 0 else -math.inf


Parts = list[tuple[LossDistribution, int]]
"""Releases on one grid, and how many there are of each."""


def compose(parts: Parts, delta: float) -> LossDistribution:
    """The loss of independent releases on one grid, exact to float64 where `delta` is passed.

    A transform is wrong by about 1e-16 of the *largest* of its results for each release, which at a
    million releases is more than many a delta. So masses are tilted first, each by e^(tilt loss),
    until the largest are those in the tail of about `delta`, and back after. What of the bulk is
    then below the window counts as the window's lowest loss.

    Args:
        parts: Loss distributions, and how many releases there are of each.
        delta: Where the result is going to be read.
    """
    length, count = max(len(d.masses) for d, _ in parts), sum(n for _, n in parts)
    log_delta = math.log(delta)

    # The tilt: an order whose Chernoff bound on the loss that `delta` passes is nearly the least.
    best, least = 0.0, math.inf
    sums = _summed_log_mgfs(parts, length)
    for order, total in sums.items():
        if order > 0 and (total - log_delta) / order < least:
            best, least = order, (total - log_delta) / order
    tilt, least = 0.0, math.inf
    for order in (best / math.sqrt(2), best, min(best * math.sqrt(2), max(sums))):
        logs, total = [], 0.0
        for d, n in parts:
            logs.append(d.log_mgf(order))
            total += n * logs[-1]
        if (total - log_delta) / order < least:
            tilt, least, log_mgfs, log_moment = order, (total - log_delta) / order, logs, total
    tilted = []
    for log_mgf, (d, n) in zip(log_mgfs, parts, strict=True):
        masses = d.masses * np.exp(tilt * np.arange(len(d.masses)) - log_mgf)
        tilted.append((LossDistribution(d.interval, d.lower, masses, 0.0), n))

    # The window: places, counted from the lowest, that hold all but `_TAIL` of the tilted mass.
    low, high = 0, sum((len(d.masses) - 1) * n for d, n in parts)
    for order, total in _summed_log_mgfs(tilted, length).items():
        bound = (total + math.log(2 / _TAIL)) / order
        if math.isfinite(bound) and order > 0:
            high = min(high, math.ceil(bound))
        elif math.isfinite(bound):
            low = max(low, math.floor(bound))

    size = next_fast_len(max(high - low + 1, length), real=True)
    powers = [rfft(d.masses, size) ** n for d, n in tilted]
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


def _summed_log_mgfs(parts: Parts, length: int) -> dict[float, float]:
    """The log of the moment generating function of the sum of all losses, by order.

    The orders lie around 0 in both directions, each twice the one before, so that powers are
    squared rather than computed. They are fractions of `length`, the number of masses of the
    longest distribution. Each distribution keeps its own, for budgets ask for many counts of it.
    """
    sums: dict[float, float] = {}
    for d, n in parts:
        if length not in d.log_mgfs:
            logs = d.log_mgfs[length] = {}
            for sign in (1, -1):
                power = np.exp(np.arange(len(d.masses)) * (sign * _LEAST / length))
                for doubled in range(_ORDERS):
                    if doubled:
                        power *= power
                    moment = float(d.masses @ power)
                    order = sign * _LEAST * 2.0**doubled / length
                    logs[order] = math.log(moment) if moment > 0 else -math.inf
        for order, log in d.log_mgfs[length].items():
            sums[order] = sums.get(order, 0.0) + n * log
    return sums


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


# --- one Poisson-sampled Gaussian release, for one unit or more ---

_Mixture = tuple[tuple[float, float], ...]
"""(weight, by how much N(0, noise^2) is moved)."""


@lru_cache(maxsize=16)
def added_or_removed(
    rate: float, noise: float, interval: float, units: int = 1
) -> tuple[LossDistribution, ...]:
    """`units` units that each take part with probability `rate`, against none that ever does.

    Both directions, which are the same at rate 1. Each unit moves the sum by 1 in units of
    `noise`, all of them the same way: the number that takes part is binomial, and the sum is a
    mixture of Gaussians (docs/proofs/units.md). Cached, because budgets ask for many counts of it.

    | edge | behaviour |
    |---|---|
    | one unit | the cutoffs in closed form |
    | rate 1 | one Gaussian, moved by `units` |
    | so many take part that the probability is below 1e-30 | an infinite loss |
    """
    end = -noise * float(ndtri(_GAUSSIAN_TAIL))
    weights, left_out = _binomial(units, rate)
    nobody: _Mixture = ((1.0, 0.0),)
    down = tuple((weight, -float(j)) for j, weight in weights)
    up = tuple((weight, float(j)) for j, weight in weights)
    steps = _grid(down, nobody, noise, (-end - units, end), interval)
    cutoffs = -_place(steps * interval, up, noise**2, units)
    removed = _distribution(down, nobody, noise, steps, interval, cutoffs, left_out)
    if rate == 1:
        return (removed,)
    steps = _grid(nobody, up, noise, (-end, end + units), interval)
    cutoffs = _place(-(steps * interval), up, noise**2, units)
    return removed, _distribution(nobody, up, noise, steps, interval, cutoffs)


@lru_cache(maxsize=16)
def replaced(rate: float, noise: float, interval: float) -> tuple[LossDistribution, ...]:
    """A client that moves the sum by 1 one way, against one that moves it by 1 the other way.

    One direction, which is its own mirror image. The loss is at least l up to the place
    (arsinh(-a sinh(l / 2)) - l / 2) variance, a = e^(1 / 2 variance) (1 - rate) / rate.
    """
    end = -noise * float(ndtri(_GAUSSIAN_TAIL))
    one, other = ((1 - rate, 0.0), (rate, -1.0)), ((1 - rate, 0.0), (rate, 1.0))
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
    """The losses between two places, in steps of `interval`. The loss falls from left to right."""
    losses = []
    for place in ends:
        logs = []
        for mixture in (upper, lower):
            powers = []
            for weight, moved in mixture:
                powers.append(_log(weight) + (place * moved - moved**2 / 2) / noise**2)
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
            log_below = np.logaddexp(log_below, _log(weight) + log_ndtr(scaled - moved / noise))
    deltas = np.clip(above - np.exp(losses + log_below), 0.0, 1.0)
    return LossDistribution.connected(interval, int(steps[0]), deltas)


def _binomial(units: int, rate: float) -> tuple[list[tuple[int, float]], float]:
    """(j, the probability that j of `units` take part), and what is left out of that."""
    if units == 1:
        return [(0, 1 - rate), (1, rate)], 0.0
    if rate == 1:
        return [(units, 1.0)], 0.0
    every = [
        math.exp(
            math.lgamma(units + 1) - math.lgamma(j + 1) - math.lgamma(units - j + 1)
            + j * math.log(rate) + (units - j) * math.log1p(-rate)
        )
        for j in range(units + 1)
    ]  # fmt: skip
    last = max(1, max(j for j, weight in enumerate(every) if weight >= _NO_WEIGHT))
    return list(enumerate(every[: last + 1])), math.fsum(every[last + 1 :])


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _place(losses: Values, joined: _Mixture, variance: float, units: int) -> Values:
    """Where log(sum over j of w_j e^((j x - j^2 / 2) / variance)) is the loss.

    Minus infinity where the loss is at most log w_0: no place has so little. For one unit this is
    1/2 + variance log(1 + (e^loss - 1) / rate). For more, without the part of j = 0, which does not
    depend on x, the sum's logarithm is convex and no steeper or flatter than its parts: Newton's
    method from the right falls to the root.
    """
    if units == 1:
        rate = joined[-1][0]
        with np.errstate(divide="ignore", over="ignore"):
            inner = np.maximum(np.expm1(losses) / rate, -1.0)
            logs = np.where(losses > _NO_SINH, losses - math.log(rate), np.log1p(inner))
        return np.asarray(0.5 + variance * logs)
    parts = [(_log(weight), moved) for weight, moved in joined if moved and weight]
    none = next((_log(weight) for weight, moved in joined if not moved), -math.inf)
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
