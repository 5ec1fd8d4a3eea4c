"""The files that a run ends with, and whether they still match the ledger."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.ledger import hash_chain
from fedveil.privacy.ledger.file import read_closing, read_runs
from fedveil.privacy.ledger.statement import Statement
from fedveil.runs import toml
from fedveil.runs.recipe import Recipe, load_recipe

FILES = ("recipe.toml", "metrics.jsonl", "model.safetensors", "result.json")

_ALIKE = 1e-6
"""Epsilons of one account, computed on two machines, differ in their last digits."""


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file that the ledger's closing entry commits to."""
    return {name: _digest(folder / name) for name in FILES}


def recipe_digest(recipe: Recipe) -> str:
    """The digest by which a ledger identifies a recipe."""
    return hash_chain.digest(toml.dumps(recipe.model_dump()))


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


def check_as_left(path: Path, file: Path, run: str) -> None:
    """Refuse a file that has changed since the run ended, by the ledger in `file`."""
    noted = read_closing(file, run).get(path.name)
    for difference in [] if noted is None else _of_file(path, noted):
        raise BadInput(difference)


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
