"""What fedveil's Flower apps do to their own process before they start."""

import os
import random
import sys
import threading
import time

_PARENT_OPTION = "--parent-pid"
_POLL, _GRACE = 0.5, 5.0


def separate_draws() -> None:
    """Give Flower's modules a random generator of their own in place of Python's global one.

    Flower's threads (heartbeats, retries) draw at any time, while fedveil checks whether a user's
    module draws. Without this, a draw of Flower's would be blamed on the module.
    """
    own = random.Random()
    for name, module in tuple(sys.modules.items()):
        if name.split(".")[0] == "flwr" and getattr(module, "random", None) is random:
            module.random = own  # type: ignore[attr-defined]


def end_with_parent() -> None:
    """End this process when its parent, named by Flower on the command line, ends.

    Flower watches the parent too, and asks the app to end by a signal. A main thread that waits for
    an answer may never notice it: a ServerApp whose SuperLink was killed would keep the run
    directory locked, and nobody could resume. Ending at once is safe, since charges are on disk.
    Without a parent on the command line this does nothing.
    """
    if _PARENT_OPTION not in sys.argv[:-1]:
        return
    parent = int(sys.argv[sys.argv.index(_PARENT_OPTION) + 1])
    threading.Thread(target=_watch, args=(parent,), daemon=True, name="parent").start()


def _watch(parent: int) -> None:
    while _lives(parent):
        time.sleep(_POLL)
    time.sleep(_GRACE)  # for an orderly end
    os._exit(1)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
