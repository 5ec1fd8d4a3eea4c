"""`fedveil account`: solve for one of noise, rate, rounds and epsilon, given the others."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from fedveil.base.checks import check_option
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.budget_line import BudgetLine
from fedveil.privacy.accounting.calibration import noise_for, rate_for, rounds_within
from fedveil.privacy.accounting.claims import NoiseSource, PrivacyClaim, Trust, Unit
from fedveil.privacy.accounting.events import Event, Gaussian, PoissonSampled
from fedveil.privacy.sampling import Poisson


@dataclass(frozen=True)
class SolvedSettings:
    """The four settings of central DP with Poisson sampling, and the claims they give."""

    noise: float
    rate: float
    rounds: int
    claims: tuple[PrivacyClaim, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "noise": self.noise,
            "rate": self.rate,
            "rounds": self.rounds,
            "claims": [claim.to_dict() for claim in self.claims],
        }


def solve(
    *,
    noise: float | None,
    rate: float | None,
    rounds: int | None,
    epsilon: float | None,
    delta: float,
) -> SolvedSettings:
    """Fill in the one of the four that is None, so that the PLD epsilon is at most `epsilon`.

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
    if noise is None and rate and rounds and epsilon:
        share = rate
        noise = noise_for(lambda m: _event(share, m), rounds, epsilon, delta, Poisson.relation)
    elif rate is None and noise and rounds and epsilon:
        rate = rate_for(noise, rounds, epsilon, delta, Poisson.relation)
    elif rounds is None and noise and rate and epsilon:
        rounds = rounds_within(_event(rate, noise), epsilon, delta, Poisson.relation)
        if rounds == 0:
            raise BadInput(
                f"one round alone exceeds epsilon {epsilon:g}: raise the noise or the epsilon"
            )
    if noise is None or rate is None or rounds is None:
        raise AssertionError("one of the four was solved for")
    line = central_line(rate, noise, Budget(math.inf, delta))
    return SolvedSettings(noise, rate, rounds, line.claims(rounds))


def central_line(rate: float, noise: float, budget: Budget) -> BudgetLine:
    """The budget line of one round of central DP with Poisson sampling."""
    return BudgetLine(
        event=_event(rate, noise),
        share=Fraction(1),
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


def _event(rate: float, noise: float) -> Event:
    return Gaussian(noise) if rate == 1 else PoissonSampled(rate, Gaussian(noise))
