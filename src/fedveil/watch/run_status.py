"""One run directory as it is now: running, ended or gone, and what may be shown of it."""

import hashlib
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from fedveil.base.checks import MOST_ROUNDS
from fedveil.base.errors import BadInput
from fedveil.pages.run_report import RunContents
from fedveil.privacy.accounting.budget import Spending
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import budgeted, counting, smaller
from fedveil.privacy.ledger.statement import Charged, Statement
from fedveil.runs.evidence import charged_of, file_of, is_open, left
from fedveil.runs.report import claims_in, parse_result
from fedveil.runs.run_directory import STOP_FILE, in_use, stop_requested
from fedveil.watch.run_files import LARGEST_LEDGER, MOST, Tail, content_of

_PARTS = (*MOST, STOP_FILE, "ledger.json")

_T = TypeVar("_T")


class State(StrEnum):
    """What a run is doing, in the words of the page."""

    RUNNING = "running"
    ENDED = "ended"
    GONE = "not running any more"


@dataclass(frozen=True, eq=False)
class RunStatus:
    """A run at one moment.

    Attributes:
        id: Names the run in the page's links.
        name: The directory, relative to the folder that is watched.
        state: Running, ended, or gone.
        contents: What the run directory holds.
        planned: The number of rounds in the recipe, or None if it cannot be read.
        asked: Whether the run was asked to end after its current round.
        changed: When its files were last written. It orders runs and is not shown.
    """

    id: str
    name: str
    state: State
    contents: RunContents
    planned: int | None
    asked: bool
    changed: float

    @property
    def claim(self) -> PrivacyClaim | None:
        """The claim that counts: of a run that has not ended, what to quote if it ends now.

        None if nothing is claimed, or if that is not known.
        """
        return counting(self.contents.claims)

    @property
    def spent(self) -> PrivacyClaim | None:
        """What the budget has paid for so far, or the budget's claim of a run that has ended."""
        claims = self.contents.claims
        running = None if self.state is State.ENDED else smaller(claims)
        return budgeted(claims) if running is None else running

    @property
    def known(self) -> bool:
        """Whether the spending is known, from the ledger or from the run's result."""
        return bool(self.contents.result) or self.contents.statement is not None


class FollowedRun:
    """A run directory that is read again whenever its files have changed."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.id = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        self._tail = Tail(folder / "metrics.jsonl")
        self._spending: Spending | None = None
        self._charges: tuple[Charged | None, bool] = (None, False)
        self._seen_as: object = None
        self._last: RunStatus | None = None

    def status(self) -> RunStatus:
        """The run now. It is the same object as long as no file has changed."""
        running = in_use(self.folder)
        sign = (running, *map(_sign, self._files()))
        if self._last is None or sign != self._seen_as:
            self._seen_as = sign
            try:
                self._last = self._read(running=running)
            except Exception as e:  # whatever is in one directory, the others are followed on
                self._last = self._unreadable(e, running=running)
        return self._last

    def _unreadable(self, error: Exception, *, running: bool) -> RunStatus:
        trouble = f"{self.folder} cannot be read: {type(error).__name__}"
        contents = RunContents(self.folder, "", [], {}, trouble=[trouble])
        state = State.RUNNING if running else State.GONE
        return RunStatus(self.id, self.name, state, contents, None, asked=False, changed=0.0)

    def _files(self) -> list[Path]:
        files = [self.folder / name for name in _PARTS]
        try:
            ledger = file_of(self.folder)
        except BadInput:
            return files
        return [*files, ledger, Path(f"{ledger}-wal")]

    def _read(self, *, running: bool) -> RunStatus:
        trouble: list[str] = []
        recipe = self._part(trouble, lambda: content_of(self.folder / "recipe.toml")) or b""
        text = recipe.decode(errors="replace")
        planned = _planned(text)
        self._part(trouble, self._tail.read_new)
        charged, opened = self._account(trouble, running=running)
        path = self.folder / "result.json"
        claims, result = None, dict[str, Any]()
        if not (running or opened):
            result = self._part(trouble, self._result) or {}
        if result:
            claims = self._part(trouble, lambda: claims_in(result, path))
        statement = self._statement(charged, planned, spent=claims is None)
        contents = RunContents(
            folder=self.folder,
            recipe_text=text,
            history=list(self._tail.history),
            result={} if claims is None else result,
            claims=claims if claims is not None else statement.claims if statement else (),
            statement=statement,
            trouble=[*trouble, *self._tail.trouble],
        )
        return RunStatus(
            id=self.id,
            name=self.name,
            state=State.RUNNING if running else State.ENDED if contents.result else State.GONE,
            contents=contents,
            planned=planned,
            asked=running and stop_requested(self.folder),
            changed=max((_changed(path) for path in self._files()), default=0.0),
        )

    @staticmethod
    def _part(trouble: list[str], read: Callable[[], _T]) -> _T | None:
        """Read a part of the directory, or note in `trouble` why it cannot be read."""
        try:
            return read()
        except BadInput as e:
            trouble.append(str(e))
            return None

    def _account(self, trouble: list[str], *, running: bool) -> tuple[Charged | None, bool]:
        """What was charged, and whether the run is open by its ledger: running, or killed.

        A ledger that is being written may be unreadable for a moment. The charges are then those of
        the last reading, and the next one tries again.
        """
        try:
            self._charges = self._charged()
        except BadInput as e:
            if running:
                self._seen_as = None
            else:
                trouble.append(str(e))
                self._charges = (None, False)
        return self._charges

    def _charged(self) -> tuple[Charged | None, bool]:
        file = file_of(self.folder)
        if not file.is_file():
            return None, False
        if file.stat().st_size > LARGEST_LEDGER:
            raise BadInput(f"{file} has {file.stat().st_size:,} bytes: more than is looked at")
        charged = charged_of(self.folder)
        return charged, charged is not None and is_open(file, charged.run)

    def _result(self) -> dict[str, Any]:
        path = self.folder / "result.json"
        content = content_of(path)
        return {} if content is None else parse_result(left(path), content)

    def _statement(
        self, charged: Charged | None, planned: int | None, *, spent: bool
    ) -> Statement | None:
        """Charges and, where nothing else says it, what they come to by the budget's line.

        A round is charged before it begins, so that the one under way is included.
        """
        if charged is None:
            return None
        claims: tuple[PrivacyClaim, ...] = ()
        if charged.lines and spent:
            permitted = charged.planned
            wanted = Spending(charged.lines[0], planned or permitted or charged.rounds, permitted)
            if self._spending != wanted:
                self._spending = wanted
            done = charged.rounds, charged.turns, charged.extra_attempts
            paid = self._spending.spent(*done)
            claims = (self._spending.quoted(*done), paid) if paid.condition else (paid,)
        return Statement(charged.run, charged.charges, claims, charged.budget)


def _planned(recipe: str) -> int | None:
    """How many rounds a recipe says."""
    try:
        rounds = tomllib.loads(recipe).get("rounds")
    except (ValueError, RecursionError):
        return None
    return rounds if type(rounds) is int and 0 < rounds <= MOST_ROUNDS else None


def _sign(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when the file does."""
    try:
        about = path.lstat()
    except (OSError, ValueError):
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except (OSError, ValueError):
        return 0.0
