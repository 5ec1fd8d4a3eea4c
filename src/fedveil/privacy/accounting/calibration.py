"""Which noise, which rate, how many rounds: the inverse questions to `composition.epsilon`.

Every search starts from the central limit of the composed loss, so that it never visits the
tiny noises whose PLD takes minutes, and runs on a coarse grid. A coarse grid overstates epsilon,
so its answer is safe; the answer is confirmed on the fine grid all the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedveil.base.checks import check_option
from fedveil.base.errors import BadArgument, BadInput, UnsupportedEvent
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.closed_forms import gaussian_epsilon, root
from fedveil.privacy.accounting.composition import (
    FINE,
    accountants_of,
    coarse_interval,
    epsilon,
    rounds_within,
)
from fedveil.privacy.accounting.events import (
    KINDS,
    Event,
    FixedSampled,
    Gaussian,
    GaussianWithCurator,
    GroupSampled,
    Laplace,
    PoissonSampled,
    WithMetrics,
)
from fedveil.privacy.sampling import Poisson

LEAST_NOISE, MOST_NOISE = 0.02, 1e5
_TOLERANCE = 2e-4
_LEAST_RATE = 1e-8


def least_noise(
    make_event: Callable[[float], Event],
    count: int,
    budget: Budget,
    relation: Relation,
    accountant: Accountant | None = None,
) -> float:
    """The smallest noise multiplier, to about 0.1 %, that keeps `count` events within the budget.

    `make_event(m)` is the event with noise multiplier m. Without `accountant`, the first that knows
    the event is used. For the accountant PURE the result is count / epsilon, in no range.

    Guarantee: epsilon(make_event(result), count) <= budget.epsilon on the fine grid.

    | edge | behaviour |
    |---|---|
    | an infinite budget | BadInput |
    | no accountant knows the event | BadInput |
    | `accountant` does not know the event | UnsupportedEvent |
    | a multiplier of 0.02 already suffices, by another accountant than PURE | 0.02 |
    | no multiplier up to 100,000 suffices, by another accountant than PURE | BadInput |
    """
    if math.isinf(budget.epsilon):
        raise BadArgument(
            "give {multiplier} or budget.epsilon: one follows from the other", "multiplier"
        )
    event = make_event(1.0)
    known = accountants_of(event, relation)
    accountant = accountant or known[0]
    if accountant not in known:
        raise UnsupportedEvent(
            f"{accountant.upper()} has no entry for {KINDS[type(event)]} under {relation}: "
            "use another accountant"
        )
    if accountant is Accountant.PURE:
        return with_margin(count / budget.epsilon)
    guess = _guess_noise(event, count, budget)
    noise = _smallest_within_budget(
        make_event, guess, LEAST_NOISE, MOST_NOISE, count, budget, relation, accountant
    )
    if noise is None:
        raise BadInput(
            f"epsilon {budget.epsilon:g} at delta {budget.delta:g} over {count} rounds needs a "
            f"noise multiplier above {MOST_NOISE:g}: ask for fewer rounds or a larger epsilon"
        )
    return noise


def with_margin(noise: float) -> float:
    """`noise` times 1 + 1e-12, so that its epsilon is not one rounding above the budget."""
    return noise * (1 + 1e-12)


def rate_for(
    noise: float,
    count: int,
    budget: Budget,
    relation: Relation,
    accountant: Accountant = Accountant.PLD,
) -> float:
    """The largest Poisson rate, to about 0.1 %, that keeps `count` rounds within the budget.

    The rate is at most 1, `noise` is the noise multiplier. Raises BadInput if even a rate of 1e-8
    exceeds the budget.

    Guarantee: epsilon(PoissonSampled(result, Gaussian(noise)), count) <= budget.epsilon on the fine
    grid; where the result is 1, of Gaussian(noise), which is the same release.
    """
    spread = math.sqrt(count * math.expm1(1 / max(noise * noise, 1 / 600)))
    inverse = _smallest_within_budget(
        lambda inverse: sampled_gaussian(min(1.0, 1 / inverse), noise),
        spread / _mu_of_budget(budget),
        1.0,
        1 / _LEAST_RATE,
        count,
        budget,
        relation,
        accountant,
    )
    if inverse is None:
        raise BadInput(
            f"noise {noise:g} over {count} rounds exceeds epsilon {budget.epsilon:g} at every "
            "rate: raise the noise or ask for fewer rounds"
        )
    return 1 / inverse


def sampled_gaussian(rate: float, noise: float) -> Event:
    """The event of central noise on a Poisson cohort: `PoissonSampled`, plain `Gaussian` at rate 1.

    Raises BadInput for a rate outside (0, 1] or a negative `noise` multiplier.
    """
    return Gaussian(noise) if rate == 1 else PoissonSampled(rate, Gaussian(noise))


def _smallest_within_budget(
    make_event: Callable[[float], Event],
    guess: float,
    low: float,
    high: float,
    count: int,
    budget: Budget,
    relation: Relation,
    accountant: Accountant,
) -> float | None:
    """The smallest x in [low, high] with which `count` events fit the budget. None if none does.

    Brackets the root around `guess`, solves on the coarse grid, confirms on the fine one. The
    result is rounded up to eight digits, and `low` itself if that fits.

    Args:
        make_event: The event for x. Its epsilon falls with x.
        guess: Where to begin.
        low, high: The range of x.
        count: The number of events.
        budget: Epsilon and delta of all of them.
        relation: The neighbouring relation.
        accountant: The accountant that counts.
    """
    coarse = coarse_interval(budget.epsilon)

    def slack(x: float, interval: float) -> float:
        """log(budget / epsilon), finite also where epsilon is infinite or 0."""
        event = make_event(x)
        spent = epsilon(event, count, budget.delta, relation, accountant, interval=interval)
        return max(math.log(budget.epsilon) - math.log(max(spent, 1e-12)), -1e3)

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
    """`x` rounded up to eight digits, since processors differ in the last ones.

    Seeded draws depend on the noise, which must be the same everywhere.

    >>> _eight_digits(2.06412031234), _eight_digits(0.0012345), _eight_digits(7.0)
    (2.0641204, 0.0012345, 7.0)
    """
    step = 10.0 ** (math.floor(math.log10(x)) - 7)
    return max(x, float(f"{math.ceil(x / step) * step:.8g}"))


def _guess_noise(event: Event, count: int, budget: Budget) -> float:
    """The noise multiplier with which the search for the right one begins.

    With it the loss of `count` events, were it Gaussian, would meet the budget. Of Laplace noise it
    is count / epsilon. The clients' multiplier in `event` is not used. The result is 1e5 if the
    curator's own releases leave nothing of the budget.
    """
    match event:
        case WithMetrics(inner, _, _):
            return _guess_noise(inner, count, budget)
        case Laplace():
            return count / budget.epsilon
        case PoissonSampled(rate, _):
            fraction = rate
        case GroupSampled(rate, size, _):
            fraction = rate * size
        case FixedSampled(size, population, _):
            fraction = size / population
        case GaussianWithCurator(_, curator, most):
            left = _mu_of_budget(budget) ** 2 - min(count, most) / curator.multiplier**2
            return math.sqrt(count / left) if left > 0 else MOST_NOISE
        case _:
            return math.sqrt(count) / _mu_of_budget(budget)
    ratio = _mu_of_budget(budget) / (fraction * math.sqrt(count))
    return 1 / math.sqrt(math.log1p(ratio * ratio))


def _mu_of_budget(budget: Budget) -> float:
    """The mu of the Gaussian mechanism that spends exactly the budget, from 1e-9 to 1e4."""
    low, high = 1e-9, 1e4
    if gaussian_epsilon(low, budget.delta) >= budget.epsilon:
        return low
    if gaussian_epsilon(high, budget.delta) <= budget.epsilon:
        return high
    return root(
        lambda mu: gaussian_epsilon(mu, budget.delta) - budget.epsilon, low, high, xtol=1e-12
    )


# --- `fedveil account` ---


@dataclass(frozen=True)
class SolvedSettings:
    """The settings of central DP with Poisson sampling, and the claims they give.

    Attributes:
        noise: The noise multiplier.
        rate: The probability with which a client joins a round.
        rounds: The number of rounds.
        claims: One claim for each accountant. The first one counts.
    """

    noise: float
    rate: float
    rounds: int
    claims: tuple[PrivacyClaim, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values with the keys "noise", "rate", "rounds" and "claims".

        "claims" has `PrivacyClaim.to_dict` of each claim.
        """
        return {**vars(self), "claims": [claim.to_dict() for claim in self.claims]}


def solve(
    *,
    noise: float | None,
    rate: float | None,
    rounds: int | None,
    epsilon: float | None,
    delta: float,
) -> SolvedSettings:
    """Fill in the one of the four that is None, so that the PLD epsilon is at most `epsilon`.

    With `epsilon` None, the claims have it. Raises BadInput unless exactly one is None, for numbers
    outside their limits, and if no noise, rate or round fits.

    >>> solve(noise=1.0, rate=1.0, rounds=1, epsilon=None, delta=1e-5).claims[0].accountant
    <Accountant.PLD: 'pld'>
    """
    given = {"noise": noise, "rate": rate, "rounds": rounds, "epsilon": epsilon}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1:
        raise BadInput(
            "leave out exactly one of --noise, --rate, --rounds, --epsilon to solve for it; "
            f"missing now: {', '.join(missing) or 'none'}"
        )
    for name, value in {**given, "delta": delta}.items():
        if value is not None:
            check_option(name, value)
    relation = Poisson.relation
    if noise is None and rate and rounds and epsilon:
        share, budget = rate, Budget(epsilon, delta)
        noise = least_noise(lambda m: sampled_gaussian(share, m), rounds, budget, relation)
    elif rate is None and noise and rounds and epsilon:
        rate = rate_for(noise, rounds, Budget(epsilon, delta), relation)
    elif rounds is None and noise and rate and epsilon:
        rounds = rounds_within(sampled_gaussian(rate, noise), epsilon, delta, relation)
        if rounds == 0:
            raise BadInput(
                f"one round alone exceeds epsilon {epsilon:g}: raise the noise or the epsilon"
            )
    if noise is None or rate is None or rounds is None:
        raise AssertionError("one of the four was solved for")
    line = central_line(rate, noise, Budget(math.inf, delta))
    return SolvedSettings(noise, rate, rounds, line.claims(rounds))


def central_line(rate: float, noise: float, budget: Budget) -> BudgetLine:
    """The budget line of central DP with Poisson sampling and secure noise.

    It is per client, under zero-out. `rate` is the probability with which a client joins a round,
    `noise` the noise multiplier.
    """
    return BudgetLine(
        event=sampled_gaussian(rate, noise),
        budget=budget,
        unit=Unit.CLIENT,
        relation=Poisson.relation,
        trust=Trust.CENTRAL,
        noise=NoiseSource.SECURE,
        assumptions=(
            "Gaussian noise of std noise x clip on the sum of clipped updates",
            "clients join each round independently with probability rate, in secret",
            "the number of clients is public; the sum is divided by nothing that depends on data",
            "the noise is drawn from a secure source",
        ),
    )
