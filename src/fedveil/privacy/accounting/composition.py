"""From events to epsilon.

fedveil's events carry std / sensitivity *under the claim's own relation*, and `_composition` is the
one table that turns them into loss distributions, closed forms or dp-accounting's moments; each
entry is tested against an independent computation, and what is not in the table is refused.
"""

import importlib
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from scipy.special import log_ndtr

from fedveil.base.errors import BadInput, UnsupportedEvent
from fedveil.privacy.accounting.amplification import shuffled_epsilon
from fedveil.privacy.accounting.claims import Accountant, Relation
from fedveil.privacy.accounting.events import (
    Event,
    FixedSampled,
    FuGaussian,
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    Laplace,
    PoissonSampled,
    PureReport,
    Shuffled,
    TwoPoint,
    WithMetrics,
    kind_of,
)
from fedveil.privacy.accounting.loss_distribution import (
    LossDistribution,
    coin_losses,
    coin_span,
    composed,
)
from fedveil.privacy.accounting.randomised_response import randomised_response_epsilon
from fedveil.privacy.accounting.roots import root
from fedveil.privacy.accounting.sampled_gaussian import added_or_removed, replaced

FINE = 1e-4
_NO_NOISE = 1e-6
_MOST_POINTS = 2_000_000
_WIDEST = 500.0
"""Of a grid: beyond, e^interval is no float any more, and no epsilon on it means anything."""


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
    Gaussian, so that their PLD needs no grid and is evaluated in closed form; the binomial
    accountant is exact; the pure one adds epsilons and holds at every delta, 0 included.

    | edge | behaviour |
    |---|---|
    | count 0 | 0 |
    | count negative, delta outside (0, 1) (pure: [0, 1)) | BadInput |
    | noise multiplier below 1e-6, or a loss that only a grid wider than 500 holds | infinity |
    | (event, relation, accountant) not in the table | UnsupportedEvent |

    >>> round(epsilon(Gaussian(3.7306), 1, 1e-5, Relation.ADD_REMOVE), 3)
    1.0
    """
    if not 0 < delta < 1 and not (delta == 0 and accountant is Accountant.PURE):
        raise BadInput(f"delta is {delta:g}: a number in (0, 1) is needed")
    if count < 0:
        raise BadInput(f"rounds is {count}: a number >= 0 is needed")
    compose = _composition(event, relation, accountant)
    if count == 0:
        return 0.0
    if noise_in(event) < _NO_NOISE:
        return math.inf
    return compose(count, delta, interval)


def supports(event: Event, relation: Relation, accountant: Accountant) -> bool:
    """Whether the table has an entry for this release."""
    try:
        _composition(event, relation, accountant)
    except UnsupportedEvent:
        return False
    return True


def noise_in(event: Event) -> float:
    """The noise multiplier inside an event, infinite for reports that have none."""
    match event:
        case Gaussian(m) | Laplace(m) | FuGaussian(m, _) | GaussianWithBit(Gaussian(m), _):
            return m
        case GaussianWithCurator(Gaussian(m), Gaussian(c), _):
            return min(m, c)
        case PoissonSampled(_, Gaussian(m)) | FixedSampled(_, _, Gaussian(m)):
            return m
        case TwoPoint() | PureReport() | Shuffled():
            return math.inf
        case WithMetrics(inner, Gaussian(m), _):
            return min(noise_in(inner), m)


def covers(added: float, claimed: float) -> bool:
    """Whether the added noise is at least the claimed noise, up to rounding. Never for NaN."""
    return claimed <= added * (1 + 1e-9)


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
    found = root(lambda e: max(log_excess(e), -1e6), 0.0, high, xtol=1e-12, rtol=1e-12)
    return found + 1e-12 * (1 + found)  # the root may be a little further on


_Composition = Callable[[int, float, float], float]
"""(count, delta, interval) -> epsilon."""

_Losses = Callable[[float, float, float], tuple[LossDistribution, ...]]
"""(rate, noise, interval) -> the loss distributions of one release, in every direction."""


def _composition(event: Event, relation: Relation, accountant: Accountant) -> _Composition:
    """The table of (event, relation, accountant): how that accountant composes that event.

    A plain Gaussian is the pair N(0, m^2), N(1, m^2) under every relation, m being relative to
    that relation's sensitivity. Under replacement a Poisson-sampled cohort differs by a row of
    length S on one side and another on the other, so that noise relative to S is twice our
    multiplier: the loss distribution is of exactly that; moments have no bound for it. A report
    that is epsilon-DP, of whatever form, is a function of epsilon-randomised response, so that the
    composition of the latter covers it (Kairouz, Oh and Viswanath 2015).
    """
    match event, accountant:
        case Gaussian(m), Accountant.PLD:
            return lambda count, delta, _: gaussian_epsilon(math.sqrt(count) / m, delta)
        case Gaussian(m), Accountant.RDP:
            return lambda count, delta, _: _renyi().gaussian(m, count, delta)
        case Laplace(m), Accountant.PURE:
            return lambda count, *_: count / m
        case PoissonSampled(rate, Gaussian(m)), Accountant.PLD:
            grid = partial(_coarsening, event)
            if relation is Relation.REPLACE:
                return _sampled_pld(replaced, rate, 2 * m, grid)
            return _sampled_pld(added_or_removed, rate, m, grid)
        case PoissonSampled(rate, Gaussian(m)), Accountant.RDP if relation is not Relation.REPLACE:
            return lambda count, delta, _: _renyi().poisson_sampled(rate, m, count, delta)
        case FixedSampled(size, n, Gaussian(m)), Accountant.RDP if relation is Relation.REPLACE:
            return lambda count, delta, _: _renyi().fixed_sampled(size, n, m, count, delta)
        case FuGaussian(m, c2), Accountant.PUBLISHED:
            return lambda count, delta, _: c2 * math.sqrt(count * math.log(1 / delta)) / m
        case ((TwoPoint(eps0) | PureReport(eps0)), Accountant.PURE) if relation is Relation.REPLACE:
            return lambda count, *_: count * eps0
        case ((TwoPoint(eps0) | PureReport(eps0)), Accountant.BINOMIAL) if (
            relation is Relation.REPLACE
        ):
            return lambda count, delta, _: randomised_response_epsilon(eps0, count, delta)
        case Shuffled(TwoPoint(eps0), reports), Accountant.PLD if relation is Relation.REPLACE:
            return lambda count, delta, _: shuffled_epsilon(eps0, reports, count, delta)
        case GaussianWithBit(Gaussian(m), TwoPoint(eps0)), Accountant.PLD if (
            relation is Relation.REPLACE
        ):
            grid = partial(_coarsening, PoissonSampled(1.0, Gaussian(m)))
            return lambda count, delta, interval: _gaussian_with_bit_epsilon(
                m, eps0, count, delta, interval * grid(count)
            )
        case GaussianWithCurator(), Accountant.PLD if relation is Relation.REPLACE:
            return lambda count, delta, _: gaussian_epsilon(_joint_mu(event, count), delta)
        case GaussianWithCurator(), Accountant.RDP if relation is Relation.REPLACE:
            return lambda count, delta, _: _renyi().gaussian(1 / _joint_mu(event, count), 1, delta)
        case WithMetrics(Gaussian(m), Gaussian(c), most), Accountant.PLD:
            return lambda count, delta, _: gaussian_epsilon(
                math.hypot(math.sqrt(count) / m, math.sqrt(most) / c), delta
            )
        case WithMetrics(PoissonSampled(rate, Gaussian(m)) as inner, Gaussian(c), most), (
            Accountant.PLD
        ):
            one = c / math.sqrt(most)
            made, noise = (
                (replaced, 2 * m) if relation is Relation.REPLACE else (added_or_removed, m)
            )
            return lambda count, delta, interval: _with_metrics_epsilon(
                made,
                rate,
                noise,
                one,
                count,
                delta,
                interval * max(_coarsening(inner, count), _coarsening_of(1.0, one, 1)),
            )
    raise UnsupportedEvent(
        f"{accountant.upper()} has no entry for {kind_of(event)} under {relation}: "
        "use another sampler or accountant"
    )


def _renyi() -> Any:
    """The moments accountant, imported when it is first asked."""
    return importlib.import_module("fedveil.privacy.accounting.renyi")


def _sampled_pld(
    made: _Losses, rate: float, noise: float, coarsen: Callable[[int], float]
) -> _Composition:
    return lambda count, delta, interval: _sampled_epsilon(
        made, rate, noise, count, delta, interval * coarsen(count)
    )


@lru_cache(maxsize=1024)
def _sampled_epsilon(
    made: _Losses, rate: float, noise: float, count: int, delta: float, interval: float
) -> float:
    if interval > _WIDEST:
        return math.inf
    every = _losses(made, rate, noise, interval)
    return max(each.repeated(count, delta).epsilon(delta) for each in every)


@lru_cache(maxsize=16)
def _losses(
    made: _Losses, rate: float, noise: float, interval: float
) -> tuple[LossDistribution, ...]:
    """Of one Poisson-sampled Gaussian, kept because budgets ask for many counts of it."""
    return made(rate, noise, interval)


@lru_cache(maxsize=1024)
def _gaussian_with_bit_epsilon(
    multiplier: float, eps0: float, count: int, delta: float, interval: float
) -> float:
    """Epsilon of `count` Gaussians, which are one Gaussian, and `count` bits, one by one."""
    interval = max(interval, coin_span(eps0, count) / _MOST_POINTS)
    if interval > _WIDEST:
        return math.inf
    (updates,) = added_or_removed(1.0, multiplier / math.sqrt(count), interval)
    return updates.composed_with(coin_losses(eps0, count, interval), delta).epsilon(delta)


@lru_cache(maxsize=1024)
def _with_metrics_epsilon(
    made: _Losses,
    rate: float,
    noise: float,
    metrics: float,
    count: int,
    delta: float,
    interval: float,
) -> float:
    """Of `count` Poisson-sampled Gaussians and one Gaussian, of `metrics` sensitivities.

    That one has the same loss in every direction, and under every relation: it is composed with
    each direction of the others.
    """
    if interval > _WIDEST:
        return math.inf
    (measured,) = added_or_removed(1.0, metrics, interval)
    every = _losses(made, rate, noise, interval)
    return max(composed([(each, count), (measured, 1)], delta).epsilon(delta) for each in every)


def _joint_mu(event: GaussianWithCurator, count: int) -> float:
    """Gaussian releases about one unit are one Gaussian release: squares of 1 / noise add up."""
    reports = math.sqrt(count) / event.gaussian.multiplier
    return math.hypot(reports, math.sqrt(min(count, event.most)) / event.curator.multiplier)


def _coarsening(event: PoissonSampled, count: int) -> float:
    """How much wider than asked the grid must be to stay at a few hundred thousand points.

    1 unless the privacy loss is very large: of one release above about 40 (noise below 0.3), or
    of all of them above about 150.
    """
    return _coarsening_of(event.rate, noise_in(event), count)


def _coarsening_of(rate: float, m: float, count: int) -> float:
    one = 1 / (2 * m * m) + 10 / m
    spread = rate**2 * count * math.expm1(min(1 / (m * m), 600.0))
    return max(1.0, one / 40, min(count * one, one + spread) / 150)
