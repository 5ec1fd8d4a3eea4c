"""Several runs side by side: what they measured and claim, and where their recipes differ."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.pages.comparison import comparison_page, short_names
from fedveil.pages.run_report import RunContents
from fedveil.privacy.accounting.strongest import strongest_promise
from fedveil.runs.opened_run import OpenedRun


def comparison_rows(runs: Sequence[OpenedRun]) -> list[dict[str, Any]]:
    """Return one row per run: its directory, recipe, rounds, metrics and headline claim.

    The keys are "run", "recipe", "rounds", every metric that any of the runs has ("-" where this
    one has not), and "claim", a text. Raises BadInput for a run that has not ended.
    """
    metrics = [_with_nan(run.result["metrics"]) for run in runs]
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
    """Return one row per statistic across clients: its name under "number", and one column per run.

    A column is named by the run's directory, "-" stands for a missing number. [] if no run has any.
    """
    statistics = {str(run.folder): _with_nan(run.result.get("over_clients", {})) for run in runs}
    names = dict.fromkeys(name for numbers in statistics.values() for name in numbers)
    return [
        {"number": name, **{run: numbers.get(name, "-") for run, numbers in statistics.items()}}
        for name in names
    ]


def differing_keys(runs: Sequence[OpenedRun]) -> list[dict[str, Any]]:
    """Return one row per recipe key in which the runs differ: "key", and one column per run.

    Values are texts, "-" where a recipe lacks the key. The section [engine], which changes no
    result, is left out.
    """
    settings: list[dict[str, Any]] = []  # by section.key
    for run in runs:
        settings.append({})
        for section, value in run.recipe.model_dump(exclude={"engine"}).items():
            for name, one in (value if isinstance(value, dict) else {None: value}).items():
                if one is not None:
                    settings[-1][section if name is None else f"{section}.{name}"] = one
    rows = []
    for key in dict.fromkeys(key for each in settings for key in each):
        values = [each.get(key) for each in settings]
        if any(value != values[0] for value in values):
            texts = ["-" if value is None else str(value) for value in values]
            columns = {str(run.folder): text for run, text in zip(runs, texts, strict=True)}
            rows.append({"key": key, **columns})
    return rows


def verdict(runs: Sequence[OpenedRun]) -> str:
    """Return which run makes the strongest promise, in a sentence, or why that cannot be said."""
    names = short_names([run.folder for run in runs])
    return strongest_promise(dict(zip(names, (run.claim for run in runs), strict=True)))


def open_runs(folders: Sequence[Path]) -> list[OpenedRun]:
    """Open two or more runs.

    Raises BadInput for fewer, and for one that is named twice or not ended.
    """
    if len(folders) < 2:
        raise BadInput(f"{len(folders)} run to compare: name two or more run directories")
    if len(set(folders)) < len(folders):
        raise BadInput("a run directory is named twice: name each once")
    runs = [OpenedRun.at(folder) for folder in folders]
    for run in runs:
        _ = run.result
    return runs


def comparison_html(runs: Sequence[OpenedRun]) -> bytes:
    """Return an HTML page that compares runs: metrics, claims, and differing recipe keys.

    Writes no file.
    """
    contents = [RunContents(run.folder, "", run.history, run.result, run.claims) for run in runs]
    return comparison_page(
        contents, verdict(runs), comparison_rows(runs), differing_keys(runs), across_clients(runs)
    )


def _with_nan(metrics: dict[str, float | None]) -> dict[str, float]:
    """Return metrics with NaN in place of None, which JSON has for numbers that are not finite."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}
