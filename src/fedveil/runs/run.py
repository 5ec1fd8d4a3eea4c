"""A run: a directory with recipe, metrics, ledger, checkpoints, model, result and report."""

import importlib.metadata
import platform
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack

from fedveil.base.checks import CODE, OWN, TABLE
from fedveil.base.errors import BadInput
from fedveil.base.platforms import one_thread
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import budgeted
from fedveil.privacy.ledger.hash_chain import digest, verify
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs import checkpoint
from fedveil.runs.build import RECIPE_KEYS, BuildOptions, build, check_own_parts, resolve_recipe
from fedveil.runs.ending import constant_note, diagnose, ending, noise_warning, room_warning
from fedveil.runs.evidence import REPORT, complete_result, file_digests, ledger_path, read_head
from fedveil.runs.ledgers import SharedLedger, check_ledger_of, open_ledger
from fedveil.runs.logs import Logs, open_logs
from fedveil.runs.opened_run import StoredModel
from fedveil.runs.recipe import Recipe, recipe_in, to_toml, with_engine
from fedveil.runs.report import report_html
from fedveil.runs.run_directory import (
    STOP_FILE,
    check_free,
    check_run_name,
    json_text,
    locked,
    make_run_directory,
    read_metrics,
    readable,
    write_atomic,
)
from fedveil.runs.sections.section import in_keys
from fedveil.training.server import ServerState
from fedveil.training.session import Training

OnRound = Callable[[dict[str, Any]], None]
"""Called with each round's line of metrics."""

_PACKAGES = ("fedveil", "torch", "numpy", "scipy")


@dataclass(frozen=True)
class FinishedRound:
    """A finished round.

    Attributes:
        line: Its line of metrics.
        clients: The number of clients, 0 without diagnostics.
        refused_names: The names of the clients whose reports were refused.
    """

    line: dict[str, Any]
    clients: int
    refused_names: list[str]


@dataclass
class FinishedRounds:
    """The server's state, the metrics from before the start, and the rounds since.

    A round is appended before `state` changes, so an interruption in between leaves it undone.

    Attributes:
        state: The server's state after the last round.
        before: Lines of metrics of earlier executions, with that of round 0.
        rounds: The rounds of this execution.
    """

    state: ServerState
    before: list[dict[str, Any]]
    rounds: list[FinishedRound] = field(default_factory=list)


@dataclass
class Run:
    """One run and its directory. Create it with `start` or `resume`, then call `execute`.

    Attributes:
        folder: The run directory.
        recipe: The recipe, with every choice filled in.
        training: The training that the recipe builds.
        fresh: True for a new run, False for one that is resumed.
        remarks: What went wrong, for the notes of the result.
        shared: The ledger that a new run shares with others, or None.
        first_remarks: What `describe` adds at the start, such as the round to resume after.
        result: The content of result.json, empty until the run has ended.
        logs: The experiment trackers, such as "tensorboard".
        stop_requested: True once a request to stop (`request_stop`) has ended the run.
        already_complete: True if there was nothing left to do, so that nothing was changed.
    """

    folder: Path
    recipe: Recipe
    training: Training
    fresh: bool
    remarks: list[str] = field(default_factory=list)
    shared: SharedLedger | None = None
    first_remarks: list[str] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    logs: tuple[str, ...] = ()
    stop_requested: bool = False
    already_complete: bool = False

    @classmethod
    def start(
        cls,
        recipe: Recipe,
        out: Path | None,
        data_root: Path | None,
        shared: SharedLedger | None = None,
        **options: Unpack[BuildOptions],
    ) -> "Run":
        """Build the training of a recipe, then create the run directory. Nothing is trained yet.

        A recipe that is refused (BadInput) leaves no directory behind.

        Args:
            recipe: What to train.
            out: The run directory, new or empty. None makes one below `runs`.
            data_root: The folder with published data sets.
            shared: A ledger that several runs charge.
            options: Further arguments of `build`. `data` are the caller's, where the recipe says
                "own"; or the recipe's if they are loaded already; or data whose records are
                elsewhere, for `make_engine`.
        """
        if out is not None:
            check_free(out)
        else:
            check_run_name(recipe.name)
        options["data"] = check_own_parts(recipe, options.get("model"), options.get("data"))
        training = build(recipe, data_root, **options)
        if shared is not None:
            with in_keys(recipe=recipe, **RECIPE_KEYS):
                shared.check(training)
        training.open()
        folder = make_run_directory(out, recipe.name)
        return cls(folder, resolve_recipe(recipe, training), training, fresh=True, shared=shared)

    @classmethod
    def resume(
        cls,
        folder: Path,
        data_root: Path | None,
        *,
        where: Sequence[str] = (),
        **options: Unpack[BuildOptions],
    ) -> "Run":
        """Rebuild the training of an interrupted run from its directory. Nothing is trained yet.

        Arguments are as in `start`. `where` holds overrides of engine.kind and engine.address for
        this time, which change no result. Raises BadInput if there is no run, or model or data are
        not those of the start.
        """
        recipe = recipe_in(folder)
        options["data"] = check_own_parts(recipe, options.get("model"), options.get("data"))
        training = build(with_engine(recipe, where), data_root, **options)
        training.open()
        return cls(folder, recipe, training, fresh=False)

    def describe(self) -> str:
        """Return one line: model, clients, rounds, noise and, once begun, where the run resumes."""
        return "; ".join(self.summary_lines())

    def summary_lines(self) -> list[str]:
        """Return the parts of `describe`: the run, its noise, and remarks at the start."""
        training = self.training
        data, plan = training.data, training.plan
        name, where, path = self.recipe.model.name, self.recipe.data.name, self.recipe.data.path
        if name in (OWN, CODE):
            name = type(training.task.module).__name__
        if where == TABLE and path:
            where = Path(path).name if isinstance(path, str) else f"{len(path)} files"
        each = ""
        if training.gate.diagnostics and data.sizes.max() == 1:  # clients' sizes may be private
            each = ", one record each"
        text = (
            f"{self.recipe.name}: {name} "
            f"with {training.task.size:,} parameters over {data.clients:,} client"
            f"{'' if data.clients == 1 else 's'}"
            f"{'' if where == OWN else f' of {where}'}{each}, {plan.rounds} rounds"
        )
        noise = plan.describe() + ("" if plan.private else ", no privacy claim")
        remarks = [training.remark] if training.remark else []
        priced = [] if plan.metrics is None else [plan.metrics.described()]
        warnings = noise_warning(training)
        return [text, noise, *remarks, *priced, *warnings, *self.first_remarks]

    def execute(
        self, on_round: OnRound = lambda line: None, on_start: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Train to the end, write all files of the run directory, and return the result.

        The end is that of the plan or the budget, Ctrl-C, or a request to stop (`request_stop`). A
        disk that is full or read-only raises `BadInput`: a round whose charge is not on disk does
        not begin, and files are whole. An error in `on_round` ends the run as Ctrl-C does, and is
        raised.

        Args:
            on_round: Called with each round's line of metrics.
            on_start: Called once the ledger is open, before the first round.
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

        A line is yielded once it is on disk and in the logs. `on_start` is called once the ledger
        is open, before the first round. The result is then in `result`. A run that is complete, and
        whose files are as it left them, yields nothing and changes nothing.
        """
        if not self.fresh and self._is_complete():
            return
        checkpoints = self.folder / "checkpoint"
        try:
            with (
                in_keys(recipe=self.recipe, **RECIPE_KEYS),
                locked(self.folder, drop_stop_request=True),
                closing(self._open_ledger()) as ledger,
            ):
                done = self._load_progress(ledger)
                on_start()
                self.training.plan.spent(0)  # epsilon of all rounds, before one is timed
                began = time.perf_counter()
                try:
                    with ExitStack() as files:
                        logs = None
                        if self.logs:
                            logs = self._open_logs(done.before)
                            files.callback(logs.close)
                        metrics = files.enter_context((self.folder / "metrics.jsonl").open("a"))
                        for result in self.training.rounds(done.state, ledger):
                            line = result.numbers()
                            refused = self.training.gate.refused_names(result)
                            done.rounds.append(FinishedRound(line, result.clients or 0, refused))
                            done.state = result.state
                            metrics.write(json_text(line))
                            metrics.flush()
                            if result.round % self.recipe.engine.checkpoint == 0:
                                checkpoint.save(checkpoints, result.state, ledger.head())
                            if logs is not None:
                                logs.write(line)
                            yield line
                            if (self.folder / STOP_FILE).is_file():
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

    def _is_complete(self) -> bool:
        """Return whether nothing is left to do or to mend, and take over the result if so.

        Raises LedgerMismatch if model or data are not those of the start. Writes nothing.
        """
        result = complete_result(self.folder)
        if result is None:
            return False
        check_ledger_of(self.folder, self._ledger_run())
        self.result, self.already_complete = result, True
        return True

    def _open_logs(self, history: list[dict[str, Any]]) -> Logs:
        """Open the experiment trackers, and log the rounds of `history` to them."""
        about, live = {"recipe": self.recipe.name}, self.training.gate.diagnostics
        name, remarks = self.folder.name, self.remarks
        return open_logs(self.logs, self.folder, name, about, history, live=live, remarks=remarks)

    def _open_ledger(self) -> Ledger:
        """Write recipe.toml of a new run, and open or create the ledger. The caller closes it.

        The first line of the file names the versions and the machine, on which results depend in
        their last bits. If a run is resumed by others, a remark is added.
        """
        file = self.folder / "recipe.toml"
        toml = to_toml(self.recipe.model_dump())
        versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in _PACKAGES)
        resolved_by = f"{versions} on {platform.system()} {platform.machine()}"
        if self.fresh:
            if self.shared is not None:
                self.shared.write_pointer(self.folder)
            write_atomic(file, f"# resolved by {resolved_by}\n{toml}".encode())
        else:
            with readable(file), file.open() as f:
                before = f.readline().strip()
            if before != f"# resolved by {resolved_by}":
                self.remarks.append(
                    f"the run was {before.lstrip('# ')} and was resumed by {resolved_by}: it "
                    "repeats to about 1e-5, not to the last bit"
                )
        return open_ledger(self.folder, self._ledger_run(), self.shared)

    def _ledger_run(self) -> LedgerRun:
        """Return what the ledger records about the run, except its name."""
        training, plan = self.training, self.training.plan
        about = {
            "recipe": digest(to_toml(self.recipe.model_dump())),
            "data": training.data.fingerprint,
            "noise": "secure" if plan.secure else "seeded",
            "seed": "" if plan.secure else str(training.seed),
            "identity": training.digest,
        }
        repeats = not training.data.elsewhere  # other clients may answer the next time
        return LedgerRun(
            about, plan.every_line, plan.permitted, plan.counted_clients, repeats=repeats
        )

    @one_thread()
    def _load_progress(self, ledger: Ledger) -> FinishedRounds:
        """Return the newest checkpoint's state, or the first one, and the metrics up to it.

        Adds remarks on damaged files, notes in the ledger that the run is open again, and then cuts
        metrics.jsonl to these rounds. Raises BadInput if the ledger lacks charges for them or its
        chain is broken.
        """
        plan, gate, first = self.training.plan, self.training.gate, self.training.start()
        saved, damage = checkpoint.load_latest(self.folder / "checkpoint", first)
        state = first if saved is None else saved.state
        metrics = self.folder / "metrics.jsonl"
        history, damaged_metrics = read_metrics(metrics)
        measured = history[-1]["round"] if history else 0
        digest_at_end = ledger.closing_files().get(metrics.name)
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
            history.insert(0, {"round": 0, **spent, **gate.first_numbers(first.params)})
        if ledger.shared is not None:
            self.first_remarks += room_warning(ledger, plan.permitted, ledger_path(self.folder))
        if plan.metrics is not None and plan.metrics.warning is not None:
            self.remarks.append(plan.metrics.warning)
            self.first_remarks.append(plan.metrics.warning)
        ledger.note_resumed()
        write_atomic(self.folder / "metrics.jsonl", "".join(map(json_text, history)).encode())
        return FinishedRounds(state, history)

    def _check_ledger(
        self, ledger: Ledger, saved: checkpoint.Checkpoint | None, measured: int
    ) -> None:
        """Verify the ledger against the directory's heads, and raise BadInput if it is damaged.

        With a private plan, it also needs at least as many charged rounds as the checkpoint and the
        metrics have. A head file that cannot be read becomes a remark.
        """
        reached, file = 0 if saved is None else saved.state.round, ledger_path(self.folder)
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
        """Write metrics, checkpoint, model, result and report, and close the run in the ledger.

        Returns the result. `seconds` is the time that the rounds took. A crash before the ledger
        has the closing entry leaves the run open: `--verify` says so, `--resume` ends it.
        """
        ledger.note_resumed()  # an interrupted end may be in the ledger already
        plan, state, gate = self.training.plan, done.state, self.training.gate
        rounds = [round for round in done.rounds if round.line["round"] <= state.round]
        history = done.before + [round.line for round in rounds]
        data = self.training.data
        if self.recipe.data.name == OWN and replace(data).fingerprint != data.fingerprint:
            self.remarks.append(
                "the records were changed in place during the run: it cannot be repeated or resumed"
            )
        write_atomic(self.folder / "metrics.jsonl", "".join(map(json_text, history)).encode())
        checkpoint.save(self.folder / "checkpoint", state, ledger.head())
        measured = gate.last(history, state.params)
        charged = max(state.round, ledger.charged())
        claims = plan.claims(charged, ledger.counts(), ledger.extra_attempts)
        file, resume = ledger_path(self.folder), self.how_to_resume
        stopped, why = ending(
            plan, state.round, claims, ledger, file, resume, requested=self.stop_requested
        )
        updates = sum(round.clients for round in rounds)
        refused = Counter(name for round in rounds for name in round.refused_names)
        dishonest = self.training.dishonest
        attack = None if dishonest is None else dishonest.describe(claims)
        constant = constant_note(measured["metrics"].get("accuracy"), gate.commonest_share())
        result = {
            "run_dir": str(self.folder),
            "date": datetime.now(UTC).date().isoformat(),
            "recipe": self.recipe.name,
            "rounds": state.round,
            "stopped": stopped,
            "why": why,
            **measured,
            **({"attack": attack} if attack else {}),
            "claims": [claim.to_dict() for claim in claims],
            "ledger": ledger.head().to_dict(),
            "budget": budget_entry(plan, claims),
            "noise": plan.describe(),
            "timing": gate.timing(seconds, len(rounds), updates),
            "refused": dict(refused.most_common()),
            "notes": self.remarks + diagnose(history) + constant,
        }
        stored = StoredModel.from_training(self.recipe.model, self.training, state.params, claims)
        write_atomic(self.folder / "model.safetensors", stored.to_bytes())
        write_atomic(self.folder / "result.json", json_text(result, indent=2).encode())
        write_atomic(self.folder / REPORT, report_html(self.folder, ending=True))
        head = ledger.note_end(file_digests(self.folder)).to_dict()
        write_atomic(self.folder / "head.json", json_text(head, indent=2).encode())
        return result

    @property
    def how_to_resume(self) -> str:
        """Return the command, or the Python call, that continues this run, as text."""
        if self.training.data.elsewhere:
            return f"flwr run again, with {self.folder} as the run directory"
        names = {"model": self.recipe.model.name, "data": self.recipe.data.name}
        own = [f"{key}=..." for key, name in names.items() if name == OWN]
        if not own:
            code = " --allow-code" if self.recipe.model.path is not None else ""
            return f"fedveil run --resume {self.folder}{code}"
        return f"fedveil.resume({', '.join([repr(str(self.folder)), *own])})"


def budget_entry(plan: PrivacyPlan, claims: tuple[PrivacyClaim, ...]) -> dict[str, Any] | None:
    """Return the entry "budget" of result.json, or None if nothing is claimed.

    Keys: "epsilon" (the limit), "left" (what the `claims` leave of it), both "inf" without a limit,
    "claim" (the conditions of the limit, as text) and "rounds_permitted" (the plan's number).
    """
    claim, limit = budgeted(claims), plan.limit
    if plan.promise is None or claim is None:
        return None
    return {
        "epsilon": "inf" if limit is None else limit,
        "left": "inf" if limit is None else max(0.0, limit - claim.epsilon),
        "claim": plan.promise.context,
        "rounds_permitted": plan.permitted,
    }
