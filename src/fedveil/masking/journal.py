"""`Journal`: what a site has masked and answered, on disk before it is sent."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedveil.base.errors import BadInput, one_line
from fedveil.masking.sum_messages import MessageRefused, Place

SELF, PAIRS = "self", "pairs"
"""The two secrets of a site: the seed of its self mask, and those that it shares with others."""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS masked (run BLOB, round INTEGER, attempt INTEGER, "
    "PRIMARY KEY (run, round, attempt)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS answered (run BLOB, round INTEGER, attempt INTEGER, site INTEGER, "
    "secret TEXT, vectors BLOB, PRIMARY KEY (run, round, attempt, site)) WITHOUT ROWID",
)


class Journal:
    """What a site of secure sums has done: at most one vector and one answer per attempt.

    Guarantee: `record_begin` and `record_answer` return only when what they permit is on disk
    (`synchronous = EXTRA`), and permit nothing that contradicts the file, whichever process wrote
    it. So a site masks once per attempt at a round, and reveals one of another site's two secrets
    at most, also after a crash.

    | edge | behaviour |
    |---|---|
    | the attempt was begun, or a later one of this run was | `record_begin` raises MessageRefused |
    | the same answer again | permitted: the answer was perhaps lost |
    | an answer about other vectors, or the other secret | `record_answer` raises MessageRefused |
    | a file that is no journal, or cannot be written | BadInput |

    Args:
        path: The file, made if it is not there. None keeps the journal in memory, for simulations.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        try:
            self._db = sqlite3.connect(path or ":memory:", timeout=30, isolation_level=None)
            self._db.execute("PRAGMA synchronous = EXTRA")
        except sqlite3.Error as e:
            raise BadInput(f"the journal {path} cannot be opened: {one_line(e)}") from e
        with self._transaction():
            for table in _TABLES:
                self._db.execute(table)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def record_begin(self, run: bytes, place: Place) -> None:
        """Write down that this site takes part in an attempt, before it does."""
        with self._transaction():
            rows = self._db.execute(
                "SELECT round, attempt FROM masked WHERE run = ? "
                "ORDER BY round DESC, attempt DESC LIMIT 1",
                (run,),
            ).fetchall()
            if rows and place <= Place(*rows[0]):
                raise MessageRefused(
                    f"this site took part in {Place(*rows[0])}, and {place} is not after it"
                )
            self._db.execute(
                "INSERT INTO masked VALUES (?, ?, ?)", (run, place.round, place.attempt)
            )

    def record_answer(
        self, run: bytes, place: Place, secrets: dict[int, str], vectors: bytes
    ) -> None:
        """Write down which secret of each site this site reveals, before it does.

        Args:
            run: The digest of the terms.
            place: The round.
            secrets: `SELF` or `PAIRS` by site.
            vectors: The digest of the statements that count.
        """
        key = (run, place.round, place.attempt)
        with self._transaction():
            rows = self._db.execute(
                "SELECT site, secret, vectors FROM answered "
                "WHERE run = ? AND round = ? AND attempt = ?",
                key,
            ).fetchall()
            if rows:
                if {(site, secret, vectors) for site, secret in secrets.items()} != set(rows):
                    raise MessageRefused(f"this site has answered otherwise in {place}")
                return
            self._db.executemany(
                "INSERT INTO answered VALUES (?, ?, ?, ?, ?, ?)",
                [(*key, site, secret, vectors) for site, secret in sorted(secrets.items())],
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Context manager: all of it is on disk at its end, or, after an error, nothing."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as e:
            if self._db.in_transaction:  # a full disk may have ended it already
                self._db.execute("ROLLBACK")
            if isinstance(e, sqlite3.Error):
                raise BadInput(f"the journal {self._path} cannot be written: {one_line(e)}") from e
            raise
