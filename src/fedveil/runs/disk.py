"""The run directory on disk: its creation, its lock, and files that are written atomically."""

import fcntl
import os
import reprlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from fedveil.base.errors import BadInput

_LONGEST_NAME = 100


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


_TRIES, _PAUSE = 10, 0.05
"""Attempts to take the lock, and seconds between them: `in_use` holds it for a moment."""


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
