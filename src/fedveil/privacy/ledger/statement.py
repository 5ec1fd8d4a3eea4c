"""`fedveil ledger`: from the charges on disk back to claims, without the run."""

import json
import math
from collections.abc import Mapping, Sequence
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

_RELATIVE_TOLERANCE = 1e-6


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

    def claims(self) -> tuple[PrivacyClaim, ...]:
        """The claims that the charges come to."""
        done = self.rounds, self.counts, self.extra_attempts
        return claims_of(self.lines, *done, self.planned)


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
    return Statement(run, charged.charges, charged.claims(), charged.epsilon_budget)


def same_claims(recorded: object, charged: Sequence[PrivacyClaim]) -> bool:
    """Whether claims recorded as JSON are those that charges come to.

    Epsilons of one account, computed on two machines, differ in their last digits: less than 1e-6
    of them counts as the same.
    """
    if not isinstance(recorded, list) or len(recorded) != len(charged):
        return False
    for raw, claim in zip(recorded, charged, strict=True):
        own = json.loads(json.dumps(claim.to_dict()))
        try:
            found = PrivacyClaim.from_dict(raw).to_dict()  # older results lack newer fields
            if "composed" not in raw:
                own["composed"] = None
            a, b = found["epsilon"], own["epsilon"]
            numbers = isinstance(a, int | float) and isinstance(b, int | float)
            alike = math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE) if numbers else a == b
            if not alike or {**found, "epsilon": b} != own:
                return False
        except (TypeError, ValueError, AttributeError):
            return False
    return True


def read_charged(path: Path, run: str) -> Charged:
    """Read a run's charges, lines and counts from a ledger.

    Raises KeyError for an unknown run, and BadInput for a charge whose event is not that of its
    line, for missing rounds, and for anything that cannot be read. The hash chain is not checked.
    """
    with ledger_snapshot(path):
        about = read_runs(path)[run]
        charges = read_charges(path, run)
        counts = read_participations(path, run) if _lines_of(path, about) else None
    return charged_of(path, run, about, charges, counts)


def charged_of(
    path: Path, run: str, about: Mapping[str, str], charges: list[Charge], counts: Counts | None
) -> Charged:
    """Return the charges of a run with everything that its claims need.

    Raises BadInput as `read_charged`.

    Args:
        path: Where it was read, for messages.
        run: The name of the run.
        about: What the run registered with.
        charges: All charges of the run, in order.
        counts: How often each client took part, None where that is not known.
    """
    lines = _lines_of(path, about)
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


def _lines_of(path: Path, about: Mapping[str, str]) -> tuple[BudgetLine, ...]:
    """The budget lines that a run registered with. Raises BadInput if they cannot be read."""
    try:
        return tuple(map(BudgetLine.from_dict, json.loads(about["lines"])))
    except (KeyError, ValueError, TypeError) as e:
        raise BadInput(f"{path}: the ledger's lines cannot be read: {e}") from e
