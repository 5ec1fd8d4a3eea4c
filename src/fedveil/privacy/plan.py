"""`PrivacyPlan`: sampler, bound, mechanism and budget as one object, checked as a whole."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fedveil.errors import BadInput
from fedveil.privacy.accounting import supports
from fedveil.privacy.calibration import MOST_ROUNDS, noise_for
from fedveil.privacy.claims import Accountant, NoiseSource, PrivacyClaim, Trust, Unit
from fedveil.privacy.clipping import FixedBound
from fedveil.privacy.events import Event, Gaussian
from fedveil.privacy.mechanisms import GaussianMechanism
from fedveil.privacy.randomness import Streams
from fedveil.privacy.sampling import Sampler
from fedveil.privacy.terms import Budget, Terms


@dataclass(frozen=True)
class PrivacyPlan:
    """How one run protects its clients; `mechanism` None means that it does not.

    Build one with `unprotected` or `central`. Guarantee: when a round is `sampler.cohort`, each
    client's row bounded by `bound`, and the sum released through `release`, then n rounds
    satisfy every claim in `claims(n)`, and `permitted` rounds, of the `rounds` that are
    planned, stay within the budget.
    """

    sampler: Sampler
    population: int
    rounds: int
    bound: FixedBound | None = None
    mechanism: GaussianMechanism | None = None
    budget: Budget | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise BadInput(f"rounds is {self.rounds}: at least one is needed")
        if self.rounds > MOST_ROUNDS:
            raise BadInput(f"rounds is {self.rounds}: at most {MOST_ROUNDS:,} are possible")
        self.sampler.check(self.population)
        if (self.mechanism is None) != (self.budget is None):
            raise BadInput("noise and budget go together: give both or neither")
        if self.mechanism is not None and self.bound is None:
            raise BadInput("noise without a bound protects nobody: add a bound")
        if self.budget is not None and self.budget.delta >= 1 / self.population:
            raise BadInput(
                f"budget.delta is {self.budget.delta:g}, not below 1 / {self.population} clients: "
                "a delta that large would allow publishing somebody outright; use less than "
                f"{1 / self.population:g}"
            )

    @property
    def private(self) -> bool:
        """Whether anything is claimed."""
        return self.mechanism is not None

    @property
    def divisor(self) -> float:
        """The public number a round's sum is divided by: never the realised cohort."""
        return self.sampler.expected(self.population)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on each coordinate of the sum; 0 without noise."""
        if self.mechanism is None or self.bound is None:
            return 0.0
        return self.mechanism.std(self.bound, self.sampler.relation)

    @cached_property
    def terms(self) -> Terms | None:
        """What is charged per round and what it is worth; None without noise."""
        if self.mechanism is None or self.budget is None:
            return None
        return Terms(
            event=self.sampler.event(self.mechanism.release, self.population),
            share=self.sampler.share(self.population),
            budget=self.budget,
            unit=Unit.CLIENT,
            relation=self.sampler.relation,
            trust=Trust.CENTRAL,
            noise=NoiseSource.SEEDED,
            assumptions=(
                "the server is trusted: it sees true updates and adds the noise",
                self.sampler.assumption,
                f"the number of clients, {self.population}, is public",
                "only models are published; metrics on clients' data are outside the claim",
                "seeded noise: whoever knows the seed can remove it, so this is a simulation",
            ),
        )

    @cached_property
    def permitted(self) -> int:
        """How many of the planned rounds fit the budget; found once: a round compares integers."""
        return self.rounds if self.terms is None else self.terms.permitted(self.rounds)

    def claims(self, rounds: int) -> tuple[PrivacyClaim, ...]:
        """What `rounds` rounds guarantee, by every accountant that can tell; the first counts."""
        return () if self.terms is None else self.terms.claims(rounds)

    @cached_property
    def spent(self) -> tuple[float | None, ...]:
        """An upper bound on epsilon after each round, for display; None without noise."""
        if self.terms is None:
            return (None,) * (self.rounds + 1)
        return self.terms.curve(self.rounds)

    def release(self, total: torch.Tensor, round: int, streams: Streams) -> torch.Tensor:
        """The noised sum of one round's bounded rows (float64 [P])."""
        if self.mechanism is None or self.bound is None:
            return total
        keys = streams.keys("noise", round, np.zeros(1))
        return self.mechanism.apply(total, self.bound, self.sampler.relation, keys)


def unprotected(
    sampler: Sampler, population: int, *, rounds: int, bound: FixedBound | None = None
) -> PrivacyPlan:
    """No noise, no claim; a bound, if given, only limits what a client can do."""
    return PrivacyPlan(sampler, population, rounds, bound)


def central(
    sampler: Sampler,
    population: int,
    bound: FixedBound,
    *,
    rounds: int,
    budget: Budget,
    multiplier: float | None = None,
) -> PrivacyPlan:
    """Client-level central DP: Gaussian noise at a trusted server (Naseri et al., algorithm 1).

    Guarantee: docs/proofs/central.md. Without `multiplier` the noise is the least that lets
    `rounds` rounds fit into the budget; with it, the budget says how many rounds may run.

    | edge | behaviour |
    |---|---|
    | neither multiplier nor a finite epsilon | BadInput |
    | multiplier 0 | BadInput: no finite epsilon exists |
    | multiplier whose first round exceeds the budget | BadInput |
    | delta >= 1 / clients | BadInput |

    >>> from fedveil.privacy.sampling import Everyone
    >>> plan = central(Everyone(), 100, FixedBound(1.0), rounds=1, budget=Budget(1.0, 1e-5))
    >>> round(plan.noise_std, 2)
    3.73
    """
    if multiplier == 0:
        raise BadInput("noise.multiplier is 0: no finite epsilon exists; use noise.kind = 'none'")
    given = GaussianMechanism(1.0 if multiplier is None else multiplier)
    plan = PrivacyPlan(sampler, population, rounds, bound, given, budget)
    if multiplier is None:
        mechanism = GaussianMechanism(_least_noise(sampler, population, rounds, budget))
        return PrivacyPlan(sampler, population, rounds, bound, mechanism, budget)
    if plan.permitted < 1:
        raise BadInput(
            f"noise.multiplier {multiplier:g} and budget.epsilon {budget.epsilon:g} contradict "
            f"each other: one round alone costs {plan.claims(1)[0].epsilon:.4g}; raise either"
        )
    return plan


def _least_noise(sampler: Sampler, population: int, rounds: int, budget: Budget) -> float:
    if math.isinf(budget.epsilon):
        raise BadInput("give noise.multiplier or budget.epsilon: one follows from the other")

    def event(m: float) -> Event:
        return sampler.event(Gaussian(m), population)

    accountant = next(a for a in Accountant if supports(event(1.0), sampler.relation, a))
    charges = math.ceil(rounds * sampler.share(population))
    return noise_for(event, charges, budget.epsilon, budget.delta, sampler.relation, accountant)
