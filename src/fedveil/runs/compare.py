"""Several runs side by side: what they measured and claim, and where their recipes differ."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.errors import BadInput
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.runs.opened import OpenedRun

_OF_THE_MACHINE = ("engine",)
"""Sections that change no result."""


def rows_of(runs: Sequence[OpenedRun]) -> list[dict[str, Any]]:
    """One row per run: its directory, rounds, metrics and the claim that counts."""
    found = [_numbers(run.result["metrics"]) for run in runs]
    names = list(dict.fromkeys(name for measured in found for name in measured))
    rows = []
    for run, measured in zip(runs, found, strict=True):
        claim = _counting(run)
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
    claims = [claim for claim in map(_counting, runs) if claim is not None]
    for what in ("unit", "neighbours", "trust", "delta", "as_published"):
        found = list(dict.fromkeys(str(getattr(claim, what)) for claim in claims))
        if len(found) > 1:
            said = f"{what.replace('_', ' ')} is {' and '.join(found)}"
            return f"the epsilons are not comparable: {said}"
    return None


def picture(runs: Sequence[OpenedRun]) -> bytes:
    """The metric of each run over its rounds, and beside it over epsilon where that compares."""
    from matplotlib.figure import Figure

    metric = _metric(runs)
    together = not_comparable(runs) is None and any(run.claims for run in runs)
    figure = Figure(figsize=(9 if together else 5, 3.4), layout="constrained")
    axes = figure.subplots(1, 2 if together else 1, squeeze=False)[0]
    for run in runs:
        lines = [line for line in run.history if metric in line]
        values = [line[metric] for line in lines]
        axes[0].plot([line["round"] for line in lines], values, label=str(run.folder))
        if together:
            spent = [
                (line["epsilon"], line[metric]) for line in lines if line["epsilon"] is not None
            ]
            axes[1].plot([e for e, _ in spent], [v for _, v in spent])
    axes[0].set(xlabel="round", ylabel=f"test {metric}")
    axes[0].legend(fontsize=7)
    if together:
        claim = next(claim for claim in map(_counting, runs) if claim is not None)
        axes[1].set(xlabel="epsilon spent", ylabel=f"test {metric}")
        axes[1].set_title(f"epsilon {claim.told}", fontsize=7)
    for axis in axes:
        axis.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


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


def _metric(runs: Sequence[OpenedRun]) -> str:
    """The first that all runs have, other than the loss if there is one."""
    common = [name for name in runs[0].result["metrics"] if all(_has(run, name) for run in runs)]
    return next((name for name in common if name != "loss"), "loss")


def _numbers(found: dict[str, float | None]) -> dict[str, float]:
    """What was measured; null is not finite."""
    return {name: math.nan if value is None else value for name, value in found.items()}


def _has(run: OpenedRun, name: str) -> bool:
    return name in run.result["metrics"]


def _counting(run: OpenedRun) -> PrivacyClaim | None:
    """The claim that counts: the first that is a guarantee."""
    claims = run.claims
    return next((c for c in claims if not c.as_published), claims[0] if claims else None)


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
