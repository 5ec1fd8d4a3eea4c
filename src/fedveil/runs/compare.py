"""Several runs side by side: what they measured and claim, and where their recipes differ."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.pages.comparison import comparison_page
from fedveil.pages.run_report import RunContents
from fedveil.runs.opened_run import OpenedRun

_OF_THE_MACHINE = ("engine",)
"""Sections that change no result."""


def rows_of(runs: Sequence[OpenedRun]) -> list[dict[str, Any]]:
    """One row per run: its directory, rounds, metrics and the claim that counts."""
    metrics = [_numbers(run.result["metrics"]) for run in runs]
    names = list(dict.fromkeys(name for measured in metrics for name in measured))
    rows = []
    for run, measured in zip(runs, metrics, strict=True):
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
    """One row per statistic across clients, one column per run. Empty if no run has any."""
    statistics = {str(run.folder): _numbers(run.result.get("over_clients", {})) for run in runs}
    names = dict.fromkeys(name for numbers in statistics.values() for name in numbers)
    return [
        {"number": name, **{run: numbers.get(name, "-") for run, numbers in statistics.items()}}
        for name in names
    ]


def differing_keys(runs: Sequence[OpenedRun]) -> list[dict[str, Any]]:
    """One row per recipe key on which the runs do not agree, one column per run."""
    flat = [_flat(run) for run in runs]
    rows = []
    for key in dict.fromkeys(key for each in flat for key in each):
        values = [each.get(key) for each in flat]
        if any(value != values[0] for value in values):
            texts = ["-" if value is None else str(value) for value in values]
            columns = {str(run.folder): text for run, text in zip(runs, texts, strict=True)}
            rows.append({"key": key, **columns})
    return rows


def not_comparable(runs: Sequence[OpenedRun]) -> str | None:
    """Why the epsilons of these runs cannot be compared, or None if they can."""
    claims = [run.claim for run in runs if run.claim is not None]
    for what in ("unit", "neighbours", "trust", "delta", "as_published"):
        values = list(dict.fromkeys(str(getattr(claim, what)) for claim in claims))
        if len(values) > 1:
            difference = f"{what.replace('_', ' ')} is {' and '.join(values)}"
            return f"the epsilons are not comparable: {difference}"
    return None


def opened(folders: Sequence[Path]) -> list[OpenedRun]:
    """Open two or more runs that have ended."""
    if len(folders) < 2:
        raise BadInput(f"{len(folders)} run to compare: name two or more run directories")
    if len(set(folders)) < len(folders):
        raise BadInput("a run directory is named twice: name each once")
    runs = [OpenedRun.at(folder) for folder in folders]
    for run in runs:
        _ = run.result
    return runs


def comparison_html(runs: Sequence[OpenedRun]) -> bytes:
    """The page of runs side by side."""
    contents = [RunContents(run.folder, "", run.history, run.result, run.claims) for run in runs]
    return comparison_page(contents, rows_of(runs), differing_keys(runs), across_clients(runs))


def _numbers(metrics: dict[str, float | None]) -> dict[str, float]:
    """Metrics with NaN in place of JSON's null, which stands for a number that is not finite."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def _flat(run: OpenedRun) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in run.recipe.model_dump().items():
        if key in _OF_THE_MACHINE:
            continue
        inner = value if isinstance(value, dict) else {None: value}
        for name, one in inner.items():
            if one is not None:
                flat[key if name is None else f"{key}.{name}"] = one
    return flat
