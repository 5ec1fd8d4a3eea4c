"""One round as its clients and its mechanism see it: `Round`, `Channel` and `Release`.

A `Round` is what is asked of clients, a `Channel` carries their reports to the server, and a
`Release` is how clipped updates become what is published.

To add a mechanism, subclass it: say what a client does to its report, what the server does to
reports and to their sum, and how that can differ from what a budget line claims.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.checks import (
    CLIENTS,
    COUNT,
    MULTIPLIER,
    NOMINAL,
    RATE,
    ROUNDS,
    STEPS,
    shown,
)
from fedveil.base.errors import BadArgument
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.claims import SEEDED, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.events import (
    Event,
    Gaussian,
    GroupSampled,
    PoissonSampled,
    Skellam,
)
from fedveil.privacy.clip import Clip, add_weighted_
from fedveil.privacy.clip_schedules import ClipSchedule
from fedveil.privacy.noise.rotation import RotatedGrid
from fedveil.privacy.noise.streams import JointStreams, Streams
from fedveil.privacy.sampling import FixedSize, Sampler

if TYPE_CHECKING:
    from fedveil.privacy.plan import PrivacyPlan
    from fedveil.privacy.releases.secure_sum import ReportGrid

Ids = npt.NDArray[np.int64]

SERVER = np.zeros(1, dtype=np.int64)
"""The client id in the keys of the server's own noise."""


@dataclass(frozen=True, eq=False)
class Round:
    """A round for its clients, once it is sampled and charged and its clip is fixed.

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
        """The streams of the one training.

        Raises AssertionError if `streams` are those of several trainings.
        """
        if isinstance(self.streams, JointStreams):
            raise AssertionError("clients of several trainings have no streams in common")
        return self.streams

    @property
    def server_streams(self) -> Streams:
        """The streams of the server's own noise. Each attempt at the round has other ones.

        Raises AssertionError if clients of several trainings are computed together.
        """
        return self.own_streams.for_attempt(self.attempt)


class Channel:
    """Carries clients' reports to the server and adds them up. The plain one changes nothing.

    Attributes:
        minimum: The least number of reports of which a sum is handed on.
        keeps_reports: Whether `hand_on_` needs all reports of a round.
        hides_reports: Why the server sees no single report; empty if it sees them all.
        divisor: The least number of honest clients in a sum, where each of them adds that part of
            the variance of its noise. 0 where clients add no shares.
    """

    hides_reports = ""
    minimum = 0
    keeps_reports = False
    divisor = 0

    def add_(
        self, total: torch.Tensor, reports: torch.Tensor, weights: torch.Tensor, round: Round
    ) -> None:
        """total += the weighted sum of the updates that the reports stand for, in place.

        Args:
            total: The sum so far, float64 [P].
            reports: The clients' reports [K, P].
            weights: The weight of each client, float64 [K]. 0 leaves a report out.
            round: The round in which they were made.
        """
        add_weighted_(total, reports, weights)

    def updates(self, reports: torch.Tensor, round: Round) -> torch.Tensor:
        """The updates [K, P] that reports [K, P] stand for.

        Here they are the reports themselves.
        """
        return reports

    def encode_(self, updates: torch.Tensor, round: Round) -> None:
        """Turn updates [K, P] in place into the nearest reports that this channel can carry.

        Here they stay as they are.
        """

    def hand_on_(
        self,
        total: torch.Tensor,
        reports: list[tuple[Ids, torch.Tensor]],
        grid: "ReportGrid",
    ) -> None:
        """Replace the round's total by what the server is to see. Here it stays as it is.

        Called once, when all reports are in, if `keeps_reports`.

        Args:
            total: The sum of the reports, float64 [P], and of the statistics behind them.
            reports: The clients, and their reports in the same form, [K, P].
            grid: The grid on which reports with secure noise are.
        """

    def decode_(self, total: torch.Tensor, round: Round) -> None:
        """Replace a sum of reports, float64 [P], by the sum of the updates that they stand for.

        Called once, whoever has added the reports up. Here they are the updates themselves.
        """


MOST_RECORDS = 1 << 24
"""Records of a client whose batches are drawn by secure noise: each costs a word."""

STEP_DRAWS = 1 << 21
"""What a secure local step costs beside its noise, in draws of 2^-110: a word, of 2^-113, for each
of at most 2^24 records."""


@dataclass(frozen=True)
class NoisySteps:
    """The noisy local steps of DP-SGD that a client takes in a round.

    A plan makes this, its account counts it, and the work is made from it: nobody types these
    numbers twice. Each step's sum of gradients is divided by rate x n.

    Attributes:
        rate: The probability with which a unit joins a step.
        steps: The number of steps in a round.
        multiplier: The standard deviation of the noise, in clips.
        nominal: n for every client. None: n is the client's own number of units, which is public.
        unit: What joins and is clipped: a record's gradient, or the mean of the gradients of all
            records of a person.
        cap: The most records of a person that count, where persons are protected. None: records
            are.
        rotated: The grid of small integers on which rows are rounded, with Skellam noise. `clips`
            are then the bound on rounded rows. None: Gaussian noise.

    | edge | behaviour |
    |---|---|
    | rate outside (0, 1], steps < 1, nominal < 1, cap < 1, multiplier < 0 | BadInput |
    | persons join, and there is no cap | BadInput |
    | Skellam noise, and all records of a person join by themselves | BadInput |
    | another unit than records and persons | BadInput |
    """

    rate: float
    steps: int
    multiplier: float
    nominal: int | None = None
    unit: Unit = Unit.RECORD
    cap: int | None = None
    rotated: RotatedGrid | None = None

    @property
    def identity(self) -> Stated:
        """Identity pairs: steps "noisy", then rate, count, multiplier and nominal.

        Where persons are protected, also unit and cap, and for Skellam noise its grid.
        """
        return (
            ("steps", "noisy"),
            ("rate", self.rate),
            ("count", self.steps),
            *named_values(self, "multiplier", "nominal"),
            *self.of_persons,
            *(() if self.rotated is None else named_values(self, "rotated")),
        )

    @property
    def of_persons(self) -> Stated:
        """Identity pairs of the unit and the cap, () where records are protected."""
        return () if self.cap is None else named_values(self, "unit", "cap")

    @property
    def protected(self) -> Unit:
        """Whom the claim is about: a person where there is a cap, otherwise a record."""
        return Unit.RECORD if self.cap is None else Unit.PERSON

    @property
    def group(self) -> int:
        """How many records a unit has at most."""
        return self.cap if self.cap is not None and self.unit is Unit.PERSON else 1

    def event(self, multiplier: float) -> Event:
        """One step with noise of `multiplier` clips, about one record or person.

        A person all of whose records join by themselves is a group of them.
        """
        if self.rotated is not None:
            skellam = Skellam(multiplier, self.rotated.sensitivity)
            return skellam if self.rate == 1 else PoissonSampled(self.rate, skellam)
        gaussian = Gaussian(multiplier)
        if self.cap is not None and self.cap > self.group:
            return GroupSampled(self.rate, self.cap, gaussian)
        return gaussian if self.rate == 1 else PoissonSampled(self.rate, gaussian)

    def rules(self, where: str) -> tuple[str, ...]:
        """The assumptions of a claim about how records are persons'. `where` is a client's word."""
        if self.cap is None:
            return (f"one record per person and {where}",)
        count = f"{self.cap} records of a person count" if self.cap > 1 else "1 record of a person"
        if self.cap == 1:
            count += " counts"
        return (
            f"at most {count}, and a public rule leaves the others out",
            f"a person at two {where}s counts as two",
        )

    def __post_init__(self) -> None:
        """Raise BadArgument for a number outside its limits."""
        RATE.check("rate", self.rate)
        STEPS.check("steps", self.steps)
        MULTIPLIER.check("multiplier", self.multiplier)
        if self.nominal is not None:
            NOMINAL.check("nominal", self.nominal)
        if self.unit not in (Unit.RECORD, Unit.PERSON) or not isinstance(self.unit, Unit):
            raise BadArgument(
                f"{{unit}} is {shown(self.unit)}: use Unit.RECORD or Unit.PERSON", "unit"
            )
        if self.cap is not None:
            COUNT.check("cap", self.cap)
        elif self.unit is Unit.PERSON:
            raise BadArgument(
                "{cap} is missing and {unit} is 'person': say how many records of a person count "
                "at most",
                "cap",
                "unit",
            )
        if self.rotated is not None and self.cap is not None and self.cap > self.group:
            raise BadArgument(
                "{unit} is 'record' and {cap} is above 1: in a sum of fewer than 64 bits all "
                "records of a person join together; use {unit} = 'person'",
                "unit",
                "cap",
            )


@dataclass(frozen=True)
class Requirements:
    """Requirements of a release on the training that it is part of.

    Attributes:
        noisy_steps: The noisy local steps of the clients, None if local work is free.
        equal_weights: Why all clients must count alike; empty if they need not.
        only_sum: Why the server may use nothing but the sum of reports; empty if it may.
        sends_sum: A report is the noisy sum of one step, and not where the steps lead.
        all_honest: Why every client must report honestly, and the server use nothing but the mean;
            empty if a claim holds whatever others do.
    """

    noisy_steps: NoisySteps | None = None
    equal_weights: str = ""
    only_sum: str = ""
    sends_sum: bool = False
    all_honest: str = ""


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
        needs_clip: A plan without a clip is refused: its noise would protect nobody.
        channel: What carries reports to the server.
        statistic_channel: What carries the statistic of an adaptive clip. Behind a secure sum each
            client adds a share of the statistic's noise; otherwise the server, or a curator, adds
            it.
        wide: Reports are float64, so that sums of multiples of a grid stay exact.
    """

    local = False
    additive = False
    wide = False
    needs_clip = False
    channel: Channel = Channel()
    statistic_channel: Channel = Channel()

    @property
    def identity(self) -> Stated:
        """Identity pairs: release "none"."""
        return (("release", "none"),)

    @property
    def masks_reports(self) -> bool:
        """Whether a channel of this release needs all reports of a round (`keeps_reports`)."""
        return self.channel.keeps_reports or self.statistic_channel.keeps_reports

    @property
    def report_noise(self) -> float:
        """The noise multiplier of one report, in clips, where a secure sum adds reports up.

        Here 0: there is none.
        """
        return 0.0

    @property
    def adds_noise(self) -> bool:
        """Whether clients randomise their reports: whether the class overrides `randomise_`."""
        return type(self).randomise_ is not Release.randomise_

    @property
    def requires(self) -> Requirements:
        """The requirements on the training without which the claim does not hold.

        Weights must be equal under local trust. Otherwise only the sum may be used, unless the
        class is `Release` itself, which requires nothing.
        """
        if self.local:
            return Requirements(equal_weights=_SIZES_ARE_PRIVATE)
        return Requirements(only_sum="" if type(self) is Release else NOISE_IS_FOR_THE_SUM)

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        """The noise as a phrase, such as "Gaussian noise, multiplier 1.1, at the server".

        `lines` are the plan's budget lines: some releases show the epsilon of a report.
        """
        return "no noise"

    def settings(self, schedule: ClipSchedule | None) -> dict[str, float]:
        """The keys of a recipe's [noise] that fix this noise, such as {"multiplier": 1.1}.

        With them the noise is not calibrated again. {} if no single number fixes it: no noise,
        noise that differs between clients, or noise that is shared with the statistic of an
        adaptive `schedule`.
        """
        return {}

    def check(self, plan: "PrivacyPlan") -> None:
        """Raise BadInput for a plan whose parts do not go together with this release.

        A plan calls this when it is made. Here every plan passes.
        """

    def difference(self, plan: "PrivacyPlan", line: BudgetLine) -> str | None:
        """How the plan falls short of what a strict line claims, None if it does not.

        A clause that ends a message, such as "noise of 0.5 sensitivities is added". Here it is
        always "no noise is added".
        """
        return "no noise is added"

    def randomise_(self, rows: torch.Tensor, round: Round) -> None:
        """Randomise the clipped updates [K, P] of clients in place, before they are sent.

        Here they stay as they are.
        """

    def read_(self, rows: torch.Tensor, round: Round) -> torch.Tensor:
        """Process the reports [K, P] that arrived, in place. Returns which are refused, bool [K].

        Here nothing is changed and nothing is refused.
        """
        return torch.zeros(len(rows), dtype=torch.bool)

    def noise_(self, total: torch.Tensor, round: Round) -> None:
        """Add the server's noise to the sum of a round's reports, float64 [P], in place.

        Here nothing is added.
        """

    def divisor(self, weight: float, expected: float) -> float:
        """The number by which the sum is divided: here `weight`, at least 1.

        Each report is private by itself, or nothing is: the realised weight reveals nothing new.

        Args:
            weight: The sum of the weights of the reports that arrived.
            expected: The expected number of clients, which is public.
        """
        return max(weight, 1.0)

    def noise_length(self, round: Round, size: int) -> float:
        """The expected L2 length of all noise on a sum of `size` coordinates, for diagnostics.

        Here 0.
        """
        return 0.0


def wrong_terms(line: BudgetLine, unit: Unit, relation: Relation, *trusts: Trust) -> str | None:
    """How a line's unit, relation or trust differs from those given, None if none differs.

    A clause about the first difference, such as "a record is protected, not a client". Any of
    `trusts` is right.
    """
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
    """The budget line of clients that randomise their own reports.

    It is per client, under replacement and local trust, with seeded noise. Share and cap of
    participations are the sampler's. `event` is one report, by default `Gaussian(1.0)`: callers
    replace it once the noise is known.
    """
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
    """Raise BadArgument for a multiplier that is not a positive number up to 1e6. None passes."""
    if multiplier is not None:
        MULTIPLIER.check("multiplier", multiplier)
    if multiplier == 0:
        raise BadArgument("{multiplier} is 0: a positive number is needed", "multiplier")


def check_sampler(sampler: Sampler, population: int, rounds: int) -> None:
    """Raise BadInput if `rounds` rounds cannot be drawn from `population` clients.

    Refuses numbers outside their limits, populations that the sampler refuses, and a cap on
    participations (`max_participations`) that all clients would reach before the last round.
    """
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
