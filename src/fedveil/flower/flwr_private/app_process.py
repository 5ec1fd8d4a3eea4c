"""The process of an app: its random generator, and whom it ends with."""

import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress

from fedveil.base.platforms import c_function

_LARGEST_KEPT = 1 << 22
_MMAP_THRESHOLD = -3

_PARENT_OPTION = "--parent-pid"
_PARENT_DEATH_SIGNAL = 1
_POLL_SECONDS, _GRACE_SECONDS = 0.5, 5.0


def separate_flower_random() -> None:
    """Give the Flower modules imported so far a random generator in place of Python's global one.

    Call it after Flower is imported. Flower's threads (heartbeats, retries) draw at any time, while
    fedveil checks whether a user's module draws: a draw of Flower's would be blamed on the module.
    """
    own = random.Random()
    for name, module in tuple(sys.modules.items()):
        if name.split(".")[0] == "flwr" and getattr(module, "random", None) is random:
            module.random = own  # type: ignore[attr-defined]


def return_freed_memory() -> None:
    """Let this process, and those that it forks, give memory back to the system as it is freed.

    The C library would keep blocks of up to 32 MiB for later, once one was freed: a process that
    passes chunks of 5 MiB on would keep as much as it ever had. Blocks of 4 MiB and more are given
    back. Elsewhere than on Linux this does nothing.
    """
    mallopt = c_function("mallopt")
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)


def end_with_parent() -> None:
    """Start a thread that ends this process after its parent, named on the command line, ends.

    Flower watches the parent too, and asks the app to end by a signal. A main thread that waits for
    an answer may never notice it: a ServerApp whose SuperLink was killed would keep the run
    directory locked, and nobody could resume. Ending at once is safe, since charges are on disk.
    Without a parent on the command line this does nothing, nor on Windows, which cannot look
    whether a process is there without ending it.
    """
    if _PARENT_OPTION not in sys.argv[:-1] or sys.platform == "win32":
        return
    parent = int(sys.argv[sys.argv.index(_PARENT_OPTION) + 1])
    threading.Thread(target=_end_after, args=(parent,), daemon=True, name="parent").start()


def _end_after(process: int) -> None:
    """Wait until the process with this id has ended, then five seconds, and exit with code 1."""
    with suppress(ProcessLookupError):
        while True:
            with suppress(PermissionError):
                os.kill(process, 0)
            time.sleep(_POLL_SECONDS)
    time.sleep(_GRACE_SECONDS)  # for an orderly end
    os._exit(1)


def end_with_starter() -> None:
    """Let Linux send SIGTERM to this process when its parent ends. Elsewhere do nothing.

    A parent that is killed cannot stop the processes that it started.
    """
    prctl = c_function("prctl")
    if prctl is not None:
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
