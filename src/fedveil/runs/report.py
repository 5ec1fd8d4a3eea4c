"""`report.html`: reads run directories, without trusting who wrote them, and has them drawn."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.pages.html import Markup
from fedveil.pages.run_report import RunContents, run_page
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.ledger.file import one_look
from fedveil.runs.evidence import file_of, statement_of, unchanged_file, verify_ledger
from fedveil.runs.glossary import terms_of
from fedveil.runs.run_directory import read_metrics, write_atomic


def write_report(folder: Path) -> None:
    """Write the report of a run directory into it."""
    write_atomic(folder / "report.html", report_of(folder))


def report_of(folder: Path, sections: Sequence[Markup] = ()) -> bytes:
    """The report of a run directory as a page, with more `sections`, such as that of an audit."""
    contents = read_contents(folder)
    terms = {term.name: term.means for term in terms_of(contents.claims)}
    return run_page(contents, terms, sections)


def read_contents(folder: Path) -> RunContents:
    """Read a run directory, ended or not.

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
    try:
        if not path.is_file() or not (folder / "metrics.jsonl").is_file():
            raise BadInput(f"{folder} holds no run: name the directory of a run that has begun")
        recipe = path.read_text(errors="replace")
        history, trouble = read_metrics(folder / "metrics.jsonl")
    except OSError as e:
        raise BadInput(f"{folder} cannot be read: {e}") from e
    path, result = folder / "result.json", {}
    if path.is_file():
        try:
            content = unchanged_file(path).read_bytes()
        except OSError as e:
            raise BadInput(f"{path} cannot be read: {e}") from e
        result = parse_result(path, content)
    statement, verified = None, ""
    if file_of(folder).is_file():
        try:
            with one_look(file_of(folder)):
                statement = statement_of(folder)
                verified = verify_ledger(folder, None, statement)
        except BadInput as e:
            trouble.append(str(e))
    else:
        trouble.append("there is no ledger beside this run: nothing vouches for what it says")
    claims = () if statement is None else statement.claims
    if result:
        claims = claims_in(result, path)
    return RunContents(folder, recipe, history, result, claims, statement, verified, trouble)


def parse_result(path: Path, content: bytes) -> dict[str, Any]:
    """The result.json of a run, from its content."""
    try:
        result = json.loads(content)
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{path} cannot be read: {e}") from e
    if not isinstance(result, dict) or not result:
        raise BadInput(f"{path} is not a run's result: it holds {type(result).__name__}")
    return result


def claims_in(result: dict[str, Any], path: Path) -> tuple[PrivacyClaim, ...]:
    """The claims of a result, if they can be claims."""
    try:
        claims = tuple(PrivacyClaim.from_dict(raw) for raw in result.get("claims", []))
        for claim in claims:
            if not (claim.epsilon >= 0 and 0 <= float(claim.delta) <= 1):
                raise ValueError(f"epsilon {claim.epsilon} at delta {claim.delta}")
            if not all(isinstance(one, str) for one in (*claim.assumptions, claim.covers)):
                raise ValueError("what it assumes is not text")
        return claims
    except (TypeError, ValueError, AttributeError, OverflowError) as e:
        raise BadInput(f"{path}: its claims cannot be read: {e}") from e
