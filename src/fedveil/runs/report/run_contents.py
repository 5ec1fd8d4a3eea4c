"""What a report is drawn from: a run directory as it is, ended or not, whoever wrote it."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedveil.errors import BadInput
from fedveil.names import INTERVAL
from fedveil.privacy.accounting.claims import NoiseSource, PrivacyClaim, measured_on
from fedveil.privacy.accounting.meaning import Meaning
from fedveil.privacy.ledger.statement import Statement
from fedveil.runs import metrics_file
from fedveil.runs.evidence import file_of, left, statement_of, verify_ledger
from fedveil.web.html import Content, number_text

_OWN = frozenset({"round", "clients", "clipped", "snr", "refused", "clip", "epsilon", "claim"})
"""Columns of metrics.jsonl that are the run's own; the others were measured."""


@dataclass(frozen=True)
class RunContents:
    """A run directory, read and not believed: texts are texts, and numbers are looked at.

    `result` is empty for a run that has not ended; `statement` is None without a ledger, and
    `trouble` says what does not fit between the directory and its ledger.
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
            history, trouble = metrics_file.read(folder / "metrics.jsonl")
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
        """What the run is called: by its recipe, or by its directory before it has ended."""
        return str(self.result.get("recipe", self.folder.name))

    @cached_property
    def claims(self) -> tuple[PrivacyClaim, ...]:
        """What is claimed: as the result has it, or the ledger where there is none yet."""
        if self.ended:
            return claims_in(self.result, self.folder / "result.json")
        return () if self.statement is None else self.statement.claims

    @cached_property
    def meaning(self) -> Meaning:
        return Meaning.of(self.claims)

    @property
    def rounds(self) -> int:
        return metrics_file.last_round(self.history)

    @property
    def limit(self) -> float | None:
        """The epsilon at which the run stops, if something is claimed and there is one."""
        if self.statement is not None:
            limit = self.statement.budget
        else:
            budget = self.result.get("budget")
            told = budget.get("epsilon") if isinstance(budget, dict) else None
            limit = float(told) if isinstance(told, int | float) else None
        return None if limit is None or math.isinf(limit) else limit

    @property
    def metrics(self) -> dict[str, Any]:
        """What was measured at the end, or last."""
        found = self.result.get("metrics")
        if isinstance(found, dict):
            return found
        return {name: self._last(name) for name in self.measured}

    @property
    def measured(self) -> list[str]:
        """The columns that were measured, a task's own metric before the loss."""
        names = dict.fromkeys(name for line in self.history for name in line)
        found = [n for n in names if n not in _OWN and n != "seconds" and "/" not in n]
        return [*(n for n in found if n != "loss"), *(n for n in found if n == "loss")]

    @property
    def secure(self) -> bool:
        """Whether noise is the operating system's, so that diagnostics and times are not told."""
        return any(claim.noise is NoiseSource.SECURE for claim in self.claims)

    @property
    def diagnosed(self) -> bool:
        """Whether what clients' data tell of a round was recorded."""
        return any(line.get("clipped") is not None for line in self.history)

    @property
    def notes(self) -> list[str]:
        found = self.result.get("notes", [])
        return [str(note) for note in found] if isinstance(found, list) else [str(found)]

    def series(self, name: str) -> list[tuple[float, float | None]]:
        """A column over rounds."""
        return [(float(line["round"]), line[name]) for line in self.history if name in line]

    def widths(self, name: str) -> dict[float, float]:
        """Half the 95 % interval of a metric by round, where it was measured with a price."""
        found = self.series(f"{name}{INTERVAL}")
        return {round: width for round, width in found if width is not None}

    def label(self, name: str) -> str:
        """What a metric is called beside its number."""
        return f"{name} on {measured_on(self.claims)}" if self.widths(name) else f"test {name}"

    def interval(self, name: str) -> str:
        """The last of them, to stand behind a number; "" where there is none."""
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
        found = json.loads(left(path).read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise BadInput(f"{path} cannot be read: {e}") from e
    if not isinstance(found, dict) or not found:
        raise BadInput(f"{path} is not a run's result: it holds {type(found).__name__}")
    return found


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
