"""A run: a directory with recipe, metrics, ledger, checkpoints, model and result."""

import hashlib
import importlib.metadata
import math
import platform
import reprlib
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import safetensors.torch

from fedveil.errors import BadInput
from fedveil.privacy.chain import Head
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.shared import common_of
from fedveil.privacy.verification import verify
from fedveil.runs import checkpoint, metrics, toml
from fedveil.runs.build import build, resolved
from fedveil.runs.diagnosis import diagnose
from fedveil.runs.disk import locked, write_atomic
from fedveil.runs.evidence import file_of, head_of_result
from fedveil.runs.ledgers import Shared, open_ledger
from fedveil.runs.metrics import json_text, last_round
from fedveil.runs.plots import progress_png
from fedveil.runs.recipe import Recipe, load_recipe
from fedveil.training.evaluate import evaluate
from fedveil.training.server import ServerState
from fedveil.training.training import Training

Stopped = Literal["rounds", "budget", "interrupted"]
OnRound = Callable[[dict[str, Any]], None]

_LONGEST_NAME = 100
_PACKAGES = ("fedveil", "torch", "numpy", "dp-accounting")


@dataclass
class Run:
    """One run and its directory. Create it with `start` or `resume`, then call `execute`."""

    folder: Path
    recipe: Recipe
    training: Training
    fresh: bool
    remarks: list[str] = field(default_factory=list)
    shared: Shared | None = None

    @classmethod
    def start(
        cls,
        recipe: Recipe,
        out: Path | None,
        data_root: Path | None,
        shared: Shared | None = None,
    ) -> "Run":
        """Check everything, then claim the directory: a refused recipe leaves nothing behind."""
        if out is not None:
            _check_free(out)
        else:
            _check_name(recipe.name)
        training = build(recipe, data_root)
        if shared is not None:
            shared.check(training)
        folder = _claim(out, recipe.name)
        return cls(folder, resolved(recipe, training), training, fresh=True, shared=shared)

    @classmethod
    def resume(cls, folder: Path, data_root: Path | None) -> "Run":
        """Open an interrupted run with the recipe it was started with."""
        if not (folder / "recipe.toml").is_file():
            raise BadInput(f"{folder} holds no run: it has no recipe.toml")
        recipe = load_recipe(str(folder / "recipe.toml"))
        return cls(folder, recipe, build(recipe, data_root), fresh=False)

    def describe(self) -> str:
        """One line that says what is about to happen."""
        training = self.training
        data, plan = training.data, training.plan
        text = (
            f"{self.recipe.name}: {self.recipe.model.name} with {training.task.size:,} parameters "
            f"over {data.clients:,} clients of {self.recipe.data.name}, {plan.rounds} rounds"
        )
        return f"{text}, {plan.describe()}" + ("" if plan.private else ", no privacy claim")

    def execute(
        self, on_round: OnRound = lambda line: None, on_start: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Train to the end, the budget or Ctrl-C, and write what there is; returns the result.

        A disk that is full or cannot be written ends it with `BadInput`: a round whose charge is
        not on disk is not begun, and what was written is whole.
        """
        try:
            with locked(self.folder):
                return self._execute(on_round, on_start)
        except BrokenPipeError:
            raise  # of the screen
        except (OSError, sqlite3.Error) as e:
            raise BadInput(
                f"{self.folder}: the run cannot go on: {e}; what was charged stays charged: see "
                "that its disk has room and that it and its ledger can be written, then use "
                f"--resume {self.folder}"
            ) from e

    def _execute(self, on_round: OnRound, on_start: Callable[[], None]) -> dict[str, Any]:
        if self.fresh:
            if self.shared is not None:
                self.shared.point(self.folder)
            write_atomic(self.folder / "recipe.toml", self._recipe_text().encode())
        else:
            self._compare_versions()
        ledger = open_ledger(self.folder, self._about(), self.training, self.shared)
        try:
            on_start()
            return self._train(ledger, on_round)
        finally:
            ledger.close()

    def _train(self, ledger: Ledger, on_round: OnRound) -> dict[str, Any]:
        state, history = self._restore(ledger)
        self.training.plan.spent(0)  # found once, before the first round is timed
        began = time.perf_counter()
        cohorts: list[int] = []
        refused: Counter[str] = Counter()
        stopped: Stopped = "rounds"
        with (self.folder / "metrics.jsonl").open("a") as file:
            try:
                for result in self.training.rounds(state, ledger):
                    line = result.numbers(diagnostics=self._diagnostics)
                    if not self._diagnostics:
                        line["seconds"] = None  # grows with the cohort, which is secret
                    file.write(json_text(line))
                    file.flush()
                    if result.round % self.recipe.engine.checkpoint == 0:
                        checkpoint.save(self.folder / "checkpoint", result.state, ledger.head())
                    state = result.state
                    history.append(line)
                    cohorts.append(result.clients)
                    if self._diagnostics:
                        names = (self.training.data.client_name(c) for c in result.refused)
                        refused.update(names)
                    on_round(line)
                if state.round < self.training.plan.rounds:
                    stopped = "budget"
            except KeyboardInterrupt:
                stopped = "interrupted"
        checkpoint.save(self.folder / "checkpoint", state, ledger.head())
        seconds = time.perf_counter() - began
        return self._finish(state, ledger, history, cohorts, refused, stopped, seconds)

    def _finish(
        self,
        state: ServerState,
        ledger: Ledger,
        history: list[dict[str, Any]],
        cohorts: list[int],
        refused: Counter[str],
        stopped: Stopped,
        seconds: float,
    ) -> dict[str, Any]:
        task, plan = self.training.task, self.training.plan
        measured = evaluate(task, state.params, self.training.data)
        rounds = max(state.round, ledger.charged())
        again = ledger.again
        claims = [claim.to_dict() for claim in plan.claims(rounds, ledger.counts(), again)]
        updates = sum(cohorts) / seconds if cohorts else 0.0
        result = {
            "run_dir": str(self.folder),
            "recipe": self.recipe.name,
            "rounds": state.round,
            "stopped": stopped,
            "metrics": measured,
            "claims": claims,
            "ledger": ledger.head().to_dict(),
            "budget": _budget(self.training, claims),
            "noise": plan.describe(),
            "timing": {
                "seconds_per_round": seconds / max(len(cohorts), 1),
                "client_updates_per_second": updates if self._diagnostics else None,
            },
            "refused": dict(refused.most_common()),
            "notes": self.remarks + self._shared_note(ledger) + diagnose(history),
        }
        tensors = {name: value.clone() for name, value in task.named(state.params).items()}
        write_atomic(self.folder / "model.safetensors", safetensors.torch.save(tensors))
        metric = next(iter(task.metrics), "loss")
        write_atomic(self.folder / "progress.png", progress_png(history, metric, plan.limit))
        write_atomic(self.folder / "result.json", json_text(result, indent=2).encode())
        return result

    def _shared_note(self, ledger: Ledger) -> list[str]:
        """What all runs on a shared ledger have spent together."""
        spent, common = ledger.common_spent(), common_of(self._ledger_path)
        if spent is None or common is None:
            return []
        return [
            f"all runs on {self._ledger_path} together: epsilon {math.ceil(1e4 * spent) / 1e4:g} "
            f"of {common.epsilon:g} at delta {common.delta:g}"
        ]

    def _restore(self, ledger: Ledger) -> tuple[ServerState, list[dict[str, Any]]]:
        """The state to go on from, and the metrics up to it; a ledger that lacks charges for it, or
        whose chain is broken, is refused.
        """
        found, remarks = checkpoint.load_latest(self.folder / "checkpoint", self.training.start())
        self.remarks += remarks
        state = self.training.start() if found is None else found.state
        history, remarks_on_metrics = metrics.read(self.folder / "metrics.jsonl")
        self.remarks += remarks_on_metrics
        if self.training.plan.private and not self.fresh:
            for what, rounds in (("checkpoint", state.round), ("metrics", last_round(history))):
                if ledger.charged() < rounds:
                    raise BadInput(
                        f"{self._ledger_path} has {ledger.charged()} charged rounds and the {what} "
                        f"{rounds}: charges are missing (was ledger.db-wal left behind?); restore "
                        "the whole ledger or start anew"
                    )
            for head in self._known(found):
                verify(self._ledger_path, head)
        if remarks or (found is None and max(ledger.charged(), last_round(history))):
            self.remarks.append(f"the run went on from round {state.round}")
        if last_round(history) < state.round:
            lost = f"rounds {last_round(history) + 1} to {state.round}"
            self.remarks.append(f"metrics.jsonl lacks {lost}")
        history = [line for line in history if line["round"] <= state.round]
        if not history or history[0]["round"] > 0:
            params = self.training.start().params
            first = evaluate(self.training.task, params, self.training.data)
            spent = 0.0 if self.training.plan.private else None
            history.insert(0, {"round": 0, "epsilon": spent, **first})
        text = "".join(json_text(line) for line in history)
        write_atomic(self.folder / "metrics.jsonl", text.encode())
        return state, history

    def _known(self, found: checkpoint.Checkpoint | None) -> list[Head | None]:
        """The ends of the ledger that the run remembers; one that is not known, if there is none.

        They are different where a checkpoint was lost.
        """
        heads = [] if found is None else [found.head]
        try:
            told = head_of_result(self.folder)
            heads += [] if told is None else [told]
        except BadInput as e:
            self.remarks.append(f"{e}; it is written anew")
        return [*heads] or [None]

    def _compare_versions(self) -> None:
        """Say so where the run goes on with other versions or on another kind of machine."""
        try:
            with (self.folder / "recipe.toml").open() as f:
                before = f.readline().strip()
        except (OSError, ValueError) as e:
            raise BadInput(f"{self.folder / 'recipe.toml'} cannot be read: {e}") from e
        if before != _resolved_by():
            self.remarks.append(
                f"the run was {before.lstrip('# ')} and went on with "
                f"{_resolved_by().removeprefix('# resolved by ')}: it repeats to about 1e-5, not "
                "to the last bit"
            )

    @property
    def _diagnostics(self) -> bool:
        """Whether what is computed from private data is shown and kept."""
        asked = self.recipe.evaluate.diagnostics
        return not self.training.plan.secret if asked is None else asked

    @property
    def _ledger_path(self) -> Path:
        return file_of(self.folder)

    def _about(self) -> dict[str, str]:
        """What the ledger has to know of the run, but for its name."""
        return {
            "recipe": hashlib.sha256(toml.dumps(self.recipe.model_dump()).encode()).hexdigest(),
            "data": self.training.data.fingerprint,
            "noise": "secure" if self.training.plan.secret else "seeded",
            "seed": "" if self.training.plan.secret else str(self.training.seed),
        }

    def _recipe_text(self) -> str:
        return f"{_resolved_by()}\n" + toml.dumps(self.recipe.model_dump())


def _resolved_by() -> str:
    """The versions, and the kind of machine, that results depend on in their last bits."""
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in _PACKAGES)
    return f"# resolved by {versions} on {platform.system()} {platform.machine()}"


def _budget(training: Training, claims: list[dict[str, Any]]) -> dict[str, Any] | None:
    plan = training.plan
    if not claims:
        return None
    limit, spent = plan.limit, float(claims[0]["epsilon"])
    return {
        "epsilon": "inf" if limit is None else limit,
        "left": "inf" if limit is None else max(0.0, limit - spent),
        "rounds_permitted": plan.permitted,
    }


def _check_name(name: str) -> None:
    """Refuse a name that cannot be part of a run directory's, or would lead out of `runs`."""
    if not (0 < len(name) <= _LONGEST_NAME and name.isprintable()) or "/" in name or name[0] == ".":
        raise BadInput(
            f"name is {reprlib.repr(name)}: it names the run directory, so 1 to {_LONGEST_NAME} "
            "printable characters are needed, without '/' and not beginning with '.'; or use --out"
        )


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(
            f"--out {out} exists and is not an empty directory: choose another, or --resume {out}"
        )


def _claim(out: Path | None, name: str) -> Path:
    """Create the run directory."""
    try:
        if out is not None:
            _check_free(out)
            out.mkdir(parents=True, exist_ok=True)
            return out
        stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        for number in range(1, 1000):
            folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
            if not folder.exists():
                folder.mkdir(parents=True)
                return folder
    except OSError as e:
        raise BadInput(f"the run directory cannot be made: {e}; use --out") from e
    raise BadInput(f"runs/{stem} and 999 more exist: use --out")
