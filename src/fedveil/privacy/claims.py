"""`PrivacyClaim`: an epsilon together with everything without which it means nothing."""

import math
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Context
from enum import StrEnum
from typing import Any


class Unit(StrEnum):
    """What one neighbour differs in."""

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


@dataclass(frozen=True, kw_only=True)
class PrivacyClaim:
    """(epsilon, delta)-differential privacy, for whom, against whom, and under which assumptions.

    `holds_for` is "everyone" unless clients differ: then there is one claim for the worst and one
    for the median client. `covers` names what was released: the updates, or what an adaptive
    bound collects beside them.

    >>> claim = PrivacyClaim(epsilon=2.0, delta=1e-5, unit=Unit.CLIENT,
    ...     neighbours=Relation.ADD_REMOVE, trust=Trust.CENTRAL, accountant=Accountant.PLD,
    ...     noise=NoiseSource.SEEDED, assumptions=())
    >>> print(claim)
    epsilon 2 at delta 1e-05 per client (add-remove, central trust, PLD, seeded noise)
    """

    epsilon: float
    delta: float
    unit: Unit
    neighbours: Relation
    trust: Trust
    accountant: Accountant
    noise: NoiseSource
    as_published: bool = False
    assumptions: tuple[str, ...] = ()
    holds_for: str = "everyone"
    covers: str = "updates"

    def __str__(self) -> str:
        what = "" if self.covers == "updates" else f"{self.covers}: "
        who = "" if self.holds_for == "everyone" else f", {self.holds_for}"
        label = ", as published, not a guarantee" if self.as_published else ""
        value = f"{rounded_up(self.epsilon):.4g} at delta {self.delta:g}"
        return (
            f"{what}epsilon {value} per {self.unit}{who} "
            f"({self.neighbours}, {self.trust} trust, {self.accountant.upper()}, "
            f"{self.noise} noise{label})"
        )

    def to_dict(self) -> dict[str, Any]:
        """The claim as plain JSON values; an infinite epsilon becomes the string "inf"."""
        out = asdict(self)
        for key in ("unit", "neighbours", "trust", "accountant", "noise"):
            out[key] = str(out[key])
        out["epsilon"] = self.epsilon if math.isfinite(self.epsilon) else "inf"
        out["assumptions"] = list(self.assumptions)
        return out


def rounded_up(epsilon: float) -> float:
    """Four digits, never below the claim."""
    return float(Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(epsilon))
