"""Whether a ledger is what it was: its chain of hashes, from the first entry to the last."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.privacy.ledger import hash_chain
from fedveil.privacy.ledger.file import as_count, as_text, read_about
from fedveil.privacy.ledger.hash_chain import Closing, Entry, Head
from fedveil.privacy.ledger.looking import one_look, query

Link = Entry | Closing

_CHARGES = (
    "SELECT seq, charges.run, round, attempt, covers, event, charged_at, ids, hash "
    "FROM charges LEFT JOIN cohorts USING (run, round, attempt)"
)
_CLOSINGS = "SELECT seq, run, files, closed_at, hash FROM closings"
_HASHES = "SELECT seq, hash FROM "


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
    place = hash_chain.broken_at(hash_chain.first_hash(about), links)
    if place is not None:
        raise BadInput(
            f"{path}: entry {place} ({_entry_text(links[place - 1][0])}) does not follow from what "
            "is before it: it, or something before it, was changed, removed, inserted or moved"
        )
    if not cohorts <= {(e.run, e.round, e.attempt) for e, _ in links if isinstance(e, Entry)}:
        raise BadInput(f"{path}: there is a cohort without a charge: the ledger was changed")
    hashes = [hash_chain.first_hash(about), *(found for _, found in links)]
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
        first = hash_chain.first_hash(read_about(path))
        rows = [row for table in ("charges", "closings") for row in query(path, _HASHES + table)]
    return [first, *(str(found) for _, found in sorted(rows, key=lambda row: int(row[0])))]


def read_links(path: Path, salt: str) -> list[tuple[Link, str]]:
    """The charges and closings as the chain sees them, and the hash noted with each."""
    with one_look(path):
        runs = _runs(path)
        rows = [*query(path, _CHARGES), *query(path, _CLOSINGS)]
    links: list[tuple[Link, str]] = []
    digests: dict[int, str] = {}
    for number, (seq, *row, found) in enumerate(sorted(rows, key=lambda row: int(row[0])), 1):
        if seq != number:
            raise BadInput(f"{path}: entry {number} is missing: the ledger was changed")
        there = [text for after, text in runs if after < number]
        if len(there) not in digests:  # runs are only ever added
            digests[len(there)] = hash_chain.digest_of(there)
        try:
            links.append((_link(row, salt, digests[len(there)]), as_text(found)))
        except TypeError as e:
            raise BadInput(f"{path}: entry {number} cannot be read: {e}") from e
    return links


def _link(row: list[Any], salt: str, runs: str) -> Link:
    """A row of either table as the chain sees it."""
    if len(row) == 3:
        run, files, at = map(as_text, row)
        return Closing(run, files, at, runs)
    run, round, attempt, covers, event, at, ids = row
    if not isinstance(ids, bytes | None):
        raise TypeError(f"{type(ids).__name__} where a cohort should be")
    return Entry(
        as_text(run),
        as_count(round),
        as_count(attempt),
        as_text(covers),
        as_text(event),
        as_text(at),
        "" if ids is None else hash_chain.seal(salt, ids),
        runs,
    )


def _entry_text(link: Link) -> str:
    return f"{'the end' if isinstance(link, Closing) else f'round {link.round}'} of {link.run}"


def _runs(path: Path) -> list[tuple[int, str]]:
    """What each run registered with, in order, and how many entries there were before it."""
    found = []
    for run, text in query(path, "SELECT run, about FROM runs ORDER BY rowid"):
        try:
            about = json.loads(text)
            if about["run"] != run:
                raise ValueError(f"it calls itself {about['run']!r}")
            found.append((int(about["after"]), str(text)))
        except (ValueError, LookupError, TypeError, OverflowError) as e:
            raise BadInput(f"{path}: the run {run!r} cannot be read: {e}") from e
    return found
