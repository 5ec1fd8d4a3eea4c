"""Experiment trackers: TensorBoard, MLflow and Weights & Biases, each as three plain steps.

A tracker is given the numbers of a round by their names, and texts when they change. Whatever else
its library would record by itself (the machine's load, the console, code, git, usage reports to
the library's makers) is switched off: it shows how long rounds took, which grows with the cohort.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fedveil.base.errors import BadInput

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
