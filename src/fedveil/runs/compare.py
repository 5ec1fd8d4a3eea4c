"""Several runs side by side: what they measured and claim, and where their recipes differ."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.errors import BadInput
from fedveil.runs.opened_run import OpenedRun

_OF_THE_MACHINE = ("engine",)
"""Sections that change no result."""


def rows_of(runs: Sequence[OpenedRun]) -> list[dict[str, Any]]:
    """One row per run: its directory, rounds, metrics and the claim that counts."""
    found = [_numbers(run.result["metrics"]) for run in runs]
    names = list(dict.fromkeys(name for measured in found for name in measured))
    rows = []
    for run, measured in zip(runs, found, strict=True):
        claim = run.claim
        rows.append(
            {
                "run": str(run.folder),
                "recipe": run.result["recipe"],
                "rounds": run.result["rounds"],
                **{name: measured.get(name, "-") for name in names},
                "claim": "nothing is claimed" if claim is None else str(claim),
            }
        )
    return rows


def across_clients(runs: Sequence[OpenedRun]) -> list[dict[str, Any]]:
    """One row per number across clients, one column per run; none if nobody asked for any."""
    found = {str(run.folder): _numbers(run.result.get("over_clients", {})) for run in runs}
    names = dict.fromkeys(name for numbers in found.values() for name in numbers)
    return [
        {"number": name, **{run: numbers.get(name, "-") for run, numbers in found.items()}}
        for name in names
    ]


def differing_keys(runs: Sequence[OpenedRun]) -> list[dict[str, Any]]:
    """One row per recipe key on which the runs do not agree, one column per run."""
    flat = [_flat(run) for run in runs]
    rows = []
    for key in dict.fromkeys(key for each in flat for key in each):
        values = [each.get(key) for each in flat]
        if any(value != values[0] for value in values):
            told = ["-" if value is None else str(value) for value in values]
            rows.append({"key": key, **{str(r.folder): v for r, v in zip(runs, told, strict=True)}})
    return rows


def not_comparable(runs: Sequence[OpenedRun]) -> str | None:
    """Why the epsilons of these runs are not to be compared; None if they may be."""
    claims = [run.claim for run in runs if run.claim is not None]
    for what in ("unit", "neighbours", "trust", "delta", "as_published"):
        found = list(dict.fromkeys(str(getattr(claim, what)) for claim in claims))
        if len(found) > 1:
            said = f"{what.replace('_', ' ')} is {' and '.join(found)}"
            return f"the epsilons are not comparable: {said}"
    return None


def opened(folders: Sequence[Path]) -> list[OpenedRun]:
    """At least two runs, each ended."""
    if len(folders) < 2:
        raise BadInput(f"{len(folders)} run to compare: name two or more run directories")
    if len(set(folders)) < len(folders):
        raise BadInput("a run directory is named twice: name each once")
    runs = [OpenedRun.at(folder) for folder in folders]
    for run in runs:
        _ = run.result
    return runs


def _numbers(found: dict[str, float | None]) -> dict[str, float]:
    """What was measured; null is not finite."""
    return {name: math.nan if value is None else value for name, value in found.items()}


def _flat(run: OpenedRun) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in run.recipe.model_dump().items():
        if key in _OF_THE_MACHINE:
            continue
        inner = value if isinstance(value, dict) else {None: value}
        for name, one in inner.items():
            if one is not None:
                found[key if name is None else f"{key}.{name}"] = one
    return found
