"""LDP-FL: every weight of every client as one of two values (Sun et al. 2021)."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.claims import Relation, Trust, Unit
from fedveil.privacy.accounting.events import Shuffled, TwoPoint
from fedveil.privacy.clip import add_weighted_
from fedveil.privacy.noise.mechanisms import TwoPointMechanism
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.release import (
    Channel,
    PlanParts,
    Release,
    Requirements,
    Round,
    check_sampler,
    line_of,
    misnamed,
)
from fedveil.privacy.sampling import Sampler
from fedveil.privacy.shuffle import Flags, Multisets, highs, multisets


@dataclass(frozen=True)
class TwoPointChannel(Channel):
    """Carries reports of two values per weight. Reports of weights have the model taken off again.

    Attributes:
        ranges: The ranges outside of which the two values lie.
        kappa: The distance of a value from the centre, in radii.
    """

    ranges: Ranges
    kappa: float

    def points(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two values of every coordinate: their centre, and their distance from it."""
        centre, radius = self.ranges.per_coordinate(state)
        return centre, radius * self.kappa

    def add_(
        self, total: torch.Tensor, reports: torch.Tensor, weights: torch.Tensor, round: Round
    ) -> None:
        add_weighted_(total, reports, weights)
        if self.ranges.perturb is Perturb.WEIGHTS:
            total -= weights.sum() * round.start.to(torch.float64)

    def updates(self, reports: torch.Tensor, round: Round) -> torch.Tensor:
        return reports - round.start if self.ranges.perturb is Perturb.WEIGHTS else reports

    def encode_(self, updates: torch.Tensor, round: Round) -> None:
        """The point on the side of the update: the most that a report can say."""
        centre, reach = self.points(round.adaptive_state)
        target = updates + round.start if self.ranges.perturb is Perturb.WEIGHTS else updates
        updates.copy_(torch.where(target >= centre, centre + reach, centre - reach))


@dataclass(frozen=True)
class Shuffler(TwoPointChannel):
    """Hands on, per weight, how many reports were high, and nothing below `minimum` reports."""

    minimum: int

    hides_reports = (
        "a shuffler hands on what was reported per weight, and nobody's report as a whole"
    )

    def add_(
        self, total: torch.Tensor, reports: torch.Tensor, weights: torch.Tensor, round: Round
    ) -> None:
        arrived = reports[weights > 0]
        if len(arrived):
            points = self.points(round.adaptive_state)
            self.add_multisets_(total, multisets(arrived, *points, 1), round)

    def add_multisets_(self, total: torch.Tensor, counts: Multisets, round: Round) -> None:
        """Add the sum of the updates behind a shuffler's counts to `total`, float64 [P]."""
        total += counts.sums(*self.points(round.adaptive_state))
        if self.ranges.perturb is Perturb.WEIGHTS:
            total -= float(counts.report_counts[0]) * round.start.to(torch.float64)

    def messages(self, reports: torch.Tensor, round: Round) -> Flags:
        """What clients send to a shuffler in place of reports [K, P]: which values are high."""
        return highs(reports, *self.points(round.adaptive_state)).numpy()


@dataclass(frozen=True)
class TwoPointReports(Release):
    """Every coordinate, clamped to its range, is reported as one of two values outside of it.

    A budget line may count on fewer honest reports than `shuffled`: the difference is the number of
    dishonest clients that it tolerates.

    Attributes:
        mechanism: The mechanism of one coordinate.
        ranges: The ranges of the coordinates, which are also the plan's clip schedule.
        shuffled: The least number of reports that a shuffler hands on; 0 without a shuffler.
    """

    mechanism: TwoPointMechanism
    ranges: Ranges
    shuffled: int = 0

    local = True

    @property
    def identity(self) -> Stated:
        return (("release", "two-point"), *named_values(self, "mechanism", "ranges", "shuffled"))

    @cached_property
    def channel(self) -> TwoPointChannel:
        kappa = self.mechanism.kappa
        if not self.shuffled:
            return TwoPointChannel(self.ranges, kappa)
        return Shuffler(self.ranges, kappa, self.shuffled)

    @property
    def requires(self) -> Requirements:
        return replace(super().requires, only_sum=self.channel.hides_reports)

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        return f"two-point reports at the clients, {lines[-1].claims(1)[-1].short}"

    def check(self, plan: PlanParts) -> None:
        if plan.schedule != self.ranges:
            raise BadInput(
                "two-point reports are clamped to ranges: their clip schedule is these ranges"
            )

    def difference(self, plan: PlanParts, line: BudgetLine) -> str | None:
        weights = sum(self.ranges.sizes)
        match line.event:
            case TwoPoint(epsilon):
                wrong = misnamed(line, Unit.CLIENT, Relation.REPLACE, Trust.LOCAL)
            case Shuffled(TwoPoint(epsilon), reports):
                wrong = misnamed(line, Unit.CLIENT, Relation.REPLACE, Trust.SHUFFLED)
                if reports > self.shuffled:
                    return f"a round is handed on with {self.shuffled} reports"
            case _:
                return f"reports are those of {self.mechanism}"
        if wrong is not None:
            return wrong
        if epsilon < self.mechanism.epsilon or line.per < weights or plan.parameters != weights:
            return f"{weights} weights are reported by {self.mechanism}"
        return None

    def randomise_(self, rows: torch.Tensor, round: Round) -> None:
        if rows.shape[1] != sum(self.ranges.sizes):
            raise AssertionError("ranges are for another number of weights")
        keys = round.streams.keys("client-noise", round.number, round.ids)
        if self.ranges.perturb is Perturb.WEIGHTS:
            rows += round.start
        centre, radius = self.ranges.per_coordinate(round.adaptive_state)
        self.mechanism.report_(rows, centre, radius, keys)

    def read_(self, rows: torch.Tensor, round: Round) -> torch.Tensor:
        """Refuse rows with any other value: a message carries one bit per weight."""
        centre, reach = self.channel.points(round.adaptive_state)
        return ((rows != centre + reach) & (rows != centre - reach)).any(dim=1)

    def noise_length(self, round: Round, size: int) -> float:
        reach = self.channel.points(round.adaptive_state)[1]
        return float(reach.double().norm()) * math.sqrt(len(round.ids))


def two_point(
    sampler: Sampler,
    population: int,
    ranges: Ranges,
    *,
    epsilon: float,
    rounds: int,
    budget: Budget,
    shuffled: int = 0,
    dishonest: int = 0,
) -> PrivacyPlan:
    """LDP-FL: every weight of every client as one of two values, shuffled or not (Sun et al.).

    Guarantee: docs/proofs/ldp-fl.md. One round is one two-valued report per weight, all about the
    same client, so a client's claim composes all weights and all its rounds. Four readings of
    the same reports: composed behind an ideal shuffler with at least `shuffled` honest reports
    per position (when it is > 0), composed exactly without one, composed by adding epsilons, and
    the published epsilon of one weight in one round, which is no guarantee for anybody.

    A round is handed on with `shuffled` + `dishonest` reports or more, one per client. So
    `shuffled` of them are honest as long as at most `dishonest` clients side with the server
    (docs/proofs/mixer.md).

    | edge | behaviour |
    |---|---|
    | epsilon <= 0 | BadInput |
    | dishonest < 0, or > 0 without a shuffler | BadInput |
    | fewer clients per round than `shuffled` + `dishonest` | BadInput |
    | budget that one round of all weights exceeds | BadInput |
    """
    check_sampler(sampler, population, rounds)
    if shuffled < 0:
        raise BadArgument(f"{{shuffled}} is {shuffled}: at least 1 report is needed", "shuffled")
    if dishonest < 0 or (dishonest and not shuffled):
        raise BadArgument(
            f"{{dishonest}} is {dishonest}: 0 or more, behind a shuffler", "dishonest"
        )
    if shuffled + dishonest > sampler.expected(population):
        raise BadArgument(
            f"{{shuffled}} is {shuffled}, {{dishonest}} is {dishonest}, and a round has "
            f"{sampler.expected(population):g} clients: lower one or ask more clients",
            "shuffled",
            "dishonest",
        )
    mechanism = TwoPointMechanism(epsilon)
    alone = replace(
        line_of(sampler, population, budget),
        event=mechanism.event,
        per=sum(ranges.sizes),
    )
    lines = [alone]
    if shuffled:
        behind = replace(
            alone,
            event=Shuffled(TwoPoint(epsilon), shuffled),
            trust=Trust.SHUFFLED,
            assumptions=(
                "an ideal shuffler: per position the server sees a multiset of reports and nothing "
                "about their senders; random delays alone are no such thing",
                _honesty(shuffled, dishonest, population),
                *alone.assumptions,
            ),
        )
        unlimited = Budget(math.inf, budget.delta)
        lines = [behind, replace(alone, reading=True, budget=unlimited)]
    weight = replace(
        alone,
        unit=Unit.WEIGHT,
        per=1,
        cap=1,
        budget=Budget(math.inf, budget.delta),
        as_published=True,
        reading=True,
        covers="one weight in one round",
    )
    plan = PrivacyPlan(
        sampler=sampler,
        population=population,
        rounds=rounds,
        schedule=ranges,
        release=TwoPointReports(mechanism, ranges, shuffled + dishonest),
        lines=(*lines, weight),
        parameters=sum(ranges.sizes),
    )
    if plan.permitted < 1:
        raise BadInput(
            f"budget.epsilon is {budget.epsilon:g} and one round of {alone.per:,} weights costs "
            f"{lines[0].claims(1)[0].short}: raise it, or omit it to see the total cost"
        )
    return plan


def honest_reports(plan: PrivacyPlan) -> int:
    """How many honest reports of a round the plan's claims count on, 0 without a shuffler."""
    events = [line.event for line in plan.lines]
    return max((event.reports for event in events if isinstance(event, Shuffled)), default=0)


def _honesty(honest: int, dishonest: int, population: int) -> str:
    """The assumption about clients that a shuffled claim rests on."""
    who = (
        f"at most {dishonest} of the {population} clients side"
        if dishonest
        else (f"none of the {population} clients sides")
    )
    return (
        f"at least {honest} honest reports per position in every round: each client reports once, "
        f"a round is handed on with {honest + dishonest} reports or more, and {who} with the server"
    )
