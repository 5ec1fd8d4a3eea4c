"""Budgets: what is charged, what it is worth, and how much of it is spent.

A plan has budget lines, a ledger stores them, and a claim is made from them: so what a ledger says
long after a run is what the run itself said.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import BUDGET, DELTA
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting import events
from fedveil.privacy.accounting.claims import (
    OF_CLIENTS,
    Accountant,
    Composed,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.composition import (
    FINE,
    accountants_of,
    epsilon,
    quick_interval,
    rounds_within,
)
from fedveil.privacy.accounting.events import Event, GaussianWithCurator

EARLY = 1 / 100
"""The share of delta that pays for all numbers of rounds at which a run may be ended."""

NOT_DECIDED = "what was released did not decide how many rounds were done"
"""The condition of the smaller claim where a run was ended early, or rounds were done again."""


@dataclass(frozen=True)
class Budget:
    """The epsilon that may be spent at a fixed delta. If infinite, it is only reported."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        """Raise BadArgument unless epsilon is positive (or infinite) and 1e-100 <= delta < 1."""
        BUDGET.check("epsilon", self.epsilon)
        DELTA.check("delta", self.delta)


@dataclass(frozen=True, kw_only=True)
class BudgetLine:
    """One line of a budget: which event, how often it concerns a unit, and what is promised.

    There is a release in rounds 1, 1 + every, 1 + 2 every, ...; a unit takes part in a `share`
    of the rounds, any of which may have a release, and in at most `cap` of them, with `per` events
    each time.

    Attributes:
        event: What one release is.
        budget: The epsilon that may be spent, and delta.
        unit: Whom the claim is about.
        relation: Which two data sets count as neighbours.
        trust: Who sees what clients do not randomise themselves.
        noise: Where the noise comes from.
        assumptions: The conditions under which the claim holds.
        share: The share of the rounds in which a unit takes part.
        every: The number of rounds from one release to the next.
        per: Events of each participation.
        cap: The largest number of participations. None: no limit.
        covers: What is released, in words.
        as_published: Whether this is a paper's formula, and no guarantee.
        reading: Whether this is another account of a release that is charged on another line. It
            adds a claim and no charge.
        members: The number of clients that the line is about. None: everyone.
        slip: The part of delta that pays for the sampler of secure noise. A pure claim has it as
            delta.
        vouched: The largest epsilon for which `slip` is enough. Above, a claim is not vouched for.
        rounds: The only rounds with a release, where they are listed. It concerns everybody that
            the line is about, whoever takes part. All of them count from the first round on, so
            that a claim holds whoever decides when to stop. There are never more releases than
            rounds in the list: the ledger refuses one more, also of a round that is done again
            (`Ledger.charge_measurement`).
    """

    event: Event
    budget: Budget
    unit: Unit
    relation: Relation
    trust: Trust
    noise: NoiseSource
    assumptions: tuple[str, ...]
    share: Fraction = Fraction(1)
    every: int = 1
    per: int = 1
    cap: int | None = None
    covers: str = "updates"
    as_published: bool = False
    reading: bool = False
    members: int | None = None
    slip: float = 0.0
    vouched: float = math.inf
    rounds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise BadInput for a share, count, slip or list of rounds outside its limits."""
        if not 0 < self.share <= 1:
            raise BadInput(f"share is {self.share}: a number in (0, 1] is needed")
        for name in ("every", "per", "cap", "members"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"{name} is {value}: at least 1 is needed")
        if not 0 <= self.slip < self.budget.delta:
            raise BadInput(f"slip is {self.slip:g}: a number from 0 to below delta is needed")
        if list(self.rounds) != sorted({round for round in self.rounds if round >= 1}):
            raise BadInput(f"rounds are {self.rounds}: numbers from 1 on, each above the last")

    def due(self, round: int) -> bool:
        """Whether `round`, counting from 1, has a release: one of `rounds`, if they are listed.

        Otherwise rounds 1, 1 + every, 1 + 2 every, ... have one.
        """
        return round in self.rounds if self.rounds else (round - 1) % self.every == 0

    def participations(self, rounds: int, extra_attempts: int = 0) -> int:
        """The largest number of participations of one unit in `rounds` rounds.

        `extra_attempts` attempts were charged beyond each round's first, and each of them adds one:
        it may be anybody's. For a line that lists its rounds it is the length of the list, 0 before
        the first round.
        """
        if self.rounds:
            return len(self.rounds) if rounds else 0
        turns = min(-(-rounds // self.every), math.ceil(rounds * self.share))
        return (turns if self.cap is None else min(turns, self.cap)) + extra_attempts

    def with_extra_attempts(self, extra_attempts: int) -> "BudgetLine":
        """The line when `extra_attempts` attempts were made beyond each round's first.

        With a curator, each attempt is one more release of his in the event. Other lines stay as
        they are: their participations count attempts.
        """
        if not extra_attempts or not isinstance(self.event, GaussianWithCurator):
            return self
        return replace(self, event=replace(self.event, most=self.event.most + extra_attempts))

    def end_was_chosen(self, rounds: int, planned: int | None, extra_attempts: int = 0) -> bool:
        """Whether somebody may have chosen, by looking, how often a unit took part.

        Args:
            rounds: The number of rounds that were done.
            planned: The number that was planned and fits the budget. None: not known, so False.
            extra_attempts: Attempts that were charged beyond each round's first.

        | edge | behaviour |
        |---|---|
        | all planned rounds were done, each once, or none was done | no |
        | as published | no: it is not a guarantee in either case |
        | epsilons that are added | no: they hold whoever decides |
        | rounds are listed | no: all of them count from the first on |
        """
        if planned is None or self.rounds:
            return False
        if rounds == 0 or not (rounds < planned or extra_attempts):
            return False
        return not self.as_published and self.accountants[0] is not Accountant.PURE

    def epsilon_if_ended(
        self,
        participations: int,
        planned: int,
        extra_attempts: int = 0,
        accountant: Accountant | None = None,
    ) -> float:
        """The epsilon of a unit with so many participations, whoever decided that, when and why.

        Args:
            participations: How often the unit took part.
            planned: The number of rounds that was planned and fits the budget.
            extra_attempts: Attempts that were charged beyond each round's first.
            accountant: The accountant, None for the one that counts.

        Guarantee: docs/proofs/ending.md. The epsilon is the smaller of two. One is that of the
        largest number of participations in `planned` rounds: whatever was released is a function of
        them. The other is that of the next of a few numbers of participations (`early_ends`), which
        share `EARLY` of the line's delta among them.

        | edge | behaviour |
        |---|---|
        | as many participations as there can be | their own epsilon |
        | none of `early_ends` is as large | that of the largest number |
        | extra attempts were charged | `planned` more are counted, at most what `affords` admits |
        | epsilons that are added | their sum |
        """
        accountant = accountant or self.accountants[0]
        line, most = self.whole_run(planned, extra_attempts)
        if accountant is Accountant.PURE or participations >= most:
            return line.epsilon_of(participations, accountant, FINE)
        whole = line.epsilon_of(most, accountant, FINE)
        if extra_attempts and not self.reading and accountant is self.accountants[0]:
            whole = min(whole, self.budget.epsilon, self.vouched)  # no attempt is admitted beyond
        ends = early_ends(most)
        upto = next((end for end in ends if end >= participations), None)
        if upto is None:
            return whole
        return min(whole, line.epsilon_of(upto, accountant, FINE, EARLY / len(ends)))

    def whole_run(self, planned: int, extra_attempts: int = 0) -> tuple["BudgetLine", int]:
        """(the line, the largest number of participations) of all `planned` rounds.

        If there were extra attempts, as many as rounds are counted: the ledger permits no more.
        """
        allowed = planned if extra_attempts else 0
        return self.with_extra_attempts(allowed), self.participations(planned) + allowed

    @cached_property
    def accountants(self) -> tuple[Accountant, ...]:
        """The accountants that know this event. The epsilon of the first one counts.

        Raises BadInput if none knows it.
        """
        return accountants_of(self.event, self.relation)

    def claims(
        self, participations: int, holds_for: str = "everyone", *, interval: float = FINE
    ) -> tuple[PrivacyClaim, ...]:
        """The claims of a unit that took part `participations` times, one for each accountant.

        The first one counts. `holds_for` is for whom they hold. A coarser `interval` of the grid
        promises a little less, and takes less time.
        """
        claims = []
        for accountant in self.accountants:
            epsilon = self.epsilon_of(participations, accountant, interval)
            claims.append(self.claim(epsilon, accountant, holds_for, participations))
        return tuple(claims)

    def claim(
        self,
        epsilon: float,
        accountant: Accountant | None = None,
        holds_for: str = "everyone",
        participations: int | None = None,
    ) -> PrivacyClaim:
        """The claim of this line with that epsilon.

        Args:
            epsilon: The epsilon of the claim.
            accountant: The accountant that computed it, None for the one that counts.
            holds_for: For which clients the claim holds.
            participations: How many participations it is about, recorded in the claim so that it
                can be extended to several units. None: not recorded.
        """
        accountant, composed = accountant or self.accountants[0], None
        if participations is not None:
            composed = Composed(self.event, self.per * participations, self.slip, self.vouched)
        return PrivacyClaim(
            epsilon=epsilon,
            delta=self.slip if accountant is Accountant.PURE else self.budget.delta,
            unit=self.unit,
            neighbours=self.relation,
            trust=self.trust,
            accountant=accountant,
            noise=self.noise,
            as_published=self.as_published,
            vouched=epsilon <= self.vouched,
            assumptions=self.assumptions,
            holds_for=holds_for,
            covers=self.covers,
            composed=composed,
        )

    def permitted_rounds(self, planned: int) -> int:
        """How many of `planned` rounds fit the budget, from 0 to `planned`."""
        accountant, budget = self.accountants[0], self.budget
        if math.isinf(budget.epsilon):
            return planned
        if self.epsilon_of(self.participations(planned), accountant, FINE) <= budget.epsilon:
            return planned
        affordable = rounds_within(
            self.event, budget.epsilon, budget.delta - self.slip, self.relation, accountant
        )

        def releases(rounds: int) -> int:
            return self.per * self.participations(rounds)

        return max(0, bisect_right(range(planned), affordable, key=releases) - 1)

    def affords(self, participations: int) -> bool:
        """Whether so many participations are within the budget, and within what is vouched for."""
        most = min(self.budget.epsilon, self.vouched)
        return math.isinf(most) or (
            self.epsilon_of(participations, self.accountants[0], FINE) <= most
        )

    def epsilon_of(
        self, participations: int, accountant: Accountant, interval: float, share: float = 1.0
    ) -> float:
        """The epsilon of `participations` by one accountant, on a grid of `interval`.

        It is at a `share` of the line's delta, of which `slip` is taken off first. By adding
        epsilons, delta is 0.
        """
        delta = 0.0 if accountant is Accountant.PURE else share * (self.budget.delta - self.slip)
        count = self.per * participations
        return epsilon(self.event, count, delta, self.relation, accountant, interval=interval)

    def to_dict(self) -> dict[str, Any]:
        """The line as JSON values, for the ledger: one key per field, in the order of `_COLUMNS`.

        The budget is "epsilon" (a string) and "delta". "rounds" is there only if rounds are listed.
        """
        values, row = {**vars(self), **vars(self.budget)}, {}
        for name, (write, _) in _COLUMNS.items():
            row[name] = None if values[name] is None else write(values[name])
        return {**row, "rounds": list(self.rounds)} if self.rounds else row

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """The line that `to_dict` wrote. Raises BadInput if it cannot be read."""
        try:
            values: dict[str, Any] = {}
            for name, (_, read) in _COLUMNS.items():
                missing = raw[name] is None and name in _OPTIONAL
                values[name] = None if missing else read(raw[name])
            budget = Budget(values.pop("epsilon"), values.pop("delta"))
            rounds = tuple(int(round) for round in raw.get("rounds", ()))
            return cls(budget=budget, rounds=rounds, **values)
        except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as e:
            raise BadInput(f"a budget line cannot be read: {e}") from e


_OPTIONAL = ("cap", "members")
_COLUMNS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "covers": (str, str),
    "event": (events.to_dict, events.from_dict),
    "share": (str, Fraction),
    "every": (int, int),
    "per": (int, int),
    "cap": (int, int),
    "epsilon": (str, float),
    "delta": (float, float),
    "unit": (str, Unit),
    "relation": (str, Relation),
    "trust": (str, Trust),
    "noise": (str, NoiseSource),
    "as_published": (bool, bool),
    "reading": (bool, bool),
    "members": (int, int),
    "slip": (float, float),
    "vouched": (str, float),
    "assumptions": (list, lambda texts: tuple(map(str, texts))),
}
"""How a budget line's values are written as JSON, and read."""


def early_ends(most: int) -> tuple[int, ...]:
    """The numbers of participations, below `most`, that have an epsilon of their own.

    There are four for each doubling: one for every number would leave each of them little delta.

    >>> early_ends(40)
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
    """
    ends, end = list[int](), 1
    while end < most:
        ends.append(end)
        end += 1 << max(0, end.bit_length() - 3)
    return tuple(ends)


def claims_of(
    lines: tuple[BudgetLine, ...],
    rounds: int,
    counts: npt.NDArray[np.int64] | None,
    extra_attempts: int = 0,
    planned: int | None = None,
) -> tuple[PrivacyClaim, ...]:
    """The claims of all lines after `rounds` rounds, for everyone or for worst and median client.

    Args:
        lines: The lines. Metrics of clients (`OF_CLIENTS`) make no claim of their own.
        rounds: The number of rounds that were charged.
        counts: How often each client took part [N]. None: every client as often as it can have.
        extra_attempts: Attempts that were charged beyond each round's first. Any may be anybody's.
        planned: The number of rounds that was planned and fits the budget, None if not known.

    Guarantee: docs/proofs/ending.md. Where fewer rounds were done than were `planned`, or some were
    done again, a claim without a condition holds whoever decided that and why. The smaller claim of
    the same line, which holds if nothing released decided it, follows with that condition.
    """
    claims: list[PrivacyClaim] = []
    for line in lines:
        if line.covers == OF_CLIENTS:
            continue
        done = line.with_extra_attempts(extra_attempts) if extra_attempts else line
        most = done.participations(rounds, extra_attempts)
        if line.as_published:
            known = done.claims(most)
            claims.append(next((c for c in known if c.accountant is Accountant.PURE), known[0]))
            continue
        whose = [(most, "everyone")]
        if counts is not None and not line.rounds:
            whose = _worst_and_median(line, most, counts)
        conditional = [done.claims(turns, who) for turns, who in whose]
        headline = conditional
        if planned is not None and line.end_was_chosen(rounds, planned, extra_attempts):
            (whole, every), headline = line.whole_run(planned, extra_attempts), []
            for turns, who in whose:
                each = []
                for accountant in line.accountants:
                    ended = line.epsilon_if_ended(turns, planned, extra_attempts, accountant)
                    each.append(whole.claim(ended, accountant, who, every))
                headline.append(tuple(each))
        claims += [*headline[0], *(others[0] for others in headline[1:])]
        if conditional[0][0].epsilon < headline[0][0].epsilon:
            claims.append(replace(conditional[0][0], condition=NOT_DECIDED))
    return tuple(claims)


def _worst_and_median(
    line: BudgetLine, most: int, counts: npt.NDArray[np.int64]
) -> list[tuple[int, str]]:
    """(participations, for whom the claim holds) of the most frequent client and of the median one.

    One pair for everyone if both are the same. For a line about some of the clients, the first pair
    only. `most` is the largest possible number, `counts` [N] how often each client took part.
    """
    worst, middle = int(counts.max()), math.ceil(np.median(counts))
    if line.every > 1:  # turns without a release of this line
        worst, middle = min(most, worst), min(most, middle)
    if line.members is not None:
        return [(worst, "the client that took part most")]
    if worst == middle:
        return [(worst, "everyone")]
    return [(worst, "the client that took part most"), (middle, "the median client")]


@dataclass(frozen=True)
class Spending:
    """The claim spent so far, and the claim if the run ends now, cheap enough for every round.

    Guarantee: both claims are upper bounds on what `claims_of` has for the line. Up to the planned
    rounds they are computed on a coarser grid (`epsilon_after`, `early_curve`).

    Attributes:
        line: The line of the budget that counts.
        rounds: The number of planned rounds.
        permitted: How many of them fit the budget.
    """

    line: BudgetLine
    rounds: int
    permitted: int | None = None
    _known: dict[int, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def spent(self, rounds: int, turns: int | None = None, extra_attempts: int = 0) -> PrivacyClaim:
        """The claim for `rounds` rounds, an upper bound.

        It has a condition if somebody may have chosen to end the run here.

        Args:
            rounds: The number of rounds that were charged.
            turns: How often the most frequent client took part. None: as often as it can have.
            extra_attempts: Attempts that were charged beyond each round's first.
        """
        line = self.line.with_extra_attempts(extra_attempts) if extra_attempts else self.line
        most = self.line.participations(rounds) + extra_attempts if turns is None else turns
        if line is self.line and most <= line.participations(self.rounds):
            claim = line.claim(self.epsilon_after(most), participations=most)
        else:
            claim = line.claims(most)[0]
        chosen = line.end_was_chosen(rounds, self.permitted, extra_attempts)
        return replace(claim, condition=NOT_DECIDED) if chosen else claim

    def claim_if_ended(
        self, rounds: int, turns: int | None = None, extra_attempts: int = 0
    ) -> PrivacyClaim:
        """The claim to quote if the run ends after `rounds` rounds, whatever the reason.

        It has no condition. Arguments are those of `spent`.
        """
        line, planned = self.line, self.permitted
        spent = self.spent(rounds, turns, extra_attempts)
        if planned is None or not spent.condition:
            return spent
        most = line.participations(rounds) + extra_attempts if turns is None else turns
        if extra_attempts or most >= len(self.early_curve):
            epsilon = line.epsilon_if_ended(most, planned, extra_attempts)
        else:
            epsilon = self.early_curve[most]
        whole, every = line.whole_run(planned, extra_attempts)
        return whole.claim(epsilon, participations=every)

    def epsilon_after(self, participations: int) -> float:
        """The epsilon of so many participations, at most those of the planned rounds.

        Guarantee: docs/proofs/ending.md. An upper bound, computed when it is first needed. Up to
        256 participations each has its own epsilon; beyond, each of 128 numbers per doubling, and
        those between two of them have that of the next one. The grid is coarser than that of a
        claim, so none is above the epsilon of all planned rounds on the fine grid.
        """
        most = self.line.participations(self.rounds)
        step = 1 << max(0, (participations - 1).bit_length() - 8)
        point = min(-(-participations // step) * step, most)
        if point not in self._known:
            line, first = self.line, self.line.accountants[0]
            whole = line.epsilon_of(most, first, FINE)
            own = line.epsilon_of(point, first, quick_interval(line.event))
            self._known[point] = min(own, whole)
        return self._known[point]

    @cached_property
    def early_curve(self) -> tuple[float, ...]:
        """`BudgetLine.epsilon_if_ended` after each number of participations below the largest.

        On a coarse grid, for the permitted rounds.
        """
        line, most = self.line, self.line.participations(self.permitted or self.rounds)
        first, ends = line.accountants[0], early_ends(most)
        whole = line.epsilon_of(most, first, 10 * FINE)
        values, before = [0.0], 0
        for end in ends:
            own = line.epsilon_of(end, first, 10 * FINE, EARLY / len(ends))
            values += [min(whole, own)] * (end - before)
            before = end
        return (*values, *[whole] * (most - len(values)))
