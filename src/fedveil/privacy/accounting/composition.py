"""From events to epsilon, for one unit or for several units of one person.

fedveil's events carry std / sensitivity *under the claim's own relation*, and `_composition` is the
one table that turns them into loss distributions, closed forms or Renyi divergences. Each
entry is tested against an independent computation, and what is not in the table is refused.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial

from fedveil.base.checks import MOST_ROUNDS
from fedveil.base.errors import BadInput, UnsupportedEvent
from fedveil.privacy.accounting.claims import (
    Accountant,
    Composed,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.closed_forms import (
    gaussian_epsilon,
    randomised_response_epsilon,
    shuffled_epsilon,
)
from fedveil.privacy.accounting.events import (
    KINDS,
    Event,
    FixedSampled,
    FuGaussian,
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    GroupSampled,
    Laplace,
    PoissonSampled,
    PureReport,
    Shuffled,
    Skellam,
    TwoPoint,
    WithMetrics,
)
from fedveil.privacy.accounting.loss_distribution import (
    add_remove_losses,
    coin_losses,
    coin_span,
    compose,
    replacement_losses,
)
from fedveil.privacy.accounting.renyi import renyi_epsilon

FINE = 1e-4
_NO_NOISE = 1e-6
_MOST_POINTS = 2_000_000
_WIDEST = 500.0
"""Of a grid: beyond, e^interval is no float any more, and no epsilon on it means anything."""

_MOST_UNITS = 256
"""Beyond, a sampled release is accounted as one that everybody takes part in, which is safe."""

_PRECISE = 1e-3
"""Group privacy's epsilon is at most this much above the least, relative to it."""

_LEAST_LOG_DELTA = -690.0


def epsilon(
    event: Event,
    count: int,
    delta: float,
    relation: Relation,
    accountant: Accountant = Accountant.PLD,
    *,
    interval: float = FINE,
) -> float:
    """The epsilon at `delta` of `count` releases of `event` about one unit.

    Guarantee: an upper bound on the true epsilon. PLD rounds the privacy loss up to a grid of
    `interval` (coarser where the loss is so large that the grid would not fit into memory); a
    coarser grid gives a larger value, never a smaller one. Plain Gaussians compose to a Gaussian,
    so that their PLD needs no grid and is evaluated in closed form; the binomial accountant is
    exact; the pure one adds epsilons and holds at every delta, 0 included.

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
    composed_epsilon = _composition(event, relation, accountant)
    if composed_epsilon is None:
        raise UnsupportedEvent(
            f"{accountant.upper()} has no entry for {KINDS[type(event)]} under {relation}: "
            "use another sampler or accountant"
        )
    if count == 0:
        return 0.0
    if noise_in(event) < _NO_NOISE:
        return math.inf
    return composed_epsilon(count, delta, interval)


def accountants_of(event: Event, relation: Relation) -> tuple[Accountant, ...]:
    """The accountants with an entry for this release. The first one counts.

    Raises BadInput if there is none.
    """
    known = []
    for accountant in Accountant:
        if _composition(event, relation, accountant) is not None:
            known.append(accountant)
    if not known:
        raise BadInput(f"no accountant knows {event} under {relation}")
    return tuple(known)


def noise_in(event: Event) -> float:
    """The least noise multiplier inside an event, infinite for reports without additive noise."""
    match event:
        case Gaussian(m) | Laplace(m) | FuGaussian(m, _) | GaussianWithBit(Gaussian(m), _):
            return m
        case Skellam(m, _):
            return m
        case GaussianWithCurator(Gaussian(m), Gaussian(c), _):
            return min(m, c)
        case PoissonSampled(_, inner):
            return noise_in(inner)
        case GroupSampled(_, _, Gaussian(m)):
            return m
        case FixedSampled(_, _, Gaussian(m)):
            return m
        case TwoPoint() | PureReport() | Shuffled():
            return math.inf
        case WithMetrics(inner, Gaussian(m), _):
            return min(noise_in(inner), m)


def covers(added: float, claimed: float) -> bool:
    """Whether the noise `added` is at least the noise `claimed`, up to 1e-9. False for NaN."""
    return claimed <= added * (1 + 1e-9)


def _composition(
    event: Event, relation: Relation, accountant: Accountant
) -> Callable[[int, float, float], float] | None:
    """A function (count, delta, interval) -> epsilon, None if the table has no entry.

    The table is by event, relation and accountant.

    A plain Gaussian is the pair N(0, m^2), N(1, m^2) under every relation, m being relative to that
    relation's sensitivity. Under replacement a Poisson-sampled cohort differs by a row of length S
    on one side and another on the other, so that noise relative to S is twice our multiplier: the
    loss distribution is of exactly that; moments have no bound for it. Skellam noise on integers is
    bounded at integer orders, without sampling under every relation. A report that is epsilon-DP,
    of whatever form, is a function of epsilon-randomised response, so that the composition of the
    latter covers it (Kairouz, Oh and Viswanath 2015).
    """
    replaces = relation is Relation.REPLACE
    match event, accountant:
        case Gaussian(m), Accountant.PLD:
            return lambda count, delta, _: gaussian_epsilon(math.sqrt(count) / m, delta)
        case Gaussian(), Accountant.RDP:
            return lambda count, delta, _: renyi_epsilon(event, count, delta)
        case Laplace(m), Accountant.PURE:
            return lambda count, *_: count / m
        case PoissonSampled(rate, Gaussian(m)), Accountant.PLD:
            return partial(_sampled_epsilon, replaces, rate, m, None)
        case Skellam(), Accountant.RDP:
            return lambda count, delta, _: renyi_epsilon(event, count, delta)
        case PoissonSampled(_, Gaussian() | Skellam()), Accountant.RDP if not replaces:
            return lambda count, delta, _: renyi_epsilon(event, count, delta)
        case GroupSampled(rate, size, Gaussian(m)), Accountant.PLD if not replaces:
            return partial(_together_epsilon, rate, m, size)
        case FixedSampled(_, _, Gaussian()), Accountant.RDP if replaces:
            return lambda count, delta, _: renyi_epsilon(event, count, delta)
        case FuGaussian(m, c2), Accountant.PUBLISHED:
            return lambda count, delta, _: c2 * math.sqrt(count * math.log(1 / delta)) / m
        case ((TwoPoint(eps0) | PureReport(eps0)), Accountant.PURE) if replaces:
            return lambda count, *_: count * eps0
        case ((TwoPoint(eps0) | PureReport(eps0)), Accountant.BINOMIAL) if replaces:
            return lambda count, delta, _: randomised_response_epsilon(eps0, count, delta)
        case Shuffled(TwoPoint(eps0), reports), Accountant.PLD if replaces:
            return lambda count, delta, _: shuffled_epsilon(eps0, reports, count, delta)
        case GaussianWithBit(Gaussian(m), TwoPoint(eps0)), Accountant.PLD if replaces:
            return partial(_gaussian_with_bit_epsilon, m, eps0)
        case GaussianWithCurator(), Accountant.PLD if replaces:
            return lambda count, delta, _: gaussian_epsilon(_joint_mu(event, count), delta)
        case GaussianWithCurator(), Accountant.RDP if replaces:
            return lambda count, delta, _: renyi_epsilon(
                Gaussian(1 / _joint_mu(event, count)), 1, delta
            )
        case WithMetrics(Gaussian(m), Gaussian(c), most), Accountant.PLD:
            return lambda count, delta, _: gaussian_epsilon(
                math.hypot(math.sqrt(count) / m, math.sqrt(most) / c), delta
            )
        case WithMetrics(PoissonSampled(rate, Gaussian(m)), Gaussian(c), most), Accountant.PLD:
            return partial(_sampled_epsilon, replaces, rate, m, c / math.sqrt(most))
    return None


@lru_cache(maxsize=1024)
def _sampled_epsilon(
    replaces: bool,
    rate: float,
    noise: float,
    metrics: float | None,
    count: int,
    delta: float,
    interval: float,
) -> float:
    """The epsilon of `count` Poisson-sampled Gaussians and, unless None, one of `metrics` noise.

    Infinite if only a grid wider than 500 holds the losses. Cached.

    Args:
        replaces: Whether the relation is replacement.
        rate: The probability with which a unit takes part.
        noise: The noise multiplier.
        metrics: The multiplier of one more Gaussian, with the same loss in every direction and
            under every relation. It is composed with each direction of the others.
        count: The number of releases.
        delta: The delta.
        interval: The spacing of the grid, which is widened if need be.
    """
    coarsening = _grid_factor(rate, noise, count)
    if metrics is not None:
        coarsening = max(coarsening, _grid_factor(1.0, metrics, 1))
    interval *= coarsening
    if interval > _WIDEST:
        return math.inf
    measured = []
    if metrics is not None:
        measured = [(add_remove_losses(1.0, metrics, interval)[0], 1)]
    sampled = replacement_losses(rate, 2 * noise, interval) if replaces else None
    largest = 0.0
    for losses in sampled or add_remove_losses(rate, noise, interval):
        largest = max(largest, compose([(losses, count), *measured], delta).epsilon(delta))
    return largest


@lru_cache(maxsize=1024)
def _gaussian_with_bit_epsilon(
    multiplier: float, eps0: float, count: int, delta: float, interval: float
) -> float:
    """The epsilon of `count` Gaussians, which compose to one, and `count` bits with odds e^eps0.

    `interval` is widened if need be. Infinite if only a grid wider than 500 holds the losses.
    Cached.
    """
    interval *= _grid_factor(1.0, multiplier, count)
    interval = max(interval, coin_span(eps0, count) / _MOST_POINTS)
    if interval > _WIDEST:
        return math.inf
    (updates,) = add_remove_losses(1.0, multiplier / math.sqrt(count), interval)
    return compose([(updates, 1), (coin_losses(eps0, count, interval), 1)], delta).epsilon(delta)


def _joint_mu(event: GaussianWithCurator, count: int) -> float:
    """The mu of the one Gaussian release that `count` reports and the curator's releases are."""
    reports = math.sqrt(count) / event.gaussian.multiplier
    return math.hypot(reports, math.sqrt(min(count, event.most)) / event.curator.multiplier)


def _grid_factor(rate: float, noise: float, count: int) -> float:
    """The factor by which a grid is widened to stay at a few hundred thousand points.

    1 unless the privacy loss is very large: of one release above about 40 (noise below 0.3), or
    of all of them above about 150.
    """
    one = _width(noise)
    spread = rate**2 * count * math.expm1(min(1 / (noise * noise), 600.0))
    return max(1.0, one / 40, min(count * one, one + spread) / 150)


def rounds_within(
    event: Event,
    target: float,
    delta: float,
    relation: Relation,
    accountant: Accountant = Accountant.PLD,
) -> int:
    """The largest number of releases within the epsilon `target`, from 0 to a million.

    An infinite target gives a million. Raises BadInput for one that is not positive.

    Guarantee: epsilon(event, result) <= target on the fine grid.
    """
    if target == math.inf:
        return MOST_ROUNDS

    def within(rounds: int, interval: float) -> bool:
        spent = epsilon(event, rounds, delta, relation, accountant, interval=interval)
        return max(spent, 1e-12) <= target

    low = 0
    for interval in (coarse_interval(target), FINE):
        low, step = low if low and within(low, interval) else 0, 1
        while low + step <= MOST_ROUNDS and within(low + step, interval):
            low, step = low + step, step * 2
        high = min(low + step, MOST_ROUNDS + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if within(middle, interval) else (low, middle)
    return low


def coarse_interval(target: float) -> float:
    """The spacing of the grid on which a search for the epsilon `target` starts, 1e-4 to 1e-3.

    Raises BadInput for a target that is not positive and finite.
    """
    if not (target > 0 and math.isfinite(target)):
        raise BadInput(f"epsilon is {target:g}: a positive, finite number is needed")
    return min(10 * FINE, max(FINE, target * 1e-3))


def quick_interval(event: Event) -> float:
    """The interval of a grid for the epsilons of many counts of an event, one to ten times `FINE`.

    For a sampled Gaussian, or a Gaussian with a bit, it is about a twentieth of the standard
    deviation of one release's loss, or more where this loss would then have more than 60,000
    values. Metrics beside it do not count. For any other event it is ten times `FINE`.
    """
    match event:
        case PoissonSampled(rate, Gaussian(m)):
            spread, width = rate * math.sqrt(math.expm1(min(1 / (m * m), 600.0))), _width(m)
        case GaussianWithBit(Gaussian(m), TwoPoint(eps0)):
            spread, width = max(1 / m, eps0), _width(m)
        case WithMetrics(inner, _, _):
            return quick_interval(inner)
        case _:
            return 10 * FINE
    return min(10 * FINE, max(FINE, spread / 20, width / 60_000))


def _width(noise: float) -> float:
    """The range, nearly, of the loss of one Gaussian release."""
    return 1 / (2 * noise * noise) + 10 / noise


# --- several units of one person ---


def units_epsilon(claim: PrivacyClaim, composed: Composed, units: int) -> float:
    """The epsilon at the claim's delta of `units` units that change together.

    Only pure epsilons multiply. At the same delta two Gaussian releases' worth of one person are
    one release with twice the shift, whose epsilon is more than twice as large.

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
    | the same of all records of a person | exact: with `units` times as many records |
    | Skellam | that of `units` times the sensitivity, with the same noise |
    | anything else | group privacy, or all of them always take part, whichever is less |
    """
    event, count = composed.event, composed.count
    relation, accountant = claim.neighbours, claim.accountant
    delta = 0.0 if accountant is Accountant.PURE else claim.delta - composed.slip

    epsilon_of = partial(
        epsilon, count=count, delta=delta, relation=relation, accountant=accountant
    )
    if accountant is Accountant.PURE:
        return units * epsilon_of(event)
    match event:
        case GaussianWithCurator(Gaussian(m), Gaussian(c), most):
            own = Gaussian(m / math.sqrt(units))
            return epsilon_of(GaussianWithCurator(own, Gaussian(c / units), most))
        case _ if claim.trust is Trust.LOCAL and claim.unit not in (Unit.RECORD, Unit.PERSON):
            return epsilon_of(event, count=units * count)
        case Gaussian(m):
            return epsilon_of(Gaussian(m / units))
        case Skellam(m, sensitivity):
            return epsilon_of(Skellam(m / units, sensitivity * units))
        case PoissonSampled(rate, Gaussian(m)) if (
            accountant is Accountant.PLD and relation is not Relation.REPLACE and rate < 1
        ):
            return _together_epsilon(rate, m, units, count, delta, FINE)
        case GroupSampled(rate, size, gaussian):
            return epsilon_of(GroupSampled(rate, size * units, gaussian))
        case WithMetrics(Gaussian(m), Gaussian(c), most):
            return epsilon_of(WithMetrics(Gaussian(m / units), Gaussian(c / units), most))
        case WithMetrics(PoissonSampled(_, Gaussian(m)), Gaussian(c), most):
            plain = epsilon_of(WithMetrics(Gaussian(m / units), Gaussian(c / units), most))
        case PoissonSampled(_, Gaussian(m)) | FixedSampled(_, _, Gaussian(m)):
            plain = epsilon_of(Gaussian(m / units))
        case PoissonSampled(_, Skellam(m, sensitivity)):
            plain = epsilon_of(Skellam(m / units, sensitivity * units))
        case Shuffled(report, _):
            plain = epsilon(report, units * count, delta, relation, Accountant.BINOMIAL)
        case _:
            plain = math.inf
    return min(plain, group_epsilon(lambda less: epsilon_of(event, delta=less), units, delta))


def group_epsilon(curve: Callable[[float], float], units: int, delta: float) -> float:
    """The least epsilon at `delta` that group privacy gives for `units` units, to 0.1 %.

    `curve(d)` is the epsilon e at delta d about one unit, which falls with d. A release that is (e,
    d)-DP about one unit is (k e, d (e^(k e) - 1) / (e^e - 1))-DP about k. So the largest d is
    looked for that makes the second of the two at most `delta`.

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
def _together_epsilon(
    rate: float, noise: float, units: int, count: int, delta: float, interval: float
) -> float:
    """The epsilon of `count` Gaussian releases that each of `units` units joins with the rate.

    The mixture of Gaussians, or that of all units in every release where it is less, where there
    are more than 256, or where only a grid wider than 500 holds the mixture's losses. Cached. The
    grid is no finer than `interval`, fine beside the spread of one release's loss, and fits into
    memory: a release has 20,000 to 400,000 losses, and all of them together about a million. Its
    spread, and that of all of them, are taken from the second moment of the ratio of densities.
    """
    if count == 0:
        return 0.0
    always = gaussian_epsilon(math.sqrt(count) * units / noise, delta)
    if units > _MOST_UNITS or rate == 1:
        return always
    one = units * units / (2 * noise * noise) + 10 * units / noise
    moment = units * units * math.log1p(rate * rate * math.expm1(min(1 / noise**2, 600.0)))
    spread = math.expm1(min(moment, 600.0))
    every = min(count * one, one + count * spread)
    fine = min(one / 20_000, math.sqrt(spread) / 20)
    interval = max(interval, fine, one / 400_000, every / 1_000_000)
    if interval > _WIDEST:
        return always
    both = add_remove_losses(rate, noise, interval, units)
    mixture = max(compose([(losses, count)], delta).epsilon(delta) for losses in both)
    return min(always, mixture)
