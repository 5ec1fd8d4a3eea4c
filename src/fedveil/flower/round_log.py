"""`sites.jsonl`: whom a federation's server asked, and what came of it, round by round.

The file is private, as the server's ledger is: under central DP nobody else may know who was asked.
It decides nothing that a claim depends on, but for one thing: an ask is noted, durably, before it
is sent, so that no two asks of a run are called the same.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil.errors import BadInput
from fedveil.flower.messages import new_run_id
from fedveil.runs.disk import write_atomic

NAME, ABOUT = "sites.jsonl", "federation.json"


@dataclass
class Outcome:
    """What came of asking sites in one round; names of sites, with a reason where one is due."""

    round: int
    attempt: int
    asked: list[str]
    answered: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    enough: bool = True

    @property
    def absent(self) -> list[str]:
        """Who was asked and sent nothing in time."""
        known = {*self.answered, *self.declined, *self.refused}
        return [name for name in self.asked if name not in known]

    def __str__(self) -> str:
        told = [f"{len(self.answered)} of {len(self.asked)} sites answered"]
        told += [f"{name} declined: {reason}" for name, reason in self.declined.items()]
        told += [f"{name} was refused: {reason}" for name, reason in self.refused.items()]
        if self.absent:
            told.append(f"absent: {', '.join(self.absent)}")
        if not self.enough:
            told.append("too few: the model stays as it was, and the charge stays")
        return f"round {self.round}: " + "; ".join(told)


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
        """What the file holds; a last line that a crash cut off was never followed by an ask."""
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
    """What a run directory says of its federation: a name for the run, and the plan's digest.

    The name also tells the run's noise apart from that of every other run.
    """

    run: str
    plan: str

    @classmethod
    def of(cls, folder: Path, plan: str) -> "About":
        """As the directory says, or new for a new run. Refuses another plan."""
        path = folder / ABOUT
        if not path.exists():
            if (folder / "recipe.toml").exists():
                raise BadInput(f"{path} is missing: restore it, or start over")
            return cls(new_run_id(), plan)
        try:
            found = json.loads(path.read_text())
            about = cls(str(found["run"]), str(found["plan"]))
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
