"""The privacy loss distributions of one Poisson-sampled Gaussian release."""

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


def added_or_removed(rate: float, noise: float, interval: float) -> tuple[LossDistribution, ...]:
    """A client that takes part with probability `rate`, against one that never does.

    Both directions, which are the same at rate 1; the sum moves by 1 in units of `noise`.
    """
    end = -noise * float(ndtri(_TAIL))
    removed = _Pair(rate, -1.0, 0.0, 0.0, partial(_removed, rate=rate, variance=noise**2), noise)
    if rate == 1:
        return (removed.distribution(-end - 1, end, interval),)
    added = _Pair(0.0, 0.0, rate, 1.0, partial(_added, rate=rate, variance=noise**2), noise)
    return (
        removed.distribution(-end - 1, end, interval),
        added.distribution(-end, end + 1, interval),
    )


def replaced(rate: float, noise: float, interval: float) -> tuple[LossDistribution, ...]:
    """A client that moves the sum by 1 one way, against one that moves it by 1 the other way.

    One direction, which is its own mirror image.
    """
    end = -noise * float(ndtri(_TAIL))
    pair = _Pair(rate, -1.0, rate, 1.0, partial(_mirrored, rate=rate, variance=noise**2), noise)
    return (pair.distribution(-end - 1, end, interval),)


@dataclass(frozen=True)
class _Pair:
    """Two mixtures of N(0, noise^2) and the same moved: the loss falls from left to right.

    `cutoffs` gives for every loss the place up to which it is at least that; infinite, where it
    is so everywhere or nowhere.
    """

    upper_rate: float
    upper_moved: float
    lower_rate: float
    lower_moved: float
    cutoffs: Callable[[Values], Values]
    noise: float

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
        above, below = self.upper_moved / self.noise, self.lower_moved / self.noise
        with np.errstate(invalid="ignore"):
            upper = (1 - self.upper_rate) * ndtr(at) + self.upper_rate * ndtr(at - above)
            still, moved = log_ndtr(at), log_ndtr(at - below)
            lower = np.logaddexp(_log(1 - self.lower_rate) + still, _log(self.lower_rate) + moved)
        found: Values = np.clip(upper - np.exp(losses + lower), 0.0, 1.0)
        return found

    def _loss(self, place: float) -> float:
        """log of the ratio of densities at a place."""

        def relative(rate: float, moved: float) -> float:
            power = (place * moved - moved**2 / 2) / self.noise**2
            return float(np.logaddexp(_log(1 - rate), _log(rate) + power))

        return relative(self.upper_rate, self.upper_moved) - relative(
            self.lower_rate, self.lower_moved
        )


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _removed(losses: Values, rate: float, variance: float) -> Values:
    return -0.5 - variance * _unsampled(losses, rate)


def _added(losses: Values, rate: float, variance: float) -> Values:
    return 0.5 + variance * _unsampled(-losses, rate)


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
