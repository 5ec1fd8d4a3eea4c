"""Epsilon by Renyi divergences, the moments accountant: dp-accounting's, read in our terms.

The library is imported with this file and by nothing else: it takes a second, and the claims that
are computed by it come after a training. Every `m` is std / sensitivity under the claim's relation.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import dp_accounting as dpa
import numpy as np
import numpy.typing as npt
from dp_accounting.rdp import RdpAccountant, compute_epsilon

Moments = npt.NDArray[np.float64]

_ADD_REMOVE = dpa.NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE = dpa.NeighboringRelation.REPLACE_ONE


def gaussian(m: float, count: int, delta: float) -> float:
    """Of `count` Gaussian releases: the pair N(0, m^2), N(1, m^2) under every relation."""
    return _epsilon(dpa.GaussianDpEvent(m), _ADD_REMOVE, count, delta)


def poisson_sampled(rate: float, m: float, count: int, delta: float) -> float:
    """Of Gaussian releases in which a unit takes part with probability `rate`, or never does."""
    event = dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(m))
    return _epsilon(event, _ADD_REMOVE, count, delta)


def fixed_sampled(size: int, population: int, m: float, count: int, delta: float) -> float:
    """Of Gaussian releases of `size` units out of `population`, under replacement.

    The library takes noise relative to twice the length of a row, which is m. Where its bound is so
    loose that it exceeds the release without sampling, the latter counts.
    """
    event = dpa.SampledWithoutReplacementDpEvent(population, size, dpa.GaussianDpEvent(m))
    return min(_epsilon(event, _REPLACE, count, delta), gaussian(m, count, delta))


@lru_cache(maxsize=1024)
def _epsilon(
    event: dpa.DpEvent, relation: dpa.NeighboringRelation, count: int, delta: float
) -> float:
    orders, moments = _moments(event, relation)
    with _quiet():
        return float(compute_epsilon(orders, count * moments, delta)[0])


@lru_cache(maxsize=64)
def _moments(event: dpa.DpEvent, relation: dpa.NeighboringRelation) -> tuple[Moments, Moments]:
    """Orders, and the divergence of one release at each: what takes long, and adds up.

    Kept because budgets ask for many counts of one release.
    """
    with _quiet():
        accountant = RdpAccountant(neighboring_relation=relation)
        accountant.compose(event)
        return accountant.orders, accountant.rdp


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's remarks about RDP orders it skipped from the user; skipping is safe."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
