"""`Finding`: what one attack found, beside the claim that it was held against."""

from dataclasses import dataclass
from decimal import ROUND_FLOOR
from enum import StrEnum
from functools import cached_property
from typing import Any

from fedveil.audit.bounds import Evidence
from fedveil.privacy.accounting.claims import PrivacyClaim, rendered

SHOWN = 0.05
"""Lower bounds are shown at 95 %."""

ALARM = 1e-4
"""A claim is called violated where chance would do so in one audit of ten thousand."""


class Verdict(StrEnum):
    """What is said of a claim: this attack does not violate it, or by chance only, or it does.

    No attack proves a claim.
    """

    NOT_VIOLATED = "not violated"
    CHANCE = "above, which chance explains"
    VIOLATED = "violated"


@dataclass(frozen=True)
class Finding:
    """A lower bound on epsilon from `evidence` about `what`, and the claim about the same.

    `estimate`, where there is one, is the likeliest epsilon, without any confidence. `alarm` is
    the chance of a false alarm that this finding is allowed.
    """

    attack: str
    what: str
    claim: PrivacyClaim
    evidence: Evidence
    alarm: float = ALARM
    estimate: float | None = None

    @cached_property
    def lower(self) -> float:
        """The lower bound at 95 %."""
        return self.evidence.epsilon(SHOWN)

    @cached_property
    def verdict(self) -> Verdict:
        """Violated only if the bound exceeds the claim where it is hardly ever wrong.

        A bound at 95 % is wrong once in twenty audits where the attack is as good as the claim
        allows; an exit code must not be.
        """
        if self.evidence.epsilon(self.alarm) > self.claim.epsilon:
            return Verdict.VIOLATED
        return Verdict.CHANCE if self.lower > self.claim.epsilon else Verdict.NOT_VIOLATED

    @property
    def violated(self) -> bool:
        """Whether the claim is refuted."""
        return self.verdict is Verdict.VIOLATED

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "attack": self.attack,
            "what": self.what,
            "claim": self.claim.to_dict(),
            "lower_bound": self.lower,
            "confidence": 1 - SHOWN,
            "estimate": self.estimate,
            "draws": self.evidence.draws,
            "how": self.evidence.how,
            "verdict": str(self.verdict),
        }

    def row(self) -> dict[str, str]:
        """For a table."""
        estimate = "" if self.estimate is None else rendered(self.estimate, ROUND_FLOOR)
        return {
            "attack": self.attack,
            "about": self.what,
            "claim": self.claim.short,
            "at least (95 %)": rendered(self.lower, ROUND_FLOOR),
            "estimate": estimate,
            "draws": f"{self.evidence.draws:,}",
            "by": self.evidence.how,
            "claim is": str(self.verdict),
        }


@dataclass(frozen=True)
class Measure:
    """One number about an attack, `low` to `high` its 95 % interval where there is one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Leak:
    """What an attack learnt about `what`: no bound on epsilon, so that it refutes no claim.

    `claim` is None where the run claims nothing, as the baselines do.
    """

    attack: str
    what: str
    measures: tuple[Measure, ...]
    claim: PrivacyClaim | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "attack": self.attack,
            "what": self.what,
            "claim": None if self.claim is None else self.claim.to_dict(),
            "measures": {measure.name: measure.to_dict() for measure in self.measures},
        }

    def row(self) -> dict[str, str]:
        """For a table of leaks of the same attack."""
        claim = "nothing claimed" if self.claim is None else self.claim.short
        measures = {measure.name: str(measure) for measure in self.measures}
        return {"attack": self.attack, "about": self.what, "claim": claim, **measures}
