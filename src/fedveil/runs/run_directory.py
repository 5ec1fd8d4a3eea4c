"""The run directory: its creation, lock, atomic files, stop request and metrics file."""

import fcntl
import json
import math
import os
import reprlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput

STOP_FILE = "stop"
History = list[dict[str, Any]]
"""The lines of the metrics file, one JSON document per round."""

_LONGEST_NAME = 100
_MOST = int(sys.float_info.max)
_TRIES, _PAUSE = 10, 0.05
"""Attempts to take the lock, and seconds between them: `in_use` holds it for a moment."""


def write_atomic(path: Path, content: bytes) -> None:
    """Write to a temporary name, sync, rename: a crash leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that the user named. It must not exist."""
    if path.exists():
        raise BadInput(f"{path} exists: name another file")
    try:
        write_atomic(path, content)
    except OSError as e:
        raise BadInput(f"{path} cannot be written: {e.strerror}") from e


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_run_name(name: str) -> None:
    """Refuse a recipe name that cannot name a run directory below `runs`."""
    if not (0 < len(name) <= _LONGEST_NAME and name.isprintable()) or "/" in name or name[0] == ".":
        raise BadInput(
            f"name is {reprlib.repr(name)}: it names the run directory, so 1 to {_LONGEST_NAME} "
            "printable characters are needed, without '/' and not beginning with '.'; or use --out"
        )


def check_free(out: Path) -> None:
    """Refuse a directory that is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(
            f"--out {out} exists and is not an empty directory: choose another, or --resume {out}"
        )


def reserve(out: Path | None, name: str) -> Path:
    """Create the run directory: `out`, or a new one below `runs` named after the recipe."""
    try:
        if out is not None:
            check_free(out)
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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager: lock the run directory. A second process gets `BadInput`."""
    with (folder / "lock").open("w") as f:
        for tries in range(_TRIES):
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as e:
                if tries == _TRIES - 1:
                    raise BadInput(
                        f"{folder} is in use by another process: wait for it or use another --out"
                    ) from e
                time.sleep(_PAUSE)
        yield


def in_use(folder: Path) -> bool:
    """Whether a process has the run directory locked. A lock that cannot be read is nobody's.

    The kernel releases a lock when the process that has it ends, however it ends.
    """
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def request_stop(folder: Path) -> None:
    """Ask the run that is going on in `folder` to end after its round, by a file.

    Anybody who may write the directory may make one. A run checks for it between rounds: the
    current round is finished, charged and noised as planned.

    Guarantee: a request ends the training early and changes nothing else. Fewer rounds are charged
    than were planned, and the claim is about those. The run does not read what the file holds.

    | edge | behaviour |
    |---|---|
    | left over from an earlier start | removed before the first round: it ends nothing |
    | made after the last round | the run has ended already, and removes it |
    | made while nothing runs | the next start removes it |
    | a folder of that name | the run cannot begin, and says so |
    """
    write_atomic(folder / STOP_FILE, b"asked to end after this round\n")


def stop_requested(folder: Path) -> bool:
    """Whether there is a request to end the run in `folder`."""
    return (folder / STOP_FILE).is_file()


@contextmanager
def without_stop_request(folder: Path) -> Iterator[None]:
    """Context manager: remove a request that is left over, and at the end one that came since."""
    (folder / STOP_FILE).unlink(missing_ok=True)
    try:
        yield
    finally:
        (folder / STOP_FILE).unlink(missing_ok=True)


def read_metrics(path: Path) -> tuple[History, list[str]]:
    """The lines up to the first that is damaged, and a remark if there is one."""
    lines: History = []
    if not path.exists():
        return lines, []
    for text in path.read_text(errors="replace").splitlines():
        line = parse_metrics(text)
        if line is None or (lines and line["round"] <= lines[-1]["round"]):
            damage = f"metrics.jsonl was damaged after {len(lines)} lines: the rest was left out"
            return lines, [damage]
        lines.append(line)
    return lines, []


def parse_metrics(text: str) -> dict[str, Any] | None:
    """Parse a line of the metrics file. None if it is not one that a run writes."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or type(line.get("round")) is not int or "epsilon" not in line:
        return None
    for name in ("clients", "clipped", "snr", "refused", "clip") if line["round"] else ():
        if name not in line:
            return None
    for name, value in line.items():
        whole = isinstance(value, int) and abs(value) < _MOST  # floats have room for it
        if name != "claim" and not (whole or value is None or isinstance(value, float)):
            return None
    # Epsilon and the text of its claim are both there, or neither.
    claim = line.get("claim")
    return line if (claim is None if line["epsilon"] is None else isinstance(claim, str)) else None


def last_round(history: History) -> int:
    """The last round that was measured."""
    return int(history[-1]["round"]) if history else 0


def json_text(value: dict[str, Any], indent: int | None = None) -> str:
    """One JSON document, with null in place of numbers that are not finite."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_without_nan(value), indent=indent, allow_nan=False) + "\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
