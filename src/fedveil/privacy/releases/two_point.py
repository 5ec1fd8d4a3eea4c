"""LDP-FL: every weight of every client as one of two values (Sun et al. 2021)."""

import math
from dataclasses import dataclass, field, replace

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
    Release,
    Requirements,
    Round,
    check_sampler,
    line_of,
    wrong_terms,
)
from fedveil.privacy.sampling import Sampler
from fedveil.privacy.shuffle import Flags, Multisets, highs, multisets


@dataclass(frozen=True)
class TwoPointChannel(Channel):
    """Carries reports of two values per weight.

    If reports are of weights, the model that clients started from is subtracted again.

    Attributes:
        ranges: The ranges outside of which the two values lie.
        kappa: The distance of a value from the centre, in radii.
    """

    ranges: Ranges
    kappa: float

    def two_values(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(centre, reach) of every coordinate, float32 [P] each: reports are centre +- reach.

        `state` is the round's adaptive state.
        """
        centre, radius = self.ranges.per_coordinate(state)
        return centre, radius * self.kappa

    def add_(
        self, total: torch.Tensor, reports: torch.Tensor, weights: torch.Tensor, round: Round
    ) -> None:
        """As `Channel.add_`. If reports are of weights, `round.start` is subtracted from each."""
        add_weighted_(total, reports, weights)
        if self.ranges.perturb is Perturb.WEIGHTS:
            total -= weights.sum() * round.start.to(torch.float64)

    def updates(self, reports: torch.Tensor, round: Round) -> torch.Tensor:
        """The reports or, if they are of weights, the reports less `round.start`, [K, P]."""
        return reports - round.start if self.ranges.perturb is Perturb.WEIGHTS else reports

    def encode_(self, updates: torch.Tensor, round: Round) -> None:
        """Replace updates [K, P] in place by the report values on their side of the centre.

        No report is nearer to the update.
        """
        centre, reach = self.two_values(round.adaptive_state)
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
        """As `TwoPointChannel.add_`, from counts: each report with a positive weight counts once.

        Raises BadInput for a report with another value than the two.
        """
        arrived = reports[weights > 0]
        if len(arrived):
            points = self.two_values(round.adaptive_state)
            self.add_multisets_(total, multisets(arrived, *points, 1), round)

    def add_multisets_(self, total: torch.Tensor, counts: Multisets, round: Round) -> None:
        """Add the sum of the updates behind a shuffler's counts to `total`, float64 [P]."""
        total += counts.sums(*self.two_values(round.adaptive_state))
        if self.ranges.perturb is Perturb.WEIGHTS:
            total -= float(counts.report_counts[0]) * round.start.to(torch.float64)

    def messages(self, reports: torch.Tensor, round: Round) -> Flags:
        """The messages that clients send for reports [K, P]: which values are high, bool [K, P].

        Raises BadInput for a report with another value than the two.
        """
        return highs(reports, *self.two_values(round.adaptive_state)).numpy()


@dataclass(frozen=True)
class TwoPointReports(Release):
    """Every coordinate, clamped to its range, is reported as one of two values outside of it.

    A budget line may count on fewer honest reports than `shuffled`: the difference is the number of
    dishonest clients that it tolerates.

    Attributes:
        mechanism: The mechanism of one coordinate.
        ranges: The ranges of the coordinates, which are also the plan's clip schedule.
        shuffled: The least number of reports that a shuffler hands on; 0 without a shuffler.
        channel: The shuffler, or the channel without one.
    """

    mechanism: TwoPointMechanism
    ranges: Ranges
    shuffled: int = 0
    channel: Channel = field(init=False, repr=False, compare=False)

    local = True

    @property
    def identity(self) -> Stated:
        """Identity pairs: release "two-point", mechanism, ranges, shuffled."""
        return (("release", "two-point"), *named_values(self, "mechanism", "ranges", "shuffled"))

    def __post_init__(self) -> None:
        """Set `channel`: a `Shuffler` if `shuffled` is above 0, otherwise a `TwoPointChannel`."""
        channel = TwoPointChannel(self.ranges, self.mechanism.kappa)
        if self.shuffled:
            channel = Shuffler(self.ranges, self.mechanism.kappa, self.shuffled)
        object.__setattr__(self, "channel", channel)

    def _two_values(self, round: Round) -> tuple[torch.Tensor, torch.Tensor]:
        """(centre, reach) of every coordinate in a round, as `TwoPointChannel.two_values`."""
        channel = TwoPointChannel(self.ranges, self.mechanism.kappa)
        return channel.two_values(round.adaptive_state)

    @property
    def requires(self) -> Requirements:
        """Equal weights and, behind a shuffler, nothing but the sum of reports."""
        return replace(super().requires, only_sum=self.channel.hides_reports)

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        """The phrase "two-point reports at the clients, ..." with the claim of one turn.

        The claim is that of the last of `lines`, which may not be empty.
        """
        return f"two-point reports at the clients, {lines[-1].claims(1)[-1].short}"

    def check(self, plan: PrivacyPlan) -> None:
        """Raise BadInput for a plan whose clip schedule is not these ranges."""
        if plan.clip_schedule != self.ranges:
            raise BadInput(
                "two-point reports are clamped to ranges: their clip schedule is these ranges"
            )

    def difference(self, plan: PrivacyPlan, line: BudgetLine) -> str | None:
        """How the plan falls short of what a strict line claims, as a clause, None if it does not.

        Compares unit, relation, trust, epsilon, number of weights and number of shuffled reports.
        """
        weights = sum(self.ranges.tensor_sizes)
        match line.event:
            case TwoPoint(epsilon):
                wrong = wrong_terms(line, Unit.CLIENT, Relation.REPLACE, Trust.LOCAL)
            case Shuffled(TwoPoint(epsilon), reports):
                wrong = wrong_terms(line, Unit.CLIENT, Relation.REPLACE, Trust.SHUFFLED)
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
        """Replace updates [K, P] in place by reports, of weights or of updates as `ranges` has it.

        Raises AssertionError if P is not the number of weights that the ranges are for.
        """
        if rows.shape[1] != sum(self.ranges.tensor_sizes):
            raise AssertionError("ranges are for another number of weights")
        keys = round.streams.keys("client-noise", round.number, round.ids)
        if self.ranges.perturb is Perturb.WEIGHTS:
            rows += round.start
        centre, radius = self.ranges.per_coordinate(round.adaptive_state)
        self.mechanism.report_(rows, centre, radius, keys)

    def read_(self, rows: torch.Tensor, round: Round) -> torch.Tensor:
        """Which rows [K, P] are refused, bool [K]: those with another value than the weights' two.

        Rows are not changed. A message carries one bit per weight.
        """
        centre, reach = self._two_values(round)
        return ((rows != centre + reach) & (rows != centre - reach)).any(dim=1)

    def noise_length(self, round: Round, size: int) -> float:
        """As `Release.noise_length`, from above: as if weights were at their ranges' centres."""
        reach = self._two_values(round)[1]
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
    """A plan in which clients report every weight as one of two values: LDP-FL (Sun et al.).

    Guarantee: docs/proofs/ldp-fl.md. One round is one two-valued report per weight, all about the
    same client, so a client's claim composes all weights and all its rounds. Four readings of the
    same reports: composed behind an ideal shuffler with at least `shuffled` honest reports per
    position (when it is > 0), composed exactly without one, composed by adding epsilons, and the
    published epsilon of one weight in one round, which is no guarantee for anybody.

    A round is handed on with `shuffled` + `dishonest` reports or more, one per client. So
    `shuffled` of them are honest as long as at most `dishonest` clients side with the server
    (docs/proofs/mixer.md).

    Args:
        sampler: Who takes part in a round.
        population: The number of clients.
        ranges: The ranges that weights or updates are clamped to.
        epsilon: The epsilon of the report of one weight.
        rounds: The number of planned rounds.
        budget: The epsilon that may be spent, and delta.
        shuffled: The least number of honest reports in a round, 0 without a shuffler.
        dishonest: The number of clients that may side with the server.

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
    mechanism, event = TwoPointMechanism(epsilon), TwoPoint(epsilon)
    alone = replace(line_of(sampler, population, budget, event), per=sum(ranges.tensor_sizes))
    lines = [alone]
    if shuffled:
        honesty = f"none of the {population} clients sides"
        if dishonest:
            honesty = f"at most {dishonest} of the {population} clients side"
        behind = replace(
            alone,
            event=Shuffled(event, shuffled),
            trust=Trust.SHUFFLED,
            assumptions=(
                "an ideal shuffler: per position the server sees a multiset of reports and nothing "
                "about their senders; random delays alone are no such thing",
                f"at least {shuffled} honest reports per position in every round: each client "
                f"reports once, a round is handed on with {shuffled + dishonest} reports or more, "
                f"and {honesty} with the server",
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
        clip_schedule=ranges,
        release=TwoPointReports(mechanism, ranges, shuffled + dishonest),
        lines=(*lines, weight),
        parameters=sum(ranges.tensor_sizes),
    )
    if plan.permitted < 1:
        raise BadInput(
            f"budget.epsilon is {budget.epsilon:g} and one round of {alone.per:,} weights costs "
            f"{lines[0].claims(1)[0].short}: raise it, or omit it to see the total cost"
        )
    return plan


def honest_reports(plan: PrivacyPlan) -> int:
    """The number of honest reports per round that claims count on, 0 without a shuffler."""
    events = [line.event for line in plan.lines]
    return max((event.reports for event in events if isinstance(event, Shuffled)), default=0)
