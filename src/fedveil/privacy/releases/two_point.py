"""LDP-FL: every weight of every client as one of two values (Sun et al. 2021)."""

import math
from dataclasses import dataclass, replace

import torch

from fedveil.base.errors import BadInput
from fedveil.base.identity import Stated
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.claims import Relation, Trust, Unit
from fedveil.privacy.accounting.events import Shuffled, TwoPoint
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.mechanisms import TwoPointMechanism
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.releases.counted import check_sampler, line_of
from fedveil.privacy.releases.release import Asked, Ids, Parts, Release, misnamed
from fedveil.privacy.rows import add_weighted_
from fedveil.privacy.sampling import Sampler
from fedveil.privacy.shuffle import Flags, Multisets, highs, multisets


@dataclass(frozen=True)
class TwoPointReports(Release):
    """Every coordinate, clamped to its range, is reported as one of two values outside of it.

    Behind a shuffler that hands on nothing below `shuffled` reports (0: there is none) only the
    multisets of the reports are looked at. A budget line may count on fewer honest ones: the
    difference is how many dishonest clients it tolerates. Reports of weights are weights;
    `add_sum_` takes the model off again.
    """

    mechanism: TwoPointMechanism
    ranges: Ranges
    shuffled: int = 0

    counted = True
    randomises = True
    moves = True

    @property
    def identity(self) -> Stated:
        return (
            ("release", "two-point"),
            ("mechanism", self.mechanism),
            ("ranges", self.ranges),
            ("shuffled", self.shuffled),
        )

    @property
    def minimum(self) -> int:
        return self.shuffled

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        return f"two-point reports at the clients, {lines[-1].claims(1)[-1].short}"

    def check(self, parts: Parts) -> None:
        if parts.schedule is not None:
            raise BadInput("two-point reports are clamped to ranges: leave out the clip")

    def difference(self, parts: Parts, line: BudgetLine) -> str | None:
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
        if epsilon < self.mechanism.epsilon or line.per < weights or parts.parameters != weights:
            return f"{weights} weights are reported by {self.mechanism}"
        return None

    def start(self, params: torch.Tensor) -> torch.Tensor:
        return self.ranges.start(params)

    def move(self, moving: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return self.ranges.move(moving, before, after)

    def reachable(
        self, moving: torch.Tensor, params: torch.Tensor, first: torch.Tensor, round: int
    ) -> bool:
        return self.ranges.reachable(moving, params, first, round)

    def randomise_(self, rows: torch.Tensor, asked: Asked) -> None:
        if rows.shape[1] != sum(self.ranges.sizes):
            raise AssertionError("ranges are for another number of weights")
        keys = asked.streams.keys("client-noise", asked.number, asked.ids)
        if self.ranges.perturb is Perturb.WEIGHTS:
            rows += asked.start
        centre, radius = self.ranges.per_coordinate(asked.moving)
        self.mechanism.report_(rows, centre, radius, keys)

    def unrandomised_(self, rows: torch.Tensor, asked: Asked) -> None:
        """The point on the side of the update: the most that a report can say."""
        centre, reach = self._points(asked.moving)
        target = rows + asked.start if self.ranges.perturb is Perturb.WEIGHTS else rows
        rows.copy_(torch.where(target >= centre, centre + reach, centre - reach))

    def read_(self, rows: torch.Tensor, asked: Asked) -> torch.Tensor:
        """A message carries one bit, so any other value is somebody's invention."""
        centre, reach = self._points(asked.moving)
        return ((rows != centre + reach) & (rows != centre - reach)).any(dim=1)

    def add_sum_(
        self, total: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, asked: Asked
    ) -> None:
        if not self.shuffled:
            add_weighted_(total, rows, weights)
            if self.ranges.perturb is Perturb.WEIGHTS:
                total -= weights.sum() * asked.start.to(torch.float64)
            return
        counted = rows[weights > 0]
        if len(counted):
            self.add_multisets_(total, multisets(counted, *self._points(asked.moving), 1), asked)

    def add_multisets_(self, total: torch.Tensor, found: Multisets, asked: Asked) -> None:
        """Add the sum of the updates behind what a shuffler handed on to `total`, float64 [P]."""
        total += found.sums(*self._points(asked.moving))
        if self.ranges.perturb is Perturb.WEIGHTS:
            total -= float(found.reports[0]) * asked.start.to(torch.float64)

    def messages(self, rows: torch.Tensor, asked: Asked) -> Flags:
        """What clients tell a shuffler of their reports [K, P]: which are high, no more."""
        return highs(rows, *self._points(asked.moving)).numpy()

    def updates_of(self, rows: torch.Tensor, asked: Asked) -> torch.Tensor:
        return rows - asked.start if self.ranges.perturb is Perturb.WEIGHTS else rows

    @property
    def needs_sum(self) -> str:
        if not self.shuffled:
            return ""
        return "a shuffler hands on what was reported per weight, and nobody's report as a whole"

    def noise_length(self, ids: Ids, clip: Clip | None, moving: torch.Tensor, size: int) -> float:
        return float(self._points(moving)[1].double().norm()) * math.sqrt(len(ids))

    def _points(self, moving: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where reports lie: the centre of every coordinate, and how far to either side."""
        centre, radius = self.ranges.per_coordinate(moving)
        return centre, radius * self.mechanism.kappa


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
        raise BadInput(f"shuffle.minimum is {shuffled}: at least 1 report is needed")
    if dishonest < 0 or (dishonest and not shuffled):
        raise BadInput(f"shuffle.dishonest is {dishonest}: 0 or more, behind a shuffler")
    if shuffled + dishonest > sampler.expected(population):
        raise BadInput(
            f"shuffle.minimum is {shuffled}, shuffle.dishonest is {dishonest}, and a round has "
            f"{sampler.expected(population):g} clients: lower one or ask more clients"
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
        release=TwoPointReports(mechanism, ranges, shuffled + dishonest),
        lines=(*lines, weight),
        parameters=sum(ranges.sizes),
    )
    if plan.permitted < 1:
        raise BadInput(
            f"budget.epsilon is {budget.epsilon:g} and one round of {alone.per:,} weights costs "
            f"{lines[0].claims(1)[0].short}: raise it, or leave it out to be told"
        )
    return plan


def honest_reports(plan: PrivacyPlan) -> int:
    """How many honest reports of a round the plan's claims count on; 0 without a shuffler."""
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
