"""What a claim is worth to somebody with several units: clients or records, by the claim's unit.

Only pure epsilons multiply. At the same delta two Gaussian releases' worth of one person are one
release with twice the shift, whose epsilon is more than twice as large (docs/proofs/units.md).
"""

import math
from collections.abc import Callable
from functools import lru_cache

from fedveil.privacy.accounting.claims import (
    Accountant,
    Composed,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.composition import FINE, epsilon
from fedveil.privacy.accounting.events import (
    Event,
    FixedSampled,
    Gaussian,
    GaussianWithCurator,
    PoissonSampled,
    Shuffled,
    WithMetrics,
)
from fedveil.privacy.accounting.sampled_gaussian import added_or_removed

_WIDEST = 500.0
_MOST_UNITS = 256
"""Beyond, a sampled release is accounted as one that everybody takes part in, which is safe."""

_PRECISE = 1e-3
"""Group privacy's epsilon is at most this much above the least, relative to it."""

_LEAST_LOG_DELTA = -690.0


def units_epsilon(claim: PrivacyClaim, composed: Composed, units: int) -> float:
    """The epsilon at the claim's delta of `units` units that change together.

    Guarantee: an upper bound, for units that are all taken away, all zeroed or all replaced,
    wherever they are and however they point. docs/proofs/units.md

    | what was composed | epsilon |
    |---|---|
    | anything, pure | `units` times that of one |
    | clients that randomise their own reports (local trust) | that of `units` times the releases |
    | Gaussian | exact: the Gaussian with `units` times the shift |
    | Gaussian, with metrics of the same clients | exact: `units` times both shifts |
    | Gaussian with a curator | the reports as clients' own, the curator's with `units` shifts |
    | Poisson-sampled Gaussian, add-remove or zero-out, by PLD | exact: a mixture of Gaussians |
    | anything else | group privacy, or all of them always take part, whichever is less |
    """
    event, count = composed.event, composed.count
    relation, accountant = claim.neighbours, claim.accountant
    delta = 0.0 if accountant is Accountant.PURE else claim.delta - composed.slip

    def of(event: Event, count: int, delta: float = delta) -> float:
        return epsilon(event, count, delta, relation, accountant)

    if accountant is Accountant.PURE:
        return units * of(event, count)
    match event:
        case GaussianWithCurator(Gaussian(m), Gaussian(c), most):
            own = Gaussian(m / math.sqrt(units))
            return of(GaussianWithCurator(own, Gaussian(c / units), most), count)
        case _ if claim.trust is Trust.LOCAL and claim.unit is not Unit.RECORD:
            return of(event, units * count)
        case Gaussian(m):
            return of(Gaussian(m / units), count)
        case PoissonSampled(rate, Gaussian(m)) if (
            accountant is Accountant.PLD and relation is not Relation.REPLACE and rate < 1
        ):
            found = math.inf
            if units <= _MOST_UNITS:
                found = _mixture_epsilon(rate, m, units, count, delta)
            return min(found, of(Gaussian(m / units), count))
        case WithMetrics(Gaussian(m), Gaussian(c), most):
            return of(WithMetrics(Gaussian(m / units), Gaussian(c / units), most), count)
        case WithMetrics(PoissonSampled(_, Gaussian(m)), Gaussian(c), most):
            plain = of(WithMetrics(Gaussian(m / units), Gaussian(c / units), most), count)
        case PoissonSampled(_, Gaussian(m)) | FixedSampled(_, _, Gaussian(m)):
            plain = of(Gaussian(m / units), count)
        case Shuffled(report, _):
            plain = epsilon(report, units * count, delta, relation, Accountant.BINOMIAL)
        case _:
            plain = math.inf
    return min(plain, group_epsilon(lambda less: of(event, count, less), units, delta))


def group_epsilon(curve: Callable[[float], float], units: int, delta: float) -> float:
    """The least epsilon at `delta` that group privacy gives for `units` units, nearly.

    A release that is (e, d)-DP about one unit is (k e, d (e^(k e) - 1) / (e^e - 1))-DP about k.
    `curve` is e by d. The smaller d, the larger e: the largest d is looked for that makes the
    second of the two at most `delta`.

    | edge | behaviour |
    |---|---|
    | e is 0 at delta / k | 0: the deltas add up |
    | no d above 1e-299 is small enough | infinity |
    """

    def fits(log: float, e: float) -> bool:
        return log + _log_factor(e, units) <= math.log(delta)

    high = math.log(delta / units)
    above = curve(math.exp(high))
    if fits(high, above):
        return units * above
    low, below, step = high, above, 1.0
    while not fits(low, below):
        high, above = low, below
        low -= step
        step = max(2 * step, (units - 1) * min(below, 100.0))
        if low < _LEAST_LOG_DELTA:
            return math.inf
        below = curve(math.exp(low))
    while below - above > _PRECISE * below and high - low > _PRECISE:
        middle = (low + high) / 2
        e = curve(math.exp(middle))
        if fits(middle, e):
            low, below = middle, e
        else:
            high, above = middle, e
    return units * below


def _log_factor(e: float, units: int) -> float:
    """log((e^(units e) - 1) / (e^e - 1)), which is log(units) at e = 0."""
    if math.isinf(e):
        return math.inf
    if e < 1e-9:
        return math.log(units) + units * e
    return (units - 1) * e + math.log(-math.expm1(-units * e)) - math.log(-math.expm1(-e))


@lru_cache(maxsize=256)
def _mixture_epsilon(rate: float, noise: float, units: int, count: int, delta: float) -> float:
    """Of `count` Poisson-sampled releases that each of `units` units joins by itself."""
    if count == 0:
        return 0.0
    interval = _interval(rate, noise, units, count)
    if interval > _WIDEST:
        return math.inf
    both = added_or_removed(rate, noise, interval, units)
    return max(each.repeated(count, delta).epsilon(delta) for each in both)


def _interval(rate: float, noise: float, units: int, count: int) -> float:
    """A grid that is fine beside the spread of one release's loss, and fits into memory.

    Its spread, and that of all of them, are taken from the second moment of the ratio of
    densities. A release has 20,000 to 400,000 losses, and all of them together about a million.
    """
    one = units * units / (2 * noise * noise) + 10 * units / noise
    moment = units * units * math.log1p(rate * rate * math.expm1(min(1 / noise**2, 600.0)))
    spread = math.expm1(min(moment, 600.0))
    every = min(count * one, one + count * spread)
    fine = min(one / 20_000, math.sqrt(spread) / 20)
    return max(FINE, fine, one / 400_000, every / 1_000_000)
