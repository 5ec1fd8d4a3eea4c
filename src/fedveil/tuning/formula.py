"""E and T by formulas alone, without data: the noise, and how much signal it leaves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.clip_schedules import Fixed
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.releases.central import central
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.rows import Norm
from fedveil.privacy.sampling import Poisson, RoundRobin
from fedveil.tuning.theory import Convergence, Sizes, convergence, rule_of_thumb


@dataclass(frozen=True)
class FormulaSettings:
    """What the formulas need.

    Attributes:
        sizes: Clients, cohort and parameters.
        epsilon: Of the wanted claim.
        delta: Of the wanted claim.
        laplace: Whether noise is Laplace. Otherwise it is Gaussian.
        trusted_server: Whether the server adds the noise. Otherwise clients do.
    """

    sizes: Sizes
    epsilon: float
    delta: float
    laplace: bool
    trusted_server: bool

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise BadInput(f"--epsilon is {self.epsilon}: a positive number is needed")
        if self.laplace and self.trusted_server:
            raise BadInput("--noise laplace is added by clients: use --trust local, or gaussian")

    @property
    def exponent(self) -> float:
        """The exponent z of the mechanism: noise variance grows like T^z."""
        return 2.0 if self.laplace else 1.0

    @property
    def convergence(self) -> Convergence:
        return convergence(self.exponent)

    def plan(self, rounds: int) -> PrivacyPlan:
        """The privacy plan of that many rounds, for updates of length at most 1."""
        n, b = self.sizes.clients, self.sizes.cohort
        budget = Budget(self.epsilon, self.delta)
        if self.trusted_server:
            return central(Poisson(b / n), n, Fixed(1.0), rounds=rounds, budget=budget)
        rule = Fixed(1.0, Norm.L1 if self.laplace else Norm.L2)
        return client_noise(
            RoundRobin(b), n, rule, laplace=self.laplace, rounds=rounds, budgets=(budget,)
        )


@dataclass(frozen=True)
class Choice:
    """E local steps in each of `rounds` rounds, and what the noise leaves of an update.

    `noise` is the standard deviation of one coordinate of a round's mean, as a share of the clip
    on an update; `signal` the length of the sum of all rounds' mean updates, where each reaches the
    clip, over the length of their noise, which adds up in squares.
    """

    steps: int
    rounds: int
    turns: int
    noise: float
    signal: float
    claim: PrivacyClaim

    @property
    def iterations(self) -> int:
        return self.steps * self.rounds


def choices(
    settings: FormulaSettings, steps: Sequence[int], iterations: Sequence[int]
) -> list[Choice]:
    """Every E with every T that it fits, strongest signal first, then more local work."""
    found: dict[tuple[int, int], Choice] = {}
    by_rounds: dict[int, tuple[float, PrivacyClaim]] = {}
    for t in iterations:
        for e in steps:
            if e > t:
                continue
            rounds = max(1, round(t / e))
            if rounds not in by_rounds:
                by_rounds[rounds] = _noise(settings, rounds)
            noise, claim = by_rounds[rounds]
            each = 1 / (noise * math.sqrt(settings.sizes.parameters))
            found[e, rounds] = Choice(
                steps=e,
                rounds=rounds,
                turns=settings.sizes.turns(rounds),
                noise=noise,
                signal=each * math.sqrt(rounds),
                claim=claim,
            )
    if not found:
        raise BadInput(
            f"no E of {', '.join(map(str, steps))} fits a T of {', '.join(map(str, iterations))}: "
            "E is at most T"
        )
    return sorted(found.values(), key=lambda c: (-float(f"{c.signal:.6g}"), -c.steps, -c.rounds))


def thumb(settings: FormulaSettings, iterations: int) -> str:
    """The rule of thumb for E, in words."""
    found = rule_of_thumb(settings.exponent, iterations)
    if found is None:
        return "constants decide about E: estimate them (give a recipe) or simulate (--simulate)"
    return f"E about {max(1, round(found))} for T = {iterations}"


def _noise(settings: FormulaSettings, rounds: int) -> tuple[float, PrivacyClaim]:
    plan = settings.plan(rounds)
    sizes = settings.sizes
    spread = math.sqrt(2) if settings.laplace else 1.0
    if settings.trusted_server:
        noise = plan.release.multiplier / sizes.cohort
    else:
        noise = 2 * spread * plan.release.multiplier / math.sqrt(sizes.cohort)
    return noise, plan.claims(rounds)[0]
