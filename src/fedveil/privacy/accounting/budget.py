"""Budgets: what is charged, what it is worth, and how much of it is spent.

A plan has budget lines, a ledger stores them, and a claim is made from them: so what a ledger says
long after a run is what the run itself said.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from fedveil.privacy.accounting.composition import FINE, accountants_of, epsilon, rounds_within
from fedveil.privacy.accounting.events import Event, GaussianWithCurator

_MILESTONES = 32

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
        """Whether `round`, counting from 1, has a release."""
        return round in self.rounds if self.rounds else (round - 1) % self.every == 0

    def participations(self, rounds: int, extra_attempts: int = 0) -> int:
        """How often the unluckiest unit can have been concerned after `rounds` rounds.

        `extra_attempts` attempts were charged beyond each round's first. Any of them may be
        anybody's. Lines that list their rounds have no more releases than these.
        """
        if self.rounds:
            return len(self.rounds) if rounds else 0
        turns = min(-(-rounds // self.every), math.ceil(rounds * self.share))
        return (turns if self.cap is None else min(turns, self.cap)) + extra_attempts

    def with_extra_attempts(self, extra_attempts: int) -> "BudgetLine":
        """The line when `extra_attempts` attempts were made beyond each round's first.

        Each attempt is one more participation; with a curator, it is also one more release of his.
        """
        if not extra_attempts or not isinstance(self.event, GaussianWithCurator):
            return self
        return replace(self, event=replace(self.event, most=self.event.most + extra_attempts))

    def end_was_chosen(self, rounds: int, planned: int | None, extra_attempts: int = 0) -> bool:
        """Whether somebody may have chosen, by looking, how often a unit was concerned.

        `planned` is how many rounds were planned and fit the budget, None where that is not known;
        `extra_attempts` attempts were charged beyond each round's first.

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
        """The epsilon of a unit concerned so often, whoever decided that, when and why.

        Guarantee: docs/proofs/ending.md. The epsilon is the smaller of two. One is that of the
        largest number of participations in `planned` rounds: whatever was released is a function
        of them. The other is that of the next of a few numbers of participations (`early_ends`),
        which share `EARLY` of the line's delta among them.

        | edge | behaviour |
        |---|---|
        | as many participations as there can be | their own epsilon |
        | none of `early_ends` is as large | that of the largest number |
        | extra attempts were charged | `planned` more are counted, at most what `affords` admits |
        | epsilons that are added | their sum |
        """
        accountant = accountant or self.accountants[0]
        allowed = planned if extra_attempts else 0  # there may be as many of them as rounds
        most, line = self.participations(planned) + allowed, self.with_extra_attempts(allowed)
        if accountant is Accountant.PURE or participations >= most:
            return line._epsilon(participations, accountant, FINE)
        whole = line._epsilon(most, accountant, FINE)
        if extra_attempts and not self.reading and accountant is self.accountants[0]:
            whole = min(whole, self.budget.epsilon, self.vouched)  # no attempt is admitted beyond
        ends = early_ends(most)
        upto = next((end for end in ends if end >= participations), None)
        if upto is None:
            return whole
        return min(whole, line._epsilon(upto, accountant, FINE, EARLY / len(ends)))

    def whole_run(self, planned: int, extra_attempts: int = 0) -> Composed:
        """All `planned` rounds, which bound several units of a run that ended early."""
        allowed = planned if extra_attempts else 0
        most = self.participations(planned) + allowed
        return self.with_extra_attempts(allowed).composed(most)

    @cached_property
    def accountants(self) -> tuple[Accountant, ...]:
        """The accountants that know this event. The epsilon of the first one counts."""
        return accountants_of(self.event, self.relation)

    def claims(
        self, participations: int, holds_for: str = "everyone", *, interval: float = FINE
    ) -> tuple[PrivacyClaim, ...]:
        """What a unit concerned `participations` times is promised, by every accountant.

        A grid that is coarser than usual promises a little less, and takes less time.
        """
        composed, claims = self.composed(participations), []
        for accountant in self.accountants:
            epsilon = self._epsilon(participations, accountant, interval)
            claims.append(self.claim(epsilon, accountant, holds_for, composed))
        return tuple(claims)

    def composed(self, participations: int) -> Composed:
        """What is composed for a unit that is concerned so often."""
        return Composed(self.event, self.per * participations, self.slip, self.vouched)

    def claim(
        self,
        epsilon: float,
        accountant: Accountant | None = None,
        holds_for: str = "everyone",
        composed: Composed | None = None,
    ) -> PrivacyClaim:
        """What this line promises with that epsilon, by an accountant, None the one that counts.

        `composed` is what the epsilon belongs to, without which the claim is about one unit only.
        """
        accountant = accountant or self.accountants[0]
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
        """How many of `planned` rounds fit the budget."""
        accountant, budget = self.accountants[0], self.budget
        if math.isinf(budget.epsilon):
            return planned
        if self._epsilon(self.participations(planned), accountant, FINE) <= budget.epsilon:
            return planned
        affordable = rounds_within(
            self.event, budget.epsilon, budget.delta - self.slip, self.relation, accountant
        )

        def releases(rounds: int) -> int:
            return self.per * self.participations(rounds)

        return max(0, bisect_right(range(planned), affordable, key=releases) - 1)

    def affords(self, participations: int) -> bool:
        """Whether a unit may be concerned so often: within the budget, and what is vouched for."""
        most = min(self.budget.epsilon, self.vouched)
        return math.isinf(most) or (
            self._epsilon(participations, self.accountants[0], FINE) <= most
        )

    def early_epsilons(self, most: int) -> tuple[float, ...]:
        """`epsilon_if_ended` for 0..most - 1 of `most` participations, on a coarse grid."""
        first, ends = self.accountants[0], early_ends(most)
        whole = self._epsilon(most, first, 10 * FINE)
        values, before = [0.0], 0
        for end in ends:
            own = self._epsilon(end, first, 10 * FINE, EARLY / len(ends))
            values += [min(whole, own)] * (end - before)
            before = end
        return (*values, *[whole] * (most - len(values)))

    def epsilon_curve(self, most: int) -> tuple[float, ...]:
        """An upper bound on epsilon after each of 0..most participations, cheap enough to display.

        Exact, but for a coarse grid, up to 32 participations; beyond that the value at the next
        of 32 milestones, since epsilon only grows.
        """
        step = -(-most // _MILESTONES)
        milestones = [min(k * step, most) for k in range(-(-most // step) + 1)]
        values = [self._epsilon(m, self.accountants[0], 10 * FINE) for m in milestones]
        return tuple(values[-(-count // step)] for count in range(most + 1))

    def _epsilon(
        self, participations: int, accountant: Accountant, interval: float, share: float = 1.0
    ) -> float:
        delta = 0.0 if accountant is Accountant.PURE else share * (self.budget.delta - self.slip)
        count = self.per * participations
        return epsilon(self.event, count, delta, self.relation, accountant, interval=interval)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the ledger."""
        values, row = {**vars(self), **vars(self.budget)}, {}
        for name, (write, _) in _COLUMNS.items():
            row[name] = write(values[name])
        return {**row, "rounds": list(self.rounds)} if self.rounds else row

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        try:
            values = {}
            for name, (_, read) in _COLUMNS.items():
                values[name] = read(raw[name])
            budget = Budget(values.pop("epsilon"), values.pop("delta"))
            rounds = tuple(int(round) for round in raw.get("rounds", ()))
            return cls(budget=budget, rounds=rounds, **values)
        except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as e:
            raise BadInput(f"a budget line cannot be read: {e}") from e


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


_COLUMNS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "covers": (str, str),
    "event": (events.to_dict, events.from_dict),
    "share": (str, Fraction),
    "every": (int, int),
    "per": (int, int),
    "cap": (_optional_int, _optional_int),
    "epsilon": (str, float),
    "delta": (float, float),
    "unit": (str, Unit),
    "relation": (str, Relation),
    "trust": (str, Trust),
    "noise": (str, NoiseSource),
    "as_published": (bool, bool),
    "reading": (bool, bool),
    "members": (_optional_int, _optional_int),
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
    """The claims of all lines after `rounds` rounds, for everyone or for worst and median.

    `extra_attempts` attempts were charged beyond each round's first; any of them may be anybody's.

    Guarantee: docs/proofs/ending.md. Where fewer rounds were done than were `planned` and fit the
    budget, or some were done again, a claim without a condition holds whoever decided that and why.
    The smaller claim of the same line, which holds if nothing released decided it, follows with
    that condition. Metrics of clients make no claim of their own (`OF_CLIENTS`).
    """
    claims: list[PrivacyClaim] = []
    for line in lines:
        if line.covers == OF_CLIENTS:
            continue
        done = line.with_extra_attempts(extra_attempts)
        most = done.participations(rounds, extra_attempts)
        if line.as_published:
            known = done.claims(most)
            claims.append(next((c for c in known if c.accountant is Accountant.PURE), known[0]))
            continue
        whose = _whose(line, most, None if line.rounds else counts)
        conditional = []
        for turns, who in whose:
            conditional.append(done.claims(turns, who))
        headline = conditional
        if planned is not None and line.end_was_chosen(rounds, planned, extra_attempts):
            whole, headline = line.whole_run(planned, extra_attempts), []
            for turns, who in whose:
                epsilons = {
                    a: line.epsilon_if_ended(turns, planned, extra_attempts, a)
                    for a in line.accountants
                }
                headline.append(tuple(line.claim(e, a, who, whole) for a, e in epsilons.items()))
        claims += [*headline[0], *(each[0] for each in headline[1:])]
        if conditional[0][0].epsilon < headline[0][0].epsilon:
            claims.append(replace(conditional[0][0], condition=NOT_DECIDED))
    return tuple(claims)


def _whose(
    line: BudgetLine, most: int, counts: npt.NDArray[np.int64] | None
) -> list[tuple[int, str]]:
    """(participations, holds for) of the claims to make: the unluckiest first, then the median."""
    if counts is None:
        return [(most, "everyone")]
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
    rounds they are computed once for all of them, on a coarse grid (`BudgetLine.epsilon_curve`).

    Attributes:
        line: The line of the budget that counts.
        rounds: The number of planned rounds.
        permitted: How many of them fit the budget.
    """

    line: BudgetLine
    rounds: int
    permitted: int | None = None

    def spent(self, rounds: int, turns: int | None = None, extra_attempts: int = 0) -> PrivacyClaim:
        """The claim for `rounds` rounds, if their releases do not end the run.

        With `turns`, how often the most frequent client took part, it is that client's; otherwise
        `extra_attempts` attempts were charged beyond each round's first.
        """
        line = self.line.with_extra_attempts(extra_attempts)
        most = self.line.participations(rounds) + extra_attempts if turns is None else turns
        if line is self.line and most < len(self._curve):
            claim = line.claim(self._curve[most], composed=line.composed(most))
        else:
            claim = line.claims(most)[0]
        chosen = line.end_was_chosen(rounds, self.permitted, extra_attempts)
        return replace(claim, condition=NOT_DECIDED) if chosen else claim

    def claim_if_ended(
        self, rounds: int, turns: int | None = None, extra_attempts: int = 0
    ) -> PrivacyClaim:
        """The claim to quote if the run ends after `rounds` rounds, whatever the reason."""
        line, planned = self.line, self.permitted
        spent = self.spent(rounds, turns, extra_attempts)
        if planned is None or not spent.condition:
            return spent
        most = line.participations(rounds) + extra_attempts if turns is None else turns
        if extra_attempts or most >= len(self._early):
            epsilon = line.epsilon_if_ended(most, planned, extra_attempts)
        else:
            epsilon = self._early[most]
        return line.claim(epsilon, composed=line.whole_run(planned, extra_attempts))

    @cached_property
    def _curve(self) -> tuple[float, ...]:
        return self.line.epsilon_curve(self.line.participations(self.rounds))

    @cached_property
    def _early(self) -> tuple[float, ...]:
        """What to quote after fewer participations than there can be in the permitted rounds."""
        return self.line.early_epsilons(self.line.participations(self.permitted or self.rounds))
