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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.privacy.ledger.file import column, ledger_snapshot, query, read_about


@dataclass(frozen=True)
class Head:
    """The last hash of a chain and how many entries it covers."""

    hash: str
    length: int

    def to_dict(self) -> dict[str, object]:
        """JSON values with the keys "head" (the hash) and "length"."""
        return {"head": self.hash, "length": self.length}


@dataclass(frozen=True)
class Entry:
    """A charge with everything that its hash covers.

    `ids`, the cohort, is sealed, and empty where it is not noted. `runs` is the digest of all runs
    that had registered.
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
    """The end of a run with everything that its hash covers.

    `files` is a JSON object with the digest of each file that the run left; empty, the run has gone
    on and the end before is not one any more.
    """

    run: str
    files: str
    closed_at: str
    runs: str


Link = Entry | Closing


def digest(content: bytes | str) -> str:
    """SHA-256 of bytes, or of a text in UTF-8, as 64 hexadecimal digits."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def json_digest(value: object) -> str:
    """SHA-256 of a JSON value with sorted keys, in hexadecimal.

    The hash before a ledger's first entry is that of `about`. Lists of texts have the same digest
    only if they are the same texts in the same order.
    """
    return digest(json.dumps(value, sort_keys=True))


def seal(salt: str, content: bytes | str) -> str:
    """HMAC-SHA-256 of the content with the ledger's salt as key, in hexadecimal.

    It confirms no guess to somebody who does not have the salt.
    """
    content = content.encode() if isinstance(content, str) else content
    return hmac.new(salt.encode(), content, hashlib.sha256).hexdigest()


def next_hash(before: str, entry: Link) -> str:
    """The hash of an entry that follows the hash `before`.

    A charge and a closing never have the same hash: their contents differ in length.
    """
    return digest(json.dumps([before, *vars(entry).values()]))


def first_broken_entry(first: str, links: Iterable[tuple[Link, str]]) -> int | None:
    """The number, from 1, of the first entry whose hash is wrong. None if all are right.

    Args:
        first: The hash before the first entry.
        links: (entry, the hash noted beside it) in order.

    >>> a = Entry("r", 1, 0, "updates", "{}", "now", "", "")
    >>> b = Entry("r", 2, 0, "updates", "{}", "now", "", "")
    >>> one = next_hash("", a)
    >>> print(first_broken_entry("", [(a, one), (b, next_hash(one, b))]))
    None
    >>> first_broken_entry("", [(b, one)])
    1
    """
    before = first
    for number, (entry, noted) in enumerate(links, 1):
        before = next_hash(before, entry)
        if before != noted:
            return number
    return None


def head_of(db: sqlite3.Connection) -> Head:
    """The last hash of a ledger and its number of entries, unchecked.

    Before the first entry the hash is the digest of `about`, and the number 0.
    """
    last = (
        db.execute(f"SELECT seq, hash FROM {table} ORDER BY seq DESC LIMIT 1").fetchone()
        for table in ("charges", "closings")
    )
    seq, noted = max((row for row in last if row is not None), default=(0, ""))
    if not seq:
        return Head(json_digest(dict(db.execute("SELECT key, value FROM about"))), 0)
    return Head(str(noted), int(seq))


def append(db: sqlite3.Connection, kind: Callable[..., Link], *values: Any) -> Head:
    """Append a charge or a closing to the chain, and return the new head.

    The caller holds a transaction. The sealed cohort of a charge goes into the hash and is not
    stored here: `verify` computes it again from the table `cohorts`, so the caller writes the
    cohort there first, in the same transaction, or gives "" where none is noted.

    Args:
        db: The ledger.
        kind: `Entry` or `Closing`.
        values: The fields of `kind` in order, without the last: `runs` is computed here.
    """
    runs = [text for (text,) in db.execute("SELECT about FROM runs ORDER BY rowid").fetchall()]
    entry, last = kind(*values, json_digest(runs)), head_of(db)
    head = Head(next_hash(last.hash, entry), last.length + 1)
    table, columns = ("charges", 6) if kind is Entry else ("closings", 3)
    row = (head.length, *values[:columns], head.hash)
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
    """Check the chain of a ledger and return its head. Raises BadInput if it is broken.

    `known` are heads that the ledger had before, as kept elsewhere: it must still contain them.

    Guarantee: a charge, a closing, a cohort or a run that was changed, removed, inserted or moved
    is refused with its place, and so is a table, index or trigger that is not fedveil's, and, where
    somebody has `known` what the end was, a tail that was cut off. A run that registered after the
    last entry has spent nothing and is not covered yet.
    """
    with ledger_snapshot(path):
        about = read_about(path)
        (state,) = query(path, "PRAGMA integrity_check(1)")[0]
        if state != "ok":
            what = " ".join(str(state).split())
            raise BadInput(f"{path}: the file is damaged: {what}; restore it from a copy")
        links = read_links(path, about["salt"])
        cohorts = {row[:3] for row in query(path, "SELECT run, round, attempt FROM cohorts")}
    place = first_broken_entry(json_digest(about), links)
    if place is not None:
        entry = links[place - 1][0]
        what = "the end" if isinstance(entry, Closing) else f"round {entry.round}"
        raise BadInput(
            f"{path}: entry {place} ({what} of {entry.run}) does not follow from what is before "
            "it: it, or something before it, was changed, removed, inserted or moved"
        )
    if not cohorts <= {(e.run, e.round, e.attempt) for e, _ in links if isinstance(e, Entry)}:
        raise BadInput(f"{path}: there is a cohort without a charge: the ledger was changed")
    hashes = [json_digest(about), *(noted for _, noted in links)]
    for head in known:
        check_head(path, head, hashes)
    return Head(hashes[-1], len(links))


def check_head(path: Path, known: Head, hashes: Sequence[str]) -> None:
    """Raise BadInput for a ledger that does not contain a head it had before.

    `hashes` are its hashes, that before the first entry first.
    """
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
    """The hashes noted in a ledger, unchecked: that before the first entry, then one per entry."""
    with ledger_snapshot(path):
        first = json_digest(read_about(path))
        rows = [row for table in ("charges", "closings") for row in query(path, _HASHES + table)]
    return [first, *(str(noted) for _, noted in sorted(rows, key=lambda row: int(row[0])))]


def read_links(path: Path, salt: str) -> list[tuple[Link, str]]:
    """All charges and closings in order, each with the hash noted beside it, unchecked.

    Cohorts are sealed with `salt`. Raises BadInput if an entry is missing or cannot be read.
    """
    with ledger_snapshot(path):
        registered = query(path, "SELECT run, about FROM runs ORDER BY rowid")
        rows = [*query(path, _CHARGES), *query(path, _CLOSINGS)]
    runs = []  # how many entries there were before each run, and what it registered with
    for run, text in registered:
        try:
            about = json.loads(text)
            if about["run"] != run:
                raise ValueError(f"it calls itself {about['run']!r}")
            runs.append((int(about["after"]), str(text)))
        except (ValueError, LookupError, TypeError, OverflowError) as e:
            raise BadInput(f"{path}: the run {run!r} cannot be read: {e}") from e
    links: list[tuple[Link, str]] = []
    digests: dict[int, str] = {}
    for number, (seq, *row, noted) in enumerate(sorted(rows, key=lambda row: int(row[0])), 1):
        if seq != number:
            raise BadInput(f"{path}: entry {number} is missing: the ledger was changed")
        before = [text for after, text in runs if after < number]
        if len(before) not in digests:  # runs are only ever added
            digests[len(before)] = json_digest(before)
        kind: Callable[..., Link] = Closing if len(row) == 3 else Entry
        try:
            values = list(map(column, row, _CLOSING_TYPES if kind is Closing else _CHARGE_TYPES))
            if kind is Entry:
                values.append("" if row[6] is None else seal(salt, column(row[6], bytes)))
            links.append((kind(*values, digests[len(before)]), column(noted, str)))
        except TypeError as e:
            raise BadInput(f"{path}: entry {number} cannot be read: {e}") from e
    return links
