"""`fedveil ledger`: from the charges on disk back to claims, without the run."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import BudgetLine, claims_of
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.events import from_dict
from fedveil.privacy.accounting.meaning import budgeted
from fedveil.privacy.ledger.file import (
    Charge,
    Counts,
    one_look,
    read_charges,
    read_participations,
    read_runs,
)


@dataclass(frozen=True)
class Charged:
    """What a ledger holds of one run: its charges, and the lines that they are on.

    `counts` is how often each client took part, where that is counted; `planned`, how many rounds
    the run may do, None in ledgers that do not say it.
    """

    run: str
    charges: list[Charge]
    lines: tuple[BudgetLine, ...]
    counts: Counts | None
    planned: int | None = None

    @cached_property
    def rounds(self) -> int:
        """How many rounds were charged, released or not."""
        return len({charge.round for charge in self.charges})

    @cached_property
    def extra_attempts(self) -> int:
        """How many attempts were charged beyond each round's first."""
        return len({(charge.round, charge.attempt) for charge in self.charges}) - self.rounds

    @property
    def turns(self) -> int | None:
        """How often the most frequent client took part, where that is counted."""
        return None if self.counts is None else int(self.counts.max())

    @property
    def epsilon_budget(self) -> float | None:
        """The epsilon at which the run stops: that of the line that counts."""
        return self.lines[0].budget.epsilon if self.lines else None

    @property
    def claims(self) -> tuple[PrivacyClaim, ...]:
        """What the charges are worth together."""
        if not self.lines:
            return ()
        return claims_of(self.lines, self.rounds, self.counts, self.extra_attempts, self.planned)


@dataclass(frozen=True)
class Statement:
    """What a ledger says: its charges, what they are worth together, and what is left."""

    run: str
    charges: list[Charge]
    claims: tuple[PrivacyClaim, ...]
    epsilon_budget: float | None

    def remainder(self) -> str:
        """What is left, in words."""
        first = budgeted(self.claims)
        if self.epsilon_budget is None or first is None:
            return "no privacy is claimed, so nothing is charged"
        if math.isinf(self.epsilon_budget):
            return "no limit was set on epsilon"
        return f"{first.left_of(self.epsilon_budget)} is left"

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
        return [statement(path, run) for run in read_runs(path)]


def statement(path: Path, run: str) -> Statement:
    """Of one run of a ledger, which has to know it."""
    charges = read_charged(path, run)
    return Statement(run, charges.charges, charges.claims, charges.epsilon_budget)


def lines_of(path: Path, run: str) -> tuple[BudgetLine, ...]:
    """What a run of the ledger is charged for."""
    lines = []
    try:
        for raw in json.loads(read_runs(path)[run]["lines"]):
            lines.append(BudgetLine.from_dict(raw))
    except (KeyError, ValueError, TypeError) as e:
        raise BadInput(f"{path}: the ledger's lines cannot be read: {e}") from e
    return tuple(lines)


def read_charged(path: Path, run: str) -> Charged:
    """Read a run's charges. Refuses one whose event is not that of its line."""
    with one_look(path):
        about, lines = read_runs(path)[run], lines_of(path, run)
        charges = read_charges(path, run)
        counts = read_participations(path, run) if lines else None
    try:
        planned = int(about["permitted"]) if "permitted" in about else None
    except ValueError as e:
        raise BadInput(f"{path}: how many rounds were planned cannot be read: {e}") from e
    promised = {line.covers: line.event for line in lines if not line.reading}
    for charge in charges:
        if promised.get(charge.covers) != from_dict(charge.event):
            raise BadInput(
                f"{path}: round {charge.round} was charged for {charge.event} on the line "
                f"{charge.covers!r}, which is not what the ledger promises: the file was changed"
            )
    charged = Charged(run, charges, lines, counts, planned)
    if lines and {charge.round for charge in charges} != set(range(1, charged.rounds + 1)):
        raise BadInput(f"{path}: charges are missing between the first and the last round")
    return charged
