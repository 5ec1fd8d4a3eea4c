"""`fedveil ledger`: from the charges on disk back to claims, without the run."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import BadInput
from fedveil.privacy.accounting.budget_line import BudgetLine, claims_of
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.events import from_dict
from fedveil.privacy.ledger.file import Charge, read_charges, read_participations, read_runs
from fedveil.privacy.ledger.looking import one_look


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
        return f"{self.claims[0].left_of(self.budget)} is left"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "run": self.run,
            "charges": [vars(charge) for charge in self.charges],
            "claims": [claim.to_dict() for claim in self.claims],
            "left": self.remainder(),
        }


def statements(path: Path) -> list[Statement]:
    """One for each run of a ledger."""
    with one_look(path):
        return [_statement(path, run, about) for run, about in read_runs(path).items()]


def statement(path: Path, run: str) -> Statement:
    """Of one run of a ledger, which has to know it."""
    with one_look(path):
        return _statement(path, run, read_runs(path)[run])


def lines_of(path: Path, run: str) -> tuple[BudgetLine, ...]:
    """What a run of the ledger is charged for."""
    return _lines(path, read_runs(path)[run])


def _lines(path: Path, about: dict[str, str]) -> tuple[BudgetLine, ...]:
    try:
        return tuple(BudgetLine.from_dict(raw) for raw in json.loads(about["lines"]))
    except (KeyError, ValueError, TypeError) as e:
        raise BadInput(f"{path}: the ledger's lines cannot be read: {e}") from e


def _statement(path: Path, run: str, about: dict[str, str]) -> Statement:
    """Read a run's charges; one whose event is not the one its line promises is refused."""
    charges, lines = read_charges(path, run), _lines(path, about)
    promised = {line.covers: line.event for line in lines if not line.reading}
    for charge in charges:
        if promised.get(charge.covers) != from_dict(charge.event):
            raise BadInput(
                f"{path}: round {charge.round} was charged for {charge.event} on the line "
                f"{charge.covers!r}, which is not what the ledger promises: the file was changed"
            )
    if not lines:
        return Statement(run, charges, (), None)
    rounds = len({charge.round for charge in charges})
    if {charge.round for charge in charges} != set(range(1, rounds + 1)):
        raise BadInput(f"{path}: charges are missing between the first and the last round")
    again = len({(charge.round, charge.attempt) for charge in charges}) - rounds
    claims = claims_of(lines, rounds, read_participations(path, run), again)
    return Statement(run, charges, claims, lines[0].budget.epsilon)
