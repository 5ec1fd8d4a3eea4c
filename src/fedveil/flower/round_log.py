"""`sites.jsonl`: the sites that a federation's server asked in each round, and their answers.

The file is private, as the server's ledger is: under central DP nobody else may know who was asked.
A claim depends on it in one respect: an ask is noted durably before it is sent, so that no two asks
of a run have the same number.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.flower.messages import new_run_id
from fedveil.runs.disk import write_atomic

NAME, ABOUT = "sites.jsonl", "federation.json"


@dataclass
class Outcome:
    """The answers of the sites that were asked in one round.

    Attributes:
        round: The round.
        attempt: The attempt at it, from 0.
        asked: The names of the sites that were asked.
        answered: Those whose reports were accepted.
        refused: Those whose reports were refused, with the reason.
        declined: Those that declined, with the reason.
        enough: False if too few answered. The model then stays as it was.
    """

    round: int
    attempt: int
    asked: list[str]
    answered: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    enough: bool = True

    @property
    def absent(self) -> list[str]:
        """The sites that sent nothing in time."""
        known = {*self.answered, *self.declined, *self.refused}
        return [name for name in self.asked if name not in known]

    def __str__(self) -> str:
        parts = [f"{len(self.answered)} of {len(self.asked)} sites answered"]
        parts += [f"{name} declined: {reason}" for name, reason in self.declined.items()]
        parts += [f"{name} was refused: {reason}" for name, reason in self.refused.items()]
        if self.absent:
            parts.append(f"absent: {', '.join(self.absent)}")
        if not self.enough:
            parts.append("too few: the model stays as it was, and the charge stays")
        return f"round {self.round}: " + "; ".join(parts)


@dataclass(frozen=True)
class RoundLog:
    """The file of one run, in its directory."""

    folder: Path

    def asked_before(self, round: int) -> int:
        """How many times `round` was asked for."""
        return sum(line.get("asking") == round for line in self._lines())

    def asking(self, outcome: Outcome) -> None:
        """Note an ask, before it is sent."""
        self._write({"asking": outcome.round, "attempt": outcome.attempt, "sites": outcome.asked})

    def ended(self, outcome: Outcome) -> None:
        """Note what came of it."""
        self._write(
            {
                "round": outcome.round,
                "attempt": outcome.attempt,
                "answered": outcome.answered,
                "declined": outcome.declined,
                "refused": outcome.refused,
                "absent": outcome.absent,
                "enough": outcome.enough,
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        descriptor = os.open(self.folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, (json.dumps(line) + "\n").encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _lines(self) -> list[dict[str, Any]]:
        """The lines of the file. One that a crash cut off was never followed by an ask."""
        path = self.folder / NAME
        if not path.exists():
            return []
        lines: list[dict[str, Any]] = []
        for text in path.read_text().split("\n"):
            try:
                lines.append(json.loads(text) if text else {})
            except ValueError:
                continue
        return lines


@dataclass(frozen=True)
class About:
    """The run's id in its federation, and the digest of its plan.

    The id also separates the run's noise from that of every other run.
    """

    run: str
    plan: str

    @classmethod
    def of(cls, folder: Path, plan: str) -> "About":
        """Read it from the run directory, or make it for a new run. Refuses another plan."""
        path = folder / ABOUT
        if not path.exists():
            if (folder / "recipe.toml").exists():
                raise BadInput(f"{path} is missing: restore it, or start over")
            return cls(new_run_id(), plan)
        try:
            stored = json.loads(path.read_text())
            about = cls(str(stored["run"]), str(stored["plan"]))
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BadInput(f"{path} cannot be read: {e}") from e
        if about.plan != plan:
            raise BadInput(
                f"{folder} is a run of another recipe, or of another number of sites: resume with "
                "those that it was started with, or name a new run directory"
            )
        return about

    def write(self, folder: Path) -> None:
        """Write it into a run directory."""
        write_atomic(folder / ABOUT, (json.dumps(vars(self), indent=2) + "\n").encode())
