"""Logs: the lines of metrics.jsonl, and nothing else, as experiment trackers show them.

A tracker is given the numbers of a round by their names, and texts when they change. Whatever else
its library would record by itself (the machine's load, the console, code, git, usage reports to
the library's makers) is switched off: it shows how long rounds took, which grows with the cohort.
"""

import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from fedveil.base.errors import BadInput, one_line
from fedveil.runs.run_directory import last_round

_RESUMED = "resumed_after_round"
_FINISH_SECONDS = 60.0
"""How long the end of a run waits for a W&B server; what it did not get stays on disk."""

_OFF = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "WANDB_ERROR_REPORTING": "false",
}
"""What the libraries read when they are imported; a user's own setting wins."""


class Tracker(Protocol):
    """Where rounds are logged. Made early, to refuse wrong settings; opened when it may be seen."""

    def open(self, resumed: int) -> None:
        """Begin a log. `resumed` is the round after which the run resumes, or 0."""

    def write(self, round: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Log one round."""

    def close(self) -> None:
        """End the log, with everything in it."""


class TensorBoard:
    """Event files in the run directory, in single precision, which is what TensorBoard draws.

    Those of earlier executions stay there and do not count.
    """

    def __init__(self, folder: Path, name: str, about: Mapping[str, str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make, self._folder, self._about = SummaryWriter, folder / "tensorboard", about

    def open(self, resumed: int) -> None:
        self._writer = self._make(str(self._folder), purge_step=0)
        for name, text in self._about.items():
            self._writer.add_text(name, text, 0)

    def write(self, round: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)
        for name, text in texts.items():
            self._writer.add_text(name, text, round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Mlflow:
    """One MLflow run, in the store and the experiment that MLflow's own variables name.

    By the client, not by `mlflow.start_run`, which adds the user, the script and the git commit.
    """

    def __init__(self, folder: Path, name: str, about: Mapping[str, str]) -> None:
        _switch_off()
        import mlflow

        self._entities, self._client = mlflow.entities, mlflow.MlflowClient()
        self._name, self._about = name, about

    def open(self, resumed: int) -> None:
        tags = {**self._about, **({_RESUMED: str(resumed)} if resumed else {})}
        run = self._client.create_run(self._experiment(), tags=tags, run_name=self._name)
        self._id = run.info.run_id

    def write(self, round: int, numbers: Mapping[str, float], texts: Mapping[str, str]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(
            self._id,
            metrics=[self._entities.Metric(*pair, now, round) for pair in numbers.items()],
            tags=[self._entities.RunTag(*pair) for pair in texts.items()],
            synchronous=True,
        )

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _experiment(self) -> str:
        """The experiment's id: by its name, which is created, by its id, or MLflow's default."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not name:
            return os.environ.get("MLFLOW_EXPERIMENT_ID") or "0"
        known = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if known is None else known.experiment_id)


class Wandb:
    """One W&B run, with its files in the run directory and the user's mode, project and account.

    A missing key is refused beforehand, so that W&B does not ask for it during the run.
    """

    def __init__(self, folder: Path, name: str, about: Mapping[str, str]) -> None:
        _switch_off()
        import wandb

        self._wandb, self._folder, self._name, self._about = wandb, folder, name, about
        offline = wandb.setup().settings.mode in ("offline", "dryrun", "disabled")
        if not offline and not wandb.login(prompt=False, verify=False):
            raise BadInput("log wandb has no account: use `wandb login`, or set WANDB_MODE=offline")

    def open(self, resumed: int) -> None:
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
        if texts:
            self._run.config.update(dict(texts), allow_val_change=True)
        self._run.log(dict(numbers), step=round, commit=True)

    def close(self) -> None:
        self._run.finish()


def _switch_off() -> None:
    for name, value in _OFF.items():
        os.environ.setdefault(name, value)


Line = dict[str, Any]
Make = Callable[[Path, str, Mapping[str, str]], Tracker]

_MAKERS: dict[str, Make] = {"tensorboard": TensorBoard, "mlflow": Mlflow, "wandb": Wandb}
KINDS = tuple(_MAKERS)
"""The trackers, by the name of the package and of the extra that brings it."""


class Logs:
    """The logs of one execution of a run. `remarks` lists those that failed, and why.

    A live log gets every line at once. Any other gets all lines at the end, because trackers note
    the time of every entry, which would show how long a round took. A log that fails is dropped,
    and the training goes on.
    """

    def __init__(
        self, trackers: Mapping[str, Tracker], resumed: int, *, live: bool, remarks: list[str]
    ) -> None:
        self.remarks = remarks
        self._trackers, self._resumed, self._live = dict(trackers), resumed, live
        self._waiting: list[Line] = []
        self._texts: dict[str, str] = {}
        self._last = -1

    def write(self, line: Line) -> None:
        """Log a line, unless its round was logged before."""
        if line["round"] <= self._last or not self._trackers:
            return
        if self._live:
            self._pass_on(line)
        else:
            self._waiting.append(line)
        self._last = line["round"]

    def close(self) -> None:
        """Write the lines that wait, and close all logs."""
        if not self._live:
            for kind, tracker in list(self._trackers.items()):
                with self._left_out_if_it_fails(kind, 0):
                    tracker.open(self._resumed)
        for line in self._waiting:
            self._pass_on(line)
        self._waiting.clear()
        for kind, tracker in list(self._trackers.items()):
            with self._left_out_if_it_fails(kind, self._last):
                tracker.close()
        self._trackers.clear()

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pass_on(self, line: Line) -> None:
        numbers = {name: value for name, value in line.items() if _is_number(name, value)}
        texts = {name: str(value) for name, value in line.items() if isinstance(value, str | bool)}
        changed = {name: text for name, text in texts.items() if self._texts.get(name) != text}
        for kind, tracker in list(self._trackers.items()):
            with self._left_out_if_it_fails(kind, line["round"]):
                tracker.write(line["round"], numbers, changed)
        self._texts |= changed

    @contextmanager
    def _left_out_if_it_fails(self, kind: str, round: int) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            del self._trackers[kind]
            self.remarks.append(
                f"log {kind} was left out from round {round} on, metrics.jsonl has every round: "
                f"{one_line(e)}"
            )


def check_logs(kinds: Iterable[str]) -> None:
    """Refuse a kind that is unknown or whose package is missing, without importing any."""
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
    """Open the logs of a run.

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
    resumed, trackers = last_round(history), {}
    with ExitStack() as opened:
        for kind in kinds:
            with _refused_if_it_fails(kind):
                trackers[kind] = _MAKERS[kind](folder, name, about)
                if live:
                    trackers[kind].open(resumed)
                    opened.callback(trackers[kind].close)
        opened.pop_all()
    logs = Logs(trackers, resumed, live=live, remarks=[] if remarks is None else remarks)
    for line in history:
        logs.write(line)
    return logs


@contextmanager
def _refused_if_it_fails(kind: str) -> Iterator[None]:
    try:
        yield
    except BadInput:
        raise
    except Exception as e:
        raise BadInput(
            f"log {kind} cannot be opened: {one_line(e)}; correct its settings or leave it out"
        ) from e


def _is_number(name: str, value: object) -> bool:
    """Whether a tracker takes it: the round is the step, and null is no number."""
    return (
        name != "round"
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )
