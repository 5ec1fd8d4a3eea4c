"""Results of attacks: a `Finding` bounds epsilon, a `Leak` measures what was learnt."""

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
"""The probability of a false alarm: one audit in ten thousand."""


class Verdict(StrEnum):
    """Whether an attack violates a claim. No attack proves one."""

    NOT_VIOLATED = "not violated"
    CHANCE = "above, which chance explains"
    VIOLATED = "violated"


@dataclass(frozen=True)
class Finding:
    """A lower bound on epsilon beside the claim about the same release.

    Attributes:
        attack: The name of the attack.
        what: What was attacked, in words.
        claim: The claim that the bound is compared with.
        evidence: The counts or scores that the bound follows from.
        alarm: The probability of a false alarm that this finding is allowed.
        estimate: The likeliest epsilon, without confidence, where there is one.
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
        """Violated only if the bound at error probability `alarm` exceeds the claim.

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
    """One measure of an attack, with its 95 % interval where there is one."""

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
    """How well an attack did. It does not bound epsilon, so it refutes no claim.

    Attributes:
        attack: The name of the attack.
        what: What was attacked, in words.
        measures: In the field's own measures, such as AUC or PSNR.
        claim: The claim that covers this attacker. None if nothing is claimed.
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
