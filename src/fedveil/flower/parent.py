"""An app of Flower's ends when the process that it belongs to does, whatever it waits for."""

import os
import sys
import threading
import time

_OPTION = "--parent-pid"
_LOOK, _GRACE = 0.5, 5.0


def end_with_parent() -> None:
    """Watch the process that Flower has named on the command line; nothing if it has named none.

    Flower watches it too, and asks the app to end by a signal, which a main thread that waits for
    an answer may never notice: a ServerApp whose SuperLink was killed would go on holding the run
    directory, and nobody could resume. Ending at once is safe: what was charged is on disk.
    """
    if _OPTION not in sys.argv[:-1]:
        return
    parent = int(sys.argv[sys.argv.index(_OPTION) + 1])
    threading.Thread(target=_watch, args=(parent,), daemon=True, name="parent").start()


def _watch(parent: int) -> None:
    while _lives(parent):
        time.sleep(_LOOK)
    time.sleep(_GRACE)  # for an end in good order
    os._exit(1)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
