"""How far private local SGD can be from the optimum, and which E and T make that least.

The bound of Fu et al. (arXiv 2101.04163), Theorem 3, derived in docs/proofs/iterations.md with
the errata of its statement removed: with Y_k = E|theta_k - theta*|^2 and T local iterations,

    Y_k+1 <= (1 - eta_k mu) Y_k + eta_k^2 B                          between two rounds' ends,
    Y_k+1 <= (1 - eta_k mu) Y_k + eta_k^2 (B + C) + p v / b          at the end of a round,

B = 6 lambda Gamma + 8 (E - 1)^2 G^2, C = 4 (N - b) / (b (N - 1)) E^2 G^2, and v the variance of one
coordinate of a client's noise, which grows with the number of times a client takes part.

Without data, E and T follow from the noise alone and how much signal it leaves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import Fixed
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.releases.central import central
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.sampling import Poisson, RoundRobin
from fedveil.tuning.recipe_grid import Space

Array = npt.NDArray[np.float64]

Rate = Callable[[Array], Array]
"""The learning rates of local iterations k, counted from 0 over all rounds."""

_MOST_ROUNDS = 1000


@dataclass(frozen=True)
class Constants:
    """Constants of the clients' losses. `exact` is False for estimates.

    Every loss is `smoothness`-smooth and `convexity`-strongly convex (lambda and mu), gradients are
    at most `gradient` long (G), `heterogeneity` is the optimum's loss minus the mean of the
    clients' own least losses (Gamma), and `distance` the squared distance from start to optimum.
    """

    smoothness: float
    convexity: float
    heterogeneity: float
    gradient: float
    distance: float
    exact: bool

    def __post_init__(self) -> None:
        for name in ("smoothness", "convexity"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise BadInput(
                    f"{name} is {value:g}: the theory needs strongly convex, smooth losses; "
                    "simulate instead (--simulate)"
                )
        for name in ("heterogeneity", "gradient", "distance"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise BadInput(f"{name} is {value:g}: a number >= 0 is needed")
        if self.convexity > self.smoothness * (1 + 1e-9):
            raise BadInput(
                f"convexity is {self.convexity:g}, above smoothness, {self.smoothness:g}: no loss "
                "is like that"
            )

    @property
    def least_gamma(self) -> float:
        """8 lambda / mu: the smallest gamma for which 2 / (mu (k + gamma)) is slow enough."""
        return 8 * self.smoothness / self.convexity


@dataclass(frozen=True)
class Sizes:
    """N clients, b of them per round, p parameters."""

    clients: int
    cohort: int
    parameters: int

    def __post_init__(self) -> None:
        if self.clients < 1 or self.parameters < 1:
            raise BadInput(
                f"{self.clients} clients and {self.parameters} parameters: at least one of each"
            )
        if not 1 <= self.cohort <= self.clients:
            raise BadInput(
                f"{self.cohort} clients per round of {self.clients}: a number from 1 to "
                f"{self.clients} is needed"
            )

    def most_turns(self, rounds: int) -> int:
        """How often a client takes part at most, in turn: ceil(b rounds / N)."""
        return -(-self.cohort * rounds // self.clients)


class Noise(Protocol):
    """What a client adds to its report, as the bound sees it."""

    @property
    def exponent(self) -> float:
        """z: the variance grows like (number of participations)^z."""
        ...

    def variance(self, reach: Array, turns: int) -> Array:
        """Of one coordinate, in rounds whose rates add up to `reach`, when clients report `turns`
        times in all. It goes with the square of `reach`."""
        ...


@dataclass(frozen=True)
class NoNoise:
    """Nothing is added."""

    exponent: float = 0.0

    def variance(self, reach: Array, turns: int) -> Array:
        return np.zeros_like(reach)


@dataclass(frozen=True)
class LaplaceNoise:
    """Fu's Corollary 1.1, strict, z = 2: scale turns x 2 zeta reach / epsilon, variance 2 scale^2.

    `clip_norm` is zeta, in L1, on every local gradient; two inputs differ by twice that.
    """

    epsilon: float
    clip_norm: float
    exponent: float = 2.0

    def variance(self, reach: Array, turns: int) -> Array:
        return 2 * (turns * 2 * self.clip_norm * reach / self.epsilon) ** 2


@dataclass(frozen=True)
class GaussianNoise:
    """Fu's Corollary 2.1, strict, z = 1: std sqrt(turns) x multiplier x 2 zeta reach.

    `multiplier` is the least for one report: n reports with sqrt(n) times it cost the same, since
    Gaussian mechanisms compose in the squares of their multipliers.
    """

    multiplier: float
    clip_norm: float
    exponent: float = 1.0

    def variance(self, reach: Array, turns: int) -> Array:
        return turns * (self.multiplier * 2 * self.clip_norm * reach) ** 2


def error_bound(
    constants: Constants,
    sizes: Sizes,
    noise: Noise,
    rate: Rate,
    *,
    steps: int,
    rounds: int,
) -> float:
    """An upper bound on E|theta - theta*|^2 after `rounds` rounds of `steps` local steps.

    Guarantee: docs/proofs/iterations.md, for a non-increasing rate with eta_k <= 1 / (4 lambda)
    that no more than halves within a round, full batches, cohorts chosen at random in every
    round, unbiased noise, gradients at most G long in root mean square, and none that a bound
    shortens; for cohorts in turn it is a heuristic. Infinity where the rate is too fast for the
    theory: it then says nothing.
    """
    _check_counts(steps, rounds)
    rates = rate(np.arange(steps * rounds, dtype=np.float64))
    if not rate_is_slow(constants, rates, steps):
        return math.inf
    local = _local_error(constants, steps)
    cohort = _cohort_error(constants, sizes, steps)
    turns, share = sizes.most_turns(rounds), sizes.parameters / sizes.cohort
    added = rates**2 * local
    variances = noise.variance(rates.reshape(rounds, steps).sum(axis=1), turns)
    ends = np.arange(steps - 1, steps * rounds, steps)
    added[ends] += rates[ends] ** 2 * cohort + share * variances
    kept = 1 - rates * constants.convexity
    after = np.append(np.cumprod(kept[::-1])[::-1], 1.0)
    return float(after[0] * constants.distance + (added * after[1:]).sum())


def rate_is_slow(constants: Constants, rates: Array, steps: int) -> bool:
    """Whether the bound speaks about these rates at all."""
    below = rates.max() <= (1 + 1e-12) / (4 * constants.smoothness)
    gentle = (rates[::steps] <= 2 * (1 + 1e-12) * rates[steps - 1 :: steps]).all()
    return bool(below and gentle and (np.diff(rates) <= 0).all())


def decayed_bound(
    constants: Constants,
    sizes: Sizes,
    noise: Noise,
    *,
    steps: int,
    rounds: int,
    gamma: float | None = None,
) -> float:
    """The same in closed form, for Theorem 3's rate 2 / (mu (k + gamma)).

    Y_T <= [(gamma - 1)(gamma - 2) Y_0 + 4 / mu^2 (T B + T_g (C + D))] / ((T + gamma - 1)(T + gamma
    - 2)), D the variance of a round's mean noise over the square of the round's last rate, at its
    largest. gamma, left out, is max(8 lambda / mu, E); infinity for a smaller one.
    """
    _check_counts(steps, rounds)
    least = max(constants.least_gamma, steps)
    gamma = least if gamma is None else gamma
    if not gamma >= least * (1 - 1e-12):
        return math.inf
    mu, total = constants.convexity, steps * rounds
    turns, share = sizes.most_turns(rounds), sizes.parameters / sizes.cohort
    first = 2 / (mu * (np.arange(steps) + gamma))
    worst = share * float(noise.variance(first.sum(keepdims=True), turns)[0]) / first[-1] ** 2
    each = total * _local_error(constants, steps)
    each += rounds * (_cohort_error(constants, sizes, steps) + worst)
    top = (gamma - 1) * (gamma - 2) * constants.distance + 4 / mu**2 * each
    return float(top / ((total + gamma - 1) * (total + gamma - 2)))


def _check_counts(steps: int, rounds: int) -> None:
    if steps < 1 or rounds < 1:
        raise BadInput(f"{steps} local steps in {rounds} rounds: at least one of each is needed")


def _local_error(constants: Constants, steps: int) -> float:
    """B."""
    drift = 8 * ((steps - 1) * constants.gradient) ** 2
    return 6 * constants.smoothness * constants.heterogeneity + drift


def _cohort_error(constants: Constants, sizes: Sizes, steps: int) -> float:
    """C, which is 0 when everybody takes part."""
    n, b = sizes.clients, sizes.cohort
    if b == n:
        return 0.0
    return 4 * (n - b) / (b * (n - 1)) * (steps * constants.gradient) ** 2


@dataclass(frozen=True)
class Convergence:
    """How the error behaves as T grows.

    Attributes:
        exponent: z of the mechanism.
        fixed_power: With a fixed E the error goes like T to this power.
        best_power: With the best E it goes like T to this power.
    """

    exponent: float
    fixed_power: float
    best_power: float

    def __str__(self) -> str:
        if self.exponent < 1:
            return f"converges: the error falls like T^{self.fixed_power:.3g}, fastest with E = 1"
        if self.exponent == 1:
            return "ends at a constant error: noise costs the same for every T and E"
        return (
            f"diverges: with a fixed E the error grows like T^{self.fixed_power:.3g}, with E about "
            f"T^{self.exponent / (self.exponent + 1):.3g} like T^{self.best_power:.3g}: stop early"
        )


def convergence(exponent: float) -> Convergence:
    """Theorems 4 and 5 as they must be read (with E = 1 for z < 1: no larger E does better).

    >>> convergence(2.0).best_power, convergence(0.5).best_power, convergence(1.0).best_power
    (0.3333333333333333, -0.5, 0.0)
    """
    if not (exponent >= 0 and math.isfinite(exponent)):
        raise BadInput(f"z is {exponent}: a number >= 0 is needed")
    fixed = max(exponent - 1, -1.0)
    best = fixed if exponent <= 1 else (exponent - 1) / (exponent + 1)
    return Convergence(exponent, fixed, best)


def rule_of_thumb(exponent: float, iterations: int) -> float | None:
    """The best E of the theory without constants, or None at z = 1, where constants decide.

    >>> rule_of_thumb(0.5, 1000), rule_of_thumb(1.0, 1000), round(rule_of_thumb(2.0, 1000))
    (1.0, None, 100)
    """
    if exponent == 1:
        return None
    return 1.0 if exponent < 1 else iterations ** (exponent / (exponent + 1))


Bound = Callable[[int, int], float]
"""(local steps, rounds) -> the error."""


def best_steps(bound: Bound, iterations: int) -> int:
    """The E from 1 to T that minimises bound(E, max(1, round(T / E)))."""
    if iterations < 1:
        raise BadInput(f"iterations is {iterations}: at least one is needed")
    errors = [bound(e, max(1, round(iterations / e))) for e in range(1, iterations + 1)]
    return 1 + int(np.argmin(errors))


def best_rounds(bound: Bound, steps: int, most: int = _MOST_ROUNDS) -> int:
    """T* / E of Corollary 5.1 as the true minimiser: after that many rounds more of them hurt.

    `most` where the bound falls all the way there.
    """
    return 1 + int(np.argmin([bound(steps, rounds) for rounds in range(1, most + 1)]))


def constant(rate: float) -> Rate:
    """The same learning rate in every iteration."""
    return lambda iterations: np.full(len(iterations), rate)


@dataclass(frozen=True)
class FormulaSettings:
    """What the formulas need.

    Attributes:
        federation_sizes: Clients, cohort and parameters.
        epsilon: Of the wanted claim.
        delta: Of the wanted claim.
        laplace: Whether noise is Laplace. Otherwise it is Gaussian.
        trusted_server: Whether the server adds the noise. Otherwise clients do.
    """

    federation_sizes: Sizes
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

    def privacy_plan(self, rounds: int) -> PrivacyPlan:
        """The privacy plan of that many rounds, for updates of length at most 1."""
        n, b = self.federation_sizes.clients, self.federation_sizes.cohort
        budget = Budget(self.epsilon, self.delta)
        if self.trusted_server:
            return central(Poisson(b / n), n, Fixed(1.0), rounds=rounds, budget=budget)
        rule = Fixed(1.0, Norm.L1 if self.laplace else Norm.L2)
        return client_noise(
            RoundRobin(b), n, rule, laplace=self.laplace, rounds=rounds, budgets=(budget,)
        )

    def option(self, steps: int, rounds: int) -> "FormulaOption":
        """The noise, the signal and the claim of so many rounds."""
        plan = self.privacy_plan(rounds)
        multiplier = plan.release.settings(plan.schedule)["multiplier"]
        spread = math.sqrt(2) if self.laplace else 1.0
        if self.trusted_server:
            noise = multiplier / self.federation_sizes.cohort
        else:
            noise = 2 * spread * multiplier / math.sqrt(self.federation_sizes.cohort)
        return FormulaOption(
            steps=steps,
            rounds=rounds,
            reports_per_client=self.federation_sizes.most_turns(rounds),
            noise_std=noise,
            signal=1 / (noise * math.sqrt(self.federation_sizes.parameters)) * math.sqrt(rounds),
            claim=plan.claims(rounds)[0],
        )


@dataclass(frozen=True)
class FormulaOption:
    """E local steps in each of several rounds, and what the noise leaves of an update.

    Attributes:
        steps: Local steps per round, E.
        rounds: Rounds.
        reports_per_client: How often a client takes part at most.
        noise_std: Standard deviation of one coordinate of a round's mean, as a share of the clip on
            an update.
        signal: The length of the sum of all rounds' mean updates, where each reaches the clip, over
            the length of their noise, which adds up in squares.
        claim: The claim of the whole run.
    """

    steps: int
    rounds: int
    reports_per_client: int
    noise_std: float
    signal: float
    claim: PrivacyClaim

    @property
    def iterations(self) -> int:
        return self.steps * self.rounds


def formula_options(settings: FormulaSettings, space: Space) -> list[FormulaOption]:
    """Every E with every T that it fits, strongest signal first, then more local work."""
    by_rounds = {rounds: settings.option(1, rounds) for _, rounds in space.pairs}
    options = [replace(by_rounds[rounds], steps=steps) for steps, rounds in space.pairs]
    return sorted(options, key=lambda o: (-float(f"{o.signal:.6g}"), -o.steps, -o.rounds))


def thumb(settings: FormulaSettings, iterations: int) -> str:
    """The rule of thumb for E, in words."""
    steps = rule_of_thumb(settings.exponent, iterations)
    if steps is None:
        return "constants decide about E: estimate them (give a recipe) or simulate (--simulate)"
    return f"E about {max(1, round(steps))} for T = {iterations}"
