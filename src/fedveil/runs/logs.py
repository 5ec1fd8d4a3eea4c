"""Logs: the lines of metrics.jsonl, and nothing else, as experiment trackers show them."""

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedveil.errors import BadInput, one_line
from fedveil.runs.metrics_file import last_round
from fedveil.runs.trackers import Mlflow, TensorBoard, Tracker, Wandb

Line = dict[str, Any]
Make = Callable[[Path, str, Mapping[str, str]], Tracker]

_MAKERS: dict[str, Make] = {"tensorboard": TensorBoard, "mlflow": Mlflow, "wandb": Wandb}
KINDS = tuple(_MAKERS)
"""The trackers, by the name of the package and of the extra that brings it."""


class Logs:
    """The logs of one execution of a run; `remarks` says which of them failed, and why.

    A live log gets every line when it is written. Any other is opened when it is closed and gets
    all lines then: trackers note when something reaches them, which tells how long a round took.
    A log that fails is left out from there on; the training goes on.
    """

    def __init__(self, trackers: Mapping[str, Tracker], resumed: int, *, live: bool) -> None:
        self.remarks: list[str] = []
        self._trackers, self._resumed, self._live = dict(trackers), resumed, live
        self._waiting: list[Line] = []
        self._texts: dict[str, str] = {}
        self._last = -1

    def write(self, line: Line) -> None:
        """One more line; a round that was written is not written again."""
        if line["round"] <= self._last:
            return
        if self._live:
            self._pass_on(line)
        else:
            self._waiting.append(line)
        self._last = line["round"]

    def close(self) -> None:
        """Write what has waited, and end the logs."""
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
        found = importlib.util.find_spec(kind)
        if found is None or found.origin is None:  # a folder of that name is no package
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
    """The logs of the run `name` in `folder`, with the lines of `history` in them.

    `about` goes along as texts. It and all lines leave this machine where a tracker has a server:
    neither may hold what is secret. `live` is for runs whose lines tell `seconds` anyway.
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
