"""What differs between Linux, macOS and Windows: processes, threads, file locks, the C library."""

import ctypes
import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

_PAUSE = 0.01


def can_fork() -> bool:
    """Whether this platform can fork a process safely."""
    return sys.platform == "linux" and hasattr(os, "fork")


def start_method() -> str:
    """How worker processes start: by "fork", or by "spawn" where fork is unsafe or missing."""
    return "fork" if can_fork() else "spawn"


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager: torch computes with one thread inside, and as before after it.

    A process that is forked from one with several threads would wait for them for ever.
    """
    import torch  # here, so that commands without models start quickly

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def c_function(name: str) -> Any:
    """A function of the C library, None if this platform lacks it."""
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name, None)
    except (OSError, TypeError):  # Windows has no library of the whole process
        return None


def open_unfollowed(path: Path, access: int = os.O_RDONLY) -> int:
    """Open a file that others may have put there, and return its descriptor.

    The caller closes it. `access` has the flags of `os.open`. Raises OSError for a link, and does
    not wait for the other end of a pipe. Windows cannot refuse links while it opens a file: there
    they are looked for before.
    """
    if not hasattr(os, "O_NOFOLLOW") and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
        access |= getattr(os, name, 0)
    return os.open(path, access)


def take_lock(descriptor: int, seconds: float = 0.0) -> bool:
    """Lock an open file against other processes and threads, and return whether that worked.

    While somebody else has the lock, it is tried for `seconds`, or once with 0. Closing the
    descriptor ends the lock, and so does the end of the process, however it comes. Raises OSError
    if the file system has no locks: nothing weaker takes their place.
    """
    deadline = time.monotonic() + seconds
    while not lock_descriptor(descriptor, blocking=False):
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(_PAUSE, seconds))
    return True
