"""Flower's programs as processes of this one: started, waited for, and always ended.

Each has a log file and a group of its own, so that Ctrl-C on a terminal reaches this process alone,
which then ends them in order.
"""

import ctypes
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedveil.base.errors import FedveilError
from fedveil.base.interrupts import held

STARTING = 120.0
"""Seconds that a program may take to begin, on a machine that is busy."""

_PAUSE, _GRACE = 0.1, 10.0
_TAIL = 4000
_PARENT_DEATH_SIGNAL = 1


class ProcessFailed(FedveilError):
    """A program ended, or did not begin, when it was needed."""


@dataclass(frozen=True)
class Process:
    """A running program."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "Process":
        """Start a program whose output goes to the end of a log file."""
        with log.open("ab") as output, held():
            popen = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=own_environment() if environment is None else environment,
                start_new_session=True,
                preexec_fn=end_with_us,
            )
        return cls(name, popen, log)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.popen.poll() is None

    def wait_for(self, ready: Callable[[], bool], what: str, seconds: float = STARTING) -> None:
        """Wait until `ready` holds. Raises `ProcessFailed` if it ends before or takes too long."""
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.running:
                raise ProcessFailed(f"{self.name} ended before {what}: {self.last_words}")
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{self.name}: not {what} in {seconds:g} s: {self.last_words}")
            time.sleep(_PAUSE)

    def wait(self, seconds: float) -> int:
        """Wait for its end and return its exit code. `ProcessFailed` if it takes too long."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired as e:
            raise ProcessFailed(f"{self.name} did not end in {seconds:g} s") from e

    def kill(self) -> None:
        """End it and what it started in its group at once, as a power cut would."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    @property
    def output(self) -> str:
        """Its output so far."""
        return self.log.read_text(errors="replace")

    @property
    def last_words(self) -> str:
        """The last line of its output that is not blank."""
        lines = [line.strip() for line in self.output[-_TAIL:].splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def end_with_us() -> None:
    """Runs in a new process: end when the parent does, on systems that can do this.

    A parent that is killed has no time to stop what it started.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def stop_all(processes: Iterable[Process]) -> None:
    """End programs as their operators would, all at once, and by force those that do not listen.

    A second Ctrl-C, or whatever else comes in between, does not keep any of them alive.
    """
    left = [process for process in processes if process.running]
    try:
        for process in left:
            process.popen.terminate()
        deadline = time.monotonic() + _GRACE
        while any(process.running for process in left) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
    finally:
        with held():
            for process in left:
                process.kill()


def own_environment(**more: str) -> dict[str, str]:
    """This process's environment, in which Flower's programs are those installed beside Python."""
    programs = str(Path(sys.executable).parent)
    path = os.pathsep.join(part for part in (programs, os.environ.get("PATH", "")) if part)
    return {**os.environ, "PATH": path, **more}


def answers(url: str, authority: Path) -> bool:
    """Whether a server says at `url` that it is well, with a certificate of that authority."""
    context = ssl.create_default_context(cafile=str(authority))
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
