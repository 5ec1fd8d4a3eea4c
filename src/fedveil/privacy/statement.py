"""`fedveil ledger`: from the charges on disk back to a claim, without the run."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import BadInput
from fedveil.privacy.claims import PrivacyClaim
from fedveil.privacy.events import from_dict
from fedveil.privacy.ledger import Charge, read_about, read_charges
from fedveil.privacy.terms import Terms


@dataclass(frozen=True)
class Statement:
    """What a ledger says: its charges, what they are worth together, and what is left."""

    run: str
    charges: list[Charge]
    claims: tuple[PrivacyClaim, ...]
    budget: float | None

    def remainder(self) -> str:
        """What is left, in words."""
        if self.budget is None:
            return "no privacy is claimed, so nothing is charged"
        if math.isinf(self.budget):
            return "no limit was set on epsilon"
        left = max(0.0, self.budget - self.claims[0].epsilon)
        left = math.floor(left * 1e4) / 1e4
        return f"{left:.4f} of epsilon {self.budget:g} is left"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "run": self.run,
            "charges": [vars(charge) for charge in self.charges],
            "claims": [claim.to_dict() for claim in self.claims],
            "left": self.remainder(),
        }


def statement(path: Path) -> Statement:
    """Read a ledger; a charge whose event is not the one in its terms is refused."""
    about, charges = read_about(path), read_charges(path)
    run = about.get("run", "?")
    try:
        raw = json.loads(about["terms"])
    except (KeyError, ValueError) as e:
        raise BadInput(f"{path}: the ledger's terms cannot be read: {e}") from e
    if raw is None:
        return Statement(run, charges, (), None)
    terms = Terms.from_dict(raw)
    if [charge.round for charge in charges] != list(range(1, len(charges) + 1)):
        raise BadInput(f"{path}: charges are missing between the first and the last round")
    for charge in charges:
        if from_dict(charge.event) != terms.event:
            raise BadInput(
                f"{path}: round {charge.round} was charged for {charge.event}, which is not what "
                "the ledger's terms say: the file was changed"
            )
    return Statement(run, charges, terms.claims(len(charges)), terms.budget.epsilon)
