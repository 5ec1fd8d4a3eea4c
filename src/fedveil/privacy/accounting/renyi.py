"""Epsilon by Renyi divergences, the moments accountant, read in our terms.

The divergences of plain and Poisson-sampled Gaussians, and the way from divergences to epsilon, are
dp-accounting's. Those of cohorts of fixed size are computed here: whether noise is relative to the
length of a row or to the distance between two is read one way or the other by the library's
versions. The library is imported with this file and by nothing else: it takes a second, and the
claims that are computed by it come after a training. Every `m` is std / sensitivity under the
claim's relation.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from functools import lru_cache
from itertools import pairwise

import dp_accounting as dpa
import numpy as np
import numpy.typing as npt
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from scipy.special import gammaln

Moments = npt.NDArray[np.float64]

_ORDERS = (
    *(1 + k / 10 for k in range(1, 100)),
    *map(float, range(11, 64)),
    128.0,
    256.0,
    512.0,
    1024.0,
)
"""At which a fixed cohort's divergence is bounded."""

_EXACT = 256
"""The largest order at which differences of moments are computed; above, their cruder bound."""


def gaussian(m: float, count: int, delta: float) -> float:
    """Of `count` Gaussian releases: the pair N(0, m^2), N(1, m^2) under every relation."""
    return _epsilon(dpa.GaussianDpEvent(m), count, delta)


def poisson_sampled(rate: float, m: float, count: int, delta: float) -> float:
    """Of Gaussian releases in which a unit takes part with probability `rate`, or never does."""
    return _epsilon(dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(m)), count, delta)


def fixed_sampled(size: int, population: int, m: float, count: int, delta: float) -> float:
    """Of Gaussian releases of `size` units out of `population`, under replacement.

    Guarantee: an upper bound (Wang, Balle and Kasiviswanathan 2019, theorem 27). `m` is noise over
    the distance of two rows, 2 S. Where the bound is so loose that it exceeds the release without
    sampling, the latter counts.

    | edge | behaviour |
    |---|---|
    | everybody is in the cohort | the release without sampling |
    """
    plain = gaussian(m, count, delta)
    if size == population:
        return plain
    moments = fixed_sampled_moments(size / population, m)
    return min(_of_moments(np.array(_ORDERS), count * moments, delta), plain)


@lru_cache(maxsize=64)
def fixed_sampled_moments(share: float, m: float) -> Moments:
    """The Renyi divergence of one release of a fixed cohort at each of `_ORDERS`, from above.

    With f(k) = e^(k (k - 1) / 2 m^2), the k-th moment of the Gaussian without sampling, and its
    differences d(l) = sum over k of (-1)^(l - k) C(l, k) f(k), the moment of order a is at most

        1 + C(a, 2) q^2 min(4 (e^(1/m^2) - 1), 2 e^(1/m^2))
          + sum over j = 3 .. a of C(a, j) q^j min(4 sqrt(d(2 floor(j/2)) d(2 ceil(j/2))), 2 f(j)).

    Its logarithm is convex in the order: between two integers it is below the chord.
    """
    logs = {1: 0.0}
    for order in sorted({round for a in _ORDERS for round in (math.floor(a), math.ceil(a))} - {1}):
        logs[order] = _log_moment(order, share, m)
    divergences = []
    for a in _ORDERS:
        low, high = math.floor(a), math.ceil(a)
        log = logs[low] + (a - low) * (logs[high] - logs[low])
        divergences.append(log / (a - 1))
    return np.array(divergences)


def _log_moment(order: int, share: float, m: float) -> float:
    """log of the bound on the moment of an integer order."""
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
    """log d(0), log d(2), log d(4), ... up to d(256).

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


@lru_cache(maxsize=1024)
def _epsilon(event: dpa.DpEvent, count: int, delta: float) -> float:
    orders, moments = _moments(event)
    return _of_moments(orders, count * moments, delta)


def _of_moments(orders: Moments, moments: Moments, delta: float) -> float:
    with _quiet():
        return float(compute_epsilon(orders, moments, delta)[0])


@lru_cache(maxsize=64)
def _moments(event: dpa.DpEvent) -> tuple[Moments, Moments]:
    """Orders, and the divergence of one release at each.

    This takes long, and adds up: budgets ask for many counts of one release.
    """
    with _quiet():
        accountant = RdpAccountant(
            neighboring_relation=dpa.NeighboringRelation.ADD_OR_REMOVE_ONE
        ).compose(event)
        return accountant.orders, accountant.rdp


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the library's remarks about RDP orders that it skipped. Skipping is safe."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
