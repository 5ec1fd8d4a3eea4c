"""A run: a directory with recipe, metrics, ledger, checkpoints, model and result."""

import hashlib
import importlib.metadata
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import safetensors.torch

from fedveil.errors import BadInput
from fedveil.privacy.ledger import Ledger
from fedveil.runs import checkpoint, toml
from fedveil.runs.build import build, resolved
from fedveil.runs.diagnosis import diagnose
from fedveil.runs.disk import locked, write_atomic
from fedveil.runs.plots import progress_png
from fedveil.runs.recipe import Recipe, load_recipe
from fedveil.training.evaluate import evaluate
from fedveil.training.loop import RoundResult
from fedveil.training.server import ServerState
from fedveil.training.training import Training

Stopped = Literal["rounds", "budget", "interrupted"]
OnRound = Callable[[dict[str, Any]], None]

_PACKAGES = ("fedveil", "torch", "numpy", "dp-accounting")


@dataclass
class Run:
    """One run and its directory. Create it with `start` or `resume`, then call `execute`."""

    folder: Path
    recipe: Recipe
    training: Training
    fresh: bool
    remarks: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, recipe: Recipe, out: Path | None, data_root: Path | None) -> "Run":
        """Check everything, then claim the directory: a refused recipe leaves nothing behind."""
        if out is not None:
            _check_free(out)
        training = build(recipe, data_root)
        return cls(_claim(out, recipe.name), resolved(recipe, training), training, fresh=True)

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
        """Train to the end, the budget or Ctrl-C, and write what there is; returns the result."""
        with locked(self.folder):
            if self.fresh:
                write_atomic(self.folder / "recipe.toml", self._recipe_text().encode())
            ledger = self._ledger()
            try:
                on_start()
                return self._train(ledger, on_round)
            finally:
                ledger.close()

    def _train(self, ledger: Ledger, on_round: OnRound) -> dict[str, Any]:
        state, history = self._restore()
        if self.training.plan.private and ledger.charged() < state.round:
            raise BadInput(
                f"{self.folder / 'ledger.db'} has {ledger.charged()} charged rounds and the "
                f"checkpoint {state.round}: charges are missing (was ledger.db-wal left behind?); "
                "restore the whole ledger or start anew"
            )
        began = time.perf_counter()
        done: list[RoundResult] = []
        refused: Counter[str] = Counter()
        stopped: Stopped = "rounds"
        with (self.folder / "metrics.jsonl").open("a") as metrics:
            try:
                for result in self.training.rounds(state, ledger):
                    line = result.numbers()
                    metrics.write(_line(line))
                    metrics.flush()
                    if result.round % self.recipe.engine.checkpoint == 0:
                        checkpoint.save(self.folder / "checkpoint", result.state)
                    state = result.state
                    history.append(line)
                    done.append(result)
                    refused.update(self.training.data.client_name(c) for c in result.refused)
                    on_round(line)
                if state.round < self.training.plan.rounds:
                    stopped = "budget"
            except KeyboardInterrupt:
                stopped = "interrupted"
        checkpoint.save(self.folder / "checkpoint", state)
        seconds = time.perf_counter() - began
        return self._finish(state, ledger, history, done, refused, stopped, seconds)

    def _finish(
        self,
        state: ServerState,
        ledger: Ledger,
        history: list[dict[str, Any]],
        done: list[RoundResult],
        refused: Counter[str],
        stopped: Stopped,
        seconds: float,
    ) -> dict[str, Any]:
        task, plan = self.training.task, self.training.plan
        metrics = evaluate(task, state.params, self.training.data)
        rounds = max(state.round, ledger.charged())
        claims = [claim.to_dict() for claim in plan.claims(rounds, ledger.counts())]
        clients = sum(result.clients for result in done)
        result = {
            "run_dir": str(self.folder),
            "recipe": self.recipe.name,
            "rounds": state.round,
            "stopped": stopped,
            "metrics": metrics,
            "claims": claims,
            "budget": _budget(self.training, claims),
            "noise": plan.describe(),
            "timing": {
                "seconds_per_round": seconds / max(len(done), 1),
                "client_updates_per_second": clients / seconds if done else 0.0,
            },
            "refused": dict(refused.most_common()),
            "notes": self.remarks + diagnose(history),
        }
        tensors = {name: value.clone() for name, value in task.named(state.params).items()}
        write_atomic(self.folder / "model.safetensors", safetensors.torch.save(tensors))
        metric = next(iter(task.metrics), "loss")
        write_atomic(self.folder / "progress.png", progress_png(history, metric, plan.limit))
        write_atomic(self.folder / "result.json", _line(result, indent=2).encode())
        return result

    def _restore(self) -> tuple[ServerState, list[dict[str, Any]]]:
        """The state to go on from, and the metrics up to it."""
        state, remarks = checkpoint.load_latest(self.folder / "checkpoint", self.training.start())
        self.remarks += remarks
        if state is None:
            state = self.training.start()
        history = [line for line in self._history() if line["round"] <= state.round]
        if not history:
            first = evaluate(self.training.task, state.params, self.training.data)
            history = [
                {"round": 0, "epsilon": 0.0 if self.training.plan.private else None, **first}
            ]
        text = "".join(_line(line) for line in history)
        write_atomic(self.folder / "metrics.jsonl", text.encode())
        return state, history

    def _history(self) -> list[dict[str, Any]]:
        """The lines of the metrics file, up to the first that a crash cut short."""
        path, lines = self.folder / "metrics.jsonl", []
        if not path.exists():
            return []
        for text in path.read_text(errors="replace").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
        return lines

    def _ledger(self) -> Ledger:
        about = {
            "run": self.folder.resolve().name,
            "recipe": hashlib.sha256(toml.dumps(self.recipe.model_dump()).encode()).hexdigest(),
            "data": self.training.data.fingerprint,
            "noise": "seeded",
        }
        path, plan = self.folder / "ledger.db", self.training.plan
        if path.exists():
            return Ledger.reopen(path, about, plan.lines, plan.permitted, plan.counted_clients)
        if (self.folder / "checkpoint").exists():
            raise BadInput(f"{path} is missing: what this run has spent is unknown; start anew")
        return Ledger.create(path, about, plan.lines, plan.permitted, plan.counted_clients)

    def _recipe_text(self) -> str:
        versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in _PACKAGES)
        return f"# resolved by {versions}\n" + toml.dumps(self.recipe.model_dump())


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


def _line(value: dict[str, Any], indent: int | None = None) -> str:
    """One JSON document; a number JSON cannot hold becomes null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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
