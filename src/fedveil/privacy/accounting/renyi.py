"""Epsilon by Renyi divergences, the moments accountant.

Divergences of plain Gaussians, of Poisson-sampled ones (Mironov, Talwar and Zhang 2019) and of
cohorts of fixed size (Wang, Balle and Kasiviswanathan 2019) add up over releases and are converted
to epsilon (Canonne, Kamath and Steinke 2020). Those of Skellam noise are, at integer orders, at
most those of a Gaussian with a little less noise. Every `m` is std / sensitivity under the claim's
relation. docs/proofs/renyi.md, docs/proofs/skellam.md
"""

import math
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, log_ndtr

from fedveil.privacy.accounting.events import FixedSampled, Gaussian, PoissonSampled, Skellam

Moments = npt.NDArray[np.float64]

_ORDERS = np.array(
    [*(1 + k / 10 for k in range(1, 100)), *range(11, 64), 128, 256, 512, 1024], dtype=np.float64
)
"""The orders at which divergences are computed, those of dp-accounting."""

_EXACT = 256
"""The largest order at which differences of moments are computed; above, their cruder bound."""

_TERMS, _NEGLIGIBLE = 1000, 30.0
"""Of the series of a fractional order: how many at most, and e^-30 of the sum is the last one."""

_MOST_NOISE = 1e100
"""Larger multipliers count as this one, whose square is a float."""

_ROUNDING = 2.0**-51
"""What rounding may change in a part of a logarithm, relative to the part."""


@lru_cache(maxsize=1024)
def renyi_epsilon(
    event: Gaussian | Skellam | PoissonSampled | FixedSampled, count: int, delta: float
) -> float:
    """The epsilon at `delta` of `count` releases of `event`, an upper bound. Cached.

    A plain Gaussian is the pair N(0, m^2), N(1, m^2) under every relation. In a Poisson-sampled one
    a unit takes part with probability `rate`, or never does. A cohort of fixed size is under
    replacement, with `m` relative to the distance of two rows, 2 S (Wang, Balle and Kasiviswanathan
    2019, theorem 27). Where that bound exceeds the release without sampling, the latter counts.
    Skellam noise, with Poisson sampling or without, is accounted at integer orders only.

    | edge | behaviour |
    |---|---|
    | everybody is in the cohort | the release without sampling |
    | a divergence so small that the total variation is below delta | 0 |
    """
    divergences = count * _divergences(event)
    epsilons = divergences + np.log1p(-1 / _ORDERS) - np.log(delta * _ORDERS) / (_ORDERS - 1)
    epsilon = max(0.0, float(epsilons.min()))
    if delta**2 + math.expm1(-float(divergences.min())) > 0:
        epsilon = 0.0
    if isinstance(event, FixedSampled):
        return min(epsilon, renyi_epsilon(event.event, count, delta))
    return epsilon


@lru_cache(maxsize=64)
def _divergences(event: Gaussian | Skellam | PoissonSampled | FixedSampled) -> Moments:
    """The Renyi divergence of one release of `event` at each of `_ORDERS`, from above.

    Infinite at orders whose series does not converge in time, and of Skellam noise at fractional
    orders, at which nothing is proved.
    """
    match event:
        case Skellam():
            return _at_integers(_divergences(gaussian_alike(event)))
        case PoissonSampled(rate, Skellam() as noise):
            return _at_integers(_divergences(PoissonSampled(rate, gaussian_alike(noise))))
        case FixedSampled(size, population, plain) if size < population:
            return fixed_sampled_moments(size / population, plain.multiplier)
        case PoissonSampled(rate, Gaussian(m)) if rate < 1:
            whole = np.floor(_ORDERS) == _ORDERS
            logs, m = np.empty_like(_ORDERS), min(m, _MOST_NOISE)
            logs[whole] = [poisson_log_moment(int(a), rate, m) for a in _ORDERS[whole]]
            logs[~whole] = _fractional_log_moments(_ORDERS[~whole], rate, m)
            return logs / (_ORDERS - 1)
        case PoissonSampled(_, plain) | FixedSampled(_, _, plain):
            return _divergences(plain)
        case Gaussian(m):
            return _ORDERS / (2 * m * m)


def _at_integers(divergences: Moments) -> Moments:
    """`divergences` at the integer orders, infinity at the others."""
    return np.where(np.floor(_ORDERS) == _ORDERS, divergences, np.inf)


def gaussian_alike(event: Skellam) -> Gaussian:
    """The Gaussian release whose divergence is no smaller at any integer order.

    So is that of the two under Poisson sampling, for add-remove and zero-out.

    Guarantee: docs/proofs/skellam.md. Noise of variance mu on integer rows that move a sum by at
    most D in L2 has, at every integer order a >= 2, a divergence of at most a D^2 l(mu), where
    l(mu) = log((1/2 + sqrt(mu^2 + 9/4)) / mu), which is 1 / 2 mu and a little more. A Gaussian has
    a / 2 m^2, so that m = D^-1 (2 l(mu))^-1/2. It is never counted as more than the multiplier.

    | edge | behaviour |
    |---|---|
    | multiplier 0 | 0 |

    >>> gaussian_alike(Skellam(2.0, 1000.0))
    Gaussian(multiplier=1.9999995...)
    """
    mu = min(event.multiplier * event.sensitivity, _MOST_NOISE) ** 2
    if mu == 0:
        return Gaussian(0.0)
    beyond = 2.25 / (math.hypot(mu, 1.5) + mu)  # sqrt(mu^2 + 9/4) - mu, without cancellation
    loss = 2 * mu * math.log1p((0.5 + beyond) / mu)
    return Gaussian(event.multiplier / math.sqrt(max(1.0, loss) * (1 + 8 * _ROUNDING)))


def poisson_log_moment(order: int, rate: float, m: float) -> float:
    """The logarithm of the moment of a Poisson-sampled Gaussian, at an integer order above 1.

    The moment is 1 + sum over k = 2 .. order of C(order, k) rate^k (1 - rate)^(order - k)
    (e^(k (k - 1) / 2 m^2) - 1): binomial probabilities have the sum 1, and nothing cancels.
    """
    k, m = np.arange(2, order + 1, dtype=np.float64), min(m, _MOST_NOISE)
    power = k * (k - 1) / (2 * m * m)
    terms = _summed_logs(
        np.full_like(k, gammaln(order + 1)),
        -gammaln(k + 1),
        -gammaln(order - k + 1),
        k * math.log(rate),
        (order - k) * math.log1p(-rate),
        power,
        np.log(-np.expm1(-power)),
    )
    return float(np.logaddexp.reduce(terms, initial=0.0))


def _fractional_log_moments(orders: Moments, rate: float, m: float) -> Moments:
    """The logarithms of the moments of a Poisson-sampled Gaussian at fractional orders, from above.

    The densities' ratio is 1 - rate + rate e^((2 x - 1) / 2 m^2). On either side of the x where the
    two parts are equal, its power is a binomial series in the smaller over the larger. Terms are
    added without their signs, which alternate beyond the order, until both series fall and are
    negligible. Infinite, if that takes more than 1,000 terms.
    """
    a, i = orders[:, None], np.arange(_TERMS, dtype=np.float64)
    factors = np.append(np.ones_like(a), (a - i[:-1]) / i[1:], axis=1)
    log_binomial = np.cumsum(np.log(np.abs(factors)), axis=1)
    log_in, log_out, twice = math.log(rate), math.log1p(-rate), 2 * m * m
    equal = m * m * (log_out - log_in) + 0.5
    j = a - i
    below = _summed_logs(
        log_binomial, i * log_in, j * log_out, i * (i - 1) / twice, log_ndtr((equal - i) / m)
    )
    above = _summed_logs(
        log_binomial, j * log_in, i * log_out, j * (j - 1) / twice, log_ndtr((j - equal) / m)
    )
    sums = np.logaddexp.accumulate(np.logaddexp(below, above), axis=1)
    small = np.maximum(below, above)[:, 1:] < sums[:, 1:] - _NEGLIGIBLE
    falling = (below[:, 1:] < below[:, :-1]) & (above[:, 1:] < above[:, :-1])
    ended = small & falling & (i[1:] >= a + 2)
    logs = sums[np.arange(len(orders)), 1 + np.argmax(ended, axis=1)]
    return np.where(ended.any(axis=1), np.maximum(logs, 0.0) + _ROUNDING, np.inf)


def _summed_logs(*parts: Moments) -> Moments:
    """The sum of the parts of a logarithm, and the rounding of each part on top of it."""
    total: Moments = np.zeros(1)
    size: Moments = np.zeros(1)
    for part in parts:
        total, size = total + part, size + np.abs(part)
    return total + _ROUNDING * size


@lru_cache(maxsize=64)
def fixed_sampled_moments(share: float, m: float) -> Moments:
    """The Renyi divergence of one release of a fixed cohort at each of `_ORDERS`, from above.

    `share` is q, the size of the cohort / population, and `m` is std / the distance of two rows.
    Cached.

    With f(k) = e^(k (k - 1) / 2 m^2), the k-th moment of the Gaussian without sampling, and its
    differences d(l) = sum over k of (-1)^(l - k) C(l, k) f(k), the moment of order a is at most

        1 + C(a, 2) q^2 min(4 (e^(1/m^2) - 1), 2 e^(1/m^2))
          + sum over j = 3 .. a of C(a, j) q^j min(4 sqrt(d(2 floor(j/2)) d(2 ceil(j/2))), 2 f(j)).

    Its logarithm is convex in the order: between two integers it is below the chord.
    """
    logs = {1: 0.0}
    for order in sorted({*map(math.floor, _ORDERS), *map(math.ceil, _ORDERS)} - {1}):
        logs[order] = _log_moment(order, share, m)
    divergences = []
    for a in _ORDERS:
        low, high = math.floor(a), math.ceil(a)
        log = logs[low] + (a - low) * (logs[high] - logs[low])
        divergences.append(log / (a - 1))
    return np.array(divergences)


def _log_moment(order: int, share: float, m: float) -> float:
    """The logarithm of the bound in `fixed_sampled_moments` on the moment of an integer order."""
    j = np.arange(2, order + 1, dtype=np.float64)
    crude = math.log(2) + j * (j - 1) / (2 * m * m)
    if order <= _EXACT:
        even = _log_differences(m)
        finer = np.array([(even[k // 2] + even[(k + 1) // 2]) / 2 for k in range(2, order + 1)])
        crude = np.minimum(crude, math.log(4) + finer)
    else:
        crude[0] = min(crude[0], math.log(4) + _log_differences(m)[1])
    binomial = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
    terms = binomial + j * math.log(share) + crude
    return float(np.logaddexp.reduce(terms, initial=0.0))


@lru_cache(maxsize=64)
def _log_differences(m: float) -> tuple[float, ...]:
    """(log d(0), log d(2), log d(4), ..., log d(256)), d as in `fixed_sampled_moments`.

    d(l) is the l-th moment of the ratio of densities less 1: a small sum of large terms with
    alternating signs. The terms are at most 2^l f(l) and d(l) at least (f(l)^(1/l) - 1)^l
    (Minkowski), so that it is known how many digits cancel; the sum has thirty more.
    """
    half = 1 / (2 * m * m)
    lost = max(
        order * (math.log(2) - math.log(-math.expm1(-(order - 1) * half)))
        for order in range(2, _EXACT + 1, 2)
    )
    exact = Context(30 + math.ceil(lost / math.log(10)), Emin=MIN_EMIN, Emax=MAX_EMAX)
    step = exact.exp(exact.divide(1, exact.power(Decimal(m), 2)))  # f(k + 1) / f(k) = step^k
    moments, ratio = [Decimal(1)], Decimal(1)
    for _ in range(_EXACT):
        moments.append(exact.multiply(moments[-1], ratio))
        ratio = exact.multiply(ratio, step)
    logs, differences, rough = [0.0], moments, Context(20, Emin=MIN_EMIN, Emax=MAX_EMAX)
    for order in range(1, _EXACT + 1):
        differences = [exact.subtract(high, low) for low, high in pairwise(differences)]
        if order % 2 == 0:
            logs.append(float(rough.ln(rough.plus(differences[0]))))
    return tuple(logs)
