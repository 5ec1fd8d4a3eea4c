"""Entries at the end of a ledger's chain: charges, and what a run left when it ended."""

import json
import sqlite3

from fedveil.privacy.ledger import hash_chain
from fedveil.privacy.ledger.hash_chain import Closing, Entry, Head


def head_of(db: sqlite3.Connection) -> Head:
    """The last entry; before the first, what the ledger says of itself."""
    last = (
        db.execute(f"SELECT seq, hash FROM {table} ORDER BY seq DESC LIMIT 1").fetchone()
        for table in ("charges", "closings")
    )
    seq, found = max((row for row in last if row is not None), default=(0, ""))
    if not seq:
        return Head(hash_chain.first_hash(dict(db.execute("SELECT key, value FROM about"))), 0)
    return Head(str(found), int(seq))


def runs_digest(db: sqlite3.Connection) -> str:
    """Of all runs that have registered."""
    return hash_chain.digest_of(
        text for (text,) in db.execute("SELECT about FROM runs ORDER BY rowid").fetchall()
    )


def add_charge(db: sqlite3.Connection, entry: Entry) -> None:
    """Append a charge; the caller holds a transaction."""
    head = _after(head_of(db), entry)
    said = (entry.run, entry.round, entry.attempt, entry.covers, entry.event, entry.charged_at)
    row = (head.length, *said, head.hash)
    db.execute("INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def add_closing(db: sqlite3.Connection, run: str, files: dict[str, str], at: str) -> Head:
    """Append what a run left; the caller holds a transaction."""
    entry = Closing(run, json.dumps(files, sort_keys=True), at, runs_digest(db))
    head = _after(head_of(db), entry)
    row = (head.length, run, entry.files, at, head.hash)
    db.execute("INSERT INTO closings VALUES (?, ?, ?, ?, ?)", row)
    return head


def last_closing(db: sqlite3.Connection, run: str) -> dict[str, str]:
    """What a run left when it ended last; nothing while it is open."""
    query = "SELECT files FROM closings WHERE run = ? ORDER BY seq DESC LIMIT 1"
    row = db.execute(query, (run,)).fetchone()
    return {} if row is None else dict(json.loads(row[0]))


def _after(head: Head, entry: Entry | Closing) -> Head:
    return Head(hash_chain.next_hash(head.hash, entry), head.length + 1)
