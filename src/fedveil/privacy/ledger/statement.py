"""`fedveil ledger`: from the charges on disk back to claims, without the run."""

import json
import math
from dataclasses import dataclass
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
    ledger_snapshot,
    read_charges,
    read_participations,
    read_runs,
)


@dataclass(frozen=True)
class Charged:
    """The charges of one run, and what is needed to compute its claims from them.

    Attributes:
        run: The name of the run.
        charges: All charges, in order.
        lines: The budget lines that were charged.
        rounds: How many rounds were charged, released or not.
        extra_attempts: How many attempts were charged beyond each round's first.
        counts: How often each client took part, None where that is not counted.
        planned: How many rounds the run may do, None in ledgers that do not record it.
        epsilon_budget: The epsilon of the line that the budget limits, None without lines.
    """

    run: str
    charges: list[Charge]
    lines: tuple[BudgetLine, ...]
    rounds: int
    extra_attempts: int
    counts: Counts | None
    planned: int | None
    epsilon_budget: float | None

    @property
    def turns(self) -> int | None:
        """How often the most frequent client took part, None where that is not counted."""
        return None if self.counts is None else int(self.counts.max())


@dataclass(frozen=True)
class Statement:
    """The charges of a run, its claims, and the epsilon of its budget, None without one."""

    run: str
    charges: list[Charge]
    claims: tuple[PrivacyClaim, ...]
    epsilon_budget: float | None

    def remainder(self) -> str:
        """How much of the budget is left, as a clause: "1.5 of epsilon 2 at delta ... is left".

        Without a claim, or without a limit, the clause says that instead.
        """
        first = budgeted(self.claims)
        if self.epsilon_budget is None or first is None:
            return "no privacy is claimed, so nothing is charged"
        if math.isinf(self.epsilon_budget):
            return "no limit was set on epsilon"
        return f"{first.left_of(self.epsilon_budget)} is left"

    def to_dict(self) -> dict[str, Any]:
        """JSON values with the keys "run", "charges", "claims" and "left".

        "charges" has a dict of all fields per charge, "claims" has `PrivacyClaim.to_dict` per
        claim, "left" is `remainder`. The epsilon of the budget is not among them.
        """
        return {
            "run": self.run,
            "charges": [vars(charge) for charge in self.charges],
            "claims": [claim.to_dict() for claim in self.claims],
            "left": self.remainder(),
        }


def statements(path: Path) -> list[Statement]:
    """The statements of all runs of a ledger, in the order of registration, at one moment.

    Raises BadInput if the ledger cannot be read.
    """
    with ledger_snapshot(path):
        return [statement(path, run) for run in read_runs(path)]


def statement(path: Path, run: str) -> Statement:
    """The statement of a run of a ledger. Raises KeyError for a run that it does not know.

    Raises BadInput if the ledger cannot be read.
    """
    charged = read_charged(path, run)
    done = charged.rounds, charged.counts, charged.extra_attempts
    claims = claims_of(charged.lines, *done, charged.planned)
    return Statement(run, charged.charges, claims, charged.epsilon_budget)


def read_charged(path: Path, run: str) -> Charged:
    """Read a run's charges, lines and counts from a ledger.

    Raises KeyError for an unknown run, and BadInput for a charge whose event is not that of its
    line, for missing rounds, and for anything that cannot be read. The hash chain is not checked.
    """
    with ledger_snapshot(path):
        about = read_runs(path)[run]
        try:
            lines = tuple(map(BudgetLine.from_dict, json.loads(about["lines"])))
        except (KeyError, ValueError, TypeError) as e:
            raise BadInput(f"{path}: the ledger's lines cannot be read: {e}") from e
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
    rounds = {charge.round for charge in charges}
    if lines and rounds != set(range(1, len(rounds) + 1)):
        raise BadInput(f"{path}: charges are missing between the first and the last round")
    extra_attempts = len({(charge.round, charge.attempt) for charge in charges}) - len(rounds)
    limit = lines[0].budget.epsilon if lines else None
    return Charged(run, charges, lines, len(rounds), extra_attempts, counts, planned, limit)
