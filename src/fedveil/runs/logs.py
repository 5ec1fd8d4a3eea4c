"""Logs: the lines of metrics.jsonl, and nothing else, as experiment trackers show them.

A tracker is given the numbers of a round by their names, and texts when they change. Whatever else
its library would record by itself (the machine's load, the console, code, git, usage reports to
the library's makers) is switched off: it shows how long rounds took, which grows with the cohort.
"""

import importlib.util
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput, one_line

_RESUMED = "resumed_after_round"
_FINISH_SECONDS = 60.0
"""How long the end of a run waits for a W&B server; what it did not get stays on disk."""

_OFF = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "WANDB_ERROR_REPORTING": "false",
}
"""What the libraries read when they are imported; a user's own setting wins."""


class TensorBoard:
    """Event files in the run directory, in single precision, which is what TensorBoard draws.

    Event files of earlier executions stay there, and TensorBoard ignores them.
    """

    def __init__(self, folder: Path, name: str, about: Mapping[str, str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make, self._folder, self._about = SummaryWriter, folder / "tensorboard", about

    def open(self, resumed: int) -> None:
        """Create an event file, and write the texts about the run. `resumed` has no effect."""
        self._writer = self._make(str(self._folder), purge_step=0)
        for name, text in self._about.items():
            self._writer.add_text(name, text, 0)

    def write(self, round: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Write the numbers of a round, and the given texts, to the event file."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)
        for name, text in texts.items():
            self._writer.add_text(name, text, round)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file. Only after `open`."""
        self._writer.close()


class Mlflow:
    """One MLflow run, in the store and the experiment that MLflow's own variables name.

    It is made by MLflow's client, not by `mlflow.start_run`, which adds the user, the script and
    the git commit.
    """

    def __init__(self, folder: Path, name: str, about: Mapping[str, str]) -> None:
        import mlflow

        self._entities, self._client = mlflow.entities, mlflow.MlflowClient()
        self._name, self._about = name, about

    def open(self, resumed: int) -> None:
        """Create an MLflow run. A tag has the round `resumed`, unless it is 0."""
        tags = {**self._about, **({_RESUMED: str(resumed)} if resumed else {})}
        run = self._client.create_run(self._experiment_id(), tags=tags, run_name=self._name)
        self._id = run.info.run_id

    def write(self, round: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Log the numbers of a round as metrics, and the given texts as tags."""
        now = int(1000 * time.time())
        self._client.log_batch(
            self._id,
            metrics=[self._entities.Metric(*pair, now, round) for pair in numbers.items()],
            tags=[self._entities.RunTag(*pair) for pair in texts.items()],
            synchronous=True,
        )

    def close(self) -> None:
        """Mark the MLflow run as finished."""
        self._client.set_terminated(self._id)

    def _experiment_id(self) -> str:
        """Return the experiment's id, of MLFLOW_EXPERIMENT_NAME, else MLFLOW_EXPERIMENT_ID, or "0".

        An experiment of that name is created if there is none.
        """
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not name:
            return os.environ.get("MLFLOW_EXPERIMENT_ID") or "0"
        known = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if known is None else known.experiment_id)


class Wandb:
    """One W&B run, with its files in the run directory and the user's mode, project and account.

    BadInput at once if the key of an account is missing, so that W&B does not ask for it later.
    """

    def __init__(self, folder: Path, name: str, about: Mapping[str, str]) -> None:
        import wandb

        self._wandb, self._folder, self._name, self._about = wandb, folder, name, about
        offline = wandb.setup().settings.mode in ("offline", "dryrun", "disabled")
        if not offline and not wandb.login(prompt=False, verify=False):
            raise BadInput("log wandb has no account: use `wandb login`, or set WANDB_MODE=offline")

    def open(self, resumed: int) -> None:
        """Begin a W&B run, tagged "resumed" unless `resumed` is 0."""
        self._run: Any = self._wandb.init(
            dir=str(self._folder),
            name=self._name,
            config={**self._about, **({_RESUMED: resumed} if resumed else {})},
            tags=["resumed"] if resumed else [],
            settings=self._wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
                reinit="create_new",
                finish_timeout=_FINISH_SECONDS,
                finish_timeout_raises=True,
            ),
        )

    def write(self, round: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Log the numbers of a round, and put the given texts into the config."""
        if texts:
            self._run.config.update(dict(texts), allow_val_change=True)
        self._run.log(dict(numbers), step=round, commit=True)

    def close(self) -> None:
        """Finish the W&B run. Waits for its server for up to a minute, and raises after that."""
        self._run.finish()


Line = dict[str, Any]
Tracker = TensorBoard | Mlflow | Wandb
"""Where rounds are logged. Made early, to refuse wrong settings, and opened later.

`open(resumed)` begins a log, with the round after which the run resumes, 0 for a new run. `write`
logs the numbers of a round by name, and the texts that have changed. `close` sends what waits.
"""

_MAKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": Mlflow, "wandb": Wandb}
KINDS = tuple(_MAKERS)
"""The trackers, by the name of the package and of the extra that brings it."""


@dataclass
class Logs:
    """The logs of one execution of a run.

    A live log gets every line at once. Any other gets all lines at the end, because trackers note
    the time of every entry, which would show how long a round took. A log that fails is dropped,
    and the training goes on.

    Attributes:
        trackers: The trackers that have not failed, by kind.
        resumed: The round after which the run resumes, 0 for a new run.
        live: Whether lines are logged at once.
        remarks: Gets a line about each log that fails.
    """

    trackers: dict[str, Tracker]
    resumed: int
    live: bool
    remarks: list[str]
    _waiting: list[Line] = field(default_factory=list)
    _texts: dict[str, str] = field(default_factory=dict)
    _last: int = -1

    def write(self, line: Line) -> None:
        """Log a line of metrics, or keep it until the end if not live.

        A line whose round was logged before is ignored. Never raises for a tracker that fails.
        """
        if line["round"] <= self._last or not self.trackers:
            return
        if self.live:
            self._pass_on(line)
        else:
            self._waiting.append(line)
        self._last = line["round"]

    def close(self) -> None:
        """Write the lines that wait, and close all trackers. Nothing can be logged afterwards."""
        if not self.live:
            for kind, tracker in list(self.trackers.items()):
                with self._drop_on_error(kind, 0):
                    tracker.open(self.resumed)
        for line in self._waiting:
            self._pass_on(line)
        self._waiting.clear()
        for kind, tracker in list(self.trackers.items()):
            with self._drop_on_error(kind, self._last):
                tracker.close()
        self.trackers.clear()

    def _pass_on(self, line: Line) -> None:
        """Write a line's finite numbers, and the texts that have changed, to every tracker.

        The round is the step, not a number. True and False are texts.
        """
        numbers = {}
        for name, value in line.items():  # the round is the step, and null is no number
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name != "round" and is_number and math.isfinite(value):
                numbers[name] = value
        texts = {name: str(value) for name, value in line.items() if isinstance(value, str | bool)}
        changed = {name: text for name, text in texts.items() if self._texts.get(name) != text}
        for kind, tracker in list(self.trackers.items()):
            with self._drop_on_error(kind, line["round"]):
                tracker.write(line["round"], numbers, changed)
        self._texts |= changed

    @contextmanager
    def _drop_on_error(self, kind: str, round: int) -> Iterator[None]:
        """Context manager: drop the tracker `kind`, with a remark, if the block raises an error.

        The error is not raised further. `round` is for the remark.
        """
        try:
            yield
        except Exception as e:
            del self.trackers[kind]
            self.remarks.append(
                f"log {kind} was left out from round {round} on, metrics.jsonl has every round: "
                f"{one_line(e)}"
            )


def check_logs(kinds: Iterable[str]) -> None:
    """Raise BadInput for a tracker that is unknown or not installed. Imports none of them."""
    for kind in kinds:
        if kind not in KINDS:
            raise BadInput(f"log {kind!r} is unknown: use one of {', '.join(KINDS)}")
        package = importlib.util.find_spec(kind)
        if package is None or package.origin is None:  # a folder of that name is no package
            raise BadInput(f"log {kind} needs a package: pip install 'fedveil[{kind}]'")


def open_logs(
    kinds: Iterable[str],
    folder: Path,
    name: str,
    about: Mapping[str, str],
    history: Iterable[Line] = (),
    *,
    live: bool = False,
    remarks: list[str] | None = None,
) -> Logs:
    """Make the trackers of a run, and log its `history` to them. The caller closes the logs.

    Raises BadInput if a tracker is unknown, not installed or has wrong settings.

    Args:
        kinds: The trackers, such as "tensorboard".
        folder: The run directory.
        name: The name of the run.
        about: Texts that are logged with it. They and all lines leave this machine if a tracker has
            a server, so they must hold nothing secret.
        history: Lines of earlier rounds, which are logged first.
        live: Whether lines are logged at once, which shows how long rounds take.
        remarks: Where a line about each log that fails is added.
    """
    kinds, history = tuple(dict.fromkeys(kinds)), list(history)
    check_logs(kinds)
    resumed = int(history[-1]["round"]) if history else 0
    trackers: dict[str, Tracker] = {}
    for variable, value in _OFF.items():
        os.environ.setdefault(variable, value)
    with ExitStack() as opened:
        for kind in kinds:
            try:
                trackers[kind] = _MAKERS[kind](folder, name, about)
                if live:
                    trackers[kind].open(resumed)
                    opened.callback(trackers[kind].close)
            except BadInput:
                raise
            except Exception as e:
                raise BadInput(
                    f"log {kind} cannot be opened: {one_line(e)}; correct its settings or omit it"
                ) from e
        opened.pop_all()
    logs = Logs(trackers, resumed, live, [] if remarks is None else remarks)
    for line in history:
        logs.write(line)
    return logs
