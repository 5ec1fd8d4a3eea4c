"""Run directories that are followed while they train, without trusting whoever wrote them.

| edge of a file | behaviour |
|---|---|
| no such file | None, or nothing new |
| a link, a folder, a pipe or a device | BadInput: a run leaves none of them |
| longer than a run's files are | BadInput before it is read |
| a line that is half written | left for the next reading |
"""

import hashlib
import os
import stat
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fedveil.base.checks import MOST_ROUNDS
from fedveil.base.errors import BadInput
from fedveil.pages.run_report import RunContents
from fedveil.privacy.accounting.budget import Spending
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import budgeted, counting, smaller
from fedveil.privacy.ledger.statement import Charged, Statement
from fedveil.runs.evidence import charged_of, file_of, is_open, unchanged_file
from fedveil.runs.report import claims_in, parse_result
from fedveil.runs.run_directory import STOP_FILE, History, in_use, parse_metrics, stop_requested

_MAX_BYTES = {"recipe.toml": 1 << 18, "result.json": 1 << 24, "metrics.jsonl": 1 << 27}
"""The longest files that are read. Those of a run of a million rounds are shorter."""

_MAX_LEDGER_BYTES = 1 << 30
_MAX_DEPTH, _MAX_RUNS, _MAX_FOLDERS = 3, 500, 10_000
"""Levels of folders that are searched, runs that are followed, folders that are opened."""

_T = TypeVar("_T")


def content_of(path: Path) -> bytes | None:
    """The content of a file, or None if it does not exist."""
    file = _opened(path)
    if file is None:
        return None
    with file:
        return file.read()


def check_plain(folder: Path) -> None:
    """Refuse a run directory with files that are not a run's own."""
    for name in _MAX_BYTES:
        file = _opened(folder / name)
        if file is not None:
            file.close()


def _opened(path: Path) -> BinaryIO | None:
    """Open a regular file of reasonable length, if it exists.

    Links are not followed, and pipes are not waited for.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as e:
        if path.is_symlink():
            raise BadInput(f"{path} is a link: a run leaves a file") from e
        raise BadInput(f"{path} cannot be read: {e.strerror}") from e
    about = os.fstat(descriptor)
    if stat.S_ISREG(about.st_mode) and about.st_size <= _MAX_BYTES[path.name]:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(about.st_mode):
        raise BadInput(f"{path} has {about.st_size:,} bytes: more than a run leaves")
    raise BadInput(f"{path} is not a file")


class MetricsTail:
    """The lines of a metrics file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_over(None)

    def _start_over(self, inode: int | None) -> None:
        self._inode, self._offset, self._damaged = inode, 0, False
        self.history: History = []

    @property
    def trouble(self) -> list[str]:
        """That the file was damaged, if it was."""
        if not self._damaged:
            return []
        return [f"metrics.jsonl was damaged after {len(self.history)} lines: the rest is left out"]

    def read_new(self) -> None:
        """Read what was added, or all of it if the file was replaced or cut."""
        file = _opened(self._path)
        if file is None:
            self._start_over(None)
            return
        with file:
            about = os.fstat(file.fileno())
            if about.st_ino != self._inode or about.st_size < self._offset:
                self._start_over(about.st_ino)
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for text in whole.decode(errors="replace").splitlines():
            line = None if self._damaged else parse_metrics(text)
            last = self.history[-1]["round"] if self.history else -1
            if line is None or line["round"] <= last:
                self._damaged = True
                return
            self.history.append(line)


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
        stop_requested: Whether the run was asked to end after its current round.
        changed: When its files were last written. It orders runs and is not shown.
    """

    id: str
    name: str
    state: State
    contents: RunContents
    planned: int | None
    stop_requested: bool
    changed: int

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
        self._tail = MetricsTail(folder / "metrics.jsonl")
        self._spending: Spending | None = None
        self._charges: tuple[Charged | None, bool] = (None, False)
        self._signature: object = None
        self._last: RunStatus | None = None

    def status(self) -> RunStatus:
        """The run now. It is the same object as long as no file has changed."""
        running = in_use(self.folder)
        signature = (running, *map(_signature, self._files()))
        if self._last is None or signature != self._signature:
            self._signature = signature
            try:
                self._last = self._read(running=running)
            except Exception as e:  # whatever is in one directory, the others are followed on
                self._last = self._unreadable(e, running=running)
        return self._last

    def _unreadable(self, error: Exception, *, running: bool) -> RunStatus:
        trouble = f"{self.folder} cannot be read: {type(error).__name__}"
        contents = RunContents(self.folder, "", [], {}, trouble=[trouble])
        state = State.RUNNING if running else State.GONE
        return RunStatus(self.id, self.name, state, contents, None, stop_requested=False, changed=0)

    def _files(self) -> list[Path]:
        files = [self.folder / name for name in (*_MAX_BYTES, STOP_FILE, "ledger.json")]
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
        ended = None if running or opened else self._part(trouble, self._result)
        statement = self._statement(charged, planned, spent=ended is None)
        result, claims = ended or ({}, statement.claims if statement else ())
        contents = RunContents(
            folder=self.folder,
            recipe_text=text,
            history=list(self._tail.history),
            result=result,
            claims=claims,
            statement=statement,
            trouble=[*trouble, *self._tail.trouble],
        )
        return RunStatus(
            id=self.id,
            name=self.name,
            state=State.RUNNING if running else State.ENDED if ended else State.GONE,
            contents=contents,
            planned=planned,
            stop_requested=running and stop_requested(self.folder),
            changed=max([0, *(sign[2] for sign in map(_signature, self._files()) if sign)]),
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
                self._signature = None
            else:
                trouble.append(str(e))
                self._charges = (None, False)
        return self._charges

    def _charged(self) -> tuple[Charged | None, bool]:
        file = file_of(self.folder)
        if not file.is_file():
            return None, False
        if file.stat().st_size > _MAX_LEDGER_BYTES:
            raise BadInput(f"{file} has {file.stat().st_size:,} bytes: more than is looked at")
        charged = charged_of(self.folder)
        return charged, charged is not None and is_open(file, charged.run)

    def _result(self) -> tuple[dict[str, Any], tuple[PrivacyClaim, ...]] | None:
        """The result and its claims, or None if there is no result."""
        path = self.folder / "result.json"
        content = content_of(path)
        if content is None:
            return None
        result = parse_result(unchanged_file(path), content)
        return result, claims_in(result, path)

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
            claims = (self._spending.claim_if_ended(*done), paid) if paid.condition else (paid,)
        return Statement(charged.run, charged.charges, claims, charged.epsilon_budget)


def _planned(recipe: str) -> int | None:
    """How many rounds a recipe says."""
    try:
        rounds = tomllib.loads(recipe).get("rounds")
    except (ValueError, RecursionError):
        return None
    return rounds if type(rounds) is int and 0 < rounds <= MOST_ROUNDS else None


def _signature(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when the file does."""
    try:
        about = path.lstat()
    except (OSError, ValueError):
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns


class RunsFolder:
    """The runs in and below `root`.

    Links to folders are not followed, so nothing outside `root` is read. A page names a run by its
    `id`, never by a path.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[str, FollowedRun] = {}

    def statuses(self) -> list[RunStatus]:
        """The status of every run: running ones first, then the latest."""
        self._search()
        statuses = [run.status() for run in self._runs.values()]
        return sorted(
            statuses, key=lambda status: (status.state is not State.RUNNING, -status.changed)
        )

    def find(self, id: str) -> FollowedRun | None:
        """The run with that id, or None if it is not or no longer under the folder."""
        run = self._runs.get(id)
        return run if run is not None and _is_run(run.folder) else None

    def _search(self) -> None:
        there = {}
        for folder in _runs_in(self.root):
            name = str(folder.relative_to(self.root)) if folder != self.root else folder.name
            there[folder] = name
            if len(there) == _MAX_RUNS:
                break
        known = {run.folder: run for run in self._runs.values()}
        runs = [known.get(folder) or FollowedRun(folder, name) for folder, name in there.items()]
        self._runs = {run.id: run for run in runs}


def _runs_in(root: Path) -> Iterator[Path]:
    waiting, opened = [(root, 0)], 0
    while waiting and opened < _MAX_FOLDERS:
        folder, depth = waiting.pop(0)
        opened += 1
        if _is_run(folder):
            yield folder
        elif depth < _MAX_DEPTH:
            waiting += [(inner, depth + 1) for inner in _folders_in(folder)]


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(e.path) for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    """Whether a run was begun here: the recipe is the first file that it writes."""
    try:
        return (folder / "recipe.toml").is_file()
    except OSError:
        return False
