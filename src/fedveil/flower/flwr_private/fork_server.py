"""SuperExec of a site, and the process that forks for each message.

Flower starts `flwr-clientapp` for every message, which imports PyTorch and Flower and builds the
plan each time: some seconds of one core. Here one process imports, one that it forks opens the
site, and that one forks for each message.
"""

import gc
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Never

from fedveil.base.platforms import can_fork
from fedveil.flower.flwr_private import flower_name, guard, replace_flower_name
from fedveil.flower.flwr_private.app_process import end_with_starter, return_freed_memory

SUPEREXEC = "flower-superexec"
"""The command that a site starts beside its SuperNode, and that starts the others."""

FORK_SERVER = (sys.executable, "-m", "fedveil.flower.flwr_private", "fork-server")

IMPORTED = (
    "flwr.supernode.cli",
    "flwr.supernode.runtime.run_clientapp",
    "fedveil.flower.flower_apps",
)
"""The modules that answer a message. Importing them takes longer than most messages."""

_SCRIPT = '#!/bin/sh\nexec python3 -m fedveil.flower.flwr_private {program} "$@"\n'
_EXECUTOR = "flwr.supercore.superexec.executor.subprocess_executor"
_POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"


def write_programs(folder: Path, programs: dict[str, str]) -> None:
    """Make a folder, and write commands into it as scripts: this package's programs by name.

    The folder comes first in the PATH of a site or server, so that these scripts run in place of
    Flower's. FileExistsError if the folder exists.
    """
    folder.mkdir()
    for command, program in programs.items():
        path = folder / command
        path.write_text(_SCRIPT.format(program=program), newline="\n")
        path.chmod(0o755)


class ForkedPrograms:
    """A replacement for the module `subprocess` in Flower, which forks a process for a message.

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
        if program != guard.GUARDED or options:
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
    if flower_name(_EXECUTOR, "subprocess") is not subprocess:
        sys.exit("error: this version of Flower has no subprocess where it is replaced")
    replace_flower_name(_EXECUTOR, "subprocess", ForkedPrograms(server))


def run_superexec(arguments: Sequence[str], server: Sequence[str] = FORK_SERVER) -> None:
    """Run `flower-superexec` of a site, which starts apps by the fork server `server`.

    Exits where forking is unsafe or impossible.
    """
    if not can_fork():
        sys.exit("error: a site forks a process for each message, so it runs on Linux only")
    sys.argv = [SUPEREXEC, *arguments]
    os.environ.setdefault(_POLL, "0.1")  # of SuperNode, on loopback; seconds
    install_forks(server)
    from flwr.supercore.cli import flower_superexec

    flower_superexec()


def serve_forks() -> None:
    """Run the fork server: import `IMPORTED`, and let the site's process fork for each line.

    A line of standard input is a JSON list, the arguments of `flwr-clientapp`. The process ends
    with its standard input, so that only its parent can use it. It has imported modules and nothing
    else: no key, no record, no ledger and no message was ever in its memory. It refuses to start
    where the canary does not pass.

    | edge | behaviour |
    |---|---|
    | one of the owner's files has changed | another process opens the site anew |
    | the process that opened the site has died | the same |
    | the site cannot be opened | each message says so |
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for those who started it
    end_with_starter()
    return_freed_memory()
    for name in IMPORTED:
        importlib.import_module(name)
    guard.run_canary()
    guard.guard()  # each fork does, and a Flower that cannot be guarded is noticed now
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
    gc.freeze()
    site = _SiteProcess()
    for line in io.FileIO(0):  # which reads nothing ahead that a fork would then have too
        try:
            site.ask(line)
        except OSError as e:
            print(f"error: a message is not answered: {e}", file=sys.stderr, flush=True)


def print_canary() -> None:
    """Exit unless the canary passes. Print how many bytes an ask of this site's plan has, as JSON.

    0 where the site cannot be opened, of which each message tells the owner.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    guard.run_canary()
    most = 0
    path = os.environ.get("FEDVEIL_SITE")
    if path:
        from fedveil.flower.prepared_site import open_site

        with suppress(Exception):
            most = sum(form.encoded_length for form in open_site(Path(path)).ask_forms.values())
    print(json.dumps({"ask_bytes": most}), flush=True)


class _SiteProcess:
    """A fork of the fork server that has opened the site, and forks for each message.

    It knows the site's plan and records, and no message: these are in its forks alone.
    """

    def __init__(self) -> None:
        self._pipe, self._states = -1, self._file_states()
        self._start()

    def ask(self, line: bytes) -> None:
        """Hand the arguments of one message on, to a new process if the owner's files changed.

        OSError if no process can be started.
        """
        states = self._file_states()
        if states != self._states or self._keeper_ended():
            self._states = states
            self._start()
        try:
            os.write(self._pipe, line)
        except BrokenPipeError:
            self._start()
            os.write(self._pipe, line)

    def _start(self) -> None:
        """Fork a process that opens the site. The one before ends with its pipe.

        A site of secure sums has a process with its masking keys, which does not end with it.
        """
        keeper = _keeper_of_site()
        if keeper is not None:
            keeper.keep_running()
        if self._pipe >= 0:
            os.close(self._pipe)
        readable, self._pipe = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(self._pipe)
            os.dup2(readable, 0)
            os.close(readable)
            _open_and_fork()
        os.close(readable)

    @staticmethod
    def _keeper_ended() -> bool:
        """Return whether the process with the site's masking keys was there, and has ended."""
        keeper = sys.modules.get("fedveil.flower.masking_keeper")
        running = keeper and keeper.running_keeper()
        return bool(running and running.ended)

    def _file_states(self) -> object:
        """Return the states of the owner's files. None if no file is named."""
        prepared = sys.modules.get("fedveil.flower.prepared_site")
        path = os.environ.get("FEDVEIL_SITE")
        return prepared.file_states(Path(path)) if prepared and path else None


def _keeper_of_site() -> Any:
    """Return the module `masking_keeper` if the site's file has [sum_keys], None otherwise."""
    path = os.environ.get("FEDVEIL_SITE")
    files = sys.modules.get("fedveil.flower.federation_files")
    if not path or files is None:
        return None
    with suppress(Exception):  # of a file that cannot be read each message tells the owner
        if files.read_site_file(Path(path)).sum_keys is not None:
            return importlib.import_module("fedveil.flower.masking_keeper")
    return None


def _open_and_fork() -> Never:
    """Open the site, and fork for each line of standard input, until it ends. Then exit."""
    try:
        end_with_starter()
        _open_site_before_forks()
        gc.freeze()
        for line in io.FileIO(0):
            arguments = json.loads(line)
            try:
                process = os.fork()
            except OSError as e:
                print(f"error: a message is not answered: {e}", file=sys.stderr, flush=True)
                continue
            if process == 0:
                _answer_in_fork(arguments)
    finally:
        os._exit(0)


def _open_site_before_forks() -> None:
    """Open the site that FEDVEIL_SITE names, so that every fork has it, with one PyTorch thread.

    Nothing is done without that variable, or before `prepared_site` is imported. A site that cannot
    be opened raises nothing here: each message reports the error.
    """
    path = os.environ.get("FEDVEIL_SITE")
    if path and "fedveil.flower.prepared_site" in sys.modules:
        import torch

        from fedveil.flower.flwr_private.arrays import bound_arrays
        from fedveil.flower.prepared_site import open_site

        torch.set_num_threads(1)  # a process with threads of PyTorch's cannot be forked
        with suppress(Exception):
            site = open_site(Path(path))
            site.prepare()
            bound_arrays(sum(form.encoded_length for form in site.ask_forms.values()))


def _answer_in_fork(arguments: list[str]) -> Never:
    """Answer a message in a fork, and exit with the code that the program would have.

    `arguments` are those of `flwr-clientapp`.
    """
    code = 1
    try:
        _reset_fork()
        guard.answer_message(arguments)
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
