"""`Terms`: what is charged per round and what it is worth, without the parts that do the work.

A plan has terms, a ledger stores them, and a claim is made from them: so what a ledger says long
after a run is what the run itself said.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from fedveil.errors import BadInput
from fedveil.privacy import events
from fedveil.privacy.accounting import FINE, epsilon, supports
from fedveil.privacy.calibration import rounds_within
from fedveil.privacy.claims import Accountant, NoiseSource, PrivacyClaim, Relation, Trust, Unit
from fedveil.privacy.events import Event

_MILESTONES = 32


@dataclass(frozen=True)
class Budget:
    """What may be spent: epsilon (infinite: report, never stop) at a fixed delta."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise BadInput(f"budget.epsilon is {self.epsilon:g}: a positive number is needed")
        if not 0 < self.delta < 1:
            raise BadInput(f"budget.delta is {self.delta:g}: a number in (0, 1) is needed")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """One release of `event` per round, of which a unit is concerned by a `share` of the rounds.

    After n rounds the unluckiest unit is charged for ceil(n x share) events.
    """

    event: Event
    share: Fraction
    budget: Budget
    unit: Unit
    relation: Relation
    trust: Trust
    noise: NoiseSource
    assumptions: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise BadInput(f"share is {self.share}: a number in (0, 1] is needed")

    def charges(self, rounds: int) -> int:
        """Events the unluckiest unit is charged for after `rounds` rounds."""
        return math.ceil(rounds * self.share)

    @cached_property
    def accountants(self) -> tuple[Accountant, ...]:
        """The accountants that know this event; the epsilon of the first one counts."""
        known = tuple(a for a in Accountant if supports(self.event, self.relation, a))
        if not known:
            raise BadInput(f"no accountant knows {self.event} under {self.relation}")
        return known

    def claims(self, rounds: int) -> tuple[PrivacyClaim, ...]:
        """What `rounds` rounds guarantee, by every accountant that can tell."""
        return tuple(
            PrivacyClaim(
                epsilon=self._epsilon(rounds, accountant, FINE),
                delta=self.budget.delta,
                unit=self.unit,
                neighbours=self.relation,
                trust=self.trust,
                accountant=accountant,
                noise=self.noise,
                assumptions=self.assumptions,
            )
            for accountant in self.accountants
        )

    def permitted(self, planned: int) -> int:
        """How many of `planned` rounds fit the budget."""
        accountant, budget = self.accountants[0], self.budget
        if self._epsilon(planned, accountant, FINE) <= budget.epsilon:
            return planned
        charges = rounds_within(self.event, budget.epsilon, budget.delta, self.relation, accountant)
        return min(planned, math.floor(charges / self.share))

    def curve(self, planned: int) -> tuple[float, ...]:
        """An upper bound on epsilon after each of 0..planned rounds, cheap enough to display.

        Exact, but for a coarse grid, up to 32 planned rounds; beyond that a round shows the
        value at the next of 32 milestones, since epsilon only grows.
        """
        step = -(-planned // _MILESTONES)
        milestones = [min(k * step, planned) for k in range(-(-planned // step) + 1)]
        values = [self._epsilon(m, self.accountants[0], 10 * FINE) for m in milestones]
        return tuple(values[-(-rounds // step)] for rounds in range(planned + 1))

    def _epsilon(self, rounds: int, accountant: Accountant, interval: float) -> float:
        return epsilon(
            self.event,
            self.charges(rounds),
            self.budget.delta,
            self.relation,
            accountant,
            interval=interval,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the ledger."""
        return {
            "event": events.to_dict(self.event),
            "share": str(self.share),
            "epsilon": str(self.budget.epsilon),
            "delta": self.budget.delta,
            "unit": str(self.unit),
            "relation": str(self.relation),
            "trust": str(self.trust),
            "noise": str(self.noise),
            "assumptions": list(self.assumptions),
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Terms":
        """Inverse of `to_dict`."""
        try:
            return cls(
                event=events.from_dict(raw["event"]),
                share=Fraction(raw["share"]),
                budget=Budget(float(raw["epsilon"]), float(raw["delta"])),
                unit=Unit(raw["unit"]),
                relation=Relation(raw["relation"]),
                trust=Trust(raw["trust"]),
                noise=NoiseSource(raw["noise"]),
                assumptions=tuple(str(a) for a in raw["assumptions"]),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as e:
            raise BadInput(f"privacy terms cannot be read: {e}") from e
