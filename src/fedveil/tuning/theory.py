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

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import BUDGET, COUNT, NOT_NEGATIVE, number
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

MOST_ROUNDS = 1000
_CURVATURE = number(
    lambda v: 0 < v < math.inf,
    "the theory needs strongly convex, smooth losses; simulate instead (--simulate)",
)


@dataclass(frozen=True)
class Constants:
    """Constants of the clients' losses.

    Attributes:
        smoothness: lambda: every loss is lambda-smooth.
        convexity: mu: every loss is mu-strongly convex.
        heterogeneity: Gamma: the optimum's loss minus the mean of the clients' own least losses.
        gradient: G: the longest gradient.
        distance: The squared distance from start to optimum.
        exact: False for estimates.

    Raises:
        BadInput: lambda or mu not positive, mu above lambda, another constant negative, or one that
            is not finite.
    """

    smoothness: float
    convexity: float
    heterogeneity: float
    gradient: float
    distance: float
    exact: bool

    def __post_init__(self) -> None:
        for name in ("smoothness", "convexity"):
            _CURVATURE.check(name, getattr(self, name))
        for name in ("heterogeneity", "gradient", "distance"):
            NOT_NEGATIVE.check(name, getattr(self, name))
        if self.convexity > self.smoothness * (1 + 1e-9):
            raise BadInput(
                f"convexity is {self.convexity:g}, above smoothness, {self.smoothness:g}: no loss "
                "is like that"
            )

    @property
    def least_gamma(self) -> float:
        """Return 8 lambda / mu, the least gamma at which 2 / (mu (k + gamma)) is covered."""
        return 8 * self.smoothness / self.convexity


@dataclass(frozen=True)
class Sizes:
    """N clients, b of them per round, p parameters. BadInput unless 1 <= b <= N and p >= 1."""

    clients: int
    cohort: int
    parameters: int

    def __post_init__(self) -> None:
        COUNT.check("parameters", self.parameters)
        if not 1 <= self.cohort <= self.clients:
            raise BadInput(
                f"{self.cohort} clients per round of {self.clients}: a number from 1 to "
                f"{self.clients} is needed"
            )

    def most_turns(self, rounds: int) -> int:
        """Return ceil(b rounds / N), the most rounds of one client when clients take turns."""
        return -(-self.cohort * rounds // self.clients)


class Noise:
    """The noise that a client adds to its report, for the bound. This base class adds none.

    Attributes:
        exponent: z: the variance grows like (number of participations)^z.
    """

    exponent = 0.0

    def variance(self, reach: Array, turns: int) -> Array:
        """Return the variance of the noise on one coordinate of a report, for each round.

        Args:
            reach: The sum of the learning rates of each round's steps.
            turns: How often a client reports in the whole run.
        """
        return np.zeros_like(reach)


NO_NOISE = Noise()


@dataclass(frozen=True)
class LaplaceNoise(Noise):
    """Laplace noise by Fu's Corollary 1.1, strict: scale = turns x 2 zeta reach / epsilon, z = 2.

    Attributes:
        epsilon: The epsilon of the whole run.
        clip_norm: zeta, the L1 clip of every local gradient. Two inputs differ by twice that.
    """

    epsilon: float
    clip_norm: float
    exponent = 2.0

    def variance(self, reach: Array, turns: int) -> Array:
        """Return 2 scale^2 for each round, with the arguments of `Noise.variance`."""
        return 2 * (turns * 2 * self.clip_norm * reach / self.epsilon) ** 2


@dataclass(frozen=True)
class GaussianNoise(Noise):
    """Gaussian noise by Fu's Corollary 2.1, strict: std = sqrt(turns) x multiplier x 2 zeta reach.

    z = 1.

    Attributes:
        multiplier: The least noise multiplier for one report. n reports with sqrt(n) times it cost
            the same, since Gaussian mechanisms compose in the squares of their multipliers.
        clip_norm: zeta, the L2 clip of every local gradient.
    """

    multiplier: float
    clip_norm: float
    exponent = 1.0

    def variance(self, reach: Array, turns: int) -> Array:
        """Return std^2 for each round, with the arguments of `Noise.variance`."""
        return turns * (self.multiplier * 2 * self.clip_norm * reach) ** 2


def error_bound(
    constants: Constants, sizes: Sizes, noise: Noise, rate: Rate, *, steps: int, rounds: int
) -> float:
    """Return an upper bound on E|theta - theta*|^2 after `rounds` rounds of `steps` local steps.

    Guarantee: docs/proofs/iterations.md, for a non-increasing rate with eta_k <= 1 / (4 lambda)
    that no more than halves within a round, full batches, cohorts chosen at random in every round,
    unbiased noise, gradients at most G long in root mean square, and none that is clipped. For
    cohorts in turn it is a heuristic. It is infinite if the rate is too fast for the theory.

    Args:
        constants: Constants of the losses.
        sizes: Clients, cohort and parameters.
        noise: The clients' noise.
        rate: From local iterations 0, 1, ... to their learning rates.
        steps: Local steps per round, E, at least 1, otherwise BadInput.
        rounds: Rounds, at least 1, otherwise BadInput.
    """
    COUNT.check("steps", steps)
    COUNT.check("rounds", rounds)
    rates = rate(np.arange(steps * rounds, dtype=np.float64))
    if not is_rate_covered(constants, rates, steps):
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


def is_rate_covered(constants: Constants, rates: Array, steps: int) -> bool:
    """Return whether the bound holds for these learning rates, one per local iteration.

    They must be non-increasing, at most 1 / (4 lambda), and no more than halve within a round of
    `steps` iterations.
    """
    below = rates.max() <= (1 + 1e-12) / (4 * constants.smoothness)
    gentle = (rates[::steps] <= 2 * (1 + 1e-12) * rates[steps - 1 :: steps]).all()
    return bool(below and gentle and (np.diff(rates) <= 0).all())


def decayed_bound(
    constants: Constants, sizes: Sizes, noise: Noise, *, steps: int, rounds: int
) -> float:
    """Return the bound on E|theta - theta*|^2 in closed form, for the rate 2 / (mu (k + gamma)).

    Y_T <= [(gamma - 1)(gamma - 2) Y_0 + 4 / mu^2 (T B + T_g (C + D))] / ((T + gamma - 1)(T + gamma
    - 2)), where D is the largest variance of a round's mean noise over the square of the round's
    last rate, T_g is `rounds`, T is `steps` x `rounds`, and gamma is max(8 lambda / mu, E), the
    least that the theory covers. Raise BadInput unless steps and rounds are at least 1.
    """
    COUNT.check("steps", steps)
    COUNT.check("rounds", rounds)
    gamma = max(constants.least_gamma, steps)
    mu, total = constants.convexity, steps * rounds
    turns, share = sizes.most_turns(rounds), sizes.parameters / sizes.cohort
    first = 2 / (mu * (np.arange(steps) + gamma))
    worst = share * float(noise.variance(first.sum(keepdims=True), turns)[0]) / first[-1] ** 2
    each = total * _local_error(constants, steps)
    each += rounds * (_cohort_error(constants, sizes, steps) + worst)
    top = (gamma - 1) * (gamma - 2) * constants.distance + 4 / mu**2 * each
    return float(top / ((total + gamma - 1) * (total + gamma - 2)))


def _local_error(constants: Constants, steps: int) -> float:
    """Return B = 6 lambda Gamma + 8 (E - 1)^2 G^2."""
    drift = 8 * ((steps - 1) * constants.gradient) ** 2
    return 6 * constants.smoothness * constants.heterogeneity + drift


def _cohort_error(constants: Constants, sizes: Sizes, steps: int) -> float:
    """Return C = 4 (N - b) / (b (N - 1)) E^2 G^2, which is 0 if all clients take part."""
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
    """Return the powers of T with which the error grows or falls, for noise with exponent z.

    They are those of Theorems 4 and 5. For z < 1 both are with E = 1, since no larger E does
    better. Raise BadInput unless 0 <= z < inf.

    >>> convergence(2.0).best_power, convergence(0.5).best_power, convergence(1.0).best_power
    (0.3333333333333333, -0.5, 0.0)
    """
    NOT_NEGATIVE.check("z", exponent)
    fixed = max(exponent - 1, -1.0)
    best = fixed if exponent <= 1 else (exponent - 1) / (exponent + 1)
    return Convergence(exponent, fixed, best)


def rule_of_thumb(exponent: float, iterations: int) -> float | None:
    """Return the best E without constants, not rounded, at T = `iterations`.

    It is 1 for z = `exponent` < 1, T^(z / (z + 1)) for z > 1, and None for z = 1, where constants
    decide.

    >>> rule_of_thumb(0.5, 1000), rule_of_thumb(1.0, 1000), round(rule_of_thumb(2.0, 1000))
    (1.0, None, 100)
    """
    if exponent == 1:
        return None
    return 1.0 if exponent < 1 else iterations ** (exponent / (exponent + 1))


Bound = Callable[[int, int], float]
"""(local steps, rounds) -> the error."""


def best_steps(bound: Bound, iterations: int) -> int:
    """Return the E from 1 to T = `iterations` with the least bound(E, max(1, round(T / E))).

    The smallest of several. BadInput if `iterations` is below 1.
    """
    COUNT.check("iterations", iterations)
    errors = [bound(e, max(1, round(iterations / e))) for e in range(1, iterations + 1)]
    return 1 + int(np.argmin(errors))


def best_rounds(bound: Bound, steps: int, most: int = MOST_ROUNDS) -> int:
    """Return the number of rounds from 1 to `most` with the least bound(steps, rounds).

    The smallest of several.
    """
    return 1 + int(np.argmin([bound(steps, rounds) for rounds in range(1, most + 1)]))


def constant_rate(rate: float) -> Rate:
    """Return a function from local iterations [n] to the learning rate `rate` in each, [n]."""
    return lambda iterations: np.full(len(iterations), rate)


@dataclass(frozen=True)
class FormulaSettings:
    """The settings of a plan by formulas.

    Attributes:
        federation_sizes: Clients, cohort and parameters.
        epsilon: The epsilon to be claimed.
        delta: The delta to be claimed.
        laplace: Noise is Laplace if True, otherwise Gaussian.
        trusted_server: The server adds the noise if True, otherwise clients do.

    Raises:
        BadInput: epsilon not positive, or Laplace noise with a trusted server.
    """

    federation_sizes: Sizes
    epsilon: float
    delta: float
    laplace: bool
    trusted_server: bool

    def __post_init__(self) -> None:
        BUDGET.check("epsilon", self.epsilon)
        if self.laplace and self.trusted_server:
            raise BadInput("noise is laplace, which clients add: use trust=local or gaussian")

    @property
    def exponent(self) -> float:
        """Return z: the variance of the noise grows like T^z.

        2 for Laplace noise, 1 for Gaussian.
        """
        return 2.0 if self.laplace else 1.0

    def privacy_plan(self, rounds: int) -> PrivacyPlan:
        """Return the privacy plan of `rounds` rounds, with noise for the budget and clip norm 1.

        Raise BadInput if no noise meets the budget.
        """
        n, b = self.federation_sizes.clients, self.federation_sizes.cohort
        budget = Budget(self.epsilon, self.delta)
        if self.trusted_server:
            return central(Poisson(b / n), n, Fixed(1.0), rounds=rounds, budget=budget)
        rule = Fixed(1.0, Norm.L1 if self.laplace else Norm.L2)
        return client_noise(
            RoundRobin(b), n, rule, laplace=self.laplace, rounds=rounds, budgets=(budget,)
        )

    def option(self, steps: int, rounds: int) -> "FormulaOption":
        """Return the noise, signal and claim of `rounds` rounds of `steps` local steps."""
        plan = self.privacy_plan(rounds)
        multiplier = plan.release.settings(plan.clip_schedule)["multiplier"]
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
    """Rounds of E local steps, and how much signal the noise leaves.

    Attributes:
        steps: Local steps per round, E.
        rounds: Rounds.
        reports_per_client: The most rounds of one client.
        noise_std: Std of the noise on one coordinate of a round's mean update, over the clip norm.
        signal: Norm of the sum of all rounds' mean updates, if each reaches the clip, over the norm
            of their summed noise.
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
        """Return T, the local steps in all rounds."""
        return self.steps * self.rounds


def formula_options(settings: FormulaSettings, space: Space) -> list[FormulaOption]:
    """Return an option for every (E, rounds) of the space, by falling signal.

    Options of equal signal are sorted by falling E.
    """
    by_rounds = {rounds: settings.option(1, rounds) for _, rounds in space.pairs}
    options = [replace(by_rounds[rounds], steps=steps) for steps, rounds in space.pairs]
    return sorted(options, key=lambda o: (-float(f"{o.signal:.6g}"), -o.steps, -o.rounds))


def rule_of_thumb_text(settings: FormulaSettings, iterations: int) -> str:
    """Return the rule of thumb for E at T = `iterations`, as a clause without a full stop."""
    steps = rule_of_thumb(settings.exponent, iterations)
    if steps is None:
        return "constants decide about E: estimate them (give a recipe) or simulate (--simulate)"
    return f"E about {max(1, round(steps))} for T = {iterations}"
