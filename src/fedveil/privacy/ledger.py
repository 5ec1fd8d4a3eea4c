"""The ledger: a durable record of charges, written before anything is released.

One SQLite file per run, with a write-ahead log that is synced at every commit (synchronous =
FULL): a charge is on disk before the round begins, so a crash can count a round that was never
released and never miss one that was. The log, `ledger.db-wal`, is part of the ledger until it is
closed.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.errors import BadInput, BudgetExhausted, LedgerMismatch
from fedveil.privacy import events
from fedveil.privacy.claims import NoiseSource
from fedveil.privacy.terms import Terms

FORMAT = "2"

Lines = tuple[Terms, ...]
Counts = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int64]

_SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE charges (
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    covers TEXT NOT NULL,
    event TEXT NOT NULL,
    charged_at TEXT NOT NULL,
    PRIMARY KEY (run, round, attempt, covers)
);
CREATE TABLE cohorts (
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    ids BLOB NOT NULL,
    PRIMARY KEY (run, round)
);
"""


@dataclass(frozen=True)
class Charge:
    """One row of the ledger; `round` counts from 1, `covers` is the line it belongs to."""

    round: int
    attempt: int
    covers: str
    event: dict[str, Any]
    charged_at: str


class Ledger:
    """The charges of one run, one row per round and line of the budget.

    Guarantee: `charge` returns only after the charge is on disk, and raises `BudgetExhausted`
    without writing when the round would exceed the budget. A round with seeded noise that was
    charged before is a replay of the same randomness on the same data, hence the same release:
    it costs nothing. Where clients are charged for their own turns, the ledger also notes who took
    part, in the same transaction, and knows how often each of them did. A round costs time and
    space in proportion to its cohort, not to the number of clients.

    | edge | behaviour |
    |---|---|
    | no lines: nothing is claimed | nothing is written, nothing is refused |
    | round charged before | no second charge, no second count |
    | round charged before for another cohort | LedgerMismatch |
    | ledger of another run, recipe or data set | LedgerMismatch |
    | file missing, corrupt or of another version | BadInput |
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        run: str,
        lines: Lines,
        permitted: int,
        clients: int,
    ) -> None:
        self._db, self._run = connection, run
        self._lines, self._permitted = lines, permitted
        self._turns, self._counted = np.zeros(clients, dtype=np.int64), 0

    @classmethod
    def create(
        cls,
        path: Path | None,
        about: dict[str, str],
        lines: Lines,
        permitted: int,
        clients: int = 0,
    ) -> "Ledger":
        """A new ledger at `path` (None: in memory, for a training that leaves no run behind).

        `about` says whose ledger it is, with the run's name under "run"; `permitted` is the
        number of rounds that fit the budgets in `lines`; `clients` is how many clients' turns are
        counted, 0 if none are.
        """
        if any(line.noise is not NoiseSource.SEEDED for line in lines):
            raise BadInput("the ledger replays rounds for nothing, which only seeded noise allows")
        db = _connect(path)
        db.execute("PRAGMA journal_mode = WAL")
        with _transaction(db):
            for statement in filter(str.strip, _SCHEMA.split(";")):
                db.execute(statement)
            rows = {"format": FORMAT, "lines": _text(lines), "clients": str(clients), **about}
            db.executemany("INSERT INTO about VALUES (?, ?)", rows.items())
        return cls(db, about["run"], lines, permitted, clients)

    @classmethod
    def reopen(
        cls, path: Path, about: dict[str, str], lines: Lines, permitted: int, clients: int = 0
    ) -> "Ledger":
        """Go on with an existing ledger; refuse one that belongs to something else."""
        stored = read_about(path)
        for key, value in {**about, "lines": _text(lines), "clients": str(clients)}.items():
            if stored.get(key) != value:
                raise LedgerMismatch(
                    f"{path}: {key} is {stored.get(key)!r} in the ledger and {value!r} now: "
                    "resume with what the run was started with, or start a new run"
                )
        return cls(_connect_existing(path), about["run"], lines, permitted, clients)

    def charge(self, round: int, ids: Ids | None = None) -> None:
        """Charge `round` (counting from 1), or raise `BudgetExhausted` and write nothing.

        `ids` are the clients that take part, where their turns are counted.
        """
        if not self._lines:
            return
        cohort = b"" if ids is None else ids.astype("<u4").tobytes()
        with _transaction(self._db):
            query = "SELECT 1 FROM charges WHERE run = ? AND round = ? AND attempt = 0"
            if self._db.execute(query, (self._run, round)).fetchone():
                if ids is not None and self._cohort(round) != cohort:
                    raise LedgerMismatch(
                        f"round {round} was charged for another cohort: a replay must be the same"
                    )
                return
            charged = self.charged()
            if round != charged + 1:
                raise AssertionError(f"round {round} charged after {charged} rounds")
            if round > self._permitted:
                raise BudgetExhausted(
                    f"round {round} would exceed the budget, which permits "
                    f"{self._permitted} rounds; nothing was released"
                )
            now = datetime.now(UTC).isoformat()
            self._db.executemany(
                "INSERT INTO charges VALUES (?, ?, 0, ?, ?, ?)",
                [
                    (self._run, round, line.covers, json.dumps(events.to_dict(line.event)), now)
                    for line in self._lines
                    if line.due(round) and not line.reading
                ],
            )
            if ids is not None:
                self._db.execute("INSERT INTO cohorts VALUES (?, ?, ?)", (self._run, round, cohort))

    def charged(self) -> int:
        """How many rounds were charged, released or not."""
        query = "SELECT MAX(round) FROM charges WHERE run = ?"  # they are charged in turn
        return int(self._db.execute(query, (self._run,)).fetchone()[0] or 0)

    def turns(self, rounds: int) -> Counts:
        """How often each client took part in the first `rounds` rounds, as charged; not a copy."""
        if len(self._turns) == 0:
            raise BadInput("this ledger counts nobody's turns: create it with `clients`")
        if rounds < self._counted:
            self._turns[:], self._counted = 0, 0
        for round in range(self._counted + 1, rounds + 1):
            self._turns[_clients(self._cohort(round))] += 1
        self._counted = rounds
        return self._turns

    def counts(self) -> Counts | None:
        """How often each client took part in all charged rounds, where that is counted."""
        if len(self._turns) == 0:
            return None
        return self.turns(self.charged()).copy()

    def _cohort(self, round: int) -> bytes:
        query = "SELECT ids FROM cohorts WHERE run = ? AND round = ?"
        row = self._db.execute(query, (self._run, round)).fetchone()
        return b"" if row is None else bytes(row[0])

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def read_about(path: Path) -> dict[str, str]:
    """Who a ledger belongs to."""
    db = _connect_existing(path)
    try:
        about = {str(k): str(v) for k, v in db.execute("SELECT key, value FROM about")}
    except sqlite3.DatabaseError as e:
        raise BadInput(f"{path}: not a fedveil ledger ({e})") from e
    finally:
        db.close()
    if about.get("format") != FORMAT:
        raise BadInput(
            f"{path}: ledger format {about.get('format')!r}, this fedveil reads {FORMAT!r}"
        )
    return about


def read_charges(path: Path) -> list[Charge]:
    """All charges, in order."""
    db = _connect_existing(path)
    try:
        rows = db.execute(
            "SELECT round, attempt, covers, event, charged_at FROM charges "
            "ORDER BY round, attempt, covers"
        ).fetchall()
    except sqlite3.DatabaseError as e:
        raise BadInput(f"{path}: not a fedveil ledger ({e})") from e
    finally:
        db.close()
    try:
        return [Charge(r, a, covers, json.loads(event), at) for r, a, covers, event, at in rows]
    except ValueError as e:
        raise BadInput(f"{path}: a charge cannot be read: {e}") from e


def read_participations(path: Path) -> Counts | None:
    """How often each client took part, where the ledger counts that."""
    clients = read_about(path).get("clients", "0")
    db = _connect_existing(path)
    try:
        rows = db.execute("SELECT ids FROM cohorts").fetchall()
    except sqlite3.DatabaseError as e:
        raise BadInput(f"{path}: not a fedveil ledger ({e})") from e
    finally:
        db.close()
    try:
        counts = np.zeros(int(clients), dtype=np.int64)
        for (ids,) in rows:
            counts[_clients(ids)] += 1
    except (ValueError, TypeError, IndexError) as e:
        raise BadInput(f"{path}: the ledger's cohorts cannot be read: {e}") from e
    return counts if len(counts) else None


def _clients(ids: bytes) -> Ids:
    return np.frombuffer(ids, dtype="<u4").astype(np.int64)


def _text(lines: Lines) -> str:
    return json.dumps([line.to_dict() for line in lines])


def _connect(path: Path | None) -> sqlite3.Connection:
    db = sqlite3.connect(":memory:" if path is None else path, isolation_level=None, timeout=10)
    try:
        db.execute("PRAGMA synchronous = FULL")
    except sqlite3.DatabaseError as e:
        db.close()
        raise BadInput(f"{path}: not a fedveil ledger ({e})") from e
    return db


def _connect_existing(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise BadInput(f"{path}: there is no ledger here; give a run directory or its ledger.db")
    return _connect(path)


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
