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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.privacy.ledger.file import column, one_look, query, read_about


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


Link = Entry | Closing


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


def next_hash(before: str, entry: Link) -> str:
    """The hash of an entry after `before`. A charge and a closing never have the same content."""
    return digest(json.dumps([before, *vars(entry).values()]))


def broken_at(first: str, links: Iterable[tuple[Link, str]]) -> int | None:
    """The first entry, counting from 1, whose hash is wrong. None if all are right.

    >>> a = Entry("r", 1, 0, "updates", "{}", "now", "", "")
    >>> b = Entry("r", 2, 0, "updates", "{}", "now", "", "")
    >>> one = next_hash("", a)
    >>> broken_at("", [(a, one), (b, next_hash(one, b))]), broken_at("", [(b, one)])
    (None, 1)
    """
    before = first
    for number, (entry, noted) in enumerate(links, 1):
        before = next_hash(before, entry)
        if before != noted:
            return number
    return None


def head_of(db: sqlite3.Connection) -> Head:
    """The last hash and the number of entries. Before the first entry, `first_hash`."""
    last = (
        db.execute(f"SELECT seq, hash FROM {table} ORDER BY seq DESC LIMIT 1").fetchone()
        for table in ("charges", "closings")
    )
    seq, noted = max((row for row in last if row is not None), default=(0, ""))
    if not seq:
        return Head(first_hash(dict(db.execute("SELECT key, value FROM about"))), 0)
    return Head(str(noted), int(seq))


def runs_digest(db: sqlite3.Connection) -> str:
    """The digest of all runs that have registered."""
    return digest_of(
        text for (text,) in db.execute("SELECT about FROM runs ORDER BY rowid").fetchall()
    )


def append(db: sqlite3.Connection, entry: Link) -> Head:
    """Append a charge or a closing. The caller holds a transaction."""
    last = head_of(db)
    head = Head(next_hash(last.hash, entry), last.length + 1)
    table, columns = ("charges", 6) if isinstance(entry, Entry) else ("closings", 3)
    row = (head.length, *list(vars(entry).values())[:columns], head.hash)
    db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    return head


_CHARGES = (
    "SELECT seq, charges.run, round, attempt, covers, event, charged_at, ids, hash "
    "FROM charges LEFT JOIN cohorts USING (run, round, attempt)"
)
_CLOSINGS = "SELECT seq, run, files, closed_at, hash FROM closings"
_HASHES = "SELECT seq, hash FROM "
_CHARGE_TYPES, _CLOSING_TYPES = (str, int, int, str, str, str), (str, str, str)


def verify(path: Path, *known: Head) -> Head:
    """Check the chain of a ledger and return its head.

    Guarantee: a charge, a closing, a cohort or a run that was changed, removed, inserted or moved
    is refused with its place, and so is a table, index or trigger that is not fedveil's, and, where
    somebody has `known` what the end was, a tail that was cut off. A run that registered after the
    last entry has spent nothing and is not covered yet.
    """
    with one_look(path):
        about = read_about(path)
        (state,) = query(path, "PRAGMA integrity_check(1)")[0]
        if state != "ok":
            what = " ".join(str(state).split())
            raise BadInput(f"{path}: the file is damaged: {what}; restore it from a copy")
        links = read_links(path, about["salt"])
        cohorts = {row[:3] for row in query(path, "SELECT run, round, attempt FROM cohorts")}
    place = broken_at(first_hash(about), links)
    if place is not None:
        raise BadInput(
            f"{path}: entry {place} ({_entry_text(links[place - 1][0])}) does not follow from what "
            "is before it: it, or something before it, was changed, removed, inserted or moved"
        )
    if not cohorts <= {(e.run, e.round, e.attempt) for e, _ in links if isinstance(e, Entry)}:
        raise BadInput(f"{path}: there is a cohort without a charge: the ledger was changed")
    hashes = [first_hash(about), *(noted for _, noted in links)]
    for head in known:
        check_head(path, head, hashes)
    return Head(hashes[-1], len(links))


def check_head(path: Path, known: Head, hashes: Sequence[str]) -> None:
    """Refuse a ledger whose `hashes`, from the first on, do not hold a known head."""
    if known.length >= len(hashes):
        raise BadInput(
            f"{path}: {len(hashes) - 1} entries, and there were {known.length}: the end was cut off"
        )
    if known.length < 0 or hashes[known.length] != known.hash:
        raise BadInput(
            f"{path}: entry {known.length} is not the one that was seen there before: the ledger "
            "was replaced or rewritten"
        )


def read_hashes(path: Path) -> list[str]:
    """The hashes in a ledger, from the one before the first entry on, unchecked."""
    with one_look(path):
        first = first_hash(read_about(path))
        rows = [row for table in ("charges", "closings") for row in query(path, _HASHES + table)]
    return [first, *(str(noted) for _, noted in sorted(rows, key=lambda row: int(row[0])))]


def read_links(path: Path, salt: str) -> list[tuple[Link, str]]:
    """The charges and closings as the chain sees them, and the hash noted with each."""
    with one_look(path):
        runs = _registered_runs(path)
        rows = [*query(path, _CHARGES), *query(path, _CLOSINGS)]
    links: list[tuple[Link, str]] = []
    digests: dict[int, str] = {}
    for number, (seq, *row, noted) in enumerate(sorted(rows, key=lambda row: int(row[0])), 1):
        if seq != number:
            raise BadInput(f"{path}: entry {number} is missing: the ledger was changed")
        before = [text for after, text in runs if after < number]
        if len(before) not in digests:  # runs are only ever added
            digests[len(before)] = digest_of(before)
        registered = digests[len(before)]
        try:
            values: list[Any]
            if len(row) == 3:
                values = [*map(column, row, _CLOSING_TYPES), registered]
                links.append((Closing(*values), column(noted, str)))
            else:
                cohort = "" if row[6] is None else seal(salt, column(row[6], bytes))
                values = [*map(column, row, _CHARGE_TYPES), cohort, registered]
                links.append((Entry(*values), column(noted, str)))
        except TypeError as e:
            raise BadInput(f"{path}: entry {number} cannot be read: {e}") from e
    return links


def _entry_text(link: Link) -> str:
    return f"{'the end' if isinstance(link, Closing) else f'round {link.round}'} of {link.run}"


def _registered_runs(path: Path) -> list[tuple[int, str]]:
    """How many entries there were before each run, and what it registered with, in order."""
    runs = []
    for run, text in query(path, "SELECT run, about FROM runs ORDER BY rowid"):
        try:
            about = json.loads(text)
            if about["run"] != run:
                raise ValueError(f"it calls itself {about['run']!r}")
            runs.append((int(about["after"]), str(text)))
        except (ValueError, LookupError, TypeError, OverflowError) as e:
            raise BadInput(f"{path}: the run {run!r} cannot be read: {e}") from e
    return runs
