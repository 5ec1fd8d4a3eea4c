"""The run directory: its creation, lock, atomic files, stop request and metrics file."""

import json
import math
import os
import reprlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.base.platforms import open_unfollowed, take_lock

STOP_FILE = "stop"
History = list[dict[str, Any]]
"""The lines of the metrics file, one JSON document per round."""

_LONGEST_NAME = 100
_MOST = int(sys.float_info.max)
_LOCK_SECONDS, _IN_USE_SECONDS = 0.5, 0.001
"""Seconds to wait for the lock: `in_use` takes it for a moment."""


def write_atomic(path: Path, content: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file, new or in place of an old one: a crash leaves the old file or the new.

    By a temporary name, sync and rename. The file is on disk on return. `content` may be in parts,
    which are written one after the other.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as f:
        for part in (content,) if isinstance(content, bytes) else content:
            f.write(part)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Context manager: turn what reading a damaged file raises into a BadInput that names it."""
    try:
        yield
    except BadInput:
        raise
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
        raise BadInput(f"{path} cannot be read: {e}") from e


def write_new(path: Path, content: bytes) -> None:
    """Write a file that the user named. Raises BadInput if it exists or cannot be written."""
    if path.exists():
        raise BadInput(f"{path} exists: name another file")
    try:
        write_atomic(path, content)
    except OSError as e:
        raise BadInput(f"{path} cannot be written: {e.strerror}") from e


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that renames inside it survive a power cut.

    Windows has no such call, and its file system writes renames to a journal.
    """
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_run_name(name: str) -> None:
    """Raise BadInput for a recipe name that cannot name a run directory below `runs`."""
    if not (0 < len(name) <= _LONGEST_NAME and name.isprintable()) or "/" in name or name[0] == ".":
        raise BadInput(
            f"name is {reprlib.repr(name)}: it names the run directory, so 1 to {_LONGEST_NAME} "
            "printable characters are needed, without '/' and not beginning with '.'; or use --out"
        )


def check_free(out: Path) -> None:
    """Raise BadInput if `out` is a file, or a directory that is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(
            f"--out {out} exists and is not an empty directory: choose another, or --resume {out}"
        )


def make_run_directory(out: Path | None, name: str) -> Path:
    """Create the run directory and return it: `out`, or runs/NAME-DATE-TIME if `out` is None.

    The latter is below the current directory, with -2, -3, ... appended if it exists. `name` is
    used for it only. Raises BadInput if it cannot be made, or `out` is a file or not empty.
    """
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
def locked(folder: Path, *, drop_stop_request: bool = False) -> Iterator[None]:
    """Context manager: lock a run directory. Raises BadInput if another process has it locked.

    With `drop_stop_request`, a request to stop (`request_stop`) is removed at the start, when it is
    left over, and again at the end.
    """
    with lock_held(folder / "lock", _LOCK_SECONDS) as free:
        if not free:
            raise BadInput(f"{folder} is in use by another process: wait, or use another --out")
        if not drop_stop_request:
            yield
            return
        (folder / STOP_FILE).unlink(missing_ok=True)
        try:
            yield
        finally:
            (folder / STOP_FILE).unlink(missing_ok=True)


@contextmanager
def lock_held(path: Path, seconds: float) -> Iterator[bool]:
    """Context manager: lock a file, made if it is missing. Yields whether it is locked.

    It waits up to `seconds` for the lock. The block runs in either case. Raises BadInput if the
    file cannot be opened, or its file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as e:
        raise BadInput(f"{path} cannot be written: {e.strerror}") from e
    try:
        try:
            free = take_lock(descriptor, seconds)
        except OSError as e:
            raise BadInput(f"{path} cannot be locked: {e.strerror}") from e
        yield free
    finally:
        os.close(descriptor)


def in_use(folder: Path) -> bool:
    """Return whether a process has the run directory locked. False if the lock cannot be read.

    The system releases a lock when the process that has it ends, however it ends. This function
    holds a free lock for an instant, and looks twice before it calls a lock taken: the other
    holder might be this function in another process.
    """
    path = folder / "lock"
    try:
        try:
            descriptor = open_unfollowed(path, os.O_RDWR)
        except PermissionError:  # a network file system needs the right to write, others do not
            descriptor = open_unfollowed(path)
    except OSError:
        return False
    try:
        return not take_lock(descriptor, _IN_USE_SECONDS)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def request_stop(folder: Path) -> None:
    """Write the file that asks the run in `folder` to end after its current round.

    Anybody who may write the directory may do so. A run checks for it between rounds: the current
    round is finished, charged and noised as planned.

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


def read_metrics(path: Path) -> tuple[History, list[str]]:
    """Return the lines of metrics.jsonl up to the first damaged one, and a list of remarks.

    The remarks are [] unless a line is damaged. ([], []) if the file is missing.
    """
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
    """Return a line of the metrics file as a dictionary. None if no run writes such a line."""
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


def json_text(value: dict[str, Any], indent: int | None = None) -> str:
    """Return a JSON document and a newline, with null in place of numbers that are not finite.

    `indent` None is one line.
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_without_nan(value), indent=indent, allow_nan=False) + "\n"


def _without_nan(value: Any) -> Any:
    """Return a copy of nested dicts and lists with None in place of NaN and infinite floats."""
    if isinstance(value, dict):
        return {key: _without_nan(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
