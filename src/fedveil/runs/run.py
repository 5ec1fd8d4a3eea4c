"""A run: a directory with recipe, metrics, ledger, checkpoints, model and result."""

import importlib.metadata
import platform
import reprlib
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import safetensors.torch

from fedveil.data.federated import FederatedData
from fedveil.errors import BadInput
from fedveil.privacy.ledger.hash_chain import digest
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.ledger.verification import verify
from fedveil.runs import checkpoint, metrics, toml
from fedveil.runs.build import build, resolved
from fedveil.runs.closing import digests, recipe_digest
from fedveil.runs.diagnosis import diagnose
from fedveil.runs.disk import locked, write_atomic
from fedveil.runs.done import Done, Round
from fedveil.runs.ending import Ending, room
from fedveil.runs.evidence import file_of, head_of_result, keep_head, kept_head
from fedveil.runs.ledgers import Shared, open_ledger
from fedveil.runs.metrics import json_text, last_round
from fedveil.runs.plots import progress_png
from fedveil.runs.recipe import Recipe, load_recipe
from fedveil.training.evaluate import evaluate
from fedveil.training.session import Training

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
    beforehand: list[str] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        recipe: Recipe,
        out: Path | None,
        data_root: Path | None,
        shared: Shared | None = None,
        data: FederatedData | None = None,
    ) -> "Run":
        """Check everything, then claim the directory: a refused recipe leaves nothing behind.

        `data`, when given, are what `data_of` has made of the recipe already.
        """
        if out is not None:
            _check_free(out)
        else:
            _check_name(recipe.name)
        training = build(recipe, data_root, data=data)
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
        """One line that says what is about to happen; once it has begun, also from where on."""
        training = self.training
        data, plan = training.data, training.plan
        text = (
            f"{self.recipe.name}: {self.recipe.model.name} with {training.task.size:,} parameters "
            f"over {data.clients:,} clients of {self.recipe.data.told}, {plan.rounds} rounds"
        )
        text = f"{text}, {plan.describe()}" + ("" if plan.private else ", no privacy claim")
        return "; ".join([text, *self.beforehand])

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
                f"{self.folder}: the run cannot continue: {e}; what was charged stays charged: see "
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
            done = self._restore(ledger)
            on_start()
            return self._train(done, ledger, on_round)
        finally:
            ledger.close()

    def _train(self, done: Done, ledger: Ledger, on_round: OnRound) -> dict[str, Any]:
        """Do the rounds and end the run; an interruption, whenever it comes, ends it as well."""
        self.training.plan.spent(0)  # found once, before the first round is timed
        began = time.perf_counter()
        try:
            self._do_rounds(done, ledger, on_round)
            return self._finish(done, ledger, time.perf_counter() - began)
        except KeyboardInterrupt:
            return self._finish(done, ledger, time.perf_counter() - began)

    def _do_rounds(self, done: Done, ledger: Ledger, on_round: OnRound) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            for result in self.training.rounds(done.state, ledger):
                line = result.numbers(diagnostics=self._diagnostics)
                if not self._diagnostics:
                    line["seconds"] = None  # grows with the cohort, which is secret
                shown = result.refused if self._diagnostics else ()
                names = [self.training.data.client_name(client) for client in shown]
                done.add(Round(line, result.clients, names), result.state)
                file.write(json_text(line))
                file.flush()
                if result.round % self.recipe.engine.checkpoint == 0:
                    checkpoint.save(self.folder / "checkpoint", result.state, ledger.head())
                on_round(line)

    def _finish(self, done: Done, ledger: Ledger, seconds: float) -> dict[str, Any]:
        """Write what there is, the same rounds everywhere, and close the run in the ledger.

        A crash before the last step leaves the run open: `--verify` says so, `--resume` ends it.
        """
        task, plan, state, rounds = self.training.task, self.training.plan, done.state, done.settled
        history = done.before + [round.line for round in rounds]
        self._write_metrics(history)
        checkpoint.save(self.folder / "checkpoint", state, ledger.head())
        measured = evaluate(task, state.params, self.training.data)
        charged = max(state.round, ledger.charged())
        claims = plan.claims(charged, ledger.counts(), ledger.again)
        told = [claim.to_dict() for claim in claims]
        ending = Ending(plan, state.round, claims, ledger, self.folder, self._ledger_path)
        updates = sum(round.clients for round in rounds) / seconds if rounds else 0.0
        refused = Counter(name for round in rounds for name in round.refused)
        result = {
            "run_dir": str(self.folder),
            "recipe": self.recipe.name,
            "rounds": state.round,
            "stopped": ending.stopped,
            "why": str(ending),
            "metrics": measured,
            "claims": told,
            "ledger": ledger.head().to_dict(),
            "budget": _budget(self.training, told),
            "noise": plan.describe(),
            "timing": {
                "seconds_per_round": seconds / max(len(rounds), 1),
                "client_updates_per_second": updates if self._diagnostics else None,
            },
            "refused": dict(refused.most_common()),
            "notes": self.remarks + diagnose(history),
        }
        tensors = {name: value.clone() for name, value in task.named(state.params).items()}
        write_atomic(self.folder / "model.safetensors", safetensors.torch.save(tensors))
        metric = next(iter(task.metrics), "loss")
        drawn = progress_png(history, metric, plan.limit, plan.promise)
        write_atomic(self.folder / "progress.png", drawn)
        write_atomic(self.folder / "result.json", json_text(result, indent=2).encode())
        keep_head(self.folder, ledger.end(digests(self.folder)))
        return result

    def _write_metrics(self, history: list[dict[str, Any]]) -> None:
        """Bring the file to `history`, if it is not."""
        path, content = self.folder / "metrics.jsonl", "".join(map(json_text, history)).encode()
        if not path.exists() or path.read_bytes() != content:
            write_atomic(path, content)

    def _restore(self, ledger: Ledger) -> Done:
        """What to resume from, with the metrics up to it; a ledger that lacks charges for it, or
        whose chain is broken, is refused. Before anything is changed the run is open again.
        """
        found, remarks = checkpoint.load_latest(self.folder / "checkpoint", self.training.start())
        self.remarks += remarks
        state = self.training.start() if found is None else found.state
        history, remarks_on_metrics = metrics.read(self.folder / "metrics.jsonl")
        self.remarks += remarks_on_metrics or self._changed_metrics(ledger)
        if not self.fresh:
            self._check_ledger(ledger, found, last_round(history))
        if remarks or (found is None and max(ledger.charged(), last_round(history))):
            self.remarks.append(f"the run was resumed from round {state.round}")
        if last_round(history) < state.round:
            lost = f"rounds {last_round(history) + 1} to {state.round}"
            self.remarks.append(f"metrics.jsonl lacks {lost}")
        history = [line for line in history if line["round"] <= state.round]
        if not history or history[0]["round"] > 0:
            params = self.training.start().params
            first = evaluate(self.training.task, params, self.training.data)
            promise = self.training.plan.promise
            spent = {"epsilon": promise and promise.epsilon, "claim": promise and promise.told}
            history.insert(0, {"round": 0, **spent, **first})
        if not self.fresh:
            self.beforehand.append(f"resuming after round {state.round}")
        short = room(ledger, self.training.plan.permitted, self._ledger_path)
        self.beforehand += [] if short is None else [short]
        ledger.go_on()
        self._write_metrics(history)
        return Done(state, history)

    def _changed_metrics(self, ledger: Ledger) -> list[str]:
        path, noted = self.folder / "metrics.jsonl", ledger.ended().get("metrics.jsonl")
        if noted is None or not path.exists() or digest(path.read_bytes()) == noted:
            return []
        return ["metrics.jsonl was changed after the run had ended"]

    def _check_ledger(
        self, ledger: Ledger, found: checkpoint.Checkpoint | None, measured: int
    ) -> None:
        """Refuse a ledger that knows less than the run directory, or is not the one it was."""
        saved = 0 if found is None else found.state.round
        for what, rounds in (("checkpoint", saved), ("metrics", measured)):
            if self.training.plan.private and ledger.charged() < rounds:
                raise BadInput(
                    f"{self._ledger_path} has {ledger.charged()} charged rounds and the {what} "
                    f"{rounds}: charges are missing (was ledger.db-wal left behind?); restore "
                    "the whole ledger or start over"
                )
        heads = [] if found is None else [found.head]
        for read in (head_of_result, kept_head):
            try:
                told = read(self.folder)
                heads += [] if told is None else [told]
            except BadInput as e:
                self.remarks.append(f"{e}; it is written again")
        verify(self._ledger_path, *heads)

    def _compare_versions(self) -> None:
        """Say so where the run resumes under other versions or on another kind of machine."""
        try:
            with (self.folder / "recipe.toml").open() as f:
                before = f.readline().strip()
        except (OSError, ValueError) as e:
            raise BadInput(f"{self.folder / 'recipe.toml'} cannot be read: {e}") from e
        if before != _resolved_by():
            self.remarks.append(
                f"the run was {before.lstrip('# ')} and was resumed by "
                f"{_resolved_by().removeprefix('# resolved by ')}: it repeats to about 1e-5, not "
                "to the last bit"
            )

    @property
    def _diagnostics(self) -> bool:
        """Whether what is computed from private data is shown and kept."""
        asked = self.recipe.evaluate.diagnostics
        return not self.training.plan.secure if asked is None else asked

    @property
    def _ledger_path(self) -> Path:
        return file_of(self.folder)

    def _about(self) -> dict[str, str]:
        """What the ledger has to know of the run, but for its name."""
        return {
            "recipe": recipe_digest(self.recipe),
            "data": self.training.data.fingerprint,
            "noise": "secure" if self.training.plan.secure else "seeded",
            "seed": "" if self.training.plan.secure else str(self.training.seed),
        }

    def _recipe_text(self) -> str:
        return f"{_resolved_by()}\n" + toml.dumps(self.recipe.model_dump())


def _resolved_by() -> str:
    """The versions, and the kind of machine, that results depend on in their last bits."""
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in _PACKAGES)
    return f"# resolved by {versions} on {platform.system()} {platform.machine()}"


def _budget(training: Training, claims: list[dict[str, Any]]) -> dict[str, Any] | None:
    plan = training.plan
    if plan.promise is None:
        return None
    limit, spent = plan.limit, float(claims[0]["epsilon"])
    return {
        "epsilon": "inf" if limit is None else limit,
        "left": "inf" if limit is None else max(0.0, limit - spent),
        "claim": plan.promise.told,
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
