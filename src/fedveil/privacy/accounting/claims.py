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
    """What two neighbouring data sets differ in.

    A person is one within a client: somebody with records at two clients is two persons.
    """

    RECORD = "record"
    PERSON = "person"
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
    only randomised updates; `shuffled`, somebody hides who sent which randomised report; `site`,
    the institution that has the records; `secure-sum`, the same, where the server sees nothing but
    the sum of what sites mask; `central`, the server sees the true updates.
    """

    LOCAL = "local"
    CURATOR = "curator"
    SHUFFLED = "shuffled"
    SITE = "site"
    SECURE_SUM = "secure-sum"
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
        """Raise BadInput for a negative count, a slip outside [0, 1) or a `vouched` that is NaN."""
        if self.count < 0 or not 0 <= self.slip < 1 or math.isnan(self.vouched):
            raise BadInput(f"{self}: a count >= 0, a slip in [0, 1) and a number are needed")

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """The value under "composed" that `PrivacyClaim.to_dict` wrote.

        Raises BadInput if it cannot be read.
        """
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

    def for_units(self, units: int) -> "PrivacyClaim":
        """The claim at the same delta for somebody with so many clients or records.

        Of a claim per person, it is the claim for somebody at so many clients.

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
        if self.composed is None and self.delta:
            raise BadInput(
                f"the claim {self.short} does not record what was composed: its epsilon for "
                f"{replace(self, units=units).units_text} cannot be computed"
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
        """The claim in one line, with accountant and source of noise."""
        return self._text(f"epsilon {self.rounded_epsilon} ", full=True)

    def __repr__(self) -> str:
        """The claim in one line, as PrivacyClaim(...). It cannot be evaluated."""
        return f"PrivacyClaim({self})"

    def _repr_html_(self) -> str:
        """An HTML table for notebooks, with everything that the epsilon means nothing without."""
        rows = {
            "epsilon": self.rounded_epsilon,
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
    def units_text(self) -> str:
        """The units that the claim is about, such as "2 records of one person".

        Several persons are one that is at several clients: "one person at 2 clients".
        """
        if self.unit is Unit.PERSON:
            return f"one person at {self.units} client{'s' if self.units > 1 else ''}"
        return f"{self.units} {self.unit}{'s' if self.units > 1 else ''} of one person"

    @property
    def short(self) -> str:
        """The claim in one line, without accountant and source of noise."""
        return self._text(f"epsilon {self.rounded_epsilon} ")

    @property
    def rounded_epsilon(self) -> str:
        """The epsilon alone as text, rounded up to four digits.

        A note says so if it is not vouched for, or if it is above 100 for several units. Infinity
        is "infinity".
        """
        shown = rendered(self.epsilon)
        if self.units > 1 and self.epsilon > NO_PROTECTION:
            shown += " (no protection)"
        return shown if self.vouched else f"not vouched for, about {shown}"

    @property
    def terms(self) -> str:
        """`short` without what the claim covers and without the epsilon.

        The form is "at delta ... per client (..., ... trust)", or "for 2 clients of one person".
        Where the claim has them, it also has whom it holds for, that it is as published, and its
        condition.
        """
        return self._text(covers="updates")

    @property
    def full_terms(self) -> str:
        """`terms`, so without the epsilon, with accountant and source of noise in the brackets."""
        return self._text(full=True, covers="updates")

    @property
    def context(self) -> str:
        """The claim in one line without its epsilon: what it covers, then `full_terms`."""
        return self._text(full=True)

    def remainder(self, limit: float) -> str:
        """The number that is left of a budget of `limit`, as text, rounded down.

        Below 0.0001 it is 0.
        """
        left = max(0.0, limit - self.epsilon)
        return rendered(left if left >= _LEAST else 0.0, ROUND_FLOOR)

    def left_of(self, limit: float) -> str:
        """The text "1.5 of epsilon 2 at delta ...":

        `remainder`, then the budget `limit` with its terms.
        """
        budget = replace(self, epsilon=limit, vouched=True, condition="")
        return f"{self.remainder(limit)} of {budget.short}"

    def _text(self, epsilon: str = "", *, full: bool = False, covers: str | None = None) -> str:
        """The claim as text: what it covers, then `epsilon`, then its terms.

        Terms are "at delta ... per client (neighbours, trust)". Where the claim has them, they also
        name whom it holds for, that it is as published, and its condition.

        Args:
            epsilon: The text of the epsilon, with a space at its end, "" to omit it.
            full: Whether accountant and noise are in the brackets too.
            covers: What the claim covers instead of its own field. "updates" are not written out.
        """
        covers = covers or self.covers
        what = "" if covers == "updates" else f"{covers}: "
        whose = f"per {self.unit}"
        if self.units > 1:
            whose = f"for {self.units_text}"
        who = "" if self.holds_for == "everyone" else f", {self.holds_for}"
        how = f", {self.accountant.upper()}, {self.noise} noise" if full else ""
        label = ", as published, not a guarantee" if self.as_published else ""
        condition = f", only if {self.condition}" if self.condition else ""
        return (
            f"{what}{epsilon}at delta {self.delta:g} {whose}{who} "
            f"({self.neighbours}, {self.trust} trust{how}{label}){condition}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The claim as JSON values, one key per field.

        An infinite epsilon becomes the string "inf". "composed" is None or has the keys "event",
        "count", "slip" and "vouched", the last as a string.
        """
        out = dict(vars(self))
        for key in ("unit", "neighbours", "trust", "accountant", "noise"):
            out[key] = str(out[key])
        out["epsilon"] = self.epsilon if math.isfinite(self.epsilon) else "inf"
        out["assumptions"] = list(self.assumptions)
        if self.composed is not None:
            event, vouched = events.to_dict(self.composed.event), str(self.composed.vouched)
            out["composed"] = {**vars(self.composed), "event": event, "vouched": vouched}
        return out

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """The claim that `to_dict` wrote.

        Raises BadInput if "composed" cannot be read, ValueError or TypeError for other wrong values
        or keys.
        """
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
    """The records on which a run's metrics are measured: a phrase, by what its claims cover.

    "the test split", unless metrics have a price: then "held-out owners" or "the clients".

    >>> measured_on([])
    'the test split'
    """
    whom = {HELD_OUT: "held-out owners", BOTH: "the clients"}
    return next((whom[c.covers] for c in claims if c.covers in whom), "the test split")


def rendered(epsilon: float, rounding: str = ROUND_CEILING) -> str:
    """An epsilon as text with four digits, rounded up by default, such as "2.345" or "12,350".

    Infinity is "infinity". `rounding` is a constant of `decimal`, such as ROUND_FLOOR.
    """
    if math.isinf(epsilon):
        return "infinity"
    value = float(Context(prec=4, rounding=rounding).create_decimal(repr(epsilon)))
    return f"{value:,.0f}" if _WHOLE <= value < _LONG else f"{value:.4g}"
