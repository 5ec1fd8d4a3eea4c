"""A run: a directory with recipe, metrics, ledger, checkpoints, model, result and report."""

import importlib.metadata
import platform
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedveil.base.checks import CODE, OWN
from fedveil.base.errors import BadInput
from fedveil.base.forks import one_thread
from fedveil.data.federated import FederatedData
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import budgeted
from fedveil.privacy.ledger.hash_chain import digest, verify
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs import checkpoint
from fedveil.runs.build import RECIPE_KEYS, build, check_given, resolved
from fedveil.runs.ending import Ending, diagnose, room
from fedveil.runs.evidence import file_digests, file_of, read_head, recipe_digest, save_head
from fedveil.runs.ledgers import Shared, open_ledger
from fedveil.runs.logs import open_logs
from fedveil.runs.modules import Model
from fedveil.runs.opened_run import StoredModel
from fedveil.runs.recipe import Recipe, recipe_in, to_toml, with_engine
from fedveil.runs.report import write_report
from fedveil.runs.run_directory import (
    check_free,
    check_run_name,
    json_text,
    last_round,
    locked,
    read_metrics,
    reserve,
    stop_requested,
    without_stop_request,
    write_atomic,
)
from fedveil.runs.sections.section import in_keys
from fedveil.training.engines.engine import EngineMaker
from fedveil.training.server import ServerState
from fedveil.training.session import Training

OnRound = Callable[[dict[str, Any]], None]
"""Called with each round's line of metrics."""

_PACKAGES = ("fedveil", "torch", "numpy", "dp-accounting")


@dataclass(frozen=True)
class FinishedRound:
    """A finished round: its line of metrics, the number of clients, and who was refused."""

    line: dict[str, Any]
    clients: int
    refused_names: list[str]


@dataclass
class FinishedRounds:
    """The server's state, the metrics from before the start, and the rounds since.

    A round is added before the state changes, so an interruption in between leaves it undone.
    """

    state: ServerState
    before: list[dict[str, Any]]
    rounds: list[FinishedRound] = field(default_factory=list)

    def add(self, round: FinishedRound, state: ServerState) -> None:
        """Add a round, which leads to `state`."""
        self.rounds.append(round)
        self.state = state

    @property
    def completed_rounds(self) -> list[FinishedRound]:
        """The rounds that the state includes."""
        return [round for round in self.rounds if round.line["round"] <= self.state.round]


@dataclass
class Run:
    """One run and its directory. Create it with `start` or `resume`, then call `execute`."""

    folder: Path
    recipe: Recipe
    training: Training
    fresh: bool
    remarks: list[str] = field(default_factory=list)
    shared: Shared | None = None
    first_remarks: list[str] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    logs: tuple[str, ...] = ()
    stop_requested: bool = False

    @classmethod
    def start(
        cls,
        recipe: Recipe,
        out: Path | None,
        data_root: Path | None,
        shared: Shared | None = None,
        *,
        model: Model | None = None,
        data: FederatedData | None = None,
        allow_code: bool = False,
        make_engine: EngineMaker | None = None,
    ) -> "Run":
        """Check everything, then create the directory: a refused recipe leaves nothing behind.

        Args:
            recipe: What to train.
            out: The run directory, new or empty. None makes one below `runs`.
            data_root: The folder with published data sets.
            shared: A ledger that several runs charge.
            model: The caller's module, where the recipe says "own".
            data: The caller's data, where the recipe says "own"; or the recipe's data if they are
                loaded already; or data whose records are elsewhere, for `make_engine`.
            allow_code: Whether code that the recipe names may be run.
            make_engine: Makes an engine that reaches clients elsewhere.
        """
        if out is not None:
            check_free(out)
        else:
            check_run_name(recipe.name)
        data = check_given(recipe, model, data)
        training = build(
            recipe,
            data_root,
            data=data,
            model=model,
            allow_code=allow_code,
            make_engine=make_engine,
        )
        if shared is not None:
            shared.check(training)
        training.open()
        folder = reserve(out, recipe.name)
        return cls(folder, resolved(recipe, training), training, fresh=True, shared=shared)

    @classmethod
    def resume(
        cls,
        folder: Path,
        data_root: Path | None,
        *,
        model: Model | None = None,
        data: FederatedData | None = None,
        allow_code: bool = False,
        where: Sequence[str] = (),
        make_engine: EngineMaker | None = None,
    ) -> "Run":
        """Open an interrupted run with the recipe, model and data that it was started with.

        `where` overrides its engine's kind and address for this time. They change no result.
        """
        recipe = recipe_in(folder)
        data = check_given(recipe, model, data)
        training = build(
            with_engine(recipe, where),
            data_root,
            data=data,
            model=model,
            allow_code=allow_code,
            make_engine=make_engine,
        )
        training.open()
        return cls(folder, recipe, training, fresh=False)

    def describe(self) -> str:
        """One line about the run and, once it has started, about where it resumes."""
        training = self.training
        data, plan = training.data, training.plan
        name, where = self.recipe.model.name, self.recipe.data.title
        if name in (OWN, CODE):
            name = type(training.task.module).__name__
        text = (
            f"{self.recipe.name}: {name} "
            f"with {training.task.size:,} parameters over {data.clients:,} clients"
            f"{'' if where == OWN else f' of {where}'}, {plan.rounds} rounds"
        )
        text = f"{text}, {plan.describe()}" + ("" if plan.private else ", no privacy claim")
        remarks = [training.remark] if training.remark else []
        priced = [] if plan.metrics is None else [plan.metrics.described()]
        return "; ".join([text, *remarks, *priced, *self.first_remarks])

    def execute(
        self,
        on_round: OnRound = lambda line: None,
        on_start: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Train to the end and return the result.

        The end is that of the plan or the budget, Ctrl-C, or a request to stop (`request_stop`). A
        disk that is full or read-only raises `BadInput`: a round whose charge is not on disk does
        not begin, and files are whole. An error in `on_round` ends the run as Ctrl-C does, and is
        raised.
        """
        lines = self.metric_lines(on_start)
        try:
            for line in lines:
                on_round(line)
        except KeyboardInterrupt:
            pass
        finally:
            lines.close()
        return self.result

    def metric_lines(
        self, on_start: Callable[[], None] = lambda: None
    ) -> Generator[dict[str, Any], None, None]:
        """Train like `execute`, yielding each round's line of metrics. Closing it ends the run.

        A line is yielded once it is on disk and in the logs.
        """
        checkpoints = self.folder / "checkpoint"
        try:
            with (
                in_keys(**RECIPE_KEYS),
                locked(self.folder),
                without_stop_request(self.folder),
                closing(self._open_ledger()) as ledger,
            ):
                done = self._begin(ledger)
                on_start()
                self.training.plan.spent(0)  # computed once, before the first round is timed
                began = time.perf_counter()
                try:
                    with (
                        open_logs(
                            self.logs,
                            self.folder,
                            name=self.folder.name,
                            about={"recipe": self.recipe.name},
                            history=done.before,
                            live=self.training.gate.diagnostics,
                            remarks=self.remarks,
                        ) as logs,
                        (self.folder / "metrics.jsonl").open("a") as metrics,
                    ):
                        for result in self.training.rounds(done.state, ledger):
                            line, refused = result.numbers(), self.training.gate.names(result)
                            done.add(
                                FinishedRound(line, result.clients or 0, refused), result.state
                            )
                            metrics.write(json_text(line))
                            metrics.flush()
                            if result.round % self.recipe.engine.checkpoint == 0:
                                checkpoint.save(checkpoints, result.state, ledger.head())
                            logs.write(line)
                            yield line
                            if stop_requested(self.folder):
                                self.stop_requested = True
                                break
                    self.result = self._finish(done, ledger, time.perf_counter() - began)
                except (KeyboardInterrupt, GeneratorExit):
                    # One that comes while the files are written finishes them again.
                    self.result = self._finish(done, ledger, time.perf_counter() - began)
        except BrokenPipeError:
            raise  # the terminal's, not the disk's
        except (OSError, sqlite3.Error) as e:
            raise BadInput(
                f"{self.folder}: the run cannot continue: {e}; what was charged stays charged: see "
                "that its disk has room and that it and its ledger can be written, then use "
                f"{self.how_to_resume}"
            ) from e

    def _open_ledger(self) -> Ledger:
        """Write the recipe of a new run, or compare that of an old one, and open the ledger."""
        file, training = self.folder / "recipe.toml", self.training
        if self.fresh:
            if self.shared is not None:
                self.shared.point(self.folder)
            text = f"{_resolved_by()}\n{to_toml(self.recipe.model_dump())}"
            write_atomic(file, text.encode())
        else:
            try:
                with file.open() as f:
                    before = f.readline().strip()
            except (OSError, ValueError) as e:
                raise BadInput(f"{file} cannot be read: {e}") from e
            if before != _resolved_by():
                self.remarks.append(
                    f"the run was {before.lstrip('# ')} and was resumed by "
                    f"{_resolved_by().removeprefix('# resolved by ')}: it repeats to about 1e-5, "
                    "not to the last bit"
                )
        about = {
            "recipe": recipe_digest(self.recipe),
            "data": training.data.fingerprint,
            "noise": "secure" if training.plan.secure else "seeded",
            "seed": "" if training.plan.secure else str(training.seed),
            "identity": training.digest,
        }
        return open_ledger(self.folder, about, training, self.shared)

    @one_thread()
    def _begin(self, ledger: Ledger) -> FinishedRounds:
        """Load the state to go on from, and the metrics up to it.

        A ledger that lacks charges for it, or whose chain is broken, is refused. The ledger notes
        that the run is open again before any file changes.
        """
        plan, gate, first = self.training.plan, self.training.gate, self.training.start()
        saved, damage = checkpoint.load_latest(self.folder / "checkpoint", first)
        state = first if saved is None else saved.state
        metrics = self.folder / "metrics.jsonl"
        history, damaged_metrics = read_metrics(metrics)
        measured, digest_at_end = last_round(history), ledger.closing_files().get(metrics.name)
        self.remarks += damage + damaged_metrics
        compared = not damaged_metrics and digest_at_end is not None and metrics.exists()
        if compared and digest(metrics.read_bytes()) != digest_at_end:
            self.remarks.append("metrics.jsonl was changed after the run had ended")
        if not self.fresh:
            self._check_ledger(ledger, saved, measured)
            self.first_remarks.append(f"resuming after round {state.round}")
        if damage or (saved is None and max(ledger.charged(), measured)):
            self.remarks.append(f"the run was resumed from round {state.round}")
        if measured < state.round:
            self.remarks.append(f"metrics.jsonl lacks rounds {measured + 1} to {state.round}")
        history = [line for line in history if line["round"] <= state.round]
        if not history or history[0]["round"] > 0:
            promise = plan.promise
            spent = {"epsilon": promise and promise.epsilon, "claim": promise and promise.context}
            history.insert(0, {"round": 0, **spent, **gate.first(first.params)})
        too_few = room(ledger, plan.permitted, file_of(self.folder))
        self.first_remarks += [] if too_few is None else [too_few]
        if plan.metrics is not None and plan.metrics.warning is not None:
            self.remarks.append(plan.metrics.warning)
            self.first_remarks.append(plan.metrics.warning)
        ledger.note_resumed()
        self._write_metrics(history)
        return FinishedRounds(state, history)

    def _check_ledger(
        self, ledger: Ledger, saved: checkpoint.Checkpoint | None, measured: int
    ) -> None:
        """Refuse a ledger with fewer rounds than the run directory, or with another history."""
        reached, file = 0 if saved is None else saved.state.round, file_of(self.folder)
        for what, rounds in (("checkpoint", reached), ("metrics", measured)):
            if self.training.plan.private and ledger.charged() < rounds:
                raise BadInput(
                    f"{file} has {ledger.charged()} charged rounds and the {what} "
                    f"{rounds}: charges are missing (was ledger.db-wal left behind?); restore "
                    "the whole ledger or start over"
                )
        heads = [] if saved is None else [saved.head]
        for name in ("result.json", "head.json"):
            try:
                head = read_head(self.folder / name)
                heads += [] if head is None else [head]
            except BadInput as e:
                self.remarks.append(f"{e}; it is written again")
        verify(file, *heads)

    @one_thread()
    def _finish(self, done: FinishedRounds, ledger: Ledger, seconds: float) -> dict[str, Any]:
        """Write metrics, checkpoint, model and result of the same rounds, then close the run.

        A crash before the ledger has the closing entry leaves the run open: `--verify` says so,
        `--resume` ends it. The report is drawn last, from those files. After a crash before that,
        `fedveil report` draws it.
        """
        plan, state, rounds = self.training.plan, done.state, done.completed_rounds
        gate = self.training.gate
        history = done.before + [round.line for round in rounds]
        data = self.training.data
        if self.recipe.data.name == OWN and replace(data).fingerprint != data.fingerprint:
            self.remarks.append(
                "the records were changed in place during the run: it cannot be repeated or resumed"
            )
        self._write_metrics(history)
        checkpoint.save(self.folder / "checkpoint", state, ledger.head())
        measured = gate.last(history, state.params)
        charged = max(state.round, ledger.charged())
        claims = plan.claims(charged, ledger.counts(), ledger.extra_attempts)
        ending = Ending(
            plan=plan,
            done=state.round,
            claims=claims,
            ledger=ledger,
            file=file_of(self.folder),
            resume=self.how_to_resume,
            requested=self.stop_requested,
        )
        updates = sum(round.clients for round in rounds)
        refused = Counter(name for round in rounds for name in round.refused_names)
        attack = self.training.participants.describe(claims)
        result = {
            "run_dir": str(self.folder),
            "recipe": self.recipe.name,
            "rounds": state.round,
            "stopped": ending.stopped,
            "why": str(ending),
            **measured,
            **({"attack": attack} if attack else {}),
            **gate.last_over_clients(history, state.params),
            "claims": [claim.to_dict() for claim in claims],
            "ledger": ledger.head().to_dict(),
            "budget": budget_entry(plan, claims),
            "noise": plan.describe(),
            "timing": gate.timing(seconds, len(rounds), updates),
            "refused": dict(refused.most_common()),
            "notes": self.remarks + diagnose(history),
        }
        stored = StoredModel.from_training(self.recipe.model, self.training, state.params, claims)
        write_atomic(self.folder / "model.safetensors", stored.to_bytes())
        write_atomic(self.folder / "result.json", json_text(result, indent=2).encode())
        save_head(self.folder, ledger.note_end(file_digests(self.folder)))
        write_report(self.folder)
        return result

    def _write_metrics(self, history: list[dict[str, Any]]) -> None:
        """Write `history` to the metrics file, unless it is there."""
        path, content = self.folder / "metrics.jsonl", "".join(map(json_text, history)).encode()
        if not path.exists() or path.read_bytes() != content:
            write_atomic(path, content)

    @property
    def how_to_resume(self) -> str:
        """The command, or the call, that continues this run."""
        if self.training.data.elsewhere:
            return f"flwr run again, with {self.folder} as the run directory"
        names = {"model": self.recipe.model.name, "data": self.recipe.data.name}
        own = [f"{key}=..." for key, name in names.items() if name == OWN]
        if not own:
            code = " --allow-code" if self.recipe.model.path is not None else ""
            return f"fedveil run --resume {self.folder}{code}"
        return f"fedveil.resume({', '.join([repr(str(self.folder)), *own])})"


@lru_cache(maxsize=1)
def _resolved_by() -> str:
    """The versions, and the kind of machine, that results depend on in their last bits."""
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in _PACKAGES)
    return f"# resolved by {versions} on {platform.system()} {platform.machine()}"


def budget_entry(plan: PrivacyPlan, claims: tuple[PrivacyClaim, ...]) -> dict[str, Any] | None:
    """The result's entry about the budget, None if nothing is claimed."""
    claim, limit = budgeted(claims), plan.limit
    if plan.promise is None or claim is None:
        return None
    return {
        "epsilon": "inf" if limit is None else limit,
        "left": "inf" if limit is None else max(0.0, limit - claim.epsilon),
        "claim": plan.promise.context,
        "rounds_permitted": plan.permitted,
    }
