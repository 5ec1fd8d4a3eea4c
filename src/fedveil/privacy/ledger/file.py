"""The file of a ledger: its tables, how it is opened, and what can be read back from it.

A ledger is read as it is at one moment, without writing a byte or a file beside it. SQLite's own
read-only mode makes a shared-memory file and an empty log where it can, fails where it cannot, and
leaves both behind. So a ledger at rest is opened as immutable, and one whose log has content is
read from a private copy of both.
"""

import json
import os
import shutil
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import BadInput, one_line

DAMAGED = (sqlite3.DatabaseError, UnicodeDecodeError)  # the latter from a damaged schema

_LOGS = ("-wal", "-journal")
_TRIES = 5

_looks: ContextVar[dict[Path, sqlite3.Connection] | None] = ContextVar("looks", default=None)
_writers: Counter[Path] = Counter()
_guard = threading.Lock()


def query(path: Path, statement: str) -> list[tuple[Any, ...]]:
    """All rows of an SQL statement, as tuples. Nothing is written.

    Inside `ledger_snapshot` of the same path, as of the moment at which that began. Raises BadInput
    if the file is not a ledger.
    """
    with ledger_snapshot(path) as db:
        try:
            return db.execute(statement).fetchall()
        except DAMAGED as e:
            raise BadInput(f"{path}: not a fedveil ledger ({one_line(e)})") from e


@contextmanager
def ledger_snapshot(path: Path) -> Iterator[sqlite3.Connection]:
    """Context manager: yields a connection to the ledger as it is at one moment.

    Calls of `query` inside use it as well. Nothing is written.

    | edge | behaviour |
    |---|---|
    | no log, or an empty one | read in place, as immutable: nothing is locked, nothing is made |
    | a log with content, of a run that is running or was killed | a private copy of both is read |
    | a ledger that this process writes | read in place: SQLite shares it within a process |
    | inside another snapshot of the same path | the connection of that one |
    | no file, or not a database | BadInput |
    | the file or its log may not be read | BadInput with the reason |
    | written while it was read, so that it did not fit | BadInput that says so |
    """
    looks = _looks.get() or {}
    if path in looks:
        yield looks[path]
        return
    try:
        exists = path.is_file()
    except OSError as e:
        raise BadInput(f"{path}: the ledger cannot be read: {e}") from e
    if not exists:
        raise BadInput(f"{path}: there is no ledger here; give a run directory or its ledger.db")
    file = path.resolve()
    with ExitStack() as stack:
        where, uri = str(file), False
        if not _writers[file]:
            if _logs(path, file):
                where = str(stack.enter_context(_private_copy(path, file)))
            else:
                where, uri = f"{file.as_uri()}?mode=ro&immutable=1", True
        try:
            db = sqlite3.connect(where, isolation_level=None, timeout=10, uri=uri)
            stack.callback(db.close)
            db.execute("BEGIN")
        except sqlite3.OperationalError as e:
            reason = str(e) if os.access(file, os.R_OK) else "permission denied"
            raise BadInput(f"{path}: the ledger cannot be opened ({reason})") from e
        except DAMAGED as e:
            raise BadInput(f"{path}: not a fedveil ledger ({one_line(e)})") from e
        before = _signature(file)
        token = _looks.set({**looks, path: db})
        try:
            yield db
        except BadInput as e:
            if _signature(file) != before and not _writers[file]:
                raise BadInput(f"{path}: it was written while it was read; look again") from e
            raise
        finally:
            _looks.reset(token)


def count_writer(path: Path, change: int) -> None:
    """Note that this process has opened (`change` 1) or closed (-1) the ledger for writing.

    SQLite's locks on the file are lost when this process closes a descriptor of it that SQLite does
    not know of. So the ledger is read in place meanwhile.
    """
    with _guard:
        _writers[path.resolve()] += change


@contextmanager
def _private_copy(path: Path, file: Path) -> Iterator[Path]:
    """Context manager: yields the path of a private copy of the ledger and its logs at one moment.

    The copy is deleted at the end. `path` is how messages name the ledger, `file` the same,
    resolved. Raises BadInput if there is no room for temporary files, if the ledger cannot be read,
    or if it changed during each of five tries.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="fedveil-")
    except OSError as e:
        raise BadInput(f"{path}: its log can be read in a copy only: {e}; set TMPDIR") from e
    with folder as name:
        for number in range(_TRIES):
            copy, before = Path(name) / f"{number}.db", _signature(file)
            try:
                shutil.copyfile(file, copy)
                for log in _logs(path, file):
                    shutil.copyfile(f"{file}{log}", f"{copy}{log}")
            except FileNotFoundError:
                continue
            except OSError as e:
                raise BadInput(f"{path}: the ledger cannot be read: {e}") from e
            if _signature(file) == before:  # nothing was written meanwhile
                yield copy
                return
        raise BadInput(f"{path}: it is being written all the time; look again")


def _logs(path: Path, file: Path) -> list[str]:
    """The suffixes of the ledger's logs that have content: "-wal", "-journal", both or none.

    `path` is how messages name the ledger, `file` the same, resolved. Raises BadInput if a log may
    not be looked at.
    """
    logs = []
    for log in _LOGS:
        try:
            if Path(f"{file}{log}").stat().st_size:
                logs.append(log)
        except FileNotFoundError:
            continue
        except OSError as e:
            raise BadInput(f"{path}: its log cannot be read: {e}") from e
    return logs


def _signature(file: Path) -> tuple[object, ...]:
    """(inode, size, time of change) of the file and its two logs, None for a missing one.

    Two signatures differ if something was written in between.
    """
    parts: list[object] = []
    for suffix in ("", *_LOGS):
        try:
            stat = Path(f"{file}{suffix}").stat()
            parts.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            parts.append(None)
    return tuple(parts)


FORMAT = "5"

_MOST_CLIENTS = 1 << 27
"""What a ledger may say of its clients: counts of more would not fit into memory."""

Counts = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int64]

SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE runs (run TEXT PRIMARY KEY, about TEXT NOT NULL);
CREATE TABLE charges (
    seq INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    covers TEXT NOT NULL,
    event TEXT NOT NULL,
    charged_at TEXT NOT NULL,
    hash TEXT NOT NULL,
    UNIQUE (run, round, attempt, covers)
);
CREATE TABLE cohorts (
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    ids BLOB NOT NULL,
    PRIMARY KEY (run, round, attempt)
);
CREATE TABLE closings (
    seq INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    files TEXT NOT NULL,
    closed_at TEXT NOT NULL,
    hash TEXT NOT NULL
);
"""


_TABLES = "SELECT type, name, tbl_name, sql FROM sqlite_master"

with closing(sqlite3.connect(":memory:")) as _db:
    _db.executescript(SCHEMA)
    _OWN_TABLES = frozenset(_db.execute(_TABLES).fetchall())
"""(type, name, table, SQL) of the tables and indices of a new ledger.

A ledger with others is refused: with a trigger, charges could vanish.
"""


@dataclass(frozen=True)
class Charge:
    """One row of the ledger. `round` counts from 1, `covers` is the line it belongs to."""

    round: int
    attempt: int
    covers: str
    event: dict[str, Any]
    charged_at: str
    run: str = ""


def read_about(path: Path) -> dict[str, str]:
    """The ledger's description of itself: format, salt and, of a shared ledger, common terms.

    `salt` is the key of its seals, and stays in the file. Raises BadInput for another format, and
    for tables, indices or triggers that are not as fedveil makes them.
    """
    with ledger_snapshot(path):
        rows, tables = query(path, "SELECT key, value FROM about"), set(query(path, _TABLES))
    try:
        about = {column(name, str): column(value, str) for name, value in rows}
    except TypeError as e:
        raise BadInput(f"{path}: not a fedveil ledger ({one_line(e)})") from e
    if about.get("format") != FORMAT:
        raise BadInput(
            f"{path}: ledger format {about.get('format')!r}, this fedveil reads {FORMAT!r}"
        )
    if tables != _OWN_TABLES or "salt" not in about:
        raise BadInput(
            f"{path}: its tables are not as fedveil makes them: the file was changed; restore it "
            "from a copy"
        )
    return about


def read_runs(path: Path) -> dict[str, dict[str, str]]:
    """By name, in the order of registration, the texts that each run of a ledger registered with.

    Among them are "lines", "clients" and "permitted". Raises BadInput if they cannot be read.
    """
    with ledger_snapshot(path):
        read_about(path)
        rows = query(path, "SELECT run, about FROM runs ORDER BY rowid")
    runs = {}
    try:
        for run, about in rows:
            runs[column(run, str)] = _texts(about)
    except (ValueError, TypeError) as e:
        raise BadInput(f"{path}: a run cannot be read: {e}") from e
    return runs


def read_charges(path: Path, run: str | None = None) -> list[Charge]:
    """The charges of `run`, or of all runs if it is None, by run, round, attempt and line.

    [] for an unknown run. Raises BadInput if a charge cannot be read.
    """
    rows = query(
        path,
        "SELECT round, attempt, covers, event, charged_at, run FROM charges "
        "ORDER BY run, round, attempt, covers",
    )
    kinds = (int, int, str, str, str, str)
    charges = []
    try:
        for row in rows:
            values = [column(value, kind) for value, kind in zip(row, kinds, strict=True)]
            values[3] = dict(json.loads(values[3]))
            charges.append(Charge(*values))
    except (ValueError, TypeError) as e:
        raise BadInput(f"{path}: a charge cannot be read: {e}") from e
    return [charge for charge in charges if run is None or charge.run == run]


def read_participations(path: Path, run: str | None = None) -> Counts | None:
    """How often each client took part in `run`, int64 [N]. None where turns are not counted.

    If `run` is None, the first run of the ledger counts. Raises BadInput if cohorts cannot be read.
    """
    with ledger_snapshot(path):
        runs = read_runs(path)
        rows = query(path, "SELECT run, ids FROM cohorts")
    name = run if run is not None else next(iter(runs), "")
    try:
        counts = np.zeros(counted_clients(runs.get(name, {})), dtype=np.int64)
        for owner, ids in rows:
            if owner == name:
                counts[ids_from_bytes(ids)] += 1
    except (ValueError, TypeError, IndexError) as e:
        raise BadInput(f"{path}: the ledger's cohorts cannot be read: {e}") from e
    return counts if len(counts) else None


def read_closing(path: Path, run: str) -> dict[str, str]:
    """The digests of a run's files by name, when it ended last.

    {} if it is open, resumed or unknown.

    Raises BadInput if the entry cannot be read.
    """
    rows = query(path, "SELECT run, files FROM closings ORDER BY seq DESC")
    try:
        return next((_texts(files) for owner, files in rows if owner == run), {})
    except (ValueError, TypeError) as e:
        raise BadInput(f"{path}: the end of the run {run!r} cannot be read: {e}") from e


def counted_clients(about: dict[str, str]) -> int:
    """The number of clients whose turns a run counts, from the texts that it registered with.

    0 if it counts none. Raises ValueError if the number is malformed or above 2^27.
    """
    clients = int(about.get("clients", "0"))
    if not 0 <= clients <= _MOST_CLIENTS:
        raise ValueError(f"it speaks of {clients} clients")
    return clients


def column(value: Any, kind: type) -> Any:
    """`value`, if it is of the type `kind`. Raises TypeError otherwise: SQLite may hold any."""
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} where {_KINDS[kind]} should be")
    return value


_KINDS = {str: "text", int: "a count", bytes: "a cohort", dict: "names and texts"}


def _texts(text: Any) -> dict[str, str]:
    """The names and texts of a JSON object, from a column.

    Raises TypeError or ValueError if it is anything else.
    """
    values: dict[str, str] = column(json.loads(column(text, str)), dict)
    for value in values.values():
        column(value, str)
    return values


def ids_from_bytes(ids: bytes) -> Ids:
    """The client ids of a stored cohort, int64 [K], from 32-bit little-endian numbers."""
    return np.frombuffer(ids, dtype="<u4").astype(np.int64)


def connect(path: Path | None) -> sqlite3.Connection:
    """A connection for writing to a file, or to memory if `path` is None.

    Commits wait for the disk.

    A missing file is made. Raises BadInput if it cannot be opened or is not a database.
    """
    where = ":memory:" if path is None else path
    try:
        db = sqlite3.connect(where, isolation_level=None, timeout=10)
    except sqlite3.OperationalError as e:
        raise BadInput(
            f"{path}: the ledger cannot be opened ({e}): see that it and its directory can be read "
            "and written"
        ) from e
    try:
        db.execute("PRAGMA synchronous = FULL")
    except DAMAGED as e:
        db.close()
        raise BadInput(f"{path}: not a fedveil ledger ({one_line(e)})") from e
    return db


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Context manager: commit everything that is written inside, or nothing if it raises.

    Nobody else writes meanwhile: waits up to 10 seconds for another writer.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk may have ended it already
            db.execute("ROLLBACK")
        raise
