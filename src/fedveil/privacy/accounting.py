"""From events to epsilon.

Only this file knows how the accountants of dp-accounting read an event. They do not agree with
each other: under replacement its PLD doubles the sensitivity and its RDP does not. fedveil's
events carry std / sensitivity *under the claim's own relation*, and `_translate` is the one table
that turns them into the library's; each entry is tested against a closed form, and what is not
in the table is refused.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import dp_accounting as dpa
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.special import log_ndtr

from fedveil.errors import BadInput, UnsupportedEvent
from fedveil.privacy.claims import Accountant, Relation
from fedveil.privacy.events import Event, FixedSampled, Gaussian, PoissonSampled, to_dict

FINE = 1e-4
_NO_NOISE = 1e-6

_ONE_ROW = (Relation.ADD_REMOVE, Relation.ZERO_OUT)
_ADD_REMOVE = dpa.NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE = dpa.NeighboringRelation.REPLACE_ONE


def epsilon(
    event: Event,
    count: int,
    delta: float,
    relation: Relation,
    accountant: Accountant = Accountant.PLD,
    *,
    interval: float = FINE,
) -> float:
    """The epsilon at `delta` of `count` releases of `event`.

    Guarantee: an upper bound on the true epsilon. PLD rounds the privacy loss up to a grid of
    `interval` (coarser where the loss is so large that the grid would not fit into memory);
    a coarser grid gives a larger value, never a smaller one. Plain Gaussians compose to a
    Gaussian, so that their PLD needs no grid and is evaluated in closed form.

    | edge | behaviour |
    |---|---|
    | count 0 | 0 |
    | count negative, delta outside (0, 1) | BadInput |
    | noise multiplier below 1e-6 | infinity |
    | (event, relation, accountant) not in the table | UnsupportedEvent |

    >>> round(epsilon(Gaussian(3.7306), 1, 1e-5, Relation.ADD_REMOVE), 3)
    1.0
    """
    if not 0 < delta < 1:
        raise BadInput(f"delta is {delta:g}: a number in (0, 1) is needed")
    if count < 0:
        raise BadInput(f"rounds is {count}: a number >= 0 is needed")
    translated = _translate(event, relation, accountant)
    if count == 0:
        return 0.0
    if noise_of(event) < _NO_NOISE:
        return math.inf
    if accountant is Accountant.RDP:
        return _rdp_epsilon(translated, count, delta)
    if isinstance(event, Gaussian):
        return gaussian_epsilon(math.sqrt(count) / event.multiplier, delta)
    return _pld_epsilon(translated, count, delta, interval * _coarsening(event, count))


def supports(event: Event, relation: Relation, accountant: Accountant) -> bool:
    """Whether the table has an entry for this release."""
    try:
        _translate(event, relation, accountant)
    except UnsupportedEvent:
        return False
    return True


def noise_of(event: Event) -> float:
    """The noise multiplier inside an event."""
    return event.multiplier if isinstance(event, Gaussian) else event.event.multiplier


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The exact epsilon of a Gaussian mechanism with sensitivity / std = `mu`.

    The root of delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)
    (Balle and Wang 2018), valid for every epsilon; 0 where delta(0) is small enough already.
    """

    def log_excess(eps: float) -> float:
        first = float(log_ndtr(mu / 2 - eps / mu))
        second = eps + float(log_ndtr(-mu / 2 - eps / mu))
        gap = -math.expm1(min(0.0, second - first))
        return first + (math.log(gap) if gap > 0 else -math.inf) - math.log(delta)

    if log_excess(0.0) <= 0:
        return 0.0
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    return float(brentq(lambda e: max(log_excess(e), -1e6), 0.0, high, xtol=1e-12, rtol=1e-12))


@dataclass(frozen=True)
class _Translated:
    """An event in the words of dp-accounting, with the relation it must be read under."""

    event: dpa.DpEvent
    relation: dpa.NeighboringRelation


def _translate(event: Event, relation: Relation, accountant: Accountant) -> _Translated:
    """The table of (event, relation, accountant).

    A plain Gaussian is the pair N(0, m^2), N(1, m^2) under every relation, m being relative to
    that relation's sensitivity; both accountants read it so under add-remove. Under replacement
    a Poisson-sampled cohort differs by a row of length S on one side and another on the other:
    the library's PLD models exactly that, with noise relative to S, twice our multiplier. Its
    RDP bound for sampling without replacement takes noise relative to 2 S, which is ours.
    """
    match event, accountant:
        case Gaussian(m), _:
            return _Translated(dpa.GaussianDpEvent(m), _ADD_REMOVE)
        case PoissonSampled(rate, Gaussian(m)), _ if relation in _ONE_ROW:
            inner = dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(m))
            return _Translated(inner, _ADD_REMOVE)
        case PoissonSampled(rate, Gaussian(m)), Accountant.PLD:
            inner = dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(2 * m))
            return _Translated(inner, _REPLACE)
        case FixedSampled(size, population, Gaussian(m)), Accountant.RDP if (
            relation is Relation.REPLACE
        ):
            fixed = dpa.SampledWithoutReplacementDpEvent(population, size, dpa.GaussianDpEvent(m))
            return _Translated(fixed, _REPLACE)
    raise UnsupportedEvent(
        f"{accountant.upper()} has no entry for {to_dict(event)['kind']} under {relation}: "
        "use another sampler or accountant"
    )


@lru_cache(maxsize=1024)
def _rdp_epsilon(translated: _Translated, count: int, delta: float) -> float:
    with _quiet():
        accountant = RdpAccountant(neighboring_relation=translated.relation)
        accountant.compose(translated.event, count)
        return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=1024)
def _pld_epsilon(translated: _Translated, count: int, delta: float, interval: float) -> float:
    composed = _pld(translated, interval).self_compose(count)
    return max(0.0, float(composed.get_epsilon_for_delta(delta)))


@lru_cache(maxsize=16)
def _pld(translated: _Translated, interval: float) -> Any:
    """The PLD of one Poisson-sampled Gaussian, kept because budgets ask for many counts of it."""
    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=translated.event.event.noise_multiplier,
        sampling_prob=translated.event.sampling_probability,
        value_discretization_interval=interval,
        neighboring_relation=translated.relation,
    )


def _coarsening(event: Event, count: int) -> float:
    """How much wider than asked the grid must be to stay at a few hundred thousand points.

    1 unless the privacy loss is very large: of one release above about 40 (noise below 0.3), or
    of all of them above about 150.
    """
    m = noise_of(event)
    one = 1 / (2 * m * m) + 10 / m
    rate = event.rate if isinstance(event, PoissonSampled) else 1.0
    spread = rate * rate * count * math.expm1(min(1 / (m * m), 600.0))
    return max(1.0, one / 40, min(count * one, one + spread) / 150)


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
