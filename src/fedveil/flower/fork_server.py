"""A process that has imported what answers messages, and forks for each of them.

It reads the arguments of `flwr-clientapp` from its standard input, a JSON list per line, and ends
with it, so that only its parent can use it. It has imported modules and nothing else: no key, no
record, no ledger and no message was ever in its memory. Each message is answered in a fork, which
ends with the message as the program would and leaves nothing behind.
"""

import gc
import importlib
import io
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Never

from fedveil.flower.guard import answer, guard
from fedveil.flower.programs import end_with_us

IMPORTED = (
    "flwr.supernode.cli",
    "flwr.supernode.runtime.run_clientapp",
    "fedveil.flower.client_app",
)
"""What a message needs, and what takes longer than most messages."""


def main() -> None:
    """Fork for each line, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for those who started it
    end_with_us()
    for name in IMPORTED:
        importlib.import_module(name)
    guard()  # each fork does, and a Flower that cannot be guarded is noticed now
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
    gc.freeze()
    for line in io.FileIO(0):  # which reads nothing ahead that a fork would then have too
        arguments = json.loads(line)
        try:
            process = os.fork()
        except OSError as e:
            print(f"error: a message is not answered: {e}", file=sys.stderr, flush=True)
            continue
        if process == 0:
            _in_fork(arguments)


def _in_fork(arguments: list[str]) -> Never:
    """Answer a message as a process of its own, and end."""
    code = 1
    try:
        _begin()
        answer(arguments)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _begin() -> None:
    """Reset what the fork inherited: standard input, signal handlers and random generators.

    Python reseeds its own generator in a fork. A site's noise comes from none of these generators:
    it is secure, or has a seed from the operating system. But two forks must not draw alike.
    """
    import numpy as np
    import torch

    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    np.random.seed()
    torch.seed()


if __name__ == "__main__":
    main()
