"""The ledger of a run as evidence: statements, verification against the files, and an export."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.ledger import hash_chain
from fedveil.privacy.ledger.file import ledger_snapshot, read_about, read_closing, read_runs
from fedveil.privacy.ledger.hash_chain import Head, digest
from fedveil.privacy.ledger.ledger import note_file
from fedveil.privacy.ledger.shared import common_of, spent_in
from fedveil.privacy.ledger.statement import (
    Charged,
    Statement,
    read_charged,
    same_claims,
    statement,
    statements,
)
from fedveil.runs import checkpoint
from fedveil.runs.ending import RESUMABLE
from fedveil.runs.recipe import load_recipe, to_toml
from fedveil.runs.run_directory import json_text, readable, write_atomic, write_new

REPORT = "report.html"
UNCHANGED = "recipe, metrics, model and result are those that the run left"
OPEN = (
    "the run is open, since it is running or was killed: nothing in its directory is covered but "
    "its recipe (fedveil run --resume ends it)"
)


@dataclass(frozen=True)
class LedgerStatements:
    """The statements of all runs of a ledger.

    Attributes:
        runs: One statement per run.
        shared_spending: A sentence on what the runs of a shared ledger spent together. None for a
            ledger that is not shared.
        warnings: Sentences on where the ledger and the run directory disagree.
    """

    runs: list[Statement]
    shared_spending: str | None
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the statement of a single run, or a list of runs.

        For the only run of a ledger that is not shared, the keys of `Statement.to_dict` and
        "warnings". Otherwise "runs", "common" (`shared_spending`) and "warnings".
        """
        if self.shared_spending is None and len(self.runs) == 1:
            return {**self.runs[0].to_dict(), "warnings": self.warnings}
        runs = [run.to_dict() for run in self.runs]
        return {"runs": runs, "common": self.shared_spending, "warnings": self.warnings}


def statements_of(path: Path) -> LedgerStatements:
    """Read the statements of a ledger file, or of the ledger of a run directory.

    Disagreements between the ledger and the directory become warnings, and so does a run that is
    still open. Raises BadInput if the ledger cannot be read.
    """
    file = ledger_path(path)
    with ledger_snapshot(file):
        runs, common = statements(file), common_of(file)
        text = None
        if common is not None:
            text = common.spent_text(spent_in(file, common))
        warnings = []
        try:
            hashes = hash_chain.read_hashes(file)
            for head in saved_heads(path):
                hash_chain.check_head(file, head, hashes)
        except BadInput as e:
            warnings.append(str(e))
        name = _run_name(path, [run.run for run in runs])
        for run in (run for run in runs if run.run == name):
            warnings += differences(path, file, run)
            warnings += [] if read_closing(file, run.run) else [OPEN]
    return LedgerStatements(runs, text, warnings)


def statement_of(folder: Path) -> Statement | None:
    """Return the ledger's statement on the run in a directory: its charges and claims.

    None for a ledger file, and for a directory that does not name its run in the ledger. Raises
    BadInput if the ledger cannot be read or does not know the run.
    """
    file = ledger_path(folder)
    with ledger_snapshot(file):
        name = _run_name(folder, list(read_runs(file)))
        return None if name is None else statement(file, name)


def read_charges_of(folder: Path) -> Charged | None:
    """Return the ledger's lines and charges of the run in a directory.

    None as in `statement_of`.
    """
    file = ledger_path(folder)
    with ledger_snapshot(file):
        name = _run_name(folder, list(read_runs(file)))
        return None if name is None else read_charged(file, name)


def verify_ledger(path: Path, head: str | None) -> str:
    """Check a ledger and its run directory against each other, and return the verdict as one line.

    Raises BadInput if the hash chain is broken or does not reach a known head (`head` and those
    saved in the run directory), or if a file in the directory, the report included, differs from
    what the ledger recorded. An open run is no error: the verdict says so.

    Args:
        path: A ledger file or a run directory.
        head: A head from elsewhere, as HASH:LENGTH.
    """
    file = ledger_path(path)
    known = saved_heads(path)
    if head is not None:
        hash, colon, length = head.partition(":")
        if not colon or not length.isdecimal() or len(hash) != 64:
            raise BadInput(f"--head is {head!r}: write it as HASH:LENGTH, as --verify prints it")
        known.append(Head(hash, int(length)))
    with ledger_snapshot(file):
        run = statement_of(path)
        end = check_unchanged(path, run, known)
        closed = {} if run is None else read_closing(file, run.run)
    seen = max((one.length for one in known), default=None)
    verdict = f"{file}: {end.length} entries, none changed, removed, inserted or moved"
    if seen is None:
        verdict += (
            " among them; whether some are missing at the end cannot be told without a head from "
            "elsewhere (--head)"
        )
    else:
        verdict += f", and none missing of the {seen} seen before"
    if run is not None and not closed:
        verdict += f"; {OPEN}"
    elif run is not None:
        verdict += f"; {UNCHANGED}; {_report_verdict(path, closed)}"
    return f"{verdict}; head {end.hash}:{end.length}"


def check_unchanged(path: Path, run: Statement | None, known: Sequence[Head]) -> Head:
    """Check a ledger and the files of its run directory, and return the ledger's head.

    Raises BadInput if the hash chain is broken or does not reach the `known` heads, or if recipe,
    metrics, model or result differ from those that the run left. The report is not compared.

    Args:
        path: A ledger file or a run directory.
        run: The ledger's statement on the run, or None without a run directory.
        known: Heads that the ledger had before.
    """
    file = ledger_path(path)
    with ledger_snapshot(file):
        end = hash_chain.verify(file, *known)
        for difference in [] if run is None else differences(path, file, run):
            raise BadInput(difference)
    return end


def record_report(folder: Path, content: bytes) -> None:
    """Record in the ledger that report.html of a run that has ended is written again.

    `content` is the new page. Does nothing if the ledger has this page already, and for runs that
    are open, have no ledger, or have files that differ from those the run left.
    """
    file = ledger_path(folder)
    if not file.is_file():
        return
    try:
        run = statement_of(folder)
        check_unchanged(folder, run, saved_heads(folder))
    except BadInput:  # the page says so, and --verify
        return
    if run is None or read_closing(file, run.run).get(REPORT) == digest(content):
        return
    head = note_file(file, run.run, REPORT, digest(content))
    if head is not None:
        text = json_text(head.to_dict(), indent=2)
        write_atomic(folder / "head.json", text.encode())


def complete_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of a run that has nothing left to do or to mend, otherwise None.

    All planned rounds are done or the budget is spent, and the ledger and every file that it
    records are as the run left them.
    """
    file = ledger_path(folder)
    try:
        with ledger_snapshot(file):
            run = statement_of(folder)
            closed = {} if run is None else read_closing(file, run.run)
            if REPORT not in closed or not (folder / "head.json").is_file():
                return None
            check_unchanged(folder, run, saved_heads(folder))
        if _file_differences(folder / REPORT, closed[REPORT]):
            return None
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    except (BadInput, OSError, ValueError):
        return None
    return None if result["stopped"] in RESUMABLE else result


def _report_verdict(folder: Path, closed: Mapping[str, str]) -> str:
    """Return what the ledger's closing entry says of report.html. Raises BadInput if it differs."""
    path = folder / REPORT
    if not path.exists():
        return f"there is no {REPORT}"
    if REPORT not in closed:
        return f"{REPORT} is not covered until fedveil report writes it again"
    if _file_differences(path, closed[REPORT]):
        raise BadInput(
            f"{path} was changed after fedveil wrote it: write it again with fedveil report "
            f"{folder}"
        )
    return f"{REPORT} is the one that fedveil wrote"


def charged_lines(folder: Path) -> tuple[BudgetLine, ...] | None:
    """Return the budget lines that a run was charged for.

    None without its private ledger, or if the directory does not name its run there.

    | edge | behaviour |
    |---|---|
    | recipe, metrics, model or result were changed | BadInput |
    | the charges come to other claims than the result has | BadInput |
    """
    file = ledger_path(folder)
    if not file.is_file():
        return None
    with ledger_snapshot(file):
        run = statement_of(folder)
        if run is None:
            return None
        for difference in differences(folder, file, run):
            raise BadInput(difference)
        return read_charged(file, run.run).lines


def check_same_lines(
    folder: Path, charged: tuple[BudgetLine, ...] | None, lines: tuple[BudgetLine, ...]
) -> None:
    """Raise BadInput if `lines` differ from the `charged` lines in more than their assumptions.

    A run that is rebuilt from its recipe has the noise and the accounting of this version of
    fedveil, which may differ from those it had. With `charged` None, for a run without its ledger,
    they are assumed to be the same. `folder` is for the message.
    """
    if charged is None:
        return
    before, now = ([replace(line, assumptions=()) for line in some] for some in (charged, lines))
    if before != now:
        raise BadInput(
            f"{folder} was charged for something else than this version of fedveil makes of its "
            "recipe: use the version that made it"
        )


def export_ledger(path: Path, target: Path) -> None:
    """Write the ledger of `path`, a run directory or a ledger file, as JSON to the file `target`.

    `chain` has charges and closing entries as their hashes cover them, and `first` is the hash
    before the first of them, so that anybody can compute every hash again
    (`privacy.ledger.hash_chain`). Data and cohorts appear as digests with a salt. The salt is left
    out, so that nobody can check a guess. Raises BadInput, and writes nothing, if there is no
    ledger, its chain is broken, or `target` exists or cannot be written.
    """
    file = ledger_path(path)
    with ledger_snapshot(file):
        about = read_about(file)
        links = hash_chain.read_links(file, about["salt"])
        content = {
            "about": {key: value for key, value in about.items() if key != "salt"},
            "runs": read_runs(file),
            "first": hash_chain.json_digest(about),
            "chain": [{**vars(entry), "hash": noted} for entry, noted in links],
            "statements": statements_of(path).to_dict(),
            **hash_chain.verify(file).to_dict(),
        }
    write_new(target, (json.dumps(content, indent=2) + "\n").encode())


def ledger_path(path: Path) -> Path:
    """Return the path of a run directory's ledger, its own or a shared one.

    A file is returned as is. The ledger need not exist. Raises BadInput for a ledger.json that
    cannot be read.
    """
    pointer = path / "ledger.json"
    with readable(pointer):
        if not path.is_dir():
            return path
        if pointer.is_file():
            return Path(json.loads(pointer.read_text())["path"])
    return path / "ledger.db"


def ledger_run_name(folder: Path) -> str:
    """Return the run's name in its shared ledger, from the directory's ledger.json.

    The name is that of the directory when the run started, with a random token. Raises BadInput
    without a readable ledger.json: only runs with a shared ledger have one.
    """
    pointer = folder / "ledger.json"
    with readable(pointer):
        return str(json.loads(pointer.read_text())["run"])


def unchanged_file(path: Path) -> Path:
    """Return `path`, or raise BadInput if the file differs from its digest in the ledger.

    The ledger is that of the file's folder. Without a ledger, which is private, or without a digest
    of this file in it, nothing is compared. `fedveil ledger --verify` is for those who have both.
    """
    folder, file = path.parent, ledger_path(path.parent)
    if file.is_file():
        shared = (folder / "ledger.json").is_file()
        run = ledger_run_name(folder) if shared else next(iter(read_runs(file)), "")
        noted = read_closing(file, run).get(path.name)
        for difference in [] if noted is None else _file_differences(path, noted):
            raise BadInput(difference)
    return path


def saved_heads(path: Path) -> list[Head]:
    """Return the ledger heads in head.json, result.json and the newest checkpoint of a directory.

    Missing files have none. [] for a ledger file. Raises BadInput for a file that cannot be read.
    """
    with readable(path):
        if not path.is_dir():
            return []
    heads = (
        read_head(path / "head.json"),
        read_head(path / "result.json"),
        checkpoint.recorded_head(path / "checkpoint"),
    )
    return [head for head in heads if head is not None]


def read_head(path: Path) -> Head | None:
    """Return the ledger's head from a head.json or result.json, or None if the file is missing.

    Raises BadInput if the file has no readable head.
    """
    with readable(path):
        if not path.is_file():
            return None
        stored = json.loads(path.read_text())
        stored = stored["ledger"] if path.name == "result.json" else stored
        return Head(str(stored["head"]), int(stored["length"]))


def _run_name(path: Path, runs: list[str]) -> str | None:
    """Return the name, one of `runs`, of the run whose directory `path` is. None if there is none.

    None for a ledger file, and for a site's folder, since the server has the files of its runs.
    Raises BadInput if the directory's run is not in its shared ledger.
    """
    if not path.is_dir():
        return None
    if not (path / "ledger.json").is_file():
        of_site = any("site" in about for about in read_runs(ledger_path(path)).values())
        return runs[0] if len(runs) == 1 and not of_site else None
    name = ledger_run_name(path)
    if name not in runs:
        raise BadInput(f"{ledger_path(path)} does not know the run {name!r}: it was replaced")
    return name


CLOSING_FILES = ("recipe.toml", "metrics.jsonl", "model.safetensors", "result.json", REPORT)


def file_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file that the ledger's closing entry lists, by file name.

    They are the `CLOSING_FILES` of the run directory. OSError if one is missing.
    """
    return {name: digest((folder / name).read_bytes()) for name in CLOSING_FILES}


def differences(folder: Path, file: Path, statement: Statement) -> list[str]:
    """Return a sentence for each difference between a run directory and the ledger in `file`.

    Guarantee: if the run has ended and the list is empty, recipe, metrics, model and result are,
    byte for byte, those it ended with. Recipe and claims are also compared with the charges, so
    that a closing entry cannot vouch for what was never charged. The report is not compared.

    | edge | behaviour |
    |---|---|
    | the run is open | its recipe, and its claims if nothing was charged since, are compared |
    | a file is missing or cannot be read | a sentence |
    | epsilons that differ by less than 1e-6 of them | the same |
    """
    closed, about = read_closing(file, statement.run), read_runs(file)[statement.run]
    path, found = folder / "recipe.toml", []
    if path.exists():  # if it is missing, the closing entry of an ended run shows it
        try:
            recipe = load_recipe(str(path))
            source = getattr(recipe.noise, "source", "seeded")
            noted = about.get("noise")
            if source != noted:
                found.append(f"{path}: noise.source is {source!r} and {noted!r} in the ledger")
            elif digest(to_toml(recipe.model_dump())) != about.get("recipe"):
                found.append(f"{path} is not the recipe that the run was started with")
        except BadInput as e:
            found.append(f"{path} cannot be read: {e}")
    for name, file_digest in closed.items():
        if name != REPORT:
            found += _file_differences(folder / name, file_digest)
    return found + _claim_differences(folder, statement, ended=bool(closed))


def _file_differences(path: Path, noted: str) -> list[str]:
    """Return [] if the file's SHA-256 is `noted`, otherwise a list of one sentence."""
    try:
        same = digest(path.read_bytes()) == noted
    except OSError as e:
        return [f"{path}, which the run left, cannot be read: {e.strerror}"]
    return [] if same else [f"{path} is not the one that the run left: it was changed"]


def _claim_differences(folder: Path, statement: Statement, *, ended: bool) -> list[str]:
    """Return [] if the claims in result.json are those of the ledger, else a list of one sentence.

    Without a result there is nothing to compare. A run that has not `ended` may have an older
    result of fewer rounds, which is not compared either.
    """
    path = folder / "result.json"
    if not path.is_file():
        return []
    try:
        result = json.loads(path.read_text())
        claims, rounds = list(result["claims"]), int(result["rounds"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError) as e:
        return [f"{path} cannot be read: {e}"]
    if not ended and rounds < len({charge.round for charge in statement.charges}):
        return []
    same = same_claims(claims, statement.claims)
    return [] if same else [f"{path}: its claims are not what the charges in the ledger come to"]
