"""What a ledger proves: its statements, its chain against what the run remembers, and an export."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import BadInput
from fedveil.privacy.chain import Head, first_hash
from fedveil.privacy.claims import rounded_up
from fedveil.privacy.ledger_file import read_about, read_runs
from fedveil.privacy.shared import common_of, spent_in
from fedveil.privacy.statement import Statement, statements
from fedveil.privacy.verification import read_links, verify
from fedveil.runs import checkpoint
from fedveil.runs.disk import write_atomic


@dataclass(frozen=True)
class Told:
    """What every run of a ledger was charged, and what a shared ledger's runs spent together."""

    runs: list[Statement]
    common: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: a run's own, or a list of runs for a shared ledger."""
        if self.common is None and len(self.runs) == 1:
            return self.runs[0].to_dict()
        return {"runs": [run.to_dict() for run in self.runs], "common": self.common}


def statements_of(path: Path) -> Told:
    """Read a run directory's ledger, or a ledger file."""
    file = file_of(path)
    common = common_of(file)
    if common is None:
        return Told(statements(file), None)
    spent = spent_in(file, common)
    text = (
        f"all runs together: epsilon {rounded_up(spent):.4g} of {common.epsilon:g} at delta "
        f"{common.delta:g} per {common.unit} ({common.neighbours}, {common.trust} trust, "
        f"{common.noise} noise, Renyi filter)"
    )
    return Told(statements(file), text)


def verify_ledger(path: Path, head: str | None) -> str:
    """Check the chain, against the end that the run directory or `head` remembers; in words."""
    file = file_of(path)
    known = _read_head(head) if head is not None else _remembered(path)
    found = verify(file, known)
    end = f"head {found.hash}:{found.length}"
    if known is None:
        return (
            f"{file}: {found.length} charges, none changed, removed, inserted or moved among them; "
            "whether charges are missing at the end cannot be told without a head from elsewhere "
            f"(--head); {end}"
        )
    return (
        f"{file}: {found.length} charges, none changed, removed, inserted or moved, and none "
        f"missing of the {known.length} seen before; {end}"
    )


def export_ledger(path: Path, target: Path) -> None:
    """Write what the ledger holds as JSON.

    `chain` holds the charges as their hashes cover them, from `first` on: whoever has the file can
    compute every hash again (`privacy.chain`). What it says of data and cohorts is sealed with a
    salt that is left out, so that it confirms no guess.
    """
    file = file_of(path)
    if target.exists():
        raise BadInput(f"--export {target} exists: name another file")
    about = read_about(file)
    found = {
        "about": {key: value for key, value in about.items() if key != "salt"},
        "runs": read_runs(file),
        "first": first_hash(about),
        "chain": [{**vars(e), "hash": noted} for e, noted in read_links(file, about["salt"])],
        "statements": statements_of(path).to_dict(),
        **verify(file).to_dict(),
    }
    try:
        write_atomic(target, (json.dumps(found, indent=2) + "\n").encode())
    except OSError as e:
        raise BadInput(f"--export {target} cannot be written: {e}") from e


def file_of(path: Path) -> Path:
    """The ledger of a run directory, or the file itself."""
    if not path.is_dir():
        return path
    pointer = path / "ledger.json"
    if pointer.is_file():
        try:
            return Path(json.loads(pointer.read_text())["path"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BadInput(f"{pointer} cannot be read: {e}") from e
    return path / "ledger.db"


def head_of_result(path: Path) -> Head | None:
    """What the result in a run directory says of the end of the ledger, if there is one."""
    result = path / "result.json"
    if not result.is_file():
        return None
    try:
        stored = json.loads(result.read_text())["ledger"]
        return Head(str(stored["head"]), int(stored["length"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as e:
        raise BadInput(f"{result} cannot be read: {e}") from e


def _remembered(path: Path) -> Head | None:
    """The longest end that the run directory remembers: of its result or its last checkpoint."""
    if not path.is_dir():
        return None
    heads = (head_of_result(path), checkpoint.head_of(path / "checkpoint"))
    known = [head for head in heads if head is not None]
    return max(known, key=lambda head: head.length, default=None)


def _read_head(text: str) -> Head:
    found, colon, length = text.partition(":")
    if not colon or not length.isdecimal() or len(found) != 64:
        raise BadInput(f"--head is {text!r}: write it as HASH:LENGTH, as --verify prints it")
    return Head(found, int(length))
