"""`report.html`: reads run directories, without trusting who wrote them, and has them drawn."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.pages.html import Markup
from fedveil.pages.run_report import RunContents, run_page
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.ledger.file import ledger_snapshot, read_closing
from fedveil.runs.evidence import (
    OPEN,
    UNCHANGED,
    check_unchanged,
    ledger_path,
    saved_heads,
    statement_of,
    unchanged_file,
)
from fedveil.runs.glossary import terms_of
from fedveil.runs.run_directory import read_metrics, readable


def report_html(folder: Path, sections: Sequence[Markup] = (), *, ending: bool = False) -> bytes:
    """Return the report of a run directory as an HTML page. Writes no file.

    The same files give the same page, as long as the directory has the same name.

    Args:
        folder: The run directory.
        sections: Sections to append, such as that of an audit.
        ending: Whether the run itself draws the page, before the ledger records its end.
    """
    contents = read_contents(folder, ending=ending)
    terms = {term.name: term.means for term in terms_of(contents.claims)}
    return run_page(contents, terms, sections)


def read_contents(folder: Path, *, ending: bool = False) -> RunContents:
    """Read recipe, metrics, result and ledger of a run directory, ended or not.

    `ending` is as in `report_html`.

    | edge | behaviour |
    |---|---|
    | no recipe.toml, or nothing was ever measured | BadInput |
    | a result that is not what the run left | BadInput |
    | a result that cannot be understood | BadInput |
    | no ledger | what the result says, and that nothing vouches for it |
    | a ledger whose chain is broken, or that does not fit the files | said on the page |
    | a run that has not ended | its claims by the ledger, and that it is open |
    """
    path = folder / "recipe.toml"
    with readable(folder):
        if not path.is_file() or not (folder / "metrics.jsonl").is_file():
            raise BadInput(f"{folder} holds no run: name the directory of a run that has begun")
        recipe = path.read_text(encoding="utf-8", errors="replace")
        history, trouble = read_metrics(folder / "metrics.jsonl")
    statement, verified = None, ""
    if ledger_path(folder).is_file():
        try:
            with ledger_snapshot(ledger_path(folder)):
                statement = statement_of(folder)
                end = check_unchanged(folder, statement, saved_heads(folder))
                # says nothing that changes when the ledger records the report
                entries, closed = f"{end.length:,} entries", ""
                if statement is not None:
                    entries = f"{len(statement.charges):,} charges"
                    ended = ending or read_closing(ledger_path(folder), statement.run)
                    closed = f"; {UNCHANGED if ended else OPEN}"
                verified = f"{entries}, none changed, removed, inserted or moved{closed}"
        except BadInput as e:
            trouble.append(str(e))
    else:
        trouble.append("there is no ledger beside this run: nothing vouches for what it says")
    path, result, claims = folder / "result.json", dict[str, Any](), tuple[PrivacyClaim, ...]()
    if path.is_file():
        with readable(path):
            if statement is None or not verified:  # otherwise the verdict covers this file
                unchanged_file(path)
            content = path.read_bytes()
        result, claims = parse_result(path, content)
    elif statement is not None:
        claims = statement.claims
    return RunContents(folder, recipe, history, result, claims, statement, verified, trouble)


def parse_result(path: Path, content: bytes) -> tuple[dict[str, Any], tuple[PrivacyClaim, ...]]:
    """Return the content of a result.json as a dictionary, and its claims.

    Its "notes" become a list of texts. Raises BadInput if it is not a JSON object, or if a claim
    has an epsilon below 0, a delta outside [0, 1] or an assumption that is not text. `path` is for
    messages: no file is read.
    """
    with readable(path):
        result = json.loads(content)
    if not isinstance(result, dict) or not result:
        raise BadInput(f"{path} is not a run's result: it holds {type(result).__name__}")
    try:
        claims = tuple(PrivacyClaim.from_dict(raw) for raw in result.get("claims", []))
        for claim in claims:
            if not (claim.epsilon >= 0 and 0 <= float(claim.delta) <= 1):
                raise ValueError(f"epsilon {claim.epsilon} at delta {claim.delta}")
            if not all(isinstance(one, str) for one in (*claim.assumptions, claim.covers)):
                raise ValueError("what it assumes is not text")
    except (TypeError, ValueError, AttributeError, OverflowError) as e:
        raise BadInput(f"{path}: its claims cannot be read: {e}") from e
    notes = result.get("notes", [])
    result["notes"] = [str(note) for note in notes] if isinstance(notes, list) else [str(notes)]
    return result, claims
