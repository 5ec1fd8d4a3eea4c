"""`flower-superexec` as sites run it: a message's process is forked, not started.

Flower starts `flwr-clientapp` for every message, which imports PyTorch and Flower each time: some
seconds of one core. A guarded site has this program first in its PATH as `flower-superexec`: it
starts one process, `fedveil.flower.fork_server`, which does that once.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from fedveil.flower.guard import GUARDED, SUPEREXEC

FORK_SERVER = (sys.executable, "-m", "fedveil.flower.fork_server")


class Programs:
    """A stand-in for the module `subprocess`, by which Flower starts programs."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self, server: Sequence[str]) -> None:
        self._server = server
        self._running = self._start()

    def Popen(self, command: Sequence[str], **options: Any) -> object:  # noqa: N802
        """Start a program. The one that answers messages is forked instead.

        | edge | behaviour |
        |---|---|
        | any other program | started as ever: a guarded site's refuses |
        | options for the program | started as ever, and guarded all the same |
        | the fork server has not imported everything yet | the message waits for it |
        | the fork server has died, or has not read for long | there is another one |
        | what it was asked and did not read | Flower hands it out again after half a minute |
        """
        program, *arguments = command
        if program != GUARDED or options:
            return subprocess.Popen(command, **options)
        try:
            self._ask(arguments)
        except BrokenPipeError:
            self.close()
            self._running = self._start()
            self._ask(arguments)
        return self._running

    def close(self) -> None:
        """End the fork server, and not what it forked."""
        with self._running as server:
            server.kill()

    def _ask(self, arguments: Sequence[str]) -> None:
        pipe = self._running.stdin
        if pipe is None:
            raise AssertionError("the fork server reads from a pipe")
        line = json.dumps(arguments).encode() + b"\n"
        if self._running.poll() is not None or pipe.write(line) != len(line):
            raise BrokenPipeError("nobody reads it")

    def _start(self) -> subprocess.Popen[bytes]:
        started = subprocess.Popen(self._server, stdin=subprocess.PIPE, bufsize=0)
        if started.stdin is not None:
            os.set_blocking(started.stdin.fileno(), False)
        return started


def fork(server: Sequence[str]) -> None:
    """Make Flower fork through a fork server, whose command is `server`.

    Exits if this version of Flower starts programs in another way, as `guard` does.
    """
    from flwr.supercore.superexec.executor import subprocess_executor as flower

    if getattr(flower, "subprocess", None) is not subprocess:
        sys.exit("error: this version of Flower has no subprocess where it is replaced")
    vars(flower)["subprocess"] = Programs(server)


def main(server: Sequence[str] = FORK_SERVER) -> None:
    """Run `flower-superexec`, which forks."""
    sys.argv[0] = SUPEREXEC
    fork(server)
    from flwr.supercore.cli import flower_superexec

    flower_superexec()


if __name__ == "__main__":
    main()
