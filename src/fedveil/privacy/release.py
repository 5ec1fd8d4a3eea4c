"""`Release`: how clipped updates become what is published.

To add a mechanism, subclass it: say what a client does to its report, what the server does to
reports and to their sum, and how that can differ from what a budget line claims.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from fedveil.base.checks import CLIENTS, MULTIPLIER, NOMINAL, RATE, ROUNDS, STEPS
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.claims import SEEDED, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.events import Event, Gaussian
from fedveil.privacy.channel import Channel, Round
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import ClipSchedule
from fedveil.privacy.clip_statistic import ClipStatistic
from fedveil.privacy.sampling import FixedSize, Sampler

SERVER = np.zeros(1, dtype=np.int64)
"""The client id in the keys of the server's own noise."""


class PlanParts(Protocol):
    """The parts of a plan that a release is compared with."""

    @property
    def sampler(self) -> Sampler: ...
    @property
    def population(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def schedule(self) -> ClipSchedule | None: ...
    @property
    def lines(self) -> tuple[BudgetLine, ...]: ...
    @property
    def statistic(self) -> ClipStatistic | None: ...
    @property
    def norm(self) -> Norm | None: ...
    @property
    def parameters(self) -> int | None: ...
    @property
    def secure(self) -> bool: ...


@dataclass(frozen=True)
class NoisySteps:
    """`steps` steps a round, on records that join with `rate`, with noise of `multiplier` clips.

    A sum is divided by rate x n, where n is the client's public number of records, or `nominal`
    for everyone. A plan makes this, its account counts it, and the work is made from it: nobody
    types these numbers twice.

    | edge | behaviour |
    |---|---|
    | rate outside (0, 1], steps < 1, nominal < 1, multiplier < 0 | BadInput |
    """

    rate: float
    steps: int
    multiplier: float
    nominal: int | None = None

    @property
    def identity(self) -> Stated:
        return (
            ("steps", "noisy"),
            ("rate", self.rate),
            ("count", self.steps),
            *named_values(self, "multiplier", "nominal"),
        )

    def __post_init__(self) -> None:
        RATE.check("rate", self.rate)
        STEPS.check("steps", self.steps)
        MULTIPLIER.check("multiplier", self.multiplier)
        if self.nominal is not None:
            NOMINAL.check("nominal", self.nominal)


@dataclass(frozen=True)
class Requirements:
    """What a release needs of the training that it is part of.

    Attributes:
        steps: The noisy local steps of the clients, None if local work is free.
        equal_weights: Why all clients must count alike; empty if they need not.
        only_sum: Why the server may use nothing but the sum of reports; empty if it may.
    """

    steps: NoisySteps | None = None
    equal_weights: str = ""
    only_sum: str = ""


_SIZES_ARE_PRIVATE = (
    "and the claim covers how many records a client has, which the weights would tell"
)
NOISE_IS_FOR_THE_SUM = (
    "noise is for the sum, and a client can move anything else by more than the clip"
)


class Release:
    """One way to protect clients. The base class protects nobody: reports are summed as they are.

    Attributes:
        local: Clients protect themselves: the server may see their reports, and each client is
            charged for the rounds in which it takes part.
        additive: A report is the clipped update plus noise that does not depend on it.
        channel: What carries reports to the server.
    """

    local = False
    additive = False

    @property
    def identity(self) -> Stated:
        return (("release", "none"),)

    @property
    def adds_noise(self) -> bool:
        """Whether clients randomise their reports at the end of their work."""
        return type(self).randomise_ is not Release.randomise_

    @property
    def channel(self) -> Channel:
        return Channel()

    @property
    def requires(self) -> Requirements:
        """What the training must be for the claim to hold."""
        if self.local:
            return Requirements(equal_weights=_SIZES_ARE_PRIVATE)
        return Requirements(only_sum="" if type(self) is Release else NOISE_IS_FOR_THE_SUM)

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        """The noise in a few words, for people."""
        return "no noise"

    def settings(self, schedule: ClipSchedule | None) -> dict[str, float]:
        """The arguments that make this noise without calibration, empty if none do."""
        return {}

    def check(self, plan: PlanParts) -> None:
        """Refuse a plan whose parts do not go together with this release."""

    def difference(self, plan: PlanParts, line: BudgetLine) -> str | None:
        """How the plan falls short of what a strict line claims, None if it does not."""
        return "no noise is added"

    def randomise_(self, rows: torch.Tensor, round: Round) -> None:
        """What clients do to their clipped updates [K, P] before they send them, in place."""

    def read_(self, rows: torch.Tensor, round: Round) -> torch.Tensor:
        """Process accepted reports [K, P] in place. Returns which are refused, bool [K]."""
        return torch.zeros(len(rows), dtype=torch.bool)

    def noise_(self, total: torch.Tensor, round: Round) -> None:
        """Add the server's noise to the sum of a round's reports, float64 [P], in place."""

    def divisor(self, weight: float, expected: float) -> float:
        """The number by which the sum is divided: the weight that arrived, or `expected` clients.

        Each report is private by itself, or nothing is: the realised weight reveals nothing new.
        """
        return max(weight, 1.0)

    def noise_length(self, round: Round, size: int) -> float:
        """The expected L2 length of all noise on a sum of `size` coordinates: a diagnostic."""
        return 0.0


def check_clipped(plan: PlanParts) -> None:
    """Refuse noise in a plan that clips nothing."""
    if plan.schedule is None or plan.norm is None:
        raise BadInput("noise without a clip protects nobody: add a clip")


def misnamed(line: BudgetLine, unit: Unit, relation: Relation, *trusts: Trust) -> str | None:
    """What a line says wrongly of whom it protects from whom, or None."""
    if line.unit is not unit:
        return f"a {unit} is protected, not a {line.unit}"
    if line.relation is not relation:
        return f"neighbours are {relation}, not {line.relation}"
    if line.trust not in trusts:
        return f"trust is {' or '.join(trusts)}, not {line.trust}"
    return None


TURNS = "who takes part, and how often, is public"


def line_of(
    sampler: Sampler, population: int, budget: Budget, event: Event | None = None
) -> BudgetLine:
    """The line of a client's own reports."""
    return BudgetLine(
        event=event or Gaussian(1.0),
        share=sampler.participation_share(population),
        cap=sampler.max_participations if isinstance(sampler, FixedSize) else None,
        budget=budget,
        unit=Unit.CLIENT,
        relation=Relation.REPLACE,
        trust=Trust.LOCAL,
        noise=NoiseSource.SEEDED,
        assumptions=(
            "the server is not trusted; each client randomises its own report honestly",
            TURNS,
            SEEDED,
        ),
    )


def check_multiplier(multiplier: float | None) -> None:
    """Refuse noise of no size."""
    if multiplier is not None:
        MULTIPLIER.check("multiplier", multiplier)
    if multiplier == 0:
        raise BadArgument("{multiplier} is 0: a positive number is needed", "multiplier")


def check_sampler(sampler: Sampler, population: int, rounds: int) -> None:
    """Refuse cohorts that nobody could fill to the last round."""
    CLIENTS.check("clients", population)
    ROUNDS.check("rounds", rounds)
    sampler.check(population)
    if not isinstance(sampler, FixedSize) or sampler.max_participations is None:
        return
    cap = sampler.max_participations
    if sampler.size * rounds > population * cap:
        last = population * cap // sampler.size
        raise BadArgument(
            f"{{max_participations}} is {cap}: after round {last} of {rounds} every one of "
            f"{population} clients would be at its cap; raise it or run fewer rounds",
            "max_participations",
        )
