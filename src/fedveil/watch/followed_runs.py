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
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fedveil.base.checks import MOST_ROUNDS
from fedveil.base.errors import BadInput
from fedveil.base.platforms import open_unfollowed
from fedveil.pages.run_report import RunContents
from fedveil.privacy.accounting.budget import Spending
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import budgeted, counting, smaller
from fedveil.privacy.ledger.file import read_closing
from fedveil.privacy.ledger.statement import Charged, Statement
from fedveil.runs.evidence import ledger_path, read_charges_of, unchanged_file
from fedveil.runs.report import parse_result
from fedveil.runs.run_directory import STOP_FILE, History, in_use, parse_metrics

_MAX_BYTES = {"recipe.toml": 1 << 18, "result.json": 1 << 24, "metrics.jsonl": 1 << 27}
"""The longest files that are read. Those of a run of a million rounds are shorter."""

_MAX_LEDGER_BYTES = 1 << 30
_MAX_DEPTH, _MAX_RUNS, _MAX_FOLDERS = 3, 500, 10_000
"""Levels of folders that are searched, runs that are followed, folders that are opened."""

_T = TypeVar("_T")


def read_run_file(path: Path) -> bytes | None:
    """Return the content of a file of a run, None if it does not exist.

    `path` must be named recipe.toml, result.json or metrics.jsonl, otherwise KeyError. Raise
    BadInput unless it is a regular file of reasonable length.
    """
    file = _open_run_file(path)
    if file is None:
        return None
    with file:
        return file.read()


def check_run_files(folder: Path) -> None:
    """Raise BadInput if a file of the run is a link, not a regular file, or too long.

    Missing files pass. The ledger is not looked at.
    """
    for name in _MAX_BYTES:
        file = _open_run_file(folder / name)
        if file is not None:
            file.close()


def _open_run_file(path: Path) -> BinaryIO | None:
    """Open a file of a run for reading, or return None if it does not exist.

    `path` must be named recipe.toml, result.json or metrics.jsonl. Links are not followed, and
    pipes are not waited for. Raise BadInput unless it is a regular file of reasonable length.
    """
    try:
        descriptor = open_unfollowed(path)
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
    """Reads the lines that are added to a metrics file.

    Attributes:
        history: All lines so far.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_over(None)

    def _start_over(self, inode: int | None) -> None:
        """Forget all lines. `inode` is that of the file to read from now on."""
        self._inode, self._offset, self._damaged = inode, 0, False
        self.history: History = []

    @property
    def trouble(self) -> list[str]:
        """Return a sentence if the file was damaged, in a list, otherwise an empty list."""
        if not self._damaged:
            return []
        return [f"metrics.jsonl was damaged after {len(self.history)} lines: the rest is left out"]

    def read_new(self) -> None:
        """Append new whole lines to `history`. Start over if the file was replaced or cut.

        At a line that is malformed, or whose round does not come after the last, reading stops for
        good and `trouble` says so. Without a file, `history` is empty. Raise BadInput if it is no
        regular file.
        """
        file = _open_run_file(self._path)
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
    """The state of a run, in the words of the page."""

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
        """Return the claim that counts.

        For a run that has not ended, it is the claim if it ended now. None if nothing is claimed,
        or if that is not known.
        """
        return counting(self.contents.claims)

    @property
    def spent(self) -> PrivacyClaim | None:
        """Return the claim that the budget has paid for, so far or at the end. None without one."""
        claims = self.contents.claims
        running = None if self.state is State.ENDED else smaller(claims)
        return budgeted(claims) if running is None else running

    @property
    def spending_known(self) -> bool:
        """Return whether there is a result or a ledger, from which the spending follows."""
        return bool(self.contents.result) or self.contents.statement is not None


class FollowedRun:
    """A run directory that is read again whenever its files have changed.

    Attributes:
        folder: The directory.
        name: The name of the run on pages.
        id: 16 hexadecimal digits that follow from the name.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.id = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        self._tail = MetricsTail(folder / "metrics.jsonl")
        self._spending: Spending | None = None
        self._charges: tuple[Charged | None, bool] = (None, False)
        self._signature: object = None
        self._last: RunStatus | None = None

    def status(self) -> RunStatus:
        """Return the status now. It is the same object as long as no file has changed.

        It never raises: errors are sentences in the status' `contents.trouble`.
        """
        running = in_use(self.folder)
        signature = (running, *map(_signature, self._files()))
        if self._last is None or signature != self._signature:
            self._signature = signature
            try:
                self._last = self._read_status(running=running)
            except Exception as e:  # whatever is in one directory, the others are followed on
                self._last = self._unreadable(e, running=running)
        return self._last

    def _unreadable(self, error: Exception, *, running: bool) -> RunStatus:
        """Return the status of a run whose directory cannot be read because of `error`."""
        trouble = f"{self.folder} cannot be read: {type(error).__name__}"
        contents = RunContents(self.folder, "", [], {}, trouble=[trouble])
        state = State.RUNNING if running else State.GONE
        return RunStatus(self.id, self.name, state, contents, None, stop_requested=False, changed=0)

    def _files(self) -> list[Path]:
        """Return the paths of all files whose change may change the status. Some may not exist."""
        files = [self.folder / name for name in (*_MAX_BYTES, STOP_FILE, "ledger.json")]
        try:
            ledger = ledger_path(self.folder)
        except BadInput:
            return files
        return [*files, ledger, Path(f"{ledger}-wal")]

    def _read_status(self, *, running: bool) -> RunStatus:
        """Read the directory and return the status. Parts that cannot be read are named as trouble.

        `running` is whether a process holds the run's lock.
        """
        trouble: list[str] = []
        recipe = self._read_part(trouble, lambda: read_run_file(self.folder / "recipe.toml")) or b""
        text = recipe.decode(errors="replace")
        planned = _planned_rounds(text)
        self._read_part(trouble, self._tail.read_new)
        charged, opened = self._account(trouble, running=running)
        ended = None if running or opened else self._read_part(trouble, self._read_result)
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
            stop_requested=running and (self.folder / STOP_FILE).is_file(),
            changed=max([0, *(sign[2] for sign in map(_signature, self._files()) if sign)]),
        )

    @staticmethod
    def _read_part(trouble: list[str], read: Callable[[], _T]) -> _T | None:
        """Return `read()`, or None after adding its BadInput to `trouble`."""
        try:
            return read()
        except BadInput as e:
            trouble.append(str(e))
            return None

    def _account(self, trouble: list[str], *, running: bool) -> tuple[Charged | None, bool]:
        """Return (charges, whether the ledger has the run open), (None, False) without a ledger.

        A ledger that is being written may be unreadable for a moment. While the run is `running`,
        the charges are then those of the last reading, and the next `status` reads again. Otherwise
        the error is added to `trouble`.
        """
        try:
            file, charged = ledger_path(self.folder), None
            if file.is_file():
                size = file.stat().st_size
                if size > _MAX_LEDGER_BYTES:
                    raise BadInput(f"{file} has {size:,} bytes: more than is looked at")
                charged = read_charges_of(self.folder)
            self._charges = charged, charged is not None and not read_closing(file, charged.run)
        except BadInput as e:
            if running:
                self._signature = None
            else:
                trouble.append(str(e))
                self._charges = (None, False)
        return self._charges

    def _read_result(self) -> tuple[dict[str, Any], tuple[PrivacyClaim, ...]] | None:
        """Return (result, its claims), None without result.json.

        Raise BadInput if it is malformed.
        """
        path = self.folder / "result.json"
        content = read_run_file(path)
        if content is None:
            return None
        return parse_result(unchanged_file(path), content)

    def _statement(
        self, charged: Charged | None, planned: int | None, *, spent: bool
    ) -> Statement | None:
        """Return the charges as a statement, None without a ledger.

        Args:
            charged: The charges, None without a ledger.
            planned: The number of rounds in the recipe, None if unknown.
            spent: Whether the statement claims what was spent. If that holds on a condition only,
                the claim if the run ended now comes first. Otherwise it claims nothing. A round is
                charged before it begins, so the round under way is included.
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


def _planned_rounds(recipe: str) -> int | None:
    """Return the number of rounds in the text of a recipe, None if it cannot be read."""
    try:
        rounds = tomllib.loads(recipe).get("rounds")
    except (ValueError, RecursionError):
        return None
    return rounds if type(rounds) is int and 0 < rounds <= MOST_ROUNDS else None


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Return (inode, size, time of change) of a file, or None if it cannot be read."""
    try:
        about = path.lstat()
    except (OSError, ValueError):
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns


class RunsFolder:
    """The runs in and below the folder `root`, at most 500.

    Links to folders are not followed, so nothing outside `root` is read. A page names a run by its
    `id`, never by a path.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[str, FollowedRun] = {}

    def statuses(self) -> list[RunStatus]:
        """Search the folder and return the status of every run: running first, then the latest.

        Runs that are found again keep their state, so that unchanged files are not read twice.
        """
        known = {run.folder: run for run in self._runs.values()}
        runs = []
        for folder in islice(_find_runs(self.root), _MAX_RUNS):
            name = str(folder.relative_to(self.root)) if folder != self.root else folder.name
            runs.append(known.get(folder) or FollowedRun(folder, name))
        self._runs = {run.id: run for run in runs}
        statuses = [run.status() for run in self._runs.values()]
        return sorted(
            statuses, key=lambda status: (status.state is not State.RUNNING, -status.changed)
        )

    def find(self, id: str) -> FollowedRun | None:
        """Return the run with that id from the last `statuses()`, None if it is gone or unknown."""
        run = self._runs.get(id)
        return run if run is not None and _is_run(run.folder) else None


def _find_runs(root: Path) -> Iterator[Path]:
    """Yield run directories in and below `root`, nearest first, at most three levels down.

    Nothing is searched below a run. Links to folders are not followed. At most `_MAX_FOLDERS`
    folders are opened.
    """
    waiting, opened = [(root, 0)], 0
    while waiting and opened < _MAX_FOLDERS:
        folder, depth = waiting.pop(0)
        opened += 1
        if _is_run(folder):
            yield folder
        elif depth < _MAX_DEPTH:
            try:
                with os.scandir(folder) as entries:
                    inner = sorted(e.path for e in entries if e.is_dir(follow_symlinks=False))
            except OSError:
                continue
            waiting += [(Path(path), depth + 1) for path in inner]


def _is_run(folder: Path) -> bool:
    """Return whether the folder has a recipe.toml, the first file that a run writes."""
    try:
        return (folder / "recipe.toml").is_file()
    except OSError:
        return False
