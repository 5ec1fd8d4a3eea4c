"""A deployment as processes on this machine, for `fedveil deploy --demo`.

`LocalFederation` runs the same scripts as operators and owners do. Each process has its own log
file and process group, so that Ctrl-C reaches this process alone, which then ends them in order.
"""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.base.errors import FedveilError
from fedveil.base.interrupts import hold_signals
from fedveil.flower.flwr_private.app_process import end_with_starter

STARTING = 120.0
"""Seconds that a program may take to begin, on a busy machine."""

RUN = "run"
"""The run directory of a deployment, in its server's folder."""

_PAUSE, _FOLLOW = 0.1, 0.5  # seconds between two checks of a process, and of a run's files
_GRACE = 10.0
_REGISTERING = 180.0
_TAIL = 4000
_CONNECTED = "SuperNode ID:"


class ProcessFailed(FedveilError):
    """Raised when a program ended or did not begin when it was needed, or a run has no result."""


@dataclass(frozen=True)
class Process:
    """A program that was started.

    Attributes:
        name: The name in messages.
        popen: The process.
        log: The file with the program's output.
    """

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def launch(
        cls,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> "Process":
        """Start a program in a new session.

        Args:
            name: The name in messages.
            command: The program and its arguments.
            log: The file to which its output is appended.
            environment: The environment variables. None: `own_environment`.
            folder: The working directory. None: this process's.
        """
        with log.open("ab") as output, hold_signals():
            popen = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=own_environment() if environment is None else environment,
                cwd=folder,
                start_new_session=True,
                preexec_fn=end_with_starter,
            )
        return cls(name, popen, log)

    @property
    def running(self) -> bool:
        """Return whether the program has not ended."""
        return self.popen.poll() is None

    def wait_for(self, ready: Callable[[], bool], what: str, seconds: float = STARTING) -> None:
        """Wait until `ready` returns True, asking it again and again.

        Raises ProcessFailed if the program ends before, or `seconds` are over. `what` completes the
        message "ended before ...", as in "it answered".
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.running:
                raise ProcessFailed(f"{self.name} ended before {what}: {self.last_line}")
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{self.name}: not {what} in {seconds:g} s: {self.last_line}")
            time.sleep(_PAUSE)

    def wait(self, seconds: float) -> int:
        """Wait for the end and return the exit code. Raises ProcessFailed after `seconds`."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired as e:
            raise ProcessFailed(f"{self.name} did not end in {seconds:g} s") from e

    def kill(self) -> None:
        """Kill the program and its process group at once, as a power cut would.

        Waits for its end.
        """
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    @property
    def output(self) -> str:
        """Return the program's output so far."""
        return self.log.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        """Return the last line of the output that is not blank.

        "it said nothing" if there is none.
        """
        lines = [line.strip() for line in self.output[-_TAIL:].splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def stop_all(processes: Iterable[Process]) -> None:
    """Ask all programs to end, and kill those that have not ended after ten seconds.

    An exception in between, such as a second Ctrl-C, does not keep any of them alive.
    """
    left = [process for process in processes if process.running]
    try:
        for process in left:
            process.popen.terminate()
        deadline = time.monotonic() + _GRACE
        while any(process.running for process in left) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
    finally:
        with hold_signals():
            for process in left:
                process.kill()


def own_environment(**more: str) -> dict[str, str]:
    """Return a copy of this process's environment with the variables `more`.

    The folder of the running Python comes first in its PATH.
    """
    programs = str(Path(sys.executable).parent)
    path = os.pathsep.join(part for part in (programs, os.environ.get("PATH", "")) if part)
    return {**os.environ, "PATH": path, **more}


def is_healthy(url: str, authority: Path) -> bool:
    """Return whether `url` answers with status 200, with a certificate of this authority.

    `authority` is the file of its certificate. False if nobody answers within two seconds.
    """
    context = ssl.create_default_context(cafile=str(authority))
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def free_ports(number: int) -> Iterator[int]:
    """Yield `number` different ports of this machine that are free now.

    All are held until the generator ends, so take all of them before using one.
    """
    with ExitStack() as stack:
        for _ in range(number):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            yield int(listener.getsockname()[1])


class LocalFederation:
    """The processes of a deployment that `Deployment.write` wrote into a folder.

    It is a context manager: on leaving, processes that still run are stopped, sites first.

    Args:
        folder: The folder of the deployment.
        environment: More environment variables of all processes.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.server = folder / "server"
        self.logs = folder / "logs"
        self.sites: dict[str, Process] = {}
        self.superlink: Process | None = None
        self._environment = own_environment(**environment)
        self._started: list[Process] = []

    def __enter__(self) -> "LocalFederation":
        self.logs.mkdir(exist_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start_superlink(self, url: str) -> None:
        """Start SuperLink, and wait until it answers at `url` with its certificate.

        Raises ProcessFailed if it does not.
        """
        authority = self.server / "certificates" / "ca.crt"
        self.superlink = self._start("superlink", self.server / "superlink.sh")
        self.superlink.wait_for(lambda: is_healthy(f"{url}/health", authority), "it answered")

    def register(self) -> None:
        """Register the sites' keys with SuperLink, and wait for it.

        Raises ProcessFailed if that fails.
        """
        process = self._start("register", self.server / "register.sh")
        if process.wait(_REGISTERING) != 0:
            raise ProcessFailed(f"sites were not registered: {process.last_line}")

    def start_mixer(self) -> None:
        """Start the mixer and wait until it listens. Does nothing if the deployment has none."""
        script = self.folder / "mixer" / "mixer.sh"
        if script.exists():
            mixer = self._start("mixer", script)
            mixer.wait_for(lambda: "\n" in mixer.output, "it listened")

    def start_site(self, name: str, **environment: str) -> Process:
        """Start a site's SuperNode, with more environment variables. Does not wait for it."""
        script = self.folder / "sites" / name / "supernode.sh"
        self.sites[name] = self._start(name, script, **environment)
        return self.sites[name]

    def wait_until_connected(self, *names: str) -> None:
        """Wait until these sites, by default all that were started, have reached SuperLink.

        Raises ProcessFailed if one ends before, or does not in time.
        """
        for name in names or self.sites:
            process = self.sites[name]
            process.wait_for(lambda p=process: _CONNECTED in p.output, "it reached SuperLink")  # type: ignore[misc]

    def start_run(self, directory: str = RUN) -> Process:
        """Start `flwr run`, and return it without waiting. It ends with the run.

        `directory` is the run directory, in the server's folder. A run that is there is resumed.
        """
        chosen = [] if directory == RUN else ["--run-config", f'run-directory="{directory}"']
        return self._start(f"flwr-{directory}", self.server / "run.sh", *chosen)

    def round_lines(self, directory: str = RUN) -> list[dict[str, Any]]:
        """Return the whole lines of a run's metrics file so far, parsed. [] without a file."""
        file = self.server / directory / "metrics.jsonl"
        if not file.exists():
            return []
        lines = file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def read_result(self, directory: str = RUN) -> dict[str, Any] | None:
        """Return the content of a run's result.json, or None if the run has none yet."""
        file = self.server / directory / "result.json"
        result: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
        return result

    def stop(self) -> None:
        """Stop all processes, SuperLink last, since sites sign off from it."""
        try:
            stop_all(process for process in self._started if process is not self.superlink)
        finally:
            stop_all(self._started)

    def _start(self, name: str, script: Path, *arguments: str, **environment: str) -> Process:
        """Start a script of the deployment with its own log file, and return it.

        `stop` stops it.
        """
        with hold_signals():  # until it is among those that are stopped
            command: list[str | Path] = ["sh", script, *arguments]
            log = self.logs / f"{name}.log"
            process = Process.launch(name, command, log, self._environment | environment)
            self._started.append(process)
        return process


def demonstrate(folder: Path, url: str, sites: Sequence[str]) -> Generator[str, None, None]:
    """Start SuperLink, the sites and the run of a deployment, and yield each event as a line.

    All processes are stopped when the generator ends or is closed. Nothing starts before iteration
    does.

    Args:
        folder: The folder of the deployment.
        url: The address of its SuperLink.
        sites: The names of its sites.

    Raises:
        ProcessFailed: A program ended too early, or the run has no result.
    """
    with LocalFederation(folder) as federation:
        federation.start_superlink(url)
        yield f"SuperLink is up: {url}"
        federation.register()
        federation.start_mixer()
        for name in sites:
            federation.start_site(name)
        federation.wait_until_connected()
        yield f"sites are connected: {', '.join(sites)}"
        run, running, shown = federation.start_run(), True, 0
        while running:
            running = run.running  # before the file is read, so that its last lines are shown
            rounds = federation.round_lines()
            yield from (_round_text(line) for line in rounds[shown:] if line["round"])
            shown = len(rounds)
            if running:
                time.sleep(_FOLLOW)
        if federation.read_result() is None:
            errors = [line.strip() for line in run.output.splitlines() if "rror" in line]
            reason = errors[-1] if errors else run.last_line
            raise ProcessFailed(
                f"the run has no result: {reason} (all that was said: {federation.logs})"
            )


def _round_text(line: dict[str, Any]) -> str:
    """Return a line of the metrics file in words, such as "round 3 | accuracy 0.86 | loss 0.4".

    The epsilon and its claim come last. Numbers that the line does not have are left out.
    """
    from fedveil.privacy.accounting.claims import rendered

    names = [name for name in ("accuracy", "loss") if line.get(name) is not None]
    parts = [f"round {line['round']}", *(f"{name} {line[name]:.4g}" for name in names)]
    if line["epsilon"] is not None:
        parts.append(f"epsilon {rendered(line['epsilon'])} {line['claim']}")
    return " | ".join(parts)
