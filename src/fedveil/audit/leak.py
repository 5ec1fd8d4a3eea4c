"""`Leak`: how well an attack did, in the field's own measures, beside the claim."""

from dataclasses import dataclass
from typing import Any

from fedveil.privacy.accounting.claims import PrivacyClaim


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
