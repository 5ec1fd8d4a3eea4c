"""Epsilons of Gaussians and of randomised response, also behind an ideal shuffler.

Gaussians compose to one Gaussian. A two-valued report tells two inputs apart with a probability
ratio of at most e^eps0, and k of them that all move together are k tosses of one coin: the number
that point the right way is binomial, and delta is a finite sum over it. (dp-accounting's PLD
ignores the count of such an event, so this is our own.)

Behind a shuffler the server sees n two-valued reports per position without their senders: only how
many are high. The others' reports hide the client's own. How well depends on the others' inputs,
and no single pattern of them is worst at every epsilon. The bound takes the worst at each epsilon,
over both directions. The maximum of hockey-stick profiles is a profile, so it has a dominating
pair, and that pair composes over positions and rounds (docs/proofs/ldp-fl.md).
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, log_ndtr

from fedveil.base.errors import BadArgument
from fedveil.privacy.accounting.loss_distribution import LossDistribution, compose

_Array = npt.NDArray[np.float64]

_MOST_STEPS = 200
_BINOMIAL_REACH = 40.0
"""Standard deviations, and reports, beyond which a binomial mass is below 1e-300."""

_NEGLIGIBLE = 1e-22
_MOST_POINTS = 4_000_000
_LARGEST_SHUFFLED = 30.0
_MOST_REPORTS = 20_000


def root(
    function: Callable[[float], float], low: float, high: float, *, xtol: float, rtol: float = 1e-15
) -> float:
    """A point near a root of the function, which changes its sign between `low` and `high`.

    It is off by at most `xtol` plus `rtol` times its size. Chandrupatla's method (1997): inverse
    quadratic interpolation where the last three points allow it, the middle of the bracket
    otherwise. It saves the third of a second that importing scipy.optimize takes.

    | edge | behaviour |
    |---|---|
    | the function is 0 at an end | that end |
    | the same sign at both ends | ValueError |

    >>> round(root(lambda x: x * x - 2, 0.0, 2.0, xtol=1e-12), 9)
    1.414213562
    """
    a, b = high, low
    fa, fb = function(a), function(b)
    if fa == 0 or fb == 0:
        return b if fb == 0 else a
    if (fa > 0) == (fb > 0):
        raise ValueError(f"the function is {fb:g} at {low:g} and {fa:g} at {high:g}: no root")
    share = 0.5
    for _ in range(_MOST_STEPS):
        x = a + share * (b - a)
        fx = function(x)
        if (fx > 0) == (fa > 0):
            c, fc = a, fa
        else:
            c, fc, b, fb = b, fb, a, fa
        a, fa = x, fx
        best = a if abs(fa) < abs(fb) else b
        least = (rtol * abs(best) + xtol / 2) / abs(b - a)
        if fx == 0 or least > 0.5:
            return best
        share, place, height = 0.5, (a - b) / (c - b), (fa - fb) / (fc - fb)
        if place > height * height and 1 - place > (1 - height) * (1 - height):
            inverse = fa / (fb - fa) * fc / (fb - fc)
            inverse += (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
            share = inverse if math.isfinite(inverse) else 0.5
        share = min(max(share, least), 1 - least)
    return best


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The exact epsilon at `delta` of a Gaussian mechanism with sensitivity / std = `mu`.

    The root of delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu) (Balle
    and Wang 2018), valid for every epsilon; 0 where delta(0) is small enough already.
    """

    def log_excess(eps: float) -> float:
        first = float(log_ndtr(mu / 2 - eps / mu))
        second = eps + float(log_ndtr(-mu / 2 - eps / mu))
        gap = -math.expm1(min(0.0, second - first))
        return max(first + (math.log(gap) if gap > 0 else -math.inf) - math.log(delta), -1e6)

    if log_excess(0.0) <= 0:
        return 0.0
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    eps = root(log_excess, 0.0, high, xtol=1e-12, rtol=1e-12)
    return eps + 1e-12 * (1 + eps)  # the root may be a little further on


def randomised_response_epsilon(eps0: float, count: int, delta: float) -> float:
    """The exact epsilon at `delta` of `count` reports of eps0-randomised response about one unit.

    With p = e^eps0 / (1 + e^eps0) and X ~ Bin(count, p), the loss is eps0 (2 X - count) and
    delta(eps) = E[(1 - e^(eps - loss))+]. Terms further than 40 standard deviations (and 40
    reports) from the mean are below 1e-300 and left out.

    | edge | behaviour |
    |---|---|
    | count 0 | 0 |
    | delta 0 | count x eps0, pure composition |
    | delta so large that epsilon would be negative | 0 |

    >>> [round(randomised_response_epsilon(1.0, k, 1e-5), 1) for k in (10, 100, 1000)]
    [10.0, 79.8, 577.8]
    """
    if count == 0:
        return 0.0
    if delta == 0:
        return count * eps0
    p = 1 / (1 + math.exp(-eps0))
    reach = _BINOMIAL_REACH * math.sqrt(count * p * (1 - p)) + _BINOMIAL_REACH
    low, high = max(0, math.floor(count * p - reach)), min(count, math.ceil(count * p + reach))
    x = np.arange(low, high + 1, dtype=np.float64)
    log_mass = (
        gammaln(count + 1) - gammaln(x + 1) - gammaln(count - x + 1)
        - count * np.logaddexp(0.0, -eps0) - (count - x) * eps0
    )  # fmt: skip
    mass, loss = np.exp(log_mass), eps0 * (2 * x - count)

    def excess(eps: float) -> float:
        return float((mass * -np.expm1(np.minimum(eps - loss, 0.0))).sum()) - delta

    if excess(0.0) <= 0:
        return 0.0
    eps = root(excess, 0.0, count * eps0, xtol=1e-12, rtol=1e-12)
    return min(count * eps0, eps + 1e-12 * (1 + eps))  # the root may be a little further on


def shuffled_epsilon(eps0: float, reports: int, count: int, delta: float) -> float:
    """An upper bound on epsilon at `delta` of `count` shuffled releases of `reports` reports each.

    `eps0` is the epsilon of one report. Raises BadArgument for fewer than one report.

    Guarantee: whatever the other `reports` - 1 honest clients hold, and however later releases
    depend on earlier ones; never more than without a shuffler. Fewer reports than stated would
    raise epsilon: state the minimum.

    | edge | behaviour |
    |---|---|
    | count 0 | 0 |
    | one report | nothing is hidden: the bound is that of randomised response |
    | eps0 above 30 | the same: 1 - p is lost to rounding |
    | more than 20,000 reports | accounted as 20,000, which is safe |
    """
    if reports < 1:
        raise BadArgument(
            f"{{reports}} is {reports}: at least one honest report is needed", "reports"
        )
    if count == 0:
        return 0.0
    alone = randomised_response_epsilon(eps0, count, delta)
    if eps0 > _LARGEST_SHUFFLED:
        return alone
    reports = min(reports, _MOST_REPORTS)
    # The grid: a fiftieth of the loss's standard deviation, or more where the composed loss is wide
    p = 1 / (1 + math.exp(-eps0))
    std = min(eps0, (2 * p - 1) / math.sqrt(max(reports - 1, 1) * p * (1 - p)))
    mu = std * math.sqrt(count)
    width = min(count * eps0, mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)))
    interval = max(std / 50, 2 * width / _MOST_POINTS)
    losses = _shuffled_losses(eps0, reports, interval)
    return min(alone, compose([(losses, count)], delta).epsilon(delta))


def shuffled_delta(eps0: float, reports: int, epsilons: _Array) -> _Array:
    """delta at each of `epsilons` of one release of `reports` shuffled reports, a new array.

    It is the maximum over the other clients' inputs and both directions. The client's report is
    high with probability p or 1 - p, p = e^eps0 / (1 + e^eps0), the two extremes of its input; so
    is each other's. With h others at the high extreme their count is Bin(h, p) + Bin(n - 1 - h, 1 -
    p); inputs between the extremes are mixtures of these and no worse. Exchanging high and low maps
    direction P || Q at h to Q || P at n - 1 - h, so that one direction over all h covers both.
    """
    p = 1 / (1 + math.exp(-eps0))
    others = reports - 1
    worst = np.maximum(0.0, -np.expm1(epsilons))
    scale = np.exp(epsilons)
    lost = 2 * reports * _NEGLIGIBLE
    for high in range(others + 1):
        mass = np.convolve(_binomial(high, p), _binomial(others - high, 1 - p))
        shifted, still = np.append(0.0, mass), np.append(mass, 0.0)
        with_p = p * shifted + (1 - p) * still
        with_q = (1 - p) * shifted + p * still
        loss = np.log(with_p) - np.log(with_q)
        above_p = np.append(np.cumsum(with_p[::-1])[::-1], 0.0)
        above_q = np.append(np.cumsum(with_q[::-1])[::-1], 0.0)
        first = np.searchsorted(np.maximum.accumulate(loss), epsilons, side="right")
        np.maximum(worst, above_p[first] - scale * above_q[first] + lost, out=worst)
    return worst


@lru_cache(maxsize=8)
def _shuffled_losses(eps0: float, reports: int, interval: float) -> LossDistribution:
    """The loss distribution of one shuffled release on a grid of `interval`, from above. Cached.

    It is that of the dominating pair, rounded up by connecting the dots.
    """
    reach = math.ceil(eps0 / interval)
    steps = np.arange(-reach, reach + 1)
    deltas = shuffled_delta(eps0, reports, (steps * interval).astype(np.float64))
    return LossDistribution.from_deltas(interval, -reach, deltas)


@lru_cache(maxsize=65_536)
def _binomial(n: int, p: float) -> _Array:
    """The probabilities of Bin(n, p) in order, without those at both ends that are below 1e-22.

    The result does not say how many were left out at the low end. Cached.
    """
    k = np.arange(n + 1, dtype=np.float64)
    log_mass = (
        gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
        + k * math.log(p) + (n - k) * math.log1p(-p)
    )  # fmt: skip
    mass: _Array = np.exp(log_mass)
    large = mass > _NEGLIGIBLE
    return mass[np.argmax(large) : len(mass) - np.argmax(large[::-1])]
