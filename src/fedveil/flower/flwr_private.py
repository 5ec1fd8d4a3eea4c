"""Flower's programs as a federation runs them. Only this module uses Flower's private names.

    python -m fedveil.flower.flwr_private PROGRAM [ARGUMENTS]

| program | what it does |
|---|---|
| flower-superlink | runs SuperLink behind `SuperLinkGate` |
| flower-superexec | runs SuperExec of a site, which forks for each message (`ForkedPrograms`) |
| fork-server | imports everything once, and forks for each message (`serve_forks`) |
| flwr-clientapp | answers one message with the installed ClientApp (`answer_message`) |
| any other | is refused: a site answers rounds, and nothing else |

If a version of Flower lacks one of the names that are replaced here, the program exits rather than
run without the protection. This module imports nothing heavy: Flower starts another program
for a message if one has not reported within half a minute, which is short on a busy machine.
"""

import gc
import importlib
import io
import ipaddress
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Never

from fedveil.base.platforms import c_function, can_fork

SUPERLINK = "flower-superlink"

SUPEREXEC = "flower-superexec"
"""The command that a site starts beside its SuperNode, and that starts the others."""

GUARDED = "flwr-clientapp"
"""The command for a message to a ClientApp."""

REFUSED = ("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-serverapp", "flwr-simulation")
"""The other commands that SuperExec could be made to start."""

FORK_SERVER = (sys.executable, "-m", "fedveil.flower.flwr_private", "fork-server")

IMPORTED = (
    "flwr.supernode.cli",
    "flwr.supernode.runtime.run_clientapp",
    "fedveil.flower.flower_apps",
)
"""The modules that answer a message. Importing them takes longer than most messages."""

FOR_SITES = "/v1/fleet/"
FOR_ANYBODY = ("/health",)

_SCRIPT = '#!/bin/sh\nexec python3 -m fedveil.flower.flwr_private {program} "$@"\n'
_PARENT_OPTION = "--parent-pid"
_PARENT_DEATH_SIGNAL = 1
_POLL_SECONDS, _GRACE_SECONDS = 0.5, 5.0

Scope = MutableMapping[str, Any]
Asgi = Callable[[Scope, Any, Any], Awaitable[None]]


def main() -> None:
    """Run the program that the command line names first, or exit with an error if it is refused."""
    _, program, *arguments = sys.argv
    programs = {SUPERLINK: run_superlink, SUPEREXEC: run_superexec, GUARDED: answer_message}
    if program in programs:
        programs[program](arguments)
    elif program == "fork-server":
        serve_forks()
    else:
        sys.exit(f"error: this site runs no {program}: it answers rounds, and nothing else")


def write_programs(folder: Path) -> None:
    """Make a folder, and write the commands of a guarded site into it as scripts.

    The folder comes first in the site's PATH, so that these scripts run in place of Flower's.
    FileExistsError if the folder exists.
    """
    folder.mkdir()
    for program in (SUPEREXEC, GUARDED, *REFUSED):
        path = folder / program
        path.write_text(_SCRIPT.format(program=program), newline="\n")
        path.chmod(0o755)


# SuperLink


class SuperLinkGate:
    """Middleware that passes on requests of this machine, and others' requests for sites' paths.

    SuperLink serves sites, operators and its own programs at one port, and does not authenticate
    operators: anybody who reaches the port could register keys, or start a run with code of their
    own on the server and read every site's reports there.

    | who asks, and for what | what happens |
    |---|---|
    | this machine, for anything | passed on |
    | anybody, for a path below `FOR_SITES` | passed on: Flower checks the key |
    | anybody, for whether it is up | passed on |
    | others, for anything else, a path with dots in it included | 403 |
    | somebody without an address | as others |
    """

    def __init__(self, app: Asgi) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a request on, or answer it with 403 (a websocket: close it)."""
        path, host = scope.get("path", ""), (scope.get("client") or ("",))[0]
        public = path in FOR_ANYBODY or (path.startswith(FOR_SITES) and ".." not in path)
        if scope["type"] == "lifespan" or public or _is_loopback(host):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b"for the server's own machine\n"})


def _is_loopback(host: str) -> bool:
    """Return whether `host` is an IP address of this machine's loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def install_gate() -> None:
    """Put the gate in front of a SuperLink that this process starts later.

    Exits if Flower has no `_get_middleware` to replace.
    """
    from flwr.superlink import main as superlink
    from starlette.middleware import Middleware

    inside = getattr(superlink, "_get_middleware", None)
    if not callable(inside):
        sys.exit("error: this version of Flower has no _get_middleware where it is gated")
    superlink._get_middleware = lambda: [Middleware(SuperLinkGate), *inside()]


def run_superlink(arguments: Sequence[str]) -> None:
    """Run `flower-superlink` with these arguments in this process, behind the gate."""
    sys.argv = [SUPERLINK, *arguments]
    install_gate()
    from flwr.superlink.cli import flower_superlink

    flower_superlink()


# The ClientApp of a site


def answer_message(arguments: Sequence[str]) -> None:
    """Run `flwr-clientapp` with the ClientApp that is installed, never with one that was sent.

    `flwr run` sends a Flower app to every SuperNode, which unpacks it and runs its code beside the
    site's records. A site's promises would then hold only while the server is honest. A guarded
    site has this program first in its PATH: the app that arrives is neither unpacked nor imported,
    and `fedveil.flower.flower_apps` answers its messages.
    """
    sys.argv = [GUARDED, *arguments]
    guard()
    from flwr.supernode.cli import flwr_clientapp

    flwr_clientapp()


def guard() -> None:
    """Replace Flower's loading of a sent app by the installed ClientApp.

    Exits if this version of Flower has moved one of the two functions that are replaced: the site
    answers nothing rather than run code that was sent.
    """
    from flwr.supernode.runtime import run_clientapp as runtime

    def unpack_nothing(*_: object, **__: object) -> None:
        """Do nothing, in place of unpacking the app that was sent."""

    def load_installed(*_: object, **__: object) -> Callable[..., Any]:
        """Return a function that imports the installed ClientApp, in place of the one sent."""
        return lambda *_: importlib.import_module("fedveil.flower.flower_apps").client_app

    replaced = {"install_from_fab": unpack_nothing, "get_load_client_app_fn": load_installed}
    for name, own in replaced.items():
        if not callable(getattr(runtime, name, None)):
            sys.exit(f"error: this version of Flower has no {name} where it is guarded")
        setattr(runtime, name, own)


# One process for each message


class ForkedPrograms:
    """A replacement for the module `subprocess` in Flower, which forks a process for a message.

    Flower starts `flwr-clientapp` for every message, which imports PyTorch and Flower each time:
    some seconds of one core. The fork server does that once.

    Args:
        server: The command of the fork server.
    """

    DEVNULL = subprocess.DEVNULL

    def __init__(self, server: Sequence[str]) -> None:
        self._server = server
        self._running = self._start()

    def Popen(self, command: Sequence[str], **options: Any) -> object:  # noqa: N802
        """Start a program, or let the fork server fork the one that answers messages.

        Returns the started process, or the fork server's, whatever happens to the fork.

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
        """Kill the fork server, and not the processes that it forked."""
        with self._running as server:
            server.kill()

    def _ask(self, arguments: Sequence[str]) -> None:
        """Send the arguments of one message to the fork server.

        Raises BrokenPipeError if the server has ended or does not read.
        """
        pipe = self._running.stdin
        if pipe is None:
            raise AssertionError("the fork server reads from a pipe")
        line = json.dumps(arguments).encode() + b"\n"
        if self._running.poll() is not None or pipe.write(line) != len(line):
            raise BrokenPipeError("nobody reads it")

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a fork server, with a pipe that never blocks as its standard input."""
        started = subprocess.Popen(self._server, stdin=subprocess.PIPE, bufsize=0)
        if started.stdin is not None:
            os.set_blocking(started.stdin.fileno(), False)
        return started


def install_forks(server: Sequence[str]) -> None:
    """Make Flower's SuperExec start programs through a fork server, whose command is `server`.

    Exits if this version of Flower starts programs in another way.
    """
    from flwr.supercore.superexec.executor import subprocess_executor as flower

    if getattr(flower, "subprocess", None) is not subprocess:
        sys.exit("error: this version of Flower has no subprocess where it is replaced")
    vars(flower)["subprocess"] = ForkedPrograms(server)


def run_superexec(arguments: Sequence[str], server: Sequence[str] = FORK_SERVER) -> None:
    """Run `flower-superexec`, which forks through a fork server with the command `server`.

    Exits where forking is unsafe or impossible.
    """
    if not can_fork():
        sys.exit("error: a site forks a process for each message, so it runs on Linux only")
    sys.argv = [SUPEREXEC, *arguments]
    install_forks(server)
    from flwr.supercore.cli import flower_superexec

    flower_superexec()


def serve_forks() -> None:
    """Run the fork server: import `IMPORTED`, then fork for each line of standard input.

    A line is a JSON list, the arguments of `flwr-clientapp`. The process ends with its standard
    input, so that only its parent can use it. It has imported modules and nothing else: no key, no
    record, no ledger and no message was ever in its memory. Each message is answered in a fork,
    which ends with the message as the program would and leaves nothing behind.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for those who started it
    end_with_starter()
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
            _answer_in_fork(arguments)


def _answer_in_fork(arguments: list[str]) -> Never:
    """Answer a message in a fork, and exit with the code that the program would have.

    `arguments` are those of `flwr-clientapp`.
    """
    code = 1
    try:
        _reset_fork()
        answer_message(arguments)
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


def _reset_fork() -> None:
    """Reset what a fork inherits: standard input, signal handlers and random generators.

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


# The process of an app


def separate_flower_random() -> None:
    """Give the Flower modules imported so far a random generator in place of Python's global one.

    Call it after Flower is imported. Flower's threads (heartbeats, retries) draw at any time, while
    fedveil checks whether a user's module draws: a draw of Flower's would be blamed on the module.
    """
    own = random.Random()
    for name, module in tuple(sys.modules.items()):
        if name.split(".")[0] == "flwr" and getattr(module, "random", None) is random:
            module.random = own  # type: ignore[attr-defined]


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
    """Let Linux end this process when its parent ends. Elsewhere do nothing.

    A parent that is killed has no time to stop the processes that it started.
    """
    prctl = c_function("prctl")
    if prctl is not None:
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


if __name__ == "__main__":
    main()
