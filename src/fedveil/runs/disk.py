"""Atomic files, and the lock that gives a run directory to one process."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedveil.errors import BadInput


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
