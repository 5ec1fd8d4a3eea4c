"""Which noise, how many rounds, which rate: the inverse questions to `composition.epsilon`.

Every search starts from the central limit of the composed loss, so that it never visits the
tiny noises whose PLD takes minutes, and runs on a coarse grid. A coarse grid overstates epsilon,
so its answer is safe; the answer is confirmed on the fine grid all the same.
"""

import math
from collections.abc import Callable

from fedveil.base.checks import MOST_ROUNDS
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Accountant, Relation
from fedveil.privacy.accounting.composition import FINE, epsilon, gaussian_epsilon, supports
from fedveil.privacy.accounting.events import (
    Event,
    FixedSampled,
    Gaussian,
    GaussianWithCurator,
    Laplace,
    PoissonSampled,
    WithMetrics,
)
from fedveil.privacy.accounting.roots import root

MOST_NOISE = 1e5
_TOLERANCE = 2e-4
_NOISES = (0.02, MOST_NOISE)
_RATES = (1e-8, 1.0)


def noise_for(
    make_event: Callable[[float], Event],
    count: int,
    target: float,
    delta: float,
    relation: Relation,
    accountant: Accountant = Accountant.PLD,
) -> float:
    """The smallest noise multiplier, to about 0.1 %, that keeps `count` releases within `target`.

    Guarantee: epsilon(make_event(result), count) <= target on the fine grid.

    | edge | behaviour |
    |---|---|
    | target not positive or infinite | BadInput |
    | a multiplier of 0.02 already suffices | 0.02 |
    | no multiplier up to 100,000 suffices | BadInput |
    """
    _check_target(target)

    def slack(noise: float, interval: float) -> float:
        return _slack(target, make_event(noise), count, delta, relation, accountant, interval)

    low, high = _NOISES
    found = _threshold(
        slack, _guess_noise(make_event(1.0), count, target, delta), low, high, target
    )
    if found is None:
        raise BadInput(
            f"epsilon {target:g} at delta {delta:g} over {count} rounds needs a noise multiplier "
            f"above {high:g}: ask for fewer rounds or a larger epsilon"
        )
    return found


def least_noise(
    make_event: Callable[[float], Event], count: int, budget: Budget, relation: Relation
) -> float:
    """The noise with which `count` events meet the budget, by the accountant that counts."""
    if math.isinf(budget.epsilon):
        raise BadInput("give noise.multiplier or budget.epsilon: one follows from the other")
    accountant = next((a for a in Accountant if supports(make_event(1.0), relation, a)), None)
    if accountant is None:
        raise BadInput(f"no accountant knows {make_event(1.0)} under {relation}")
    if accountant is Accountant.PURE:
        return a_little_more(count / budget.epsilon)
    return noise_for(make_event, count, budget.epsilon, budget.delta, relation, accountant)


def a_little_more(noise: float) -> float:
    """A little more, so that the epsilon computed back from it is not one rounding too large."""
    return noise * (1 + 1e-12)


def rate_for(
    noise: float,
    count: int,
    target: float,
    delta: float,
    relation: Relation,
    accountant: Accountant = Accountant.PLD,
) -> float:
    """The largest Poisson rate, to about 0.1 %, that keeps `count` rounds within `target`.

    Guarantee: epsilon(PoissonSampled(result, Gaussian(noise)), count) <= target on the fine grid;
    where the result is 1, of Gaussian(noise), which is the same release.
    """
    _check_target(target)

    def event(rate: float) -> Event:
        return Gaussian(noise) if rate >= 1 else PoissonSampled(rate, Gaussian(noise))

    def slack(inverse: float, interval: float) -> float:
        of = event(1 / inverse)
        return _slack(target, of, count, delta, relation, accountant, interval)

    spread = math.sqrt(count * math.expm1(1 / max(noise * noise, 1 / 600)))
    guess = spread / _mu_for(target, delta)
    found = _threshold(slack, guess, 1 / _RATES[1], 1 / _RATES[0], target)
    if found is None:
        raise BadInput(
            f"noise {noise:g} over {count} rounds exceeds epsilon {target:g} at every rate: "
            "raise the noise or ask for fewer rounds"
        )
    return 1 / found


def rounds_within(
    event: Event,
    target: float,
    delta: float,
    relation: Relation,
    accountant: Accountant = Accountant.PLD,
) -> int:
    """The largest number of releases within `target`, from 0 to a million.

    Guarantee: epsilon(event, result) <= target on the fine grid.
    """
    if target == math.inf:
        return MOST_ROUNDS
    _check_target(target)

    def within(rounds: int, interval: float) -> bool:
        return _at(event, rounds, delta, relation, accountant, interval) <= target

    rounds = _last(lambda n: within(n, _coarse(target)), 0)
    return _last(lambda n: within(n, FINE), rounds if within(rounds, FINE) else 0)


def _slack(
    target: float,
    event: Event,
    count: int,
    delta: float,
    relation: Relation,
    accountant: Accountant,
    interval: float,
) -> float:
    """log(target / epsilon), finite also where epsilon is infinite."""
    spent = _at(event, count, delta, relation, accountant, interval)
    return max(math.log(target) - math.log(spent), -1e3)


def _at(
    event: Event,
    count: int,
    delta: float,
    relation: Relation,
    accountant: Accountant,
    interval: float,
) -> float:
    """`epsilon`, kept away from 0 so that its logarithm exists."""
    return max(epsilon(event, count, delta, relation, accountant, interval=interval), 1e-12)


def _threshold(
    slack: Callable[[float, float], float],
    guess: float,
    low: float,
    high: float,
    target: float,
) -> float | None:
    """The smallest x in [low, high] with slack(x) >= 0, for a slack that rises with x.

    Brackets the root around `guess`, solves on the coarse grid, confirms on the fine one.
    """
    coarse = _coarse(target)
    a = b = min(max(guess, low), high)
    factor = 1.1
    if slack(a, coarse) >= 0:
        while slack(a, coarse) >= 0:
            if a <= low:
                return low
            a, b, factor = max(a / factor, low), a, factor * factor
    else:
        while slack(b, coarse) < 0:
            if b >= high:
                return None
            a, b, factor = b, min(b * factor, high), factor * factor
    hair = 1e-9  # where the guess is exact, exp(log(guess)) may lie on the other side of the root
    ends = math.log(a) - hair, math.log(b) + hair
    log_x = root(lambda log_x: slack(math.exp(log_x), coarse), *ends, xtol=1e-4)
    x = _eight_digits(math.exp(log_x) * (1 + _TOLERANCE))
    while slack(x, FINE) < 0:
        x = _eight_digits(x * (1 + _TOLERANCE))
    return min(x, high)


def _eight_digits(x: float) -> float:
    """`x`, rounded up: processors differ in the last digits, and seeded draws depend on the noise.

    >>> _eight_digits(2.06412031234), _eight_digits(0.0012345), _eight_digits(7.0)
    (2.0641204, 0.0012345, 7.0)
    """
    step = 10.0 ** (math.floor(math.log10(x)) - 7)
    return max(x, float(f"{math.ceil(x / step) * step:.8g}"))


def _last(within: Callable[[int], bool], known: int) -> int:
    """The largest n >= known with within(n), for a predicate that turns false once."""
    low, step = known, 1
    while low + step <= MOST_ROUNDS and within(low + step):
        low, step = low + step, step * 2
    high = min(low + step, MOST_ROUNDS + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def _guess_noise(event: Event, count: int, target: float, delta: float) -> float:
    """The noise at which the composed loss, were it Gaussian, would meet the target."""
    match event:
        case WithMetrics(inner, _, _):
            return _guess_noise(inner, count, target, delta)
        case Laplace():
            return count / target
        case PoissonSampled(rate, _):
            fraction = rate
        case FixedSampled(size, population, _):
            fraction = size / population
        case GaussianWithCurator(_, curator, most):
            left = _mu_for(target, delta) ** 2 - min(count, most) / curator.multiplier**2
            return math.sqrt(count / left) if left > 0 else MOST_NOISE
        case _:
            return math.sqrt(count) / _mu_for(target, delta)
    ratio = _mu_for(target, delta) / (fraction * math.sqrt(count))
    return 1 / math.sqrt(math.log1p(ratio * ratio))


def _mu_for(target: float, delta: float) -> float:
    """The mu of the Gaussian mechanism whose epsilon at `delta` is `target`."""
    low, high = 1e-9, 1e4
    if gaussian_epsilon(low, delta) >= target:
        return low
    if gaussian_epsilon(high, delta) <= target:
        return high
    return root(lambda mu: gaussian_epsilon(mu, delta) - target, low, high, xtol=1e-12)


def _coarse(target: float) -> float:
    return min(10 * FINE, max(FINE, target * 1e-3))


def _check_target(target: float) -> None:
    if not (target > 0 and math.isfinite(target)):
        raise BadInput(f"epsilon is {target:g}: a positive, finite number is needed")
