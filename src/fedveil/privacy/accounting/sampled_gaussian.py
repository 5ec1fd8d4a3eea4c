"""The privacy loss distributions of one Poisson-sampled Gaussian release, for one unit or more."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from fedveil.privacy.accounting.loss_distribution import LossDistribution, Values

_TAIL = 0.5 * math.exp(-50)
"""Of the Gaussian, left out at either end: it counts as an infinite loss."""

_NO_EXP = 300.0
"""Beyond, arsinh(e^x) is x + log 2 to the last digit, and e^x nears the end of the floats."""

_NO_WEIGHT = 1e-30
"""Below, a number of units that take part is left out of the mixture, to count as infinite."""

_NEWTON, _CLOSE = 100, 1e-13
"""Steps at most, and the last one's size relative to the place."""


def added_or_removed(
    rate: float, noise: float, interval: float, units: int = 1
) -> tuple[LossDistribution, ...]:
    """`units` units that each take part with probability `rate`, against none that ever does.

    Both directions, which are the same at rate 1. Each unit moves the sum by 1 in units of
    `noise`, all of them the same way: the number that takes part is binomial, and the sum is a
    mixture of Gaussians (docs/proofs/units.md).

    | edge | behaviour |
    |---|---|
    | one unit | the cutoffs in closed form |
    | rate 1 | one Gaussian, moved by `units` |
    | so many take part that the probability is below 1e-30 | an infinite loss |
    """
    end = -noise * float(ndtri(_TAIL))
    weights, left_out = _binomial(units, rate)
    nobody: _Mixture = ((1.0, 0.0),)
    down = tuple((weight, -float(j)) for j, weight in weights)
    up = tuple((weight, float(j)) for j, weight in weights)
    if units == 1:
        removing, adding = partial(_removed, rate=rate), partial(_added, rate=rate)
    else:
        removing, adding = partial(_all_removed, joined=up), partial(_all_added, joined=up)
    removed = _Pair(down, nobody, partial(removing, variance=noise**2), noise, left_out)
    if rate == 1:
        return (removed.distribution(-end - units, end, interval),)
    added = _Pair(nobody, up, partial(adding, variance=noise**2), noise)
    return (
        removed.distribution(-end - units, end, interval),
        added.distribution(-end, end + units, interval),
    )


def replaced(rate: float, noise: float, interval: float) -> tuple[LossDistribution, ...]:
    """A client that moves the sum by 1 one way, against one that moves it by 1 the other way.

    One direction, which is its own mirror image.
    """
    end = -noise * float(ndtri(_TAIL))
    one, other = ((1 - rate, 0.0), (rate, -1.0)), ((1 - rate, 0.0), (rate, 1.0))
    pair = _Pair(one, other, partial(_mirrored, rate=rate, variance=noise**2), noise)
    return (pair.distribution(-end - 1, end, interval),)


_Mixture = tuple[tuple[float, float], ...]
"""(weight, by how much N(0, noise^2) is moved)."""


@dataclass(frozen=True)
class _Pair:
    """Two mixtures of N(0, noise^2) and the same moved: the loss falls from left to right.

    `cutoffs` gives for every loss the place up to which it is at least that; infinite, where it
    is so everywhere or nowhere. `left_out` is mass of the upper mixture that is in none of its
    parts: it counts as an infinite loss.
    """

    upper: _Mixture
    lower: _Mixture
    cutoffs: Callable[[Values], Values]
    noise: float
    left_out: float = 0.0

    def distribution(self, first: float, last: float, interval: float) -> LossDistribution:
        """On the multiples of `interval` that hold the losses between two places."""
        low = math.floor(self._loss(last) / interval)
        high = math.ceil(self._loss(first) / interval)
        losses = np.arange(low, high + 1) * interval
        return LossDistribution.connected(interval, low, self._divergences(losses))

    def _divergences(self, losses: Values) -> Values:
        """Each is evaluated at its cutoff, where it is largest over all cutoffs: what a cutoff's
        last digit is wrong by counts squared.
        """
        at = self.cutoffs(losses) / self.noise
        upper, lower = np.full_like(at, self.left_out), np.full_like(at, -np.inf)
        with np.errstate(invalid="ignore"):
            for weight, moved in self.upper:
                upper += weight * ndtr(at - moved / self.noise)
            for weight, moved in self.lower:
                lower = np.logaddexp(lower, _log(weight) + log_ndtr(at - moved / self.noise))
        found: Values = np.clip(upper - np.exp(losses + lower), 0.0, 1.0)
        return found

    def _loss(self, place: float) -> float:
        """log of the ratio of densities at a place."""

        def relative(mixture: _Mixture) -> float:
            powers = [
                _log(weight) + (place * moved - moved**2 / 2) / self.noise**2
                for weight, moved in mixture
            ]
            return float(np.logaddexp.reduce(powers))

        return relative(self.upper) - relative(self.lower)


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


def _removed(losses: Values, rate: float, variance: float) -> Values:
    return -0.5 - variance * _unsampled(losses, rate)


def _added(losses: Values, rate: float, variance: float) -> Values:
    return 0.5 + variance * _unsampled(-losses, rate)


def _all_removed(losses: Values, joined: _Mixture, variance: float) -> Values:
    return -_place_of(losses, joined, variance)


def _all_added(losses: Values, joined: _Mixture, variance: float) -> Values:
    return _place_of(-losses, joined, variance)


def _place_of(losses: Values, joined: _Mixture, variance: float) -> Values:
    """Where log(sum over j of w_j e^((j x - j^2 / 2) / variance)) is the loss.

    Minus infinity where the loss is at most log w_0: no place has so little. Without the part of
    j = 0, which does not depend on x, the sum's logarithm is convex and no steeper or flatter
    than its parts: Newton's method from the right falls to the root.
    """
    parts = [(_log(weight), moved) for weight, moved in joined if moved and weight]
    none = next((_log(weight) for weight, moved in joined if not moved), -math.inf)
    found = np.full_like(losses, -np.inf)
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
    found[some] = x
    return found


def _unsampled(losses: Values, rate: float) -> Values:
    """log(1 + (e^loss - 1) / rate): the loss of a release that is never left out.

    Minus infinity, where sampling alone keeps the loss above: no place has so little.
    """
    with np.errstate(divide="ignore", over="ignore"):
        inner = np.maximum(np.expm1(losses) / rate, -1.0)
        found: Values = np.where(losses > _NO_EXP, losses - math.log(rate), np.log1p(inner))
    return found


def _mirrored(losses: Values, rate: float, variance: float) -> Values:
    """(arsinh(-a sinh(loss / 2)) - loss / 2) variance, a = e^(1 / 2 variance) (1 - rate) / rate."""
    half = losses / 2
    if rate == 1:
        return -half * variance
    with np.errstate(divide="ignore", over="ignore"):
        size = np.abs(half)
        log_sinh = size + np.log(-np.expm1(-2 * size)) - math.log(2)
        power = 1 / (2 * variance) + math.log1p(-rate) - math.log(rate) + log_sinh
        arsinh = np.where(power > _NO_EXP, power + math.log(2), np.arcsinh(np.exp(power)))
    found: Values = (-np.sign(half) * arsinh - half) * variance
    return found
