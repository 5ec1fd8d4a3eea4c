"""`LocalFederation`: a deployment's SuperLink and SuperNodes as processes on this machine.

It runs the very scripts that operators and owners run. Whatever happens, leaving it ends everything
that it started.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from fedveil.base.interrupts import held
from fedveil.flower.programs import (
    Process,
    ProcessFailed,
    answers,
    own_environment,
    stop_all,
)

RUN = "run"
"""The run directory of a deployment, in its server's folder."""

_CONNECTED = "SuperNode ID:"
_REGISTERING = 180.0


class LocalFederation:
    """The processes of a deployment that `Deployment.write` wrote into a folder.

    It is a context manager: on leaving, processes that still run are stopped, sites first.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def names(self) -> list[str]:
        """The names of the sites that have a folder."""
        return sorted(place.name for place in (self.folder / "sites").iterdir())

    def start_superlink(self, url: str) -> None:
        """Start SuperLink, and wait until it answers at its address, with its certificate."""
        authority = self.server / "certificates" / "ca.crt"
        self.superlink = self._start("superlink", self.server / "superlink.sh")
        self.superlink.wait_for(lambda: answers(f"{url}/health", authority), "it answered")

    def register(self) -> None:
        """Register the sites' keys with SuperLink."""
        process = self._start("register", self.server / "register.sh")
        if process.wait(_REGISTERING) != 0:
            raise ProcessFailed(f"sites were not registered: {process.last_words}")

    def start_mixer(self) -> None:
        """Start the mixer, where the recipe needs one."""
        script = self.folder / "mixer" / "mixer.sh"
        if script.exists():
            mixer = self._start("mixer", script)
            mixer.wait_for(lambda: "\n" in mixer.output, "it listened")

    def start_site(self, name: str, **environment: str) -> Process:
        """Start a site's SuperNode. `wait_until_connected` waits until it reaches SuperLink."""
        script = self.folder / "sites" / name / "supernode.sh"
        self.sites[name] = self._start(name, script, **environment)
        return self.sites[name]

    def wait_until_connected(self, *names: str) -> None:
        """Wait until these sites, or all that were started, have reached SuperLink."""
        for name in names or self.sites:
            process = self.sites[name]
            process.wait_for(lambda p=process: _CONNECTED in p.output, "it reached SuperLink")  # type: ignore[misc]

    def run(self, directory: str = RUN) -> Process:
        """`flwr run`, which shows what the server says until the run has ended.

        `directory` is the run directory, in the server's folder; a run that is there is resumed.
        """
        chosen = [] if directory == RUN else ["--run-config", f'run-directory="{directory}"']
        return self._start(f"flwr-{directory}", self.server / "run.sh", *chosen)

    def rounds(self, directory: str = RUN) -> list[dict[str, Any]]:
        """The lines of a run's metrics file so far."""
        file = self.server / directory / "metrics.jsonl"
        if not file.exists():
            return []
        lines = file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def result(self, directory: str = RUN) -> dict[str, Any] | None:
        """The result of a run, or None if it has not ended properly."""
        file = self.server / directory / "result.json"
        result: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
        return result

    def stop(self) -> None:
        """Stop runs and sites, then SuperLink, from which the sites sign off."""
        try:
            stop_all(process for process in self._started if process is not self.superlink)
        finally:
            stop_all(self._started)

    def _start(self, name: str, script: Path, *arguments: str, **environment: str) -> Process:
        with held():  # until it is among those that are stopped
            process = Process.start(
                name,
                ["sh", script, *arguments],
                self.logs / f"{name}.log",
                environment=self._environment | environment,
            )
            self._started.append(process)
        return process


def free_ports(number: int) -> Iterator[int]:
    """Ports of this machine that nobody uses now, all different."""
    with ExitStack() as stack:
        for _ in range(number):
            one = stack.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            yield int(one.getsockname()[1])
