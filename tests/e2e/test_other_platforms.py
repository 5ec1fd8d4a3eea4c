"""Commands with what macOS and Windows lack taken away: the same bits, or one line."""

import os
import subprocess
import sys

import pytest

LACKING = """
import ctypes, os, sys

import filelock  # which locks files by other means where there is no fcntl

for name in ("fcntl", "grp", "resource", "termios"):
    sys.modules[name] = None
for name in ("fork", "forkpty", "killpg", "sched_getaffinity", "O_NOFOLLOW", "O_NONBLOCK"):
    delattr(os, name)

class OtherLibrary(ctypes.CDLL):
    def __init__(self, name, *arguments, **options):
        if name is None:  # so neither prctl nor mallopt
            raise TypeError("bad argument type for built-in operation")
        super().__init__(name, *arguments, **options)

ctypes.CDLL = OtherLibrary
if "--multiprocessing-fork" in sys.orig_argv:
    with open("spawned", "a") as file:
        file.write("a worker\\n")
"""
SMALL = ("rounds=2", "data.clients=20", "noise.multiplier=2.0", "budget.epsilon=inf")
SETTINGS = [word for one in (*SMALL, "budget.delta=1e-4") for word in ("--set", one)]
WORKERS = ["--set", "engine.workers=2", "--set", "engine.chunk=2"]

OWN_MODEL = """
from torch import nn

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 10)

    def forward(self, x):
        out = self.inner(x.flatten(1))
        return out if out.sum() > 0 else out * 1.0
"""
SCRIPT = """
import fedveil as fv
from own import Branching

settings = {"rounds": 2, "data.clients": 20, "noise.multiplier": 2.0, "budget.epsilon": 1e6}
try:
    fv.run("central", model=Branching(), out="own", set=settings)
except fv.BadInput as e:
    print("refused:", e)
"""


@pytest.fixture
def lacking(tmp_path, monkeypatch):
    """Start programs that begin by losing what other platforms lack, workers included."""
    place = tmp_path / "lacking"
    place.mkdir()
    (place / "sitecustomize.py").write_text(LACKING)
    monkeypatch.chdir(tmp_path)

    def called(*arguments, lacks=True):
        before = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join(part for part in (str(place) if lacks else "", before) if part)
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    return called


@pytest.fixture
def fedveil(lacking):
    def called(*arguments, **options):
        found = lacking("-m", "fedveil", *arguments, **options)
        assert found.returncode == 0, found.stderr
        return found

    return called


@pytest.mark.slow
def test_a_run_on_spawned_workers_has_the_bits_of_forked_ones(fedveil, tmp_path):
    run = ("run", "central", *SETTINGS, *WORKERS, "--out")
    fedveil(*run, "there")
    fedveil(*run, "here", lacks=False)
    there, here = (tmp_path / name / "model.safetensors" for name in ("there", "here"))
    assert there.read_bytes() == here.read_bytes()
    assert (tmp_path / "spawned").read_text() == "a worker\n" * 2
    assert "none changed" in fedveil("ledger", "there", "--verify").stdout


@pytest.mark.slow
def test_a_sweep(fedveil, tmp_path):
    sweep = ("sweep", "central", *SETTINGS, "--grid", "client.lr=0.01,0.1", "--repeat", "1")
    fedveil(*sweep, "--workers", "2", "--out", "sweep-there")
    fedveil(*sweep, "--workers", "2", "--out", "sweep-here", lacks=False)
    assert (tmp_path / "spawned").read_text() == "a worker\n" * 2
    results = [(tmp_path / f"sweep-{at}" / "results.csv").read_text() for at in ("there", "here")]
    assert results[0] == results[1]


@pytest.mark.slow
def test_what_needs_linux_is_refused_in_one_line(lacking, tmp_path):
    demo = lacking("-m", "fedveil", "deploy", "central", "federation", "--demo", "3")
    assert demo.returncode == 2
    assert demo.stderr == (
        "error: --demo runs sites on this machine, and sites run on Linux only\n"
    )
    assert not (tmp_path / "federation").exists()
    (tmp_path / "own.py").write_text(OWN_MODEL)
    (tmp_path / "script.py").write_text(SCRIPT)
    own = lacking("script.py")
    (line,) = own.stdout.splitlines()
    assert line.startswith("refused: the model Branching or its loss cannot be captured"), own
    assert line.endswith("or use Linux on x86-64")


@pytest.mark.slow
def test_a_mixer_opens_its_rounds_once(lacking):
    program = """
from fedveil.mixing.mixer import OpenedRounds
one = OpenedRounds("opened")
one.add(3)
try:
    OpenedRounds("opened")
except ValueError as e:
    print(e)
one.close()
print(OpenedRounds("opened").numbers)
"""
    found = lacking("-c", program)
    assert found.stdout == "mixer.opened is opened: another mixer uses it\n{3}\n", found.stderr
