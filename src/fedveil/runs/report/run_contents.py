"""The contents of a run directory for a report, ended or not, without trusting who wrote it."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedveil.base.checks import INTERVAL
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import NoiseSource, PrivacyClaim, measured_on
from fedveil.privacy.accounting.meaning import Meaning
from fedveil.privacy.ledger.statement import Statement
from fedveil.runs.evidence import file_of, left, statement_of, verify_ledger
from fedveil.runs.run_directory import last_round, read_metrics
from fedveil.web.html import Content, number_text

_OWN = frozenset({"round", "clients", "clipped", "snr", "refused", "clip", "epsilon", "claim"})
"""Columns of metrics.jsonl that are the run's own; the others were measured."""


@dataclass(frozen=True)
class RunContents:
    """The contents of a run directory. Numbers are checked, and texts are shown as texts.

    Attributes:
        folder: The run directory.
        recipe: The text of recipe.toml.
        history: The lines of metrics.jsonl.
        result: What result.json holds, empty if the run has not ended.
        statement: The ledger's statement on the run, or None without a ledger.
        verified: The verdict of the ledger's verification, or "".
        trouble: Where the directory and its ledger disagree.
    """

    folder: Path
    recipe: str
    history: list[dict[str, Any]]
    result: dict[str, Any]
    statement: Statement | None
    verified: str
    trouble: list[str]

    @classmethod
    def at(cls, folder: Path) -> "RunContents":
        """Read a run directory.

        | edge | behaviour |
        |---|---|
        | no recipe.toml, or nothing was ever measured | BadInput |
        | a result that is not what the run left | BadInput |
        | a result that cannot be understood | BadInput |
        | no ledger | what the result says, and that nothing vouches for it |
        | a ledger whose chain is broken, or that does not fit the files | said on the page |
        | a run that has not ended | its claims by the ledger, and that it is open |
        """
        path = folder / "recipe.toml"
        try:
            if not path.is_file() or not (folder / "metrics.jsonl").is_file():
                raise BadInput(f"{folder} holds no run: name the directory of a run that has begun")
            recipe = path.read_text(errors="replace")
            history, trouble = read_metrics(folder / "metrics.jsonl")
        except OSError as e:
            raise BadInput(f"{folder} cannot be read: {e}") from e
        result = _result(folder / "result.json")
        statement, verified = None, ""
        if file_of(folder).is_file():
            try:
                statement = statement_of(folder)
                verified = verify_ledger(folder, None)
            except BadInput as e:
                trouble.append(str(e))
        else:
            trouble.append("there is no ledger beside this run: nothing vouches for what it says")
        return cls(folder, recipe, history, result, statement, verified, trouble)

    @property
    def ended(self) -> bool:
        return bool(self.result)

    @property
    def name(self) -> str:
        """The recipe's name, or the directory's before the run has ended."""
        return str(self.result.get("recipe", self.folder.name))

    @cached_property
    def claims(self) -> tuple[PrivacyClaim, ...]:
        """What is claimed: as the result has it, or the ledger where there is none yet."""
        if self.ended:
            return claims_in(self.result, self.folder / "result.json")
        return () if self.statement is None else self.statement.claims

    @cached_property
    def meaning(self) -> Meaning:
        return Meaning.from_claims(self.claims)

    @property
    def rounds(self) -> int:
        return last_round(self.history)

    @property
    def limit(self) -> float | None:
        """The epsilon at which the run stops, if something is claimed and there is one."""
        if self.statement is not None:
            limit = self.statement.budget
        else:
            budget = self.result.get("budget")
            epsilon = budget.get("epsilon") if isinstance(budget, dict) else None
            limit = float(epsilon) if isinstance(epsilon, int | float) else None
        return None if limit is None or math.isinf(limit) else limit

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics at the end, or those measured last."""
        metrics = self.result.get("metrics")
        if isinstance(metrics, dict):
            return metrics
        return {name: self._last(name) for name in self.measured}

    @property
    def measured(self) -> list[str]:
        """The columns that were measured, a task's own metric before the loss."""
        names = dict.fromkeys(name for line in self.history for name in line)
        metrics = [n for n in names if n not in _OWN and n != "seconds" and "/" not in n]
        return [*(n for n in metrics if n != "loss"), *(n for n in metrics if n == "loss")]

    @property
    def secure(self) -> bool:
        """Whether noise is the operating system's, so that diagnostics and times are hidden."""
        return any(claim.noise is NoiseSource.SECURE for claim in self.claims)

    @property
    def diagnosed(self) -> bool:
        """Whether diagnostics from clients' data were recorded."""
        return any(line.get("clipped") is not None for line in self.history)

    @property
    def notes(self) -> list[str]:
        notes = self.result.get("notes", [])
        return [str(note) for note in notes] if isinstance(notes, list) else [str(notes)]

    def series(self, name: str) -> list[tuple[float, float | None]]:
        """A column over rounds."""
        return [(float(line["round"]), line[name]) for line in self.history if name in line]

    def widths(self, name: str) -> dict[float, float]:
        """Half the 95 % interval of a metric by round, where it was measured with a price."""
        widths = self.series(f"{name}{INTERVAL}")
        return {round: width for round, width in widths if width is not None}

    def label(self, name: str) -> str:
        """The label of a metric's number."""
        return f"{name} on {measured_on(self.claims)}" if self.widths(name) else f"test {name}"

    def interval(self, name: str) -> str:
        """The last interval of a metric as text to follow its number, or ""."""
        widths = self.widths(name)
        return f" ± {number_text(widths[max(widths)])}" if widths else ""

    def _last(self, name: str) -> float | None:
        return next((line[name] for line in reversed(self.history) if name in line), None)


def shown(value: object) -> Content:
    """Anything as a page has it: numbers short, everything else as its text."""
    if value is None:
        return "not finite"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number_text(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(inner)}" for key, inner in value.items())
    return str(value)


def _result(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        result = json.loads(left(path).read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise BadInput(f"{path} cannot be read: {e}") from e
    if not isinstance(result, dict) or not result:
        raise BadInput(f"{path} is not a run's result: it holds {type(result).__name__}")
    return result


def claims_in(result: dict[str, Any], path: Path) -> tuple[PrivacyClaim, ...]:
    """The claims of a result, if they can be claims."""
    try:
        claims = tuple(PrivacyClaim.from_dict(raw) for raw in result.get("claims", []))
        for claim in claims:
            if not (claim.epsilon >= 0 and 0 <= float(claim.delta) <= 1):
                raise ValueError(f"epsilon {claim.epsilon} at delta {claim.delta}")
            if not all(isinstance(one, str) for one in (*claim.assumptions, claim.covers)):
                raise ValueError("what it assumes is not text")
        return claims
    except (TypeError, ValueError, AttributeError, OverflowError) as e:
        raise BadInput(f"{path}: its claims cannot be read: {e}") from e
