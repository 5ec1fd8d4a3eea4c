"""A hash chain over a ledger's charges and closings: none is changed, removed or moved unnoticed.

Each charge's hash covers everything it says, who took part, all runs that had registered by then,
and the hash before it; the first covers what the ledger says of itself. A closing covers the files
that a run left in the same way. Whoever keeps the last hash and the number of entries somewhere
else, as run directories do, also notices a tail that was cut off. The chain is evidence against
mistakes and quiet edits; it has no key, so somebody who rewrites the whole file, and has the
copies of the last hash too, is not stopped.
"""

import hashlib
import hmac
import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Head:
    """The last hash of a chain and how many entries it covers."""

    hash: str
    length: int

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {"head": self.hash, "length": self.length}


@dataclass(frozen=True)
class Entry:
    """A charge as the chain sees it.

    `ids`, who took part (empty where that is not noted), is sealed; `runs`, all that had
    registered, is a digest.
    """

    run: str
    round: int
    attempt: int
    covers: str
    event: str
    charged_at: str
    ids: str
    runs: str


@dataclass(frozen=True)
class Closing:
    """The end of a run as the chain sees it.

    `files` is a JSON object with the digest of each file that the run left; empty, the run has gone
    on and the end before is not one any more.
    """

    run: str
    files: str
    closed_at: str
    runs: str


def digest(content: bytes | str) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def digest_of(texts: Iterable[str]) -> str:
    """The digest of several texts in their order."""
    return digest(json.dumps(list(texts)))


def seal(salt: str, content: bytes | str) -> str:
    """A digest that confirms no guess to somebody who does not have the ledger's salt."""
    content = content.encode() if isinstance(content, str) else content
    return hmac.new(salt.encode(), content, hashlib.sha256).hexdigest()


def first_hash(about: dict[str, str]) -> str:
    """The hash before the first entry: that of the ledger's description of itself."""
    return digest(json.dumps(about, sort_keys=True))


def next_hash(before: str, entry: Entry | Closing) -> str:
    """The hash of an entry after `before`. A charge and a closing never have the same content."""
    return digest(json.dumps([before, *vars(entry).values()]))


def broken_at(first: str, links: Iterable[tuple[Entry | Closing, str]]) -> int | None:
    """The first entry, counting from 1, whose hash is wrong. None if all are right.

    >>> a = Entry("r", 1, 0, "updates", "{}", "now", "", "")
    >>> b = Entry("r", 2, 0, "updates", "{}", "now", "", "")
    >>> one = next_hash("", a)
    >>> broken_at("", [(a, one), (b, next_hash(one, b))]), broken_at("", [(b, one)])
    (None, 1)
    """
    before = first
    for number, (entry, found) in enumerate(links, 1):
        before = next_hash(before, entry)
        if before != found:
            return number
    return None


def head_of(db: sqlite3.Connection) -> Head:
    """The last hash and the number of entries. Before the first entry, `first_hash`."""
    last = (
        db.execute(f"SELECT seq, hash FROM {table} ORDER BY seq DESC LIMIT 1").fetchone()
        for table in ("charges", "closings")
    )
    seq, found = max((row for row in last if row is not None), default=(0, ""))
    if not seq:
        return Head(first_hash(dict(db.execute("SELECT key, value FROM about"))), 0)
    return Head(str(found), int(seq))


def runs_digest(db: sqlite3.Connection) -> str:
    """The digest of all runs that have registered."""
    return digest_of(
        text for (text,) in db.execute("SELECT about FROM runs ORDER BY rowid").fetchall()
    )


def add_charge(db: sqlite3.Connection, entry: Entry) -> None:
    """Append a charge. The caller holds a transaction."""
    head = _after(head_of(db), entry)
    values = (entry.run, entry.round, entry.attempt, entry.covers, entry.event, entry.charged_at)
    row = (head.length, *values, head.hash)
    db.execute("INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def add_closing(db: sqlite3.Connection, run: str, files: dict[str, str], at: str) -> Head:
    """Append the files that a run left. The caller holds a transaction."""
    entry = Closing(run, json.dumps(files, sort_keys=True), at, runs_digest(db))
    head = _after(head_of(db), entry)
    row = (head.length, run, entry.files, at, head.hash)
    db.execute("INSERT INTO closings VALUES (?, ?, ?, ?, ?)", row)
    return head


def last_closing(db: sqlite3.Connection, run: str) -> dict[str, str]:
    """The files that a run left when it ended last, empty while it is open."""
    query = "SELECT files FROM closings WHERE run = ? ORDER BY seq DESC LIMIT 1"
    row = db.execute(query, (run,)).fetchone()
    return {} if row is None else dict(json.loads(row[0]))


def _after(head: Head, entry: Entry | Closing) -> Head:
    return Head(next_hash(head.hash, entry), head.length + 1)
