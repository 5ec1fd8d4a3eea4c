"""`BudgetLine`: what is charged and what it is worth, without the parts that do the work.

A plan has budget lines, a ledger stores them, and a claim is made from them: so what a ledger says
long after a run is what the run itself said.
"""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.errors import BadInput
from fedveil.privacy.accounting import events
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.calibration import rounds_within
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.composition import FINE, epsilon, supports
from fedveil.privacy.accounting.events import Event, GaussianWithCurator

_MILESTONES = 32


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
    rounds: tuple[int, ...] = field(default=(), metadata={"later": True})

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

    def with_repeats(self, rounds: int, again: int) -> int:
        """The same when `again` attempts were charged beyond each round's first.

        Any of them may be anybody's. Lines that list their rounds have no more releases than these.
        """
        return self.participations(rounds) + (0 if self.rounds else again)

    def after(self, again: int) -> "BudgetLine":
        """The line when `again` attempts were made beyond each round's first.

        Each attempt is one more participation; with a curator, it is also one more release of his.
        """
        if not again or not isinstance(self.event, GaussianWithCurator):
            return self
        return replace(self, event=replace(self.event, most=self.event.most + again))

    def so_far(self, rounds: int, planned: int | None) -> "BudgetLine":
        """The line when `rounds` of `planned` rounds are done; None, it is not known how many.

        Guarantee: docs/proofs/ending.md. A claim of fewer rounds than were planned assumes that
        what was released did not decide how many there are, and says what to quote if it did. One
        that adds epsilons holds whoever decides.

        | edge | behaviour |
        |---|---|
        | all rounds are done, or none | the line as it is |
        | as published | the line as it is: it is no guarantee |
        | rounds are listed | the line as it is: all of them count already |
        | no budget | all planned rounds count if what was released decided |
        """
        if planned is None or not 0 < rounds < planned:
            return self
        if self.rounds or self.as_published or self.accountants[0] is Accountant.PURE:
            return self
        otherwise = f"count all {planned}"
        if math.isfinite(self.budget.epsilon):
            otherwise = f"quote the budget, {self.claim(self.budget.epsilon).short}"
        text = (
            f"what was released is not why only {rounds} of {planned} rounds were done; if it is, "
            f"{otherwise}"
        )
        return replace(self, assumptions=(*self.assumptions, text))

    @cached_property
    def accountants(self) -> tuple[Accountant, ...]:
        """The accountants that know this event; the epsilon of the first one counts."""
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
        return tuple(
            self.claim(self._epsilon(participations, a, interval), a, holds_for)
            for a in self.accountants
        )

    def claim(
        self, epsilon: float, accountant: Accountant | None = None, holds_for: str = "everyone"
    ) -> PrivacyClaim:
        """What this line promises with that epsilon, by an accountant, None the one that counts."""
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

    def curve(self, most: int) -> tuple[float, ...]:
        """An upper bound on epsilon after each of 0..most participations, cheap enough to display.

        Exact, but for a coarse grid, up to 32 participations; beyond that the value at the next
        of 32 milestones, since epsilon only grows.
        """
        step = -(-most // _MILESTONES)
        milestones = [min(k * step, most) for k in range(-(-most // step) + 1)]
        values = [self._epsilon(m, self.accountants[0], 10 * FINE) for m in milestones]
        return tuple(values[-(-count // step)] for count in range(most + 1))

    def _epsilon(self, participations: int, accountant: Accountant, interval: float) -> float:
        delta = 0.0 if accountant is Accountant.PURE else self.budget.delta - self.slip
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
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as e:
            raise BadInput(f"a budget line cannot be read: {e}") from e


def claims_of(
    lines: tuple[BudgetLine, ...],
    rounds: int,
    counts: npt.NDArray[np.int64] | None,
    again: int = 0,
    planned: int | None = None,
) -> tuple[PrivacyClaim, ...]:
    """The claims of all lines after `rounds` rounds, for everyone or for worst and median.

    `again` attempts were charged beyond each round's first; any of them may be anybody's.

    Where fewer were done than were `planned`, and fit the budget, they say what that assumes.
    """
    claims: list[PrivacyClaim] = []
    lines = tuple(line.so_far(rounds, planned) for line in lines)
    for line in (line.after(again) for line in lines):
        most = line.with_repeats(rounds, again)
        if line.as_published:
            told = line.claims(most)
            claims.append(next((c for c in told if c.accountant is Accountant.PURE), told[0]))
            continue
        if counts is None or line.rounds:
            claims += line.claims(most)
            continue
        worst, middle = int(counts.max()), math.ceil(np.median(counts))
        if line.every > 1:  # turns without a release of this line
            worst, middle = min(most, worst), min(most, middle)
        if line.members is not None:
            claims += line.claims(worst, "the client that took part most")
            continue
        same = worst == middle
        claims += line.claims(worst, "everyone" if same else "the client that took part most")
        if not same:
            claims += line.claims(middle, "the median client")[:1]
    return tuple(claims)
