"""One round as its clients and its mechanism see it: `Round`, `Channel` and `Release`.

A `Round` is what is asked of clients, a `Channel` carries their reports to the server, and a
`Release` is how clipped updates become what is published.

To add a mechanism, subclass it: say what a client does to its report, what the server does to
reports and to their sum, and how that can differ from what a budget line claims.
"""

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.checks import CLIENTS, MULTIPLIER, NOMINAL, RATE, ROUNDS, STEPS
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.claims import SEEDED, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.events import Event, Gaussian
from fedveil.privacy.clip import Clip, Norm, add_weighted_
from fedveil.privacy.clip_schedules import ClipSchedule
from fedveil.privacy.clip_statistic import ClipStatistic
from fedveil.privacy.noise.streams import JointStreams, Streams
from fedveil.privacy.sampling import FixedSize, Sampler

Ids = npt.NDArray[np.int64]

SERVER = np.zeros(1, dtype=np.int64)
"""The client id in the keys of the server's own noise."""


@dataclass(frozen=True, eq=False)
class Round:
    """What a round asks of its clients: sampled, charged, and with its clip fixed.

    Attributes:
        number: The round, from 1.
        ids: The clients that take part, or those of them that are computed together.
        start: The model that they start from, float32 [P]; [K, P] where clients of several
            trainings are computed in step.
        clip: The clip on their updates or gradients, None without one.
        adaptive_state: The value of an adaptive clip, or the ranges of reports, float64.
        streams: The source of their random numbers.
        attempt: How often the round was charged before.
        began: The time at which it began, by `time.perf_counter`.
    """

    number: int
    ids: Ids
    start: torch.Tensor
    clip: Clip | None
    adaptive_state: torch.Tensor
    streams: Streams | JointStreams
    attempt: int = 0
    began: float = field(default_factory=time.perf_counter)

    @property
    def own_streams(self) -> Streams:
        """The streams of the round's training."""
        if isinstance(self.streams, JointStreams):
            raise AssertionError("clients of several trainings have no streams in common")
        return self.streams

    @property
    def server_streams(self) -> Streams:
        """The server's own random numbers: a round that is charged again draws new ones."""
        return self.own_streams.for_attempt(self.attempt)


class Channel:
    """Carries clients' reports to the server and adds them up. The plain one changes nothing.

    Attributes:
        minimum: The least number of reports of which a sum is handed on.
        hides_reports: Why the server sees no single report; empty if it sees them all.
    """

    hides_reports = ""
    minimum = 0

    def add_(
        self, total: torch.Tensor, reports: torch.Tensor, weights: torch.Tensor, round: Round
    ) -> None:
        """Add the weighted sum of the updates behind reports [K, P] to `total`, float64 [P]."""
        add_weighted_(total, reports, weights)

    def updates(self, reports: torch.Tensor, round: Round) -> torch.Tensor:
        """The updates behind reports [K, P]."""
        return reports

    def encode_(self, updates: torch.Tensor, round: Round) -> None:
        """Turn updates [K, P] in place into the nearest reports that this channel can carry."""


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
