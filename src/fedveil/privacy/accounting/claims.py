"""`PrivacyClaim`: an epsilon together with everything without which it means nothing."""

import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from enum import StrEnum
from html import escape
from typing import Any, Self

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting import events
from fedveil.privacy.accounting.events import Event

__all__ = [
    "Accountant",
    "NoiseSource",
    "Relation",
    "Trust",
    "Unit",
]

SEEDED = "seeded noise: whoever knows the seed can remove it, so this is a simulation"
TRUSTED_SERVER = "the server is trusted: it sees true updates and adds the noise"

NO_PROTECTION = 100.0
"""The epsilon for several units above which a claim says that there is no protection."""

_WHOLE, _LONG, _LEAST = 1e3, 1e12, 1e-4


class Unit(StrEnum):
    """What two neighbouring data sets differ in."""

    RECORD = "record"
    CLIENT = "client"
    WEIGHT = "weight"


class Relation(StrEnum):
    """Which two data sets count as neighbours."""

    ADD_REMOVE = "add-remove"
    ZERO_OUT = "zero-out"
    REPLACE = "replace"


class Trust(StrEnum):
    """Who may see what clients do not randomise themselves.

    `local`, nobody; `curator`, somebody other than the server sees bits or norms, and the server
    only randomised updates; `shuffled`, somebody hides who sent which randomised report; `central`,
    the server sees the true updates.
    """

    LOCAL = "local"
    CURATOR = "curator"
    SHUFFLED = "shuffled"
    CENTRAL = "central"


class Accountant(StrEnum):
    """How releases were composed.

    `pld`, privacy loss distributions, and `rdp`, Renyi divergences; `binomial`, the exact sum for
    randomised response; `pure`, adding epsilons, whose delta is 0; `published`, a paper's own
    formula, which guarantees nothing by itself.
    """

    PLD = "pld"
    RDP = "rdp"
    BINOMIAL = "binomial"
    PURE = "pure"
    PUBLISHED = "published"


class NoiseSource(StrEnum):
    """Where randomness comes from: a repeatable stream, or the operating system."""

    SEEDED = "seeded"
    SECURE = "secure"


@dataclass(frozen=True)
class Composed:
    """The releases that an epsilon was computed from: `count` of `event` about one unit.

    `slip` is the part of the claim's delta that pays for the sampler of secure noise, of a pure
    claim all of it. It pays for epsilons up to `vouched`.
    """

    event: Event
    count: int
    slip: float = 0.0
    vouched: float = math.inf

    def __post_init__(self) -> None:
        if self.count < 0 or not 0 <= self.slip < 1 or math.isnan(self.vouched):
            raise BadInput(f"{self}: a count >= 0, a slip in [0, 1) and a number are needed")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "event": events.to_dict(self.event), "vouched": str(self.vouched)}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        try:
            count, slip, vouched = int(raw["count"]), float(raw["slip"]), float(raw["vouched"])
            return cls(events.from_dict(raw["event"]), count, slip, vouched)
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            if isinstance(e, BadInput):
                raise
            raise BadInput(f"what a claim was composed of cannot be read: {e}") from e


@dataclass(frozen=True, kw_only=True)
class PrivacyClaim:
    """(epsilon, delta)-differential privacy, for whom, against whom, and under which assumptions.

    `holds_for` is "everyone" unless clients differ: then there is one claim for the worst and one
    for the median client. `covers` names what was released: the updates, or also what an adaptive
    clip collects beside them. One that is not `vouched` is about right, and no guarantee. One with
    a `condition` holds only if that is true of somebody's reasons, which nobody can check: it
    stands beside a claim without one and never counts (`meaning.counting`). The condition is shown
    wherever the epsilon is. A claim is about `units` units of one person, which are one unless
    `for_units` was called. `composed` is what the epsilon was computed from, None where it is not
    one composition or is not recorded.

    Whoever shows an epsilon shows `short` or the claim itself, which differ in whether accountant
    and source of noise are told; a table may have `value` in its rows and `terms` in its heading.

    >>> claim = PrivacyClaim(epsilon=2.0, delta=1e-5, unit=Unit.CLIENT,
    ...     neighbours=Relation.ZERO_OUT, trust=Trust.CENTRAL, accountant=Accountant.PLD,
    ...     noise=NoiseSource.SEEDED, assumptions=())
    >>> print(claim)
    epsilon 2 at delta 1e-05 per client (zero-out, central trust, PLD, seeded noise)
    >>> print(claim.short)
    epsilon 2 at delta 1e-05 per client (zero-out, central trust)
    """

    epsilon: float
    delta: float
    unit: Unit
    neighbours: Relation
    trust: Trust
    accountant: Accountant
    noise: NoiseSource
    as_published: bool = False
    vouched: bool = True
    assumptions: tuple[str, ...] = ()
    holds_for: str = "everyone"
    covers: str = "updates"
    condition: str = ""
    units: int = 1
    composed: Composed | None = None

    @property
    def answers(self) -> bool:
        """Whether `for_units` has an answer: the composition is recorded, or epsilon is pure."""
        return self.composed is not None or self.delta == 0

    def for_units(self, units: int) -> "PrivacyClaim":
        """The claim at the same delta for somebody with so many clients or records.

        Guarantee: docs/proofs/units.md. The epsilon is an upper bound for units that are all
        removed, zeroed or replaced together, never below that of one unit. It is exact for plain
        and Poisson-sampled Gaussians, for pure claims and for clients that randomise their own
        reports. Assumptions, trust and standing are those of the claim.

        | edge | behaviour |
        |---|---|
        | 1 | the claim itself |
        | less than 1 | BadInput |
        | the claim is about several units already | BadInput |
        | a claim that does not record what was composed | BadInput, unless its delta is 0 |
        | the sampler's part of delta is too small for the epsilon | not vouched for |
        | epsilon above 100 | the text says that there is no protection |
        """
        if units < 1:
            raise BadInput(f"units is {units}: at least 1 is needed")
        if self.units != 1:
            raise BadInput(f"the claim is about {self.units} units already: use the one about 1")
        if units == 1:
            return self
        if not self.answers:
            raise BadInput(
                f"the claim {self.short} does not record what was composed: its epsilon for "
                f"{units} {self.unit}s of one person cannot be computed"
            )
        if self.composed is None:
            return replace(self, units=units, epsilon=units * self.epsilon)
        several = importlib.import_module("fedveil.privacy.accounting.composition")
        epsilon = max(self.epsilon, several.units_epsilon(self, self.composed, units))
        return replace(
            self,
            units=units,
            epsilon=epsilon,
            vouched=self.vouched and epsilon + math.log(units) <= self.composed.vouched,
        )

    def __str__(self) -> str:
        return f"{self._what}epsilon {self.value} {self.full_terms}"

    def __repr__(self) -> str:
        return f"PrivacyClaim({self})"

    def _repr_html_(self) -> str:
        """A table, for notebooks: everything that the epsilon means nothing without."""
        rows = {
            "epsilon": self.value,
            "delta": f"{self.delta:g}",
            "unit": self.unit if self.units == 1 else f"{self.units} {self.unit}s",
            "neighbours": self.neighbours,
            "trust": self.trust,
            "accountant": self.accountant.upper(),
            "noise": self.noise,
            "holds for": self.holds_for,
            "covers": self.covers,
        }
        if self.as_published:
            rows["as published"] = "not a guarantee"
        if self.condition:
            rows["only if"] = self.condition
        cells = {name: escape(text) for name, text in rows.items()}
        if self.assumptions:
            listed = "".join(f"<li>{escape(text)}</li>" for text in self.assumptions)
            cells["assumptions"] = f"<ul>{listed}</ul>"
        table = "".join(f"<tr><th>{name}</th><td>{cell}</td></tr>" for name, cell in cells.items())
        return f"<table>{table}</table>"

    @property
    def short(self) -> str:
        """The claim without accountant and source of noise."""
        return f"{self._what}epsilon {self.value} {self.terms}"

    @property
    def value(self) -> str:
        """The epsilon alone, never below what is claimed."""
        shown = rendered(self.epsilon)
        if self.units > 1 and self.epsilon > NO_PROTECTION:
            shown += " (no protection)"
        return shown if self.vouched else f"not vouched for, about {shown}"

    @property
    def terms(self) -> str:
        """Delta, unit, neighbours and trust, as `short` has them."""
        return self._terms("")

    @property
    def full_terms(self) -> str:
        """`terms` with the accountant and the source of noise."""
        return self._terms(f", {self.accountant.upper()}, {self.noise} noise")

    @property
    def context(self) -> str:
        """`full_terms` and what the claim covers: the claim without its epsilon."""
        return f"{self._what}{self.full_terms}"

    def remainder(self, limit: float) -> str:
        """What is left of a budget of `limit`, rounded down. Below 0.0001 it is 0."""
        left = max(0.0, limit - self.epsilon)
        return rendered(left if left >= _LEAST else 0.0, ROUND_FLOOR)

    def left_of(self, limit: float) -> str:
        """`remainder` together with the budget."""
        budget = replace(self, epsilon=limit, vouched=True, condition="")
        return f"{self.remainder(limit)} of {budget.short}"

    @property
    def _what(self) -> str:
        return "" if self.covers == "updates" else f"{self.covers}: "

    def _terms(self, how: str) -> str:
        whose = f"per {self.unit}"
        if self.units > 1:
            whose = f"for {self.units} {self.unit}s of one person"
        who = "" if self.holds_for == "everyone" else f", {self.holds_for}"
        label = ", as published, not a guarantee" if self.as_published else ""
        condition = f", only if {self.condition}" if self.condition else ""
        return (
            f"at delta {self.delta:g} {whose}{who} "
            f"({self.neighbours}, {self.trust} trust{how}{label}){condition}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The claim as plain JSON values. An infinite epsilon becomes the string "inf"."""
        out = dict(vars(self))
        for key in ("unit", "neighbours", "trust", "accountant", "noise"):
            out[key] = str(out[key])
        out["epsilon"] = self.epsilon if math.isfinite(self.epsilon) else "inf"
        out["assumptions"] = list(self.assumptions)
        out["composed"] = None if self.composed is None else self.composed.to_dict()
        return out

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        kinds: dict[str, Callable[[Any], Any]] = {
            "epsilon": float,
            "unit": Unit,
            "neighbours": Relation,
            "trust": Trust,
            "accountant": Accountant,
            "noise": NoiseSource,
            "assumptions": tuple,
            "units": int,
        }
        values = {key: kinds[key](v) if key in kinds else v for key, v in raw.items()}
        if values.get("composed") is not None:
            values["composed"] = Composed.from_dict(values["composed"])
        return cls(**values)


HELD_OUT = "metrics of held-out owners"
OF_CLIENTS = "metrics"
BOTH = "updates and metrics"
"""What lines about metrics cover: owners whose records nobody trains on, or the clients. A line of
the clients' metrics is charged and claims nothing: models depend on the same clients, so that only
updates and metrics together have an epsilon."""


def measured_on(claims: Iterable[PrivacyClaim]) -> str:
    """On what a run's metrics are measured, by its claims: test records, unless they have a price.

    >>> measured_on([])
    'the test split'
    """
    whom = {HELD_OUT: "held-out owners", BOTH: "the clients"}
    return next((whom[c.covers] for c in claims if c.covers in whom), "the test split")


def rendered(epsilon: float, rounding: str = ROUND_CEILING) -> str:
    """An epsilon for people: four digits, rounded up unless it is what is left of one."""
    if math.isinf(epsilon):
        return "infinity"
    value = float(Context(prec=4, rounding=rounding).create_decimal(repr(epsilon)))
    return f"{value:,.0f}" if _WHOLE <= value < _LONG else f"{value:.4g}"
