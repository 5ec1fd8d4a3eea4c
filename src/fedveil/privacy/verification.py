"""Whether a ledger is what it was: its chain of hashes, from the first charge to the last."""

from pathlib import Path

from fedveil.errors import BadInput
from fedveil.privacy import chain
from fedveil.privacy.chain import Entry, Head
from fedveil.privacy.ledger_file import about_rows, query


def verify(path: Path, known: Head | None = None) -> Head:
    """Check the chain of a ledger; returns its head.

    Guarantee: a charge, a cohort or a run that was changed, removed, inserted or moved is refused
    with its place, and so is, where `known` says what the end was, a tail that was cut off.
    """
    about = about_rows(path)
    runs = {run: chain.digest(text) for run, text in query(path, "SELECT run, about FROM runs")}
    rows = query(
        path,
        "SELECT seq, charges.run, round, attempt, covers, event, charged_at, ids, hash "
        "FROM charges LEFT JOIN cohorts USING (run, round, attempt) ORDER BY seq",
    )
    links: list[tuple[Entry, str]] = []
    for number, (seq, run, round, attempt, covers, event, at, ids, found) in enumerate(rows, 1):
        if seq != number:
            raise BadInput(f"{path}: charge {number} is missing: the ledger was changed")
        if not isinstance(ids, bytes | None):
            raise BadInput(f"{path}: the cohort of charge {number} cannot be read")
        taken = chain.digest(ids or b"")
        entry = Entry(run, round, attempt, covers, event, at, taken, runs.get(run, ""))
        links.append((entry, found))
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
