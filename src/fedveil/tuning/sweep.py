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
from fedveil.runs.run_directory import json_text, locked, write_atomic
from fedveil.training.gradients.modes import Mode
from fedveil.tuning.recipe_grid import Axis, Cell, cells
from fedveil.tuning.repetitions import Cost, Mean, mean_of
from fedveil.tuning.trials import Laboratory, PreparedCell, TrialOutcome
from fedveil.tuning.tuning_pages import sweep_page

OnTrial = Callable[[int, int, str], None]
"""(trials done, trials in all, the cell just finished)."""

_PACKAGES = ("fedveil", "torch", "numpy")
_FORMAT = 2
_NOTHING = "nothing claimed"


@dataclass
class Sweep:
    """A grid of cells and its directory. `run` trains what is missing.

    Trials are stored one by one and each is a function of recipe and seed alone, so a sweep that
    was killed and started again repeats no finished trial and ends with the same tables.

    Attributes:
        folder: The directory.
        axes: The axes of the grid.
        cells: The recipes, the last axis fastest.
        repeat: Repetitions of every cell.
        laboratory: Prepares and trains cells.
        prepared: The cells as built.
    """

    folder: Path
    axes: tuple[Axis, ...]
    cells: list[Cell]
    repeat: int
    laboratory: Laboratory
    prepared: list[PreparedCell] = field(default_factory=list)
    _done: dict[tuple[int, int], TrialOutcome] = field(default_factory=dict)

    @classmethod
    def in_folder(
        cls,
        folder: Path,
        source: str,
        overrides: Sequence[str],
        axes: Sequence[Axis],
        repeat: int,
        laboratory: Laboratory,
    ) -> "Sweep":
        """Prepare a sweep in `folder`, a new one or the same one to resume. Write nothing.

        Raise BadInput if a cell cannot run, or the folder holds something else. Trials that are
        stored there are read.

        Args:
            folder: The directory.
            source: A shipped recipe or a .toml file.
            overrides: Settings "section.key=value" of every cell.
            axes: The axes of the grid.
            repeat: Repetitions of every cell.
            laboratory: Prepares and trains cells.
        """
        check_option("repeat", repeat)
        sweep = cls(folder, tuple(axes), cells(source, overrides, axes), repeat, laboratory)
        modes = sweep._stored_modes()
        sweep.prepared = [
            laboratory.prepare(cell, modes[i] if modes else None)
            for i, cell in enumerate(sweep.cells)
        ]
        sweep._done = sweep._read_trials()
        return sweep

    @property
    def missing_repetitions(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return pairs (cell, block of repetitions), numbers from 0, that are not complete.

        First repetitions come first. A block that a crash has torn apart is computed whole again,
        so that it has the same result.
        """
        blocks = [
            (block, c)
            for c, prepared in enumerate(self.prepared)
            for block in prepared.blocks(0, self.repeat)
        ]
        missing = [(b, c) for b, c in blocks if any((r, c) not in self._done for r in b)]
        return [(c, block) for block, c in sorted(missing, key=lambda one: (one[0][0], one[1]))]

    def run(self, on_trial: OnTrial = lambda done, total, name: None) -> None:
        """Train the missing trials, store each in trials.jsonl, and write the tables and the page.

        Args:
            on_trial: Called with (trials done, trials in all, cell just finished) after each block
                of trials.

        Raises:
            BadInput: The directory cannot be made, is in use, or holds another sweep.
        """
        make_folder(self.folder)
        with locked(self.folder):
            self._catch_up()
            missing, total = self.missing_repetitions, self.repeat * len(self.cells)
            path = self.folder / "trials.jsonl"
            text = "".join(_trial_line(r, c, outcome) for (r, c), outcome in self._done.items())
            write_atomic(path, text.encode())
            jobs = [(self.prepared[c], block) for c, block in missing]
            with path.open("a") as file:
                for number, outcomes in self.laboratory.trials(jobs):
                    cell, block = missing[number]
                    done = {(r, cell): o for r, o in zip(block, outcomes, strict=True)}
                    new = {key: done[key] for key in done.keys() - self._done.keys()}
                    self._done |= new
                    file.write("".join(_trial_line(r, c, new[r, c]) for r, c in sorted(new)))
                    file.flush()
                    os.fsync(file.fileno())
                    on_trial(len(self._done), total, self.cells[cell].name)
            write_atomic(self.folder / "results.csv", _csv(self._rows()))
            write_atomic(self.folder / "summary.csv", _csv(self._summary()))
            write_atomic(self.folder / "report.html", sweep_page(self.folder))

    def outcomes(self, cell: int) -> list[TrialOutcome]:
        """Return the outcomes of all repetitions of a cell, in order. KeyError before `run`."""
        return [self._done[r, cell] for r in range(self.repeat)]

    @property
    def metric_names(self) -> list[str]:
        """Return the names of the test metrics, the loss last. KeyError before `run`."""
        return sorted(self._done[0, 0].test_metrics, key=lambda name: name == "loss")

    def cell_mean(self, cell: int, metric: str) -> Mean:
        """Return the mean of a test metric over the repetitions of a cell.

        KeyError before `run`.
        """
        return mean_of([outcome.test_metrics[metric] for outcome in self.outcomes(cell)])

    def table(self) -> list[dict[str, Any]]:
        """Return one row of texts per cell: choices by key, mean metrics, noise and claim.

        KeyError before `run`.
        """
        heading, claims = claim_column([prepared.shown_claims for prepared in self.prepared])
        rows = []
        for c, prepared in enumerate(self.prepared):
            means = {metric: str(self.cell_mean(c, metric)) for metric in self.metric_names}
            privacy = {"noise": prepared.noise_text, heading: claims[c]}
            rows.append({**prepared.cell.choice, **means, **privacy})
        return rows

    @cached_property
    def total_cost(self) -> Cost:
        """Return the privacy cost of all trainings of the sweep, done or not."""
        return Cost([(prepared, self.repeat) for prepared in self.prepared])

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: out (the directory), cells (rows of summary.csv) and together (cost).

        Numbers that are not finite are None.
        """
        rows = self._summary()
        for row in rows:
            row |= {
                k: None for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)
            }
        return {"out": str(self.folder), "cells": rows, "together": self.total_cost.to_dict()}

    def _rows(self) -> list[dict[str, Any]]:
        """Return the rows of results.csv by column, one per trial, cell by cell."""
        return [
            {
                **prepared.cell.choice,
                "repetition": r,
                "seed_used": prepared.cell.recipe.seed + r,
                "rounds_done": self._done[r, c].rounds_done,
                **self._done[r, c].test_metrics,
                "claims": "; ".join(map(str, prepared.shown_claims)),
            }
            for c, prepared in enumerate(self.prepared)
            for r in range(self.repeat)
        ]

    def _summary(self) -> list[dict[str, Any]]:
        """Return the rows of summary.csv, one per cell, as dicts by column.

        A row has the cell's choices, the mean of each metric and half the width of its interval,
        the numbers of repetitions and of diverged ones, the noise, the terms of the headline claim
        ("" if nothing is claimed), and all claims.
        """
        rows = []
        for c, prepared in enumerate(self.prepared):
            row: dict[str, Any] = dict(prepared.cell.choice)
            means = {metric: self.cell_mean(c, metric) for metric in self.metric_names}
            for metric, mean in means.items():
                row |= {metric: mean.value, f"{metric}_half": mean.half}
            row |= {
                "diverged": max(mean.diverged for mean in means.values()),
                "repetitions": self.repeat,
                "noise": prepared.noise_std,
            }
            claim = prepared.headline_claim
            for name in ("epsilon", "delta", "unit", "neighbours", "trust", "as_published"):
                value = getattr(claim, name, "")
                row[name] = str(value) if isinstance(value, str) else value
            row["claims"] = "; ".join(map(str, prepared.shown_claims))
            rows.append(row)
        return rows

    def _identity(self) -> dict[str, Any]:
        """Return the JSON values that must be the same for a sweep to be resumed."""
        return {
            "format": _FORMAT,
            "axes": [[axis.key, *axis.choices] for axis in self.axes],
            "repeat": self.repeat,
            "curves": self.laboratory.with_curves,
            "recipes": [cell.digest[:16] for cell in self.cells],
        }

    def _catch_up(self) -> None:
        """Write sweep.json, or use the modes stored in it, and read the trials on disk.

        The caller holds the sweep's lock, since another process may have started the same sweep.
        Raises BadInput if the folder holds another sweep.
        """
        modes = self._stored_modes()
        if modes is None:
            about = {
                **self._identity(),
                "first": _recipe_json(self.cells[0]),
                "modes": [str(prepared.mode) for prepared in self.prepared],
                "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
                "together": self.total_cost.to_dict(),
            }
            write_atomic(self.folder / "sweep.json", json.dumps(about, indent=2).encode())
        else:
            self.prepared = [
                prepared if prepared.mode is mode else self.laboratory.prepare(prepared.cell, mode)
                for prepared, mode in zip(self.prepared, modes, strict=True)
            ]
        self._done = self._read_trials()

    def _stored_modes(self) -> list[Mode] | None:
        """Return the execution mode of each cell from sweep.json, None if the folder has no sweep.

        Raise BadInput if it holds another sweep or other files.
        """
        path = self.folder / "sweep.json"
        if not path.exists():
            check_new_folder(self.folder, ("lock", ".sweep.json.tmp"), "sweep")
            return None
        try:
            stored = dict(json.loads(path.read_text()))
            known, whole = stored["format"], len(stored["modes"]) == len(stored["recipes"])
        except (OSError, ValueError, KeyError, TypeError):
            known, whole = None, False
        if whole and known == 1:
            raise BadInput(
                f"{path} is of a fedveil whose trials shared their noise: use another --out"
            )
        if not whole or known != _FORMAT:
            raise BadInput(f"{path} is not a sweep's: use another --out")
        for key, value in json.loads(json.dumps(self._identity())).items():
            if stored.get(key) != value:
                raise BadInput(
                    f"{self.folder} holds another sweep ({self._difference(key, stored)}): start "
                    "it again as it was, or use another --out"
                )
        return [Mode(mode) for mode in stored["modes"]]

    def _difference(self, key: str, stored: dict[str, Any]) -> str:
        """Return a clause on how the stored sweep differs in the value of `key`: "its ... is ...".

        `stored` is the contents of sweep.json.
        """
        match key:
            case "axes":
                grid = [f"--grid {axis[0]}={','.join(axis[1:])}" for axis in stored[key]]
                return f"its grid is {' '.join(grid) or 'empty'}"
            case "repeat":
                return f"its --repeat is {stored[key]}, not {self.repeat}"
            case "curves":
                return f"it was started {'with' if stored[key] else 'without'} --curves"
        theirs, ours = _flat_keys(stored.get("first", {})), _flat_keys(_recipe_json(self.cells[0]))
        for name in {**ours, **theirs} if theirs else ():
            if theirs.get(name) != ours.get(name):
                return f"its {name} is {theirs.get(name)}, not {ours.get(name)}"
        return "its recipes differ"

    def _read_trials(self) -> dict[tuple[int, int], TrialOutcome]:
        """Return outcomes by (repetition, cell) from trials.jsonl, up to its first damaged line.

        {} without that file.
        """
        path = self.folder / "trials.jsonl"
        outcomes: dict[tuple[int, int], TrialOutcome] = {}
        for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
                outcomes[line["repetition"], line["cell"]] = _parse_outcome(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                break
        return outcomes


def check_new_folder(folder: Path, own_files: Sequence[str], kind: str) -> None:
    """Raise BadInput if `folder` is a file or contains files other than `own_files`.

    A folder that does not exist passes. `kind`, such as "sweep", is a word for the message.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--out {folder} is a file: name a directory")
    inside = folder.iterdir() if folder.is_dir() else ()
    others = sorted(p.name for p in inside if p.name not in own_files)
    if others:
        raise BadInput(f"--out {folder} holds {others[0]} and no {kind}: use another")


def make_folder(folder: Path) -> None:
    """Make a directory and those above it, unless they exist. Raise BadInput if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"--out {folder} cannot be made: {e.strerror}") from e


def _recipe_json(cell: Cell) -> dict[str, Any]:
    """Return the recipe of a cell as JSON values, without its name."""
    return dict(json.loads(cell.recipe.model_dump_json(exclude={"name"})))


def _flat_keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe by "section.key", without those that are None."""
    keys: dict[str, Any] = {}
    for key, value in recipe.items():
        inner = value.items() if isinstance(value, dict) else None
        keys |= {key: value} if inner is None else {f"{key}.{k}": v for k, v in inner}
    return {key: value for key, value in keys.items() if value is not None}


def claim_column(cells: Sequence[Sequence[PrivacyClaim]]) -> tuple[str, list[str]]:
    """Return (heading, text of each cell) of the column with the cells' claims.

    If all claims have the same terms and no cell has two, the heading has the terms, and the texts
    are epsilons only. A cell without claims is "nothing claimed".
    """
    terms = {(claim.covers, claim.terms) for claims in cells for claim in claims}
    if len(terms) == 1 and all(len(claims) <= 1 for claims in cells):
        first = next(claim for claims in cells for claim in claims)
        values = [_NOTHING if c is None else c.rounded_epsilon for c in map(counting, cells)]
        return first.short.replace(f" {first.rounded_epsilon} ", " ", 1), values
    return "claim", [_short_text(claims) for claims in cells]


def _short_text(claims: Sequence[PrivacyClaim]) -> str:
    """Return the short forms of claims in one text, or "nothing claimed" without any.

    One that follows a published one is marked "strictly".
    """
    text = ""
    for before, claim in zip([None, *claims], claims, strict=False):
        join = "; strictly " if before and before.as_published else "; "
        text += f"{join if before else ''}{claim.short}"
    return text or _NOTHING


def _trial_line(repetition: int, cell: int, outcome: TrialOutcome) -> str:
    """Return the line of trials.jsonl for one outcome, with null for NaN and a line break."""
    line = {
        "repetition": repetition,
        "cell": cell,
        "rounds": outcome.rounds_done,
        "metrics": outcome.test_metrics,
        "curve": outcome.test_curve,
    }
    return json_text(line)


def _parse_outcome(line: dict[str, Any]) -> TrialOutcome:
    """Return the outcome in a parsed line of trials.jsonl, with NaN for null."""

    def read(metrics: dict[str, float | None]) -> dict[str, float]:
        """Return metrics as floats, NaN for None."""
        return {name: math.nan if v is None else float(v) for name, v in metrics.items()}

    curve = tuple((int(r), read(m)) for r, m in line["curve"])
    return TrialOutcome(int(line["rounds"]), read(line["metrics"]), curve)


def _csv(rows: list[dict[str, Any]]) -> bytes:
    """Return rows, at least one, as the bytes of a CSV file. Floats keep all their digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: repr(v) if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue().encode()
