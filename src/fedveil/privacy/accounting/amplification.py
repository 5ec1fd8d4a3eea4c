"""What an ideal shuffler adds to the two-point mechanism, exactly for one report, then composed.

Per position the server sees n two-valued reports without their senders: only how many are high.
The others' reports hide the client's own. How well depends on the others' inputs, and no single
pattern of them is worst at every epsilon; the bound takes the worst at each epsilon, over both
directions. The maximum of hockey-stick profiles is a profile, so it has a dominating pair, and that
pair composes over positions and rounds (docs/proofs/ldp-fl.md).
"""

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.loss_distribution import LossDistribution
from fedveil.privacy.accounting.randomised_response import randomised_response_epsilon

_Array = npt.NDArray[np.float64]
_NEGLIGIBLE = 1e-22
_MOST_POINTS = 4_000_000
_LARGEST = 30.0


def shuffled_epsilon(eps0: float, reports: int, count: int, delta: float) -> float:
    """An upper bound on epsilon at `delta` of `count` shuffled releases of `reports` reports each.

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
        raise BadInput(f"shuffle.minimum is {reports}: at least one honest report is needed")
    if count == 0:
        return 0.0
    alone = randomised_response_epsilon(eps0, count, delta)
    if eps0 > _LARGEST:
        return alone
    reports = min(reports, 20_000)
    grid = _interval(eps0, reports, count, delta)
    return min(alone, _losses(eps0, reports, grid).repeated(count, delta).epsilon(delta))


def shuffled_delta(eps0: float, reports: int, epsilons: _Array) -> _Array:
    """delta(epsilon) of one release, the maximum over the others' patterns and both directions.

    The client's report is high with probability p or 1 - p, p = e^eps0 / (1 + e^eps0), the two
    extremes of its input; so is each other's. With h others at the high extreme their count is
    Bin(h, p) + Bin(n - 1 - h, 1 - p); inputs between the extremes are mixtures of these and no
    worse. Exchanging high and low maps direction P || Q at h to Q || P at n - 1 - h, so that one
    direction over all h covers both.
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
def _losses(eps0: float, reports: int, interval: float) -> LossDistribution:
    """The dominating pair of one release, on a grid, rounded up by connecting the dots."""
    reach = math.ceil(eps0 / interval)
    steps = np.arange(-reach, reach + 1)
    deltas = shuffled_delta(eps0, reports, (steps * interval).astype(np.float64))
    return LossDistribution.connected(interval, -reach, deltas)


def _interval(eps0: float, reports: int, count: int, delta: float) -> float:
    """A fiftieth of the loss's standard deviation, or more where the composed loss is wide."""
    p = 1 / (1 + math.exp(-eps0))
    std = min(eps0, (2 * p - 1) / math.sqrt(max(reports - 1, 1) * p * (1 - p)))
    mu = std * math.sqrt(count)
    width = min(count * eps0, mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)))
    return max(std / 50, 2 * width / _MOST_POINTS)


@lru_cache(maxsize=65_536)
def _binomial(n: int, p: float) -> _Array:
    """Bin(n, p) without the ends whose masses are below 1e-22 each."""
    k = np.arange(n + 1, dtype=np.float64)
    log_mass = (
        gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
        + k * math.log(p) + (n - k) * math.log1p(-p)
    )  # fmt: skip
    mass: _Array = np.exp(log_mass)
    kept = mass > _NEGLIGIBLE
    return mass[np.argmax(kept) : len(mass) - np.argmax(kept[::-1])]
