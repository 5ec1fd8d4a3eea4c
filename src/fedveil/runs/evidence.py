"""The ledger of a run as evidence: statements, verification against the files, and an export."""

import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.ledger import hash_chain
from fedveil.privacy.ledger.file import one_look, read_about, read_closing, read_runs
from fedveil.privacy.ledger.hash_chain import (
    Head,
    check_head,
    first_hash,
    read_hashes,
    read_links,
    verify,
)
from fedveil.privacy.ledger.shared import common_of, spent_in
from fedveil.privacy.ledger.statement import (
    Charged,
    Statement,
    lines_of,
    read_charged,
    statement,
    statements,
)
from fedveil.runs import checkpoint
from fedveil.runs.recipe import Recipe, load_recipe, to_toml
from fedveil.runs.run_directory import write_atomic, write_new

OPEN = (
    "the run is open, since it is running or was killed: nothing in its directory is covered but "
    "its recipe (fedveil run --resume ends it)"
)


@dataclass(frozen=True)
class LedgerStatements:
    """The statements of all runs of a ledger.

    Attributes:
        runs: One statement per run.
        shared_spending: What the runs of a shared ledger spent together, or None.
        warnings: Where the ledger and the run directory disagree.
    """

    runs: list[Statement]
    shared_spending: str | None
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: a run's own, or a list of runs for a shared ledger."""
        if self.shared_spending is None and len(self.runs) == 1:
            return {**self.runs[0].to_dict(), "warnings": self.warnings}
        runs = [run.to_dict() for run in self.runs]
        return {"runs": runs, "common": self.shared_spending, "warnings": self.warnings}


def statements_of(path: Path) -> LedgerStatements:
    """Read a ledger file, or the ledger of a run directory. What disagrees becomes a warning."""
    file = file_of(path)
    with one_look(file):
        runs, common = statements(file), common_of(file)
        text = None
        if common is not None:
            text = common.spent_text(spent_in(file, common))
        warnings = []
        try:
            hashes = read_hashes(file)
            for head in saved_heads(path):
                check_head(file, head, hashes)
        except BadInput as e:
            warnings.append(str(e))
        name = _run_in(path, [run.run for run in runs])
        for run in (run for run in runs if run.run == name):
            warnings += differences(path, file, run)
            warnings += [OPEN] if is_open(file, run.run) else []
    return LedgerStatements(runs, text, warnings)


def statement_of(folder: Path) -> Statement | None:
    """The ledger's statement on the run in a directory.

    None for a file, and for a directory that does not say which run of its ledger it is.
    """
    file = file_of(folder)
    with one_look(file):
        name = _run_in(folder, list(read_runs(file)))
        return None if name is None else statement(file, name)


def charged_of(folder: Path) -> Charged | None:
    """The ledger's charges of the run in a directory. None as in `statement_of`."""
    file = file_of(folder)
    with one_look(file):
        name = _run_in(folder, list(read_runs(file)))
        return None if name is None else read_charged(file, name)


def verify_ledger(path: Path, head: str | None, run: Statement | None = None) -> str:
    """Check a ledger and its run directory against each other, and return the verdict as text.

    The chain must reach every head that is known: `head` and those saved in the run directory. The
    files in the directory must be those that the run left, with the claims that the charges give.
    `run` is the statement on the run, where the caller has read it in the same `one_look`.
    """
    file = file_of(path)
    known = saved_heads(path) + ([] if head is None else [_read_head(head)])
    with one_look(file):
        end = verify(file, *known)
        run = run or statement_of(path)
        for difference in [] if run is None else differences(path, file, run):
            raise BadInput(difference)
        opened = run is not None and is_open(file, run.run)
    seen = max((one.length for one in known), default=None)
    verdict = f"{file}: {end.length} entries, none changed, removed, inserted or moved"
    if seen is None:
        verdict += (
            " among them; whether some are missing at the end cannot be told without a head from "
            "elsewhere (--head)"
        )
    else:
        verdict += f", and none missing of the {seen} seen before"
    if opened:
        verdict += f"; {OPEN}"
    elif run is not None:
        verdict += "; recipe, metrics, model and result are those that the run left"
    return f"{verdict}; head {end.hash}:{end.length}"


def charged_lines(folder: Path) -> tuple[BudgetLine, ...] | None:
    """The budget lines that a run was charged for, or None without its ledger, which is private.

    | edge | behaviour |
    |---|---|
    | recipe, metrics, model or result were changed | BadInput |
    | the charges come to other claims than the result has | BadInput |
    """
    file = file_of(folder)
    if not file.is_file():
        return None
    with one_look(file):
        run = statement_of(folder)
        if run is None:
            return None
        for difference in differences(folder, file, run):
            raise BadInput(difference)
        return lines_of(file, run.run)


def check_charged(
    folder: Path, charged: tuple[BudgetLine, ...] | None, lines: tuple[BudgetLine, ...]
) -> None:
    """Refuse `lines` that differ from those the run was charged for in anything but their
    assumptions.

    A run that is rebuilt from its recipe has the noise and the accounting of this version of
    fedveil, which may differ from those it had. Without a ledger they are assumed to be the same.
    """
    if charged is not None and [*map(_deciding, charged)] != [*map(_deciding, lines)]:
        raise BadInput(
            f"{folder} was charged for something else than this version of fedveil makes of its "
            "recipe: use the version that made it"
        )


def _deciding(line: BudgetLine) -> BudgetLine:
    """The line without its assumptions, which are text."""
    return replace(line, assumptions=())


def export_ledger(path: Path, target: Path) -> None:
    """Write the ledger as JSON.

    `chain` has charges and closing entries as their hashes cover them, from `first` on, so that
    anybody can compute every hash again (`privacy.ledger.hash_chain`). Data and cohorts appear as
    digests with a salt. The salt is left out, so that nobody can check a guess.
    """
    file = file_of(path)
    with one_look(file):
        about = read_about(file)
        content = {
            "about": {key: value for key, value in about.items() if key != "salt"},
            "runs": read_runs(file),
            "first": first_hash(about),
            "chain": [{**vars(e), "hash": noted} for e, noted in read_links(file, about["salt"])],
            "statements": statements_of(path).to_dict(),
            **verify(file).to_dict(),
        }
    write_new(target, (json.dumps(content, indent=2) + "\n").encode())


def file_of(path: Path) -> Path:
    """The ledger of a run directory, or the file itself."""
    pointer = path / "ledger.json"
    try:
        if not path.is_dir():
            return path
        if pointer.is_file():
            return Path(json.loads(pointer.read_text())["path"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise BadInput(f"{pointer} cannot be read: {e}") from e
    return path / "ledger.db"


def name_of(folder: Path) -> str:
    """The run's name in a shared ledger: its directory's first name, with a token."""
    pointer = folder / "ledger.json"
    try:
        return str(json.loads(pointer.read_text())["run"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise BadInput(f"{pointer} cannot be read: {e}") from e


def unchanged_file(path: Path) -> Path:
    """Return the path of a file that a run left, unless the ledger shows that it was changed.

    A model may be given away without the ledger, which is private. Then nothing is compared, and
    `fedveil ledger --verify` is for those who have both.
    """
    folder, file = path.parent, file_of(path.parent)
    if file.is_file():
        shared = (folder / "ledger.json").is_file()
        run = name_of(folder) if shared else next(iter(read_runs(file)), "")
        noted = read_closing(file, run).get(path.name)
        for difference in [] if noted is None else _of_file(path, noted):
            raise BadInput(difference)
    return path


def save_head(folder: Path, head: Head) -> None:
    """Save the ledger's head at the end of the run, beside its files."""
    write_atomic(folder / "head.json", (json.dumps(head.to_dict(), indent=2) + "\n").encode())


def saved_heads(path: Path) -> list[Head]:
    """The heads of the ledger that a run directory has saved. Empty for a file."""
    try:
        if not path.is_dir():
            return []
    except OSError as e:
        raise BadInput(f"{path} cannot be read: {e}") from e
    heads = (
        read_head(path / "head.json"),
        read_head(path / "result.json"),
        checkpoint.recorded_head(path / "checkpoint"),
    )
    return [head for head in heads if head is not None]


def read_head(path: Path) -> Head | None:
    """The ledger's head in head.json, or in result.json as its entry "ledger". None without it."""
    try:
        if not path.is_file():
            return None
        stored = json.loads(path.read_text())
        stored = stored["ledger"] if path.name == "result.json" else stored
        return Head(str(stored["head"]), int(stored["length"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as e:
        raise BadInput(f"{path} cannot be read: {e}") from e


def _run_in(path: Path, runs: list[str]) -> str | None:
    """The name of the run whose directory `path` is, or None.

    A ledger file has no such run, and neither has a site's folder: its runs' files are at the
    server.
    """
    if not path.is_dir():
        return None
    if not (path / "ledger.json").is_file():
        of_site = any("site" in about for about in read_runs(file_of(path)).values())
        return runs[0] if len(runs) == 1 and not of_site else None
    name = name_of(path)
    if name not in runs:
        raise BadInput(f"{file_of(path)} does not know the run {name!r}: it was replaced")
    return name


def _read_head(text: str) -> Head:
    digest, colon, length = text.partition(":")
    if not colon or not length.isdecimal() or len(digest) != 64:
        raise BadInput(f"--head is {text!r}: write it as HASH:LENGTH, as --verify prints it")
    return Head(digest, int(length))


CLOSING_FILES = ("recipe.toml", "metrics.jsonl", "model.safetensors", "result.json")

_ALIKE = 1e-6
"""Epsilons of one account, computed on two machines, differ in their last digits."""


def file_digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file that the ledger's closing entry commits to."""
    return {name: _digest(folder / name) for name in CLOSING_FILES}


def recipe_digest(recipe: Recipe) -> str:
    """The digest by which a ledger identifies a recipe."""
    return hash_chain.digest(to_toml(recipe.model_dump()))


def is_open(file: Path, run: str) -> bool:
    """Whether the ledger has no closing entry of a run: it is running, or was killed."""
    return not read_closing(file, run)


def differences(folder: Path, file: Path, statement: Statement) -> list[str]:
    """Where a run directory differs from what the ledger in `file` notes, a sentence for each.

    Guarantee: if the run has ended and there are none, recipe, metrics, model and result are,
    byte for byte, those it ended with. The report is drawn from them. Recipe and claims are also
    compared with the charges, so that a closing entry cannot vouch for what was never charged.

    | edge | behaviour |
    |---|---|
    | the run is open | its recipe, and its claims if nothing was charged since, are compared |
    | a file is missing or cannot be read | a sentence |
    | epsilons that differ by less than 1e-6 of them | the same |
    """
    closed = read_closing(file, statement.run)
    return [
        *_of_recipe(folder, read_runs(file)[statement.run]),
        *(text for name, noted in closed.items() for text in _of_file(folder / name, noted)),
        *_of_claims(folder, statement, ended=bool(closed)),
    ]


def _of_recipe(folder: Path, about: dict[str, str]) -> list[str]:
    path = folder / "recipe.toml"
    if not path.exists():
        return []  # a run that has ended names it
    try:
        recipe = load_recipe(str(path))
    except BadInput as e:
        return [f"{path} cannot be read: {e}"]
    source = getattr(recipe.noise, "source", "seeded")
    if source != about.get("noise"):
        return [f"{path}: noise.source is {source!r} and {about.get('noise')!r} in the ledger"]
    if recipe_digest(recipe) != about.get("recipe"):
        return [f"{path} is not the recipe that the run was started with"]
    return []


def _of_file(path: Path, noted: str) -> list[str]:
    try:
        same = _digest(path) == noted
    except OSError as e:
        return [f"{path}, which the run left, cannot be read: {e.strerror}"]
    return [] if same else [f"{path} is not the one that the run left: it was changed"]


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _of_claims(folder: Path, statement: Statement, *, ended: bool) -> list[str]:
    path = folder / "result.json"
    if not path.is_file():
        return []
    try:
        result = json.loads(path.read_text())
        claims, rounds = list(result["claims"]), int(result["rounds"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError) as e:
        return [f"{path} cannot be read: {e}"]
    if not ended and rounds < len({charge.round for charge in statement.charges}):
        return []  # an older result of a run that was resumed
    own = [claim.to_dict() for claim in statement.claims]
    if len(own) == len(claims) and all(map(_same, claims, own)):
        return []
    return [f"{path}: its claims are not what the charges in the ledger come to"]


def _same(claim: Any, own: dict[str, Any]) -> bool:
    try:
        read = PrivacyClaim.from_dict(claim).to_dict()  # older results lack newer fields
    except (TypeError, ValueError, AttributeError):
        return False
    if "composed" not in claim:
        own = {**own, "composed": None}
    claim = read
    if claim.keys() != own.keys():
        return False
    a, b = claim["epsilon"], own["epsilon"]
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    alike = math.isclose(a, b, rel_tol=_ALIKE) if numbers else a == b
    return alike and {**claim, "epsilon": b} == json.loads(json.dumps(own))
