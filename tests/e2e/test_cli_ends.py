"""How commands end when the world is against them: one line, no traceback, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from fedveil import __main__ as entry
from fedveil.cli import main as commands
from fedveil.data import load

ROOT = Path(__file__).parents[2]
LONG = "x" * 5000


def files():
    return sorted(str(path) for path in Path(".").rglob("*"))


# ---- what is given and not used


UNUSED = {
    "a file beside digits": (["run", "--data", "cancer.csv"], "--data cancer.csv has no effect"),
    "a folder beside digits": (["run", "--data", "."], "has no effect on digits"),
    "a folder beside diabetes": (
        ["run", "dp-fedavg", "--data", ".", "--set", "data.name=diabetes"],
        "has no effect on diabetes",
    ),
    "a folder beside saved data": (
        ["run", "--data", ".", "--set", "data.name=saved", "--set", "data.path=x"],
        "has no effect on saved",
    ),
    "a folder for a sweep over digits": (
        ["sweep", "central", "--grid", "rounds=1,2", "--out", "o", "--data", "."],
        "has no effect on digits",
    ),
    "a folder for a plan on digits": (["plan", "central", "--data", "."], "--data . has no effect"),
    "a folder for formulas": (["plan", "--data", "."], "--data need a recipe"),
    "repetitions of nothing": (["plan", "dp-fedavg", "--repeat", "5"], "add --simulate"),
    "a budget for a run that goes on": (
        ["run", "--resume", ".", "--ledger-epsilon", "0"],
        "--resume takes the recipe",
    ),
    "an empty recipe": (["run", ""], "recipe '' is unknown"),
    "no hidden layers": (["run", "--set", "model.hidden=[]"], "model.hidden is empty"),
    "timings of nothing": (["run", "--set", "engine.timings={looped=1.0}"], "engine.timings"),
}


@pytest.mark.parametrize(("arguments", "mentions"), UNUSED.values(), ids=UNUSED)
def test_what_is_given_and_not_used_is_refused(cli, monkeypatch, arguments, mentions):
    monkeypatch.setattr(load, "load_records", None)  # refused before any data are read
    assert mentions in cli(*arguments).error
    assert files() == []


def test_a_variable_may_stay_set(cli, monkeypatch, settings):
    monkeypatch.setenv("FEDVEIL_DATA", "/nowhere")
    assert cli("run", "fedavg", *settings("fedavg"), "--quiet").code == 0


def test_a_sweep_may_read_one_of_its_data_sets_from_a_folder(cli):
    told = cli(
        *("sweep", "fedavg", "--grid", "data.name=digits,mnist", "--out", "o", "--data", "."),
    )
    assert "has no effect" not in told.error
    assert files() == []


def test_a_folder_is_not_needed_to_go_on(cli, settings):
    assert cli("run", "fedavg", *settings("fedavg"), "--quiet", "--out", "run").code == 0
    assert "has no effect on digits" in cli("run", "--resume", "run", "--data", ".").error


# ---- paths that cannot be looked at


PATHS = {
    "run --out": ["run", "--out", LONG],
    "run --resume": ["run", "--resume", LONG],
    "run --ledger": ["run", "--ledger", LONG],
    "run --data": ["run", "--data", LONG],
    "run recipe": ["run", f"{LONG}.toml"],
    "plan --out": ["plan", "dp-fedavg", "--out", f"{LONG}.toml"],
    "sweep --out": ["sweep", "central", "--grid", "rounds=1,2", "--out", LONG],
    "reproduce --out": ["reproduce", "fu", "--out", LONG],
}


@pytest.mark.parametrize("arguments", PATHS.values(), ids=PATHS)
def test_a_name_that_is_too_long(cli, arguments):
    line = cli(*arguments).error
    assert "File name too long" in line
    assert files() == []


WITHOUT_POWERS = """
import ctypes, os, sys
if os.getuid() == 0:  # root without capabilities is clip by permissions like anybody else
    nothing = (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None, use_errno=True).capset((ctypes.c_uint32 * 2)(0x20080522, 0), nothing)
from fedveil.cli.main import main
main()
"""


@pytest.fixture
def closed(tmp_path):
    """A folder that not even its owner may look into."""
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


CLOSED = {
    "run --out inside": ["run", "--out", "closed/run"],
    "run --out": ["run", "--out", "closed"],
    "run --resume inside": ["run", "--resume", "closed/run"],
    "run --ledger inside": ["run", "--ledger", "closed/shared.db"],
    "sweep --out inside": ["sweep", "central", "--grid", "rounds=1,2", "--out", "closed/sweep"],
    "sweep --out": ["sweep", "central", "--grid", "rounds=1,2", "--out", "closed"],
    "plan --out inside": ["plan", "dp-fedavg", "--out", "closed/plan.toml"],
    "run --data": ["run", "--set", "data.name=mnist", "--data", "closed/data"],
}


@pytest.mark.parametrize("arguments", CLOSED.values(), ids=CLOSED)
def test_a_folder_that_is_closed(closed, arguments):
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_POWERS, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=closed.parent,
    )
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert arguments[-2] in line
    assert "Permission denied" in line or "is not readable" in line


def test_a_folder_that_cannot_be_written_is_refused_at_once(cli, monkeypatch):
    Path("closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed")
    monkeypatch.setattr(load, "load_records", None)
    assert "nothing can be written in" in cli("run", "--out", "closed/run").error
    assert files() == ["closed"]


# ---- errors of the machine


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(28, "No space left on device", "/full/disk"), 2, "No space left on device"),
        (PermissionError(13, "Permission denied", "/closed"), 2, "'/closed': Permission denied"),
        (OSError("odd"), 2, "odd"),
        (MemoryError(), 1, "memory ran out"),
    ],
)
def test_an_error_of_the_machine_is_one_line(cli, monkeypatch, error, code, said):
    def fail(**_):
        raise error

    monkeypatch.setattr(commands, "whole_command", lambda: fail)
    told = cli("recipes")
    assert told.code == code
    (line,) = told.err.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_a_bug_is_no_error_of_the_machine(monkeypatch):
    def fail(**_):
        raise KeyError("a bug")

    monkeypatch.setattr(commands, "whole_command", lambda: fail)
    with pytest.raises(KeyError):
        entry.main()


def test_a_pipe_that_nobody_reads():
    process = subprocess.Popen(
        [sys.executable, "-m", "fedveil", "recipes", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.wait(timeout=60) in (0, 1)
    assert process.stderr.read() == ""
    process.stderr.close()


# ---- numbers that take for ever


QUICK = {
    "account": (
        "account --noise 1 --rate 0.01 --rounds 1000000000 --delta 1e-5",
        "--rounds is 1000000000: at most 1,000,000 are possible",
    ),
    "plan": (
        "plan --set clients=1000000000000 --set per_round=10 --set parameters=9 --set epsilon=1",
        "clients is 1000000000000: at most 100,000,000 are possible",
    ),
    "workers": ("run --set engine.workers=1000", "engine.workers is 1000: a number from 1 to"),
    "workers of a sweep": (
        "sweep central --grid rounds=1,2 --out o --workers 1000",
        "--workers is 1000: a number from 1 to",
    ),
    "workers of a plan": ("plan dp-fedavg --workers 1000", "--workers is 1000"),
    "workers of a paper": ("reproduce fu --workers 1000", "--workers is 1000"),
    "repetitions of a plan": ("plan dp-fedavg --simulate --repeat 1000000", "--repeat is 1000000"),
}


@pytest.mark.parametrize(("line", "said"), QUICK.values(), ids=QUICK)
def test_numbers_beyond_reach_are_refused_at_once(cli, monkeypatch, line, said):
    monkeypatch.setattr("fedveil.base.checks.cores", lambda: 2)
    began = time.monotonic()
    assert said in cli(*line.split()).error
    assert time.monotonic() - began < 2
    assert files() == []


def test_a_plan_for_many_clients_makes_no_list_of_them(cli):
    sizes = ("clients=100000000", "per_round=10", "parameters=9", "epsilon=1", "delta=1e-9")
    sets = [part for size in sizes for part in ("--set", size)]
    told = cli("plan", *sets, "--grid", "steps=1", "--grid", "iterations=12", "--json")
    assert told.code == 0
    assert json.loads(told.out)["options"][0]["reports_per_client"] == 1


# ---- Ctrl-C


BEGIN = (
    "import os, sys; sys.argv[0] = 'fedveil'; from fedveil.__main__ import end_at_once, main; "
    "end_at_once(); os.write(1, b'x'); main()"
)


@pytest.mark.parametrize("delay", [0.02, 0.1, 0.3])
def test_ctrl_c_while_everything_is_being_imported(tmp_path, delay):
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, "run", "fedavg", "--quiet", "--set", "rounds=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout.read(1) == b"x"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (1, b"interrupted\n")
    assert list(tmp_path.iterdir()) == []


def raised(error, cause):
    def fail():
        raise error from cause

    return fail


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (KeyboardInterrupt(), None),
        (RuntimeError("a class could not be made"), KeyboardInterrupt()),
        (ImportError("half a module"), RuntimeError("half a class")),
    ],
)
def test_what_an_import_makes_of_ctrl_c(monkeypatch, capsys, error, cause):
    by_ctrl_c = isinstance(cause or error, KeyboardInterrupt)
    monkeypatch.setattr(commands, "main", raised(error, cause))
    with pytest.raises(SystemExit if by_ctrl_c else ImportError) as ended:
        entry.main()
    if by_ctrl_c:
        assert ended.value.code == 1
        assert capsys.readouterr().err == "interrupted\n"


def test_the_command_is_the_one_that_catches_ctrl_c():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"fedveil": "fedveil.__main__:main"}


# ---- what is promised


def test_no_attacks_are_promised():
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    import fedveil

    for text in (promised, commands.app.info.help, fedveil.__doc__):
        assert "attack" not in text
    assert commands.app.info.help == f"{promised}."
