"""Reading a ledger as it is at one moment, without writing a byte or a file beside it.

SQLite's own read-only mode makes a shared-memory file and an empty log where it can, fails where it
cannot, and leaves both behind. So a ledger at rest is opened as immutable, and one whose log has
content is read from a private copy of both.
"""

import os
import shutil
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput, one_line

DAMAGED = (sqlite3.DatabaseError, UnicodeDecodeError)  # the latter from a damaged schema

_LOGS = ("-wal", "-journal")
_TRIES = 5

_looks: ContextVar[dict[Path, sqlite3.Connection] | None] = ContextVar("looks", default=None)
_written: Counter[Path] = Counter()
_guard = threading.Lock()


def query(path: Path, statement: str) -> list[tuple[Any, ...]]:
    """The rows of a statement. Inside `one_look`, as of the moment at which that began."""
    with one_look(path) as db:
        try:
            return db.execute(statement).fetchall()
        except DAMAGED as e:
            raise BadInput(f"{path}: not a fedveil ledger ({one_line(e)})") from e


@contextmanager
def one_look(path: Path) -> Iterator[sqlite3.Connection]:
    """All queries inside see the ledger at one moment, and nothing beside it is written.

    | edge | behaviour |
    |---|---|
    | no log, or an empty one | read in place, as immutable: nothing is locked, nothing is made |
    | a log with content, of a run that is running or was killed | a private copy of both is read |
    | a ledger that this process writes | read in place: SQLite shares it within a process |
    | the file or its log may not be read | BadInput with the reason |
    | written while it was read, so that it did not fit | BadInput that says so |
    """
    looks = _looks.get() or {}
    if path in looks:
        yield looks[path]
        return
    _check_there(path)
    file = path.resolve()
    with ExitStack() as stack:
        db = stack.enter_context(_opened(path, file))
        before = _signature(file)
        token = _looks.set({**looks, path: db})
        try:
            yield db
        except BadInput as e:
            if _signature(file) != before and not _written[file]:
                raise BadInput(f"{path}: it was written while it was read; look again") from e
            raise
        finally:
            _looks.reset(token)


def begin_writing(path: Path) -> None:
    """This process has the ledger open, and SQLite's locks on it.

    They are lost when the process closes any descriptor of the file that SQLite does not know of:
    from now on it is read in place.
    """
    with _guard:
        _written[path.resolve()] += 1


def end_writing(path: Path) -> None:
    """This process has closed it again."""
    with _guard:
        _written[path.resolve()] -= 1


@contextmanager
def _opened(path: Path, file: Path) -> Iterator[sqlite3.Connection]:
    with ExitStack() as stack:
        if _written[file]:
            where, uri = str(file), False
        elif not _logs(path, file):
            where, uri = f"{file.as_uri()}?mode=ro&immutable=1", True
        else:
            where, uri = str(stack.enter_context(_copy(path, file))), False
        try:
            db = sqlite3.connect(where, isolation_level=None, timeout=10, uri=uri)
            stack.callback(db.close)
            db.execute("BEGIN")
        except sqlite3.OperationalError as e:
            reason = str(e) if os.access(file, os.R_OK) else "permission denied"
            raise BadInput(f"{path}: the ledger cannot be opened ({reason})") from e
        except DAMAGED as e:
            raise BadInput(f"{path}: not a fedveil ledger ({one_line(e)})") from e
        yield db


@contextmanager
def _copy(path: Path, file: Path) -> Iterator[Path]:
    """A private copy of the file and its logs, of one moment."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="fedveil-")
    except OSError as e:
        raise BadInput(f"{path}: its log can be read in a copy only: {e}; set TMPDIR") from e
    with folder as name:
        tries = (Path(name) / f"{number}.db" for number in range(_TRIES))
        try:
            whole = next((copy for copy in tries if _copied_at_once(path, file, copy)), None)
        except OSError as e:
            raise BadInput(f"{path}: the ledger cannot be read: {e}") from e
        if whole is None:
            raise BadInput(f"{path}: it is being written all the time; look again")
        yield whole


def _copied_at_once(path: Path, file: Path, copied: Path) -> bool:
    """Copy the file. Returns whether nothing was written meanwhile."""
    before = _signature(file)
    try:
        shutil.copyfile(file, copied)
        for log in _logs(path, file):
            shutil.copyfile(f"{file}{log}", f"{copied}{log}")
    except FileNotFoundError:
        return False
    return _signature(file) == before


def _check_there(path: Path) -> None:
    try:
        there = path.is_file()
    except OSError as e:
        raise BadInput(f"{path}: the ledger cannot be read: {e}") from e
    if not there:
        raise BadInput(f"{path}: there is no ledger here; give a run directory or its ledger.db")


def _logs(path: Path, file: Path) -> list[str]:
    """Which logs of a ledger have content."""
    try:
        return [log for log in _LOGS if _size(Path(f"{file}{log}"))]
    except OSError as e:
        raise BadInput(f"{path}: its log cannot be read: {e}") from e


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _signature(file: Path) -> tuple[object, ...]:
    """What changes when the file or its log is written."""
    found: list[object] = []
    for part in (file, *(Path(f"{file}{log}") for log in _LOGS)):
        try:
            stat = part.stat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)
