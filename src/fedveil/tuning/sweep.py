"""`Sweep`: a grid of recipes, each repeated, in a directory that survives any interruption.

sweep.json     what is swept: recipe, axes, repetitions, execution modes, versions, what it costs
trials.jsonl   one line per finished trial, written as soon as it is
results.csv    one row per trial, in the grid's order
summary.csv    one row per cell: means and their 95 % intervals
report.html    the same to look at: frontiers, heat maps, the recommended cell
"""

import csv
import importlib.metadata
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedveil.base.checks import check_option
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting
from fedveil.runs.run_directory import locked, write_atomic
from fedveil.training.gradients.choice import Mode
from fedveil.tuning.recipe_grid import Axis, Cell, cells
from fedveil.tuning.repetitions import Cost, Mean, mean_of
from fedveil.tuning.sweep_page import sweep_page
from fedveil.tuning.trials import Laboratory, PreparedCell, TrialOutcome

OnTrial = Callable[[int, int, str], None]
"""(trials done, trials in all, the cell just finished)."""

_PACKAGES = ("fedveil", "torch", "numpy")
_FORMAT = 2
_NOTHING = "nothing claimed"
_OWN_FILES = ("lock", ".sweep.json.tmp")


@dataclass
class Sweep:
    """A grid of cells and its directory. `run` trains what is missing.

    Trials are stored one by one and each is a function of recipe and seed alone, so a sweep that
    was killed and started again repeats no finished trial and ends with the same tables.
    """

    folder: Path
    axes: tuple[Axis, ...]
    cells: list[Cell]
    repeat: int
    laboratory: Laboratory
    _done: dict[tuple[int, int], TrialOutcome] = field(default_factory=dict)
    _prepared: list[PreparedCell] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        folder: Path,
        source: str,
        overrides: Sequence[str],
        axes: Sequence[Axis],
        repeat: int,
        laboratory: Laboratory,
    ) -> "Sweep":
        """A new sweep in `folder`, or the one that is there if it is the same.

        Everything is checked before anything is written: a cell that cannot run refuses the sweep.
        """
        check_option("repeat", repeat)
        sweep = cls(folder, tuple(axes), cells(source, overrides, axes), repeat, laboratory)
        modes = sweep._stored_modes()
        for i, cell in enumerate(sweep.cells):
            sweep._prepared.append(laboratory.prepare(cell, modes[i] if modes else None))
        sweep._done = sweep._read_trials()
        return sweep

    @property
    def prepared(self) -> list[PreparedCell]:
        """The cells as built, in the grid's order."""
        return self._prepared

    @property
    def left(self) -> list[tuple[int, tuple[int, ...]]]:
        """(cell, repetitions) not done yet, those together that are one computation.

        One that a crash has torn apart is computed whole again, so that it comes to the same.
        """
        everything = [
            (block, c)
            for c, prepared in enumerate(self._prepared)
            for block in prepared.blocks(0, self.repeat)
        ]
        missing = [(b, c) for b, c in everything if any((r, c) not in self._done for r in b)]
        return [(c, block) for block, c in sorted(missing, key=lambda one: (one[0][0], one[1]))]

    def run(self, on_trial: OnTrial = lambda done, total, name: None) -> None:
        """Train what is left, and write the tables and the page."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise BadInput(f"--out {self.folder} cannot be made: {e.strerror}") from e
        with locked(self.folder):
            self._catch_up()
            left, total = self.left, self.repeat * len(self.cells)
            self._rewrite_trials()
            jobs = [(self._prepared[c], block) for c, block in left]
            with (self.folder / "trials.jsonl").open("a") as file:
                for number, outcomes in self.laboratory.trials(jobs):
                    cell, block = left[number]
                    done = {(r, cell): o for r, o in zip(block, outcomes, strict=True)}
                    new = {key: done[key] for key in done.keys() - self._done.keys()}
                    self._done |= new
                    file.write("".join(_line(r, c, new[r, c]) for r, c in sorted(new)))
                    file.flush()
                    os.fsync(file.fileno())
                    on_trial(len(self._done), total, self.cells[cell].name)
            self._write_tables()

    def outcomes(self, cell: int) -> list[TrialOutcome]:
        """What the repetitions of a cell came to, in order."""
        return [self._done[r, cell] for r in range(self.repeat)]

    @property
    def metrics(self) -> list[str]:
        """What was measured, the task's own metric before the loss."""
        names = list(self._done[0, 0].metrics)
        return [*(n for n in names if n != "loss"), *(n for n in names if n == "loss")]

    def mean(self, cell: int, metric: str) -> Mean:
        """Over the repetitions of a cell."""
        return mean_of([outcome.metrics[metric] for outcome in self.outcomes(cell)])

    def table(self) -> list[dict[str, Any]]:
        """One row per cell, for people."""
        heading, claims = _told([prepared.claims for prepared in self._prepared])
        rows = []
        for c, cell in enumerate(self.cells):
            means = {metric: str(self.mean(c, metric)) for metric in self.metrics}
            privacy = {"noise": self._prepared[c].noise_text, heading: claims[c]}
            rows.append({**dict(cell.choice), **means, **privacy})
        return rows

    @cached_property
    def cost(self) -> Cost:
        """What all trainings cost together."""
        return Cost.of([(prepared, self.repeat) for prepared in self._prepared])

    def report(self) -> dict[str, Any]:
        """The same for machines."""
        rows = [{k: _number(v) for k, v in row.items()} for row in self._summary()]
        return {"out": str(self.folder), "cells": rows, "together": self.cost.to_dict()}

    def _write_tables(self) -> None:
        write_atomic(self.folder / "results.csv", _csv(self._rows()))
        write_atomic(self.folder / "summary.csv", _csv(self._summary()))
        write_atomic(self.folder / "report.html", sweep_page(self.folder))

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                **dict(cell.choice),
                "repetition": r,
                "seed_used": cell.recipe.seed + r,
                "rounds_done": self._done[r, c].rounds,
                **self._done[r, c].metrics,
                "claims": "; ".join(map(str, self._prepared[c].claims)),
            }
            for c, cell in enumerate(self.cells)
            for r in range(self.repeat)
        ]

    def _summary(self) -> list[dict[str, Any]]:
        rows = []
        for c, cell in enumerate(self.cells):
            row: dict[str, Any] = dict(cell.choice)
            means = {metric: self.mean(c, metric) for metric in self.metrics}
            for metric, mean in means.items():
                row |= {metric: mean.value, f"{metric}_half": mean.half}
            prepared = self._prepared[c]
            claim = prepared.claim
            row |= {
                "diverged": max(mean.diverged for mean in means.values()),
                "repetitions": self.repeat,
                "noise": prepared.noise,
                "epsilon": "" if claim is None else claim.epsilon,
                "delta": "" if claim is None else claim.delta,
                "unit": "" if claim is None else str(claim.unit),
                "neighbours": "" if claim is None else str(claim.neighbours),
                "trust": "" if claim is None else str(claim.trust),
                "as_published": "" if claim is None else claim.as_published,
                "claims": "; ".join(map(str, prepared.claims)),
            }
            rows.append(row)
        return rows

    def _about(self) -> str:
        versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
        modes = [str(prepared.mode) for prepared in self._prepared]
        about = {**self._identity(), "first": _plain_recipe(self.cells[0])}
        results = {"modes": modes, "versions": versions, "together": self.cost.to_dict()}
        return json.dumps({**about, **results}, indent=2)

    def _identity(self) -> dict[str, Any]:
        """What makes two sweeps the same."""
        return {
            "format": _FORMAT,
            "axes": [[axis.key, *axis.values] for axis in self.axes],
            "repeat": self.repeat,
            "curves": self.laboratory.curves,
            "recipes": [cell.digest[:16] for cell in self.cells],
        }

    def _catch_up(self) -> None:
        """Under the lock: what another process may have done here since this one looked."""
        modes = self._stored_modes()
        if modes is None:
            write_atomic(self.folder / "sweep.json", self._about().encode())
        else:
            pairs = zip(self._prepared, modes, strict=True)
            self._prepared = [
                prepared if prepared.mode is mode else self.laboratory.prepare(prepared.cell, mode)
                for prepared, mode in pairs
            ]
        self._done = self._read_trials()

    def _stored_modes(self) -> list[Mode] | None:
        """The execution modes of the sweep in the folder. Another sweep is refused."""
        stored = self._stored()
        if stored is None:
            self._check_empty()
            return None
        self._check_same(stored)
        return [Mode(mode) for mode in stored["modes"]]

    def _stored(self) -> dict[str, Any] | None:
        path = self.folder / "sweep.json"
        if not path.exists():
            return None
        try:
            about = json.loads(path.read_text())
            known, whole = about["format"], len(about["modes"]) == len(about["recipes"])
        except (OSError, ValueError, KeyError, TypeError):
            known, whole = None, False
        if whole and known == 1:
            raise BadInput(
                f"{path} is of a fedveil whose trials shared their noise: use another --out"
            )
        if not whole or known != _FORMAT:
            raise BadInput(f"{path} is not a sweep's: use another --out")
        return dict(about)

    def _check_same(self, stored: dict[str, Any]) -> None:
        now = json.loads(json.dumps(self._identity()))
        for key, value in now.items():
            if stored.get(key) != value:
                raise BadInput(
                    f"{self.folder} holds another sweep ({self._difference(key, stored)}): start "
                    "it again as it was, or use another --out"
                )

    def _difference(self, key: str, stored: dict[str, Any]) -> str:
        """What makes the sweep in the folder another one, in a few words."""
        match key:
            case "axes":
                grid = [f"--grid {axis[0]}={','.join(axis[1:])}" for axis in stored[key]]
                return f"its grid is {' '.join(grid) or 'empty'}"
            case "repeat":
                return f"its --repeat is {stored[key]}, not {self.repeat}"
            case "curves":
                return f"it was started {'with' if stored[key] else 'without'} --curves"
        theirs, ours = _flat(stored.get("first", {})), _flat(_plain_recipe(self.cells[0]))
        for name in {**ours, **theirs} if theirs else ():
            if theirs.get(name) != ours.get(name):
                return f"its {name} is {theirs.get(name)}, not {ours.get(name)}"
        return "its recipes differ"

    def _check_empty(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise BadInput(f"--out {self.folder} is a file: name a directory")
        inside = self.folder.iterdir() if self.folder.is_dir() else ()
        others = sorted(p.name for p in inside if p.name not in _OWN_FILES)
        if others:
            raise BadInput(f"--out {self.folder} holds {others[0]} and no sweep: use another")

    def _read_trials(self) -> dict[tuple[int, int], TrialOutcome]:
        """The trials on disk, up to the first line that a crash cut short."""
        path = self.folder / "trials.jsonl"
        outcomes: dict[tuple[int, int], TrialOutcome] = {}
        if not path.exists():
            return outcomes
        for text in path.read_text(errors="replace").splitlines():
            try:
                line = json.loads(text)
                outcomes[line["repetition"], line["cell"]] = _outcome(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                break
        return outcomes

    def _rewrite_trials(self) -> None:
        text = "".join(_line(r, c, outcome) for (r, c), outcome in self._done.items())
        write_atomic(self.folder / "trials.jsonl", text.encode())


def _plain_recipe(cell: Cell) -> dict[str, Any]:
    return dict(json.loads(cell.recipe.model_dump_json(exclude={"name"})))


def _flat(recipe: dict[str, Any]) -> dict[str, Any]:
    """The keys of a recipe as --set names them, without those left out."""
    keys: dict[str, Any] = {}
    for key, value in recipe.items():
        inner = value.items() if isinstance(value, dict) else None
        keys |= {key: value} if inner is None else {f"{key}.{k}": v for k, v in inner}
    return {key: value for key, value in keys.items() if value is not None}


def _told(cells: Sequence[Sequence[PrivacyClaim]]) -> tuple[str, list[str]]:
    """A heading and a text for each cell: its value where all claims mean the same."""
    terms = {(claim.covers, claim.terms) for claims in cells for claim in claims}
    if len(terms) == 1 and all(len(claims) <= 1 for claims in cells):
        first = next(claim for claims in cells for claim in claims)
        values = [_NOTHING if c is None else c.value for c in map(counting, cells)]
        return first.short.replace(f" {first.value} ", " ", 1), values
    return "claim", [_short(claims) for claims in cells]


def _short(claims: Sequence[PrivacyClaim]) -> str:
    """The claims in a few words. A strict one is marked if it stands beside one as published."""
    said = ""
    for before, claim in zip([None, *claims], claims, strict=False):
        join = "; strictly " if before and before.as_published else "; "
        said += f"{join if before else ''}{claim.short}"
    return said or _NOTHING


def _line(repetition: int, cell: int, outcome: TrialOutcome) -> str:
    return (
        json.dumps(
            {
                "repetition": repetition,
                "cell": cell,
                "rounds": outcome.rounds,
                "metrics": _plain(outcome.metrics),
                "curve": [[r, _plain(m)] for r, m in outcome.curve],
            },
            allow_nan=False,
        )
        + "\n"
    )


def _plain(metrics: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _outcome(line: dict[str, Any]) -> TrialOutcome:
    def read(metrics: dict[str, float | None]) -> dict[str, float]:
        return {name: math.nan if v is None else float(v) for name, v in metrics.items()}

    curve = tuple((int(r), read(m)) for r, m in line["curve"])
    return TrialOutcome(int(line["rounds"]), read(line["metrics"]), curve)


def _number(value: Any) -> Any:
    """As JSON can hold it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: repr(v) if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue().encode()
