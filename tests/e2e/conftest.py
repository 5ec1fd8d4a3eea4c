"""The command line: in this process where that will do, as a process of its own where not."""

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedveil.cli import main as commands

SHORT = ("rounds=3", "data.clients=20", "client.epochs=1", "engine.workers=1")
NOISY = ("noise.multiplier=2.0", "budget.epsilon=inf", "budget.delta=1e-4")
SMALL = ("rounds=3", "data.clients=20", "engine.workers=1", "sample.size=10")
BASE = {
    "central": (*SHORT, *NOISY),
    "ldp-sgd": (*SMALL, *NOISY),
    "dp-sgd": (*SMALL, *NOISY),
}


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def error(self):
        """The one line a refusal consists of."""
        assert self.code == 2, self
        (line,) = self.err.splitlines()
        assert line.startswith("error: "), self.err
        assert len(line) > len("error: (see fedveil --help)")
        return line


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Run a command in this process, in an empty folder, and catch what it says."""
    workplace = tmp_path / "workplace"
    workplace.mkdir()
    monkeypatch.chdir(workplace)
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedveil", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            commands.main()
        return Outcome(ended.value.code, *capsys.readouterr())

    return called


@pytest.fixture
def spawn():
    """Start a command as a process that takes Ctrl-C; what is still running is killed."""
    started = []

    def spawned(*arguments, **options):
        program = Path(sys.executable).with_name("fedveil")
        process = subprocess.Popen(
            [program, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            **options,
        )
        started.append(process)
        return process

    yield spawned
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def settings():
    """--set arguments of a short run of a recipe, with more behind them."""

    def made(recipe, *more):
        base = BASE.get(recipe, (*SHORT, "sample.size=10"))
        return [part for setting in (*base, *more) for part in ("--set", setting)]

    return made
