"""`BudgetLine`: what is charged and what it is worth, without the parts that do the work.

A plan has budget lines, a ledger stores them, and a claim is made from them: so what a ledger says
long after a run is what the run itself said.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting import events
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.calibration import rounds_within
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
from fedveil.privacy.accounting.composition import FINE, epsilon, supports
from fedveil.privacy.accounting.events import Event, GaussianWithCurator

_MILESTONES = 32

EARLY = 1 / 100
"""The share of delta that pays for all numbers of rounds at which a run may be ended."""

NOT_DECIDED = "what was released did not decide how many rounds were done"
"""The condition of the smaller claim where a run was ended early, or rounds were done again."""


@dataclass(frozen=True, kw_only=True)
class BudgetLine:
    """One line of a budget: which event, how often it concerns a unit, and what is promised.

    There is a release in rounds 1, 1 + every, 1 + 2 every, ...; a unit takes part in a `share`
    of the rounds, any of which may have a release, and in at most `cap` of them (None: no limit),
    with `per` events each time. A
    `reading` is another account of a release that is charged on another line: it adds a claim and
    no charge. `members` is the number of clients a line is about, None when it is everyone. `slip`
    is the part of delta that pays for the sampler of secure noise; a pure claim has it as delta.
    It pays for epsilons up to `vouched`; an account that comes to more is told as not vouched for.

    `rounds`, where they are listed, are the only ones with a release, and it concerns everybody
    that the line is about, whoever takes part. All of them count from the first round on, so that a
    claim holds whoever decides when to stop. There are never more releases than rounds in the list:
    the ledger refuses one more, also of a round that is done again (`Ledger.charge_measurement`).
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

    def participations(self, rounds: int) -> int:
        """How often the unluckiest unit can have been concerned after `rounds` rounds."""
        if self.rounds:
            return len(self.rounds) if rounds else 0
        turns = min(-(-rounds // self.every), math.ceil(rounds * self.share))
        return turns if self.cap is None else min(turns, self.cap)

    def with_repeats(self, rounds: int, extra_attempts: int) -> int:
        """The same when `extra_attempts` attempts were charged beyond each round's first.

        Any of them may be anybody's. Lines that list their rounds have no more releases than these.
        """
        return self.participations(rounds) + (0 if self.rounds else extra_attempts)

    def after(self, extra_attempts: int) -> "BudgetLine":
        """The line when `extra_attempts` attempts were made beyond each round's first.

        Each attempt is one more participation; with a curator, it is also one more release of his.
        """
        if not extra_attempts or not isinstance(self.event, GaussianWithCurator):
            return self
        return replace(self, event=replace(self.event, most=self.event.most + extra_attempts))

    def chosen(self, rounds: int, planned: int | None, extra_attempts: int = 0) -> bool:
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

    def ended(
        self,
        participations: int,
        planned: int,
        extra_attempts: int = 0,
        accountant: Accountant | None = None,
    ) -> float:
        """The epsilon of a unit concerned so often, whoever decided that, when and why.

        Guarantee: docs/proofs/ending.md. The epsilon is the smaller of two. One is that of the
        largest number of participations that `planned` rounds can come to: whatever was released
        is a function of them. The other is that of the next of a few numbers of participations
        (`early_ends`), which share `EARLY` of the line's delta among them.

        | edge | behaviour |
        |---|---|
        | as many participations as there can be | their own epsilon |
        | none of `early_ends` is as large | that of the largest number |
        | extra attempts were charged | `planned` more are counted, at most what `affords` admits |
        | epsilons that are added | their sum |
        """
        accountant = accountant or self.accountants[0]
        most = self.most(planned, extra_attempts)
        line = self.after(planned if extra_attempts else 0)
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

    def most(self, planned: int, extra_attempts: int = 0) -> int:
        """The most participations that `planned` rounds can come to.

        Where extra attempts were charged, there may be as many of them as rounds.
        """
        return self.participations(planned) + (planned if extra_attempts else 0)

    def whole(self, planned: int, extra_attempts: int = 0) -> Composed:
        """All `planned` rounds: what several units of a run that ended early are bounded by."""
        most = self.most(planned, extra_attempts)
        return self.after(planned if extra_attempts else 0).composed(most)

    @cached_property
    def accountants(self) -> tuple[Accountant, ...]:
        """The accountants that know this event. The epsilon of the first one counts."""
        known = tuple(a for a in Accountant if supports(self.event, self.relation, a))
        if not known:
            raise BadInput(f"no accountant knows {self.event} under {self.relation}")
        return known

    def claims(
        self, participations: int, holds_for: str = "everyone", *, interval: float = FINE
    ) -> tuple[PrivacyClaim, ...]:
        """What a unit concerned `participations` times is promised, by every accountant.

        A grid that is coarser than usual promises a little less, and is found sooner.
        """
        composed = self.composed(participations)
        return tuple(
            self.claim(self._epsilon(participations, a, interval), a, holds_for, composed)
            for a in self.accountants
        )

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

    def permitted(self, planned: int) -> int:
        """How many of `planned` rounds fit the budget."""
        accountant, budget = self.accountants[0], self.budget
        if math.isinf(budget.epsilon):
            return planned
        if self._epsilon(self.participations(planned), accountant, FINE) <= budget.epsilon:
            return planned
        affordable = rounds_within(
            self.event, budget.epsilon, budget.delta - self.slip, self.relation, accountant
        )
        low, high = 0, planned
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.per * self.participations(middle) <= affordable
            low, high = (middle, high) if fits else (low, middle)
        return low

    def affords(self, participations: int) -> bool:
        """Whether a unit may be concerned so often: within the budget, and what is vouched for."""
        most = min(self.budget.epsilon, self.vouched)
        return math.isinf(most) or (
            self._epsilon(participations, self.accountants[0], FINE) <= most
        )

    def early(self, most: int) -> tuple[float, ...]:
        """`ended` for 0..most - 1 of `most` participations, each once: on a coarse grid."""
        first, ends = self.accountants[0], early_ends(most)
        whole = self._epsilon(most, first, 10 * FINE)
        values, before = [0.0], 0
        for end in ends:
            own = self._epsilon(end, first, 10 * FINE, EARLY / len(ends))
            values += [min(whole, own)] * (end - before)
            before = end
        return (*values, *[whole] * (most - len(values)))

    def curve(self, most: int) -> tuple[float, ...]:
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
        return {
            "covers": self.covers,
            "event": events.to_dict(self.event),
            "share": str(self.share),
            "every": self.every,
            "per": self.per,
            "cap": self.cap,
            "epsilon": str(self.budget.epsilon),
            "delta": self.budget.delta,
            "unit": str(self.unit),
            "relation": str(self.relation),
            "trust": str(self.trust),
            "noise": str(self.noise),
            "as_published": self.as_published,
            "reading": self.reading,
            "members": self.members,
            "slip": self.slip,
            "vouched": str(self.vouched),
            "assumptions": list(self.assumptions),
            **({"rounds": list(self.rounds)} if self.rounds else {}),
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "BudgetLine":
        """Inverse of `to_dict`."""
        try:
            return cls(
                covers=str(raw["covers"]),
                event=events.from_dict(raw["event"]),
                share=Fraction(raw["share"]),
                every=int(raw["every"]),
                per=int(raw["per"]),
                cap=None if raw["cap"] is None else int(raw["cap"]),
                budget=Budget(float(raw["epsilon"]), float(raw["delta"])),
                unit=Unit(raw["unit"]),
                relation=Relation(raw["relation"]),
                trust=Trust(raw["trust"]),
                noise=NoiseSource(raw["noise"]),
                as_published=bool(raw["as_published"]),
                reading=bool(raw["reading"]),
                members=None if raw["members"] is None else int(raw["members"]),
                slip=float(raw["slip"]),
                vouched=float(raw["vouched"]),
                assumptions=tuple(str(a) for a in raw["assumptions"]),
                rounds=tuple(int(round) for round in raw.get("rounds", ())),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as e:
            raise BadInput(f"a budget line cannot be read: {e}") from e


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
        done = line.after(extra_attempts)
        most = done.with_repeats(rounds, extra_attempts)
        if line.as_published:
            known = done.claims(most)
            claims.append(next((c for c in known if c.accountant is Accountant.PURE), known[0]))
            continue
        whose = _whose(line, most, None if line.rounds else counts)
        fixed = [done.claims(turns, who) for turns, who in whose]
        kept = fixed
        if planned is not None and line.chosen(rounds, planned, extra_attempts):
            whole = line.whole(planned, extra_attempts)
            kept = [
                tuple(
                    line.claim(line.ended(turns, planned, extra_attempts, a), a, who, whole)
                    for a in line.accountants
                )
                for turns, who in whose
            ]
        claims += [*kept[0], *(each[0] for each in kept[1:])]
        if fixed[0][0].epsilon < kept[0][0].epsilon:
            claims.append(replace(fixed[0][0], condition=NOT_DECIDED))
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
