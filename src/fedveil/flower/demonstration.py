"""A federation on this machine, from its first process to its last: what `deploy --demo` shows."""

import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from fedveil.base.errors import FedveilError
from fedveil.flower.deployment import Deployment
from fedveil.flower.local import LocalFederation
from fedveil.flower.programs import Process
from fedveil.privacy.accounting.claims import rendered

_LOOK = 0.5
_NUMBERS = ("accuracy", "loss")


class DemonstrationFailed(FedveilError):
    """The run ended without a result."""


def demonstrate(deployment: Deployment, folder: Path) -> Generator[str, None, None]:
    """Start SuperLink, the sites and the run of a deployment, and yield what happens as lines.

    All processes are stopped when the generator ends or is closed.
    """
    with LocalFederation(folder) as federation:
        url = f"https://{deployment.address}"
        federation.start_superlink(url)
        yield f"SuperLink is up: {url}"
        federation.register()
        federation.start_mixer()
        for name in deployment.sites:
            federation.start_site(name)
        federation.wait_until_connected()
        yield f"sites are connected: {', '.join(deployment.sites)}"
        run = federation.run()
        yield from _followed(federation, run)
        if federation.result() is None:
            raise DemonstrationFailed(
                f"the run has no result: {_reason(run)} (all that was said: {federation.logs})"
            )


def _followed(federation: LocalFederation, run: Process) -> Iterator[str]:
    """A line for each round that the run directory has, as they come."""
    shown = 0
    while True:
        running = run.running
        rounds = federation.rounds()
        yield from (_line(line) for line in rounds[shown:] if line["round"])
        shown = len(rounds)
        if not running:
            return
        time.sleep(_LOOK)


def _line(line: dict[str, Any]) -> str:
    parts = [f"round {line['round']}"]
    parts += [f"{name} {line[name]:.4g}" for name in _NUMBERS if line.get(name) is not None]
    if line["epsilon"] is not None:
        parts.append(f"epsilon {rendered(line['epsilon'])} {line['claim']}")
    return " | ".join(parts)


def _reason(run: Process) -> str:
    """The last error in the server's output, or its last line."""
    lines = [line.strip() for line in run.output.splitlines() if "rror" in line]
    return lines[-1] if lines else run.last_words
