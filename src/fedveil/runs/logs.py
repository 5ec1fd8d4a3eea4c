"""Logs: the lines of metrics.jsonl, and nothing else, as experiment trackers show them."""

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput, one_line
from fedveil.runs.metrics_file import last_round
from fedveil.runs.trackers import Mlflow, TensorBoard, Tracker, Wandb

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

    def __init__(self, trackers: Mapping[str, Tracker], resumed: int, *, live: bool) -> None:
        self.remarks: list[str] = []
        self._trackers, self._resumed, self._live = dict(trackers), resumed, live
        self._waiting: list[Line] = []
        self._texts: dict[str, str] = {}
        self._last = -1

    def write(self, line: Line) -> None:
        """Log a line, unless its round was logged before."""
        if line["round"] <= self._last:
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
    logs = Logs(trackers, resumed, live=live)
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
