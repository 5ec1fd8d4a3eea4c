"""Whether a ledger is what it was: its chain of hashes, from the first charge to the last."""

import json
from pathlib import Path

from fedveil.errors import BadInput
from fedveil.privacy import chain
from fedveil.privacy.chain import Entry, Head
from fedveil.privacy.ledger_file import query, read_about


def verify(path: Path, known: Head | None = None) -> Head:
    """Check the chain of a ledger; returns its head.

    Guarantee: a charge, a cohort or a run that was changed, removed, inserted or moved is refused
    with its place, and so is a table, index or trigger that is not fedveil's, and, where `known`
    says what the end was, a tail that was cut off. A run that registered after the last charge has
    spent nothing and is not covered yet.
    """
    about = read_about(path)
    (state,) = query(path, "PRAGMA integrity_check(1)")[0]
    if state != "ok":
        what = " ".join(str(state).split())
        raise BadInput(f"{path}: the file is damaged: {what}; restore it from a copy")
    links = read_links(path, about["salt"])
    place = chain.broken_at(chain.first_hash(about), links)
    if place is not None:
        entry = links[place - 1][0]
        raise BadInput(
            f"{path}: charge {place} (round {entry.round} of {entry.run}) does not follow from "
            "what is before it: it, or something before it, was changed, removed, inserted or moved"
        )
    cohorts = {row[:3] for row in query(path, "SELECT run, round, attempt FROM cohorts")}
    if not cohorts <= {(e.run, e.round, e.attempt) for e, _ in links}:
        raise BadInput(f"{path}: there is a cohort without a charge: the ledger was changed")
    head = Head(links[-1][1] if links else chain.first_hash(about), len(links))
    if known is not None and known.length > head.length:
        raise BadInput(
            f"{path}: {head.length} charges, and there were {known.length}: the end was cut off"
        )
    if known is not None:
        hashes = [chain.first_hash(about), *(found for _, found in links)]
        if hashes[known.length] != known.hash:
            raise BadInput(
                f"{path}: charge {known.length} is not the one that was seen there before: the "
                "ledger was replaced or written anew"
            )
    return head


def read_links(path: Path, salt: str) -> list[tuple[Entry, str]]:
    """The charges as the chain sees them, and the hash noted with each."""
    runs = _runs(path)
    rows = query(
        path,
        "SELECT seq, charges.run, round, attempt, covers, event, charged_at, ids, hash "
        "FROM charges LEFT JOIN cohorts USING (run, round, attempt) ORDER BY seq",
    )
    links: list[tuple[Entry, str]] = []
    digests: dict[int, str] = {}
    for number, (seq, run, round, attempt, covers, event, at, ids, found) in enumerate(rows, 1):
        if seq != number:
            raise BadInput(f"{path}: charge {number} is missing: the ledger was changed")
        if not isinstance(ids, bytes | None):
            raise BadInput(f"{path}: the cohort of charge {number} cannot be read")
        if not (
            all(isinstance(text, str) for text in (run, covers, event, at, found))
            and all(isinstance(count, int) for count in (round, attempt))
        ):
            raise BadInput(f"{path}: charge {number} cannot be read: the ledger was changed")
        taken = "" if ids is None else chain.seal(salt, ids)
        there = [text for after, text in runs if after < number]
        if len(there) not in digests:  # runs are only ever added
            digests[len(there)] = chain.digest_of(there)
        entry = Entry(run, round, attempt, covers, event, at, taken, digests[len(there)])
        links.append((entry, found))
    return links


def _runs(path: Path) -> list[tuple[int, str]]:
    """What each run registered with, in order, and how many charges there were before it."""
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
