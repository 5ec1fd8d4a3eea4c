"""`fedveil sweep`: what it prints, refuses and survives."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from fedveil.cli import main as commands

SMALL = ("data.clients=20", "sample.size=5", "engine.mode=vectorised")
TABLES = ("results.csv", "summary.csv")


def files():
    return sorted(str(path) for path in Path(".").rglob("*"))


def command(out, *arguments, rounds=2, grid=("client.steps=1,2", "budget.epsilon=5,inf"), repeat=2):
    settings = [part for setting in (*SMALL, f"rounds={rounds}") for part in ("--set", setting)]
    axes = [part for axis in grid for part in ("--grid", axis)]
    tail = ["--repeat", repeat, "--out", out, "--workers", 1, *arguments]
    return ["sweep", "dp-fedavg", *settings, *axes, *tail]


def lines_of(folder):
    path = folder / "trials.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def members(session):
    """The living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(path.parent.name)
    return found


def test_a_sweep_prints_a_table_and_what_its_epsilons_mean(cli):
    told = cli(*command("out"))
    assert told.code == 0
    assert max(map(len, told.out.splitlines())) <= 100
    table, bottom, below = told.out.partition("┘\n")
    table, below = (table + bottom).splitlines(), " ".join(below.split())
    assert below.endswith(
        "terms: epsilon, delta, client, replace, local trust, pure, seeded noise (fedveil explain "
        "TERM)"
    )
    heading = [line.split("┃")[-2].strip() for line in table if line.startswith("┃")]
    assert " ".join(heading) == "epsilon at delta 0 per client (replace, local trust)"
    assert below.startswith(
        "together: 4 trainings on these records, whose epsilons and deltas add up to epsilon 20 at "
        "delta 0 per client (replace, local trust, PURE, seeded noise)"
    )
    assert "4 of 8 trainings claim nothing: no epsilon covers" in below
    assert sum(line.split("│")[-2].strip() == "5" for line in table if "│" in line) == 2
    assert sum("nothing claimed" in line for line in table) == 2
    assert "8/8 trials" in told.err
    assert sorted(os.listdir("out")) == [
        "lock", "report.html", "results.csv", "summary.csv", "sweep.json", "trials.jsonl",
    ]  # fmt: skip
    quiet = cli(*command("out", "--quiet"))
    assert (quiet.out, quiet.err) == (told.out, "")


def test_a_sweep_for_machines(cli):
    told = cli(*command("out", "--json", "--quiet"))
    report = json.loads(told.out)
    cells, together = report["cells"], report["together"]
    assert (together["trainings"], together["without_claim"]) == (8, 4)
    (whole,) = together["add_up_to"]
    assert (whole["epsilon"], whole["unit"]) == (pytest.approx(20), "client")
    assert (whole["neighbours"], whole["trust"]) == ("replace", "local")
    assert [(c["client.steps"], c["budget.epsilon"]) for c in cells] == [
        ("1", "5"), ("1", "inf"), ("2", "5"), ("2", "inf"),
    ]  # fmt: skip
    assert [c["unit"] for c in cells] == ["client", "", "client", ""]
    assert all(c["loss"] > 0 and c["loss_half"] > 0 for c in cells)


def test_joint_axes(cli):
    told = cli(*command("out", "--json", grid=("client.steps:rounds=1:4,4:1",)))
    cells = json.loads(told.out)["cells"]
    assert [(c["client.steps"], c["rounds"]) for c in cells] == [("1", "4"), ("4", "1")]


def test_a_sweep_that_goes_on_must_be_the_same(cli):
    assert cli(*command("out", repeat=1)).code == 0
    before = {name: Path("out", name).read_bytes() for name in os.listdir("out")}
    assert "its --repeat is 1, not 3" in cli(*command("out", repeat=3)).error
    assert (
        "its grid is --grid client.steps=1,2 --grid" in cli(*command("out", grid=("seed=1",))).error
    )
    assert "its rounds is 2, not 3" in cli(*command("out", rounds=3, repeat=1)).error
    assert {name: Path("out", name).read_bytes() for name in os.listdir("out")} == before


BAD = {
    "no grid": (["dp-fedavg", "--out", "o"], "--grid"),
    "an empty grid": (["dp-fedavg", "--grid", "", "--out", "o"], "--grid ''"),
    "no values": (["dp-fedavg", "--grid", "x", "--out", "o"], "--grid 'x'"),
    "an empty value": (["dp-fedavg", "--grid", "client.steps=", "--out", "o"], "lacks a value"),
    "an unknown key": (["dp-fedavg", "--grid", "client.x=1", "--out", "o"], "unknown key client.x"),
    "a misspelt key": (
        ["dp-fedavg", "--grid", "client.setps=1,2", "--out", "o"],
        "cell client.setps=1: recipe dp-fedavg: unknown key client.setps of kind 'sgd': did you "
        "mean client.steps?",
    ),
    "an axis twice": (
        ["dp-fedavg", "--grid", "rounds=1", "--grid", "rounds=2", "--out", "o"],
        "--grid rounds is given twice",
    ),
    "no repetition": (
        ["dp-fedavg", "--grid", "seed=1", "--repeat", "0", "--out", "o"], "--repeat is 0"
    ),
    "half a repetition": (
        ["dp-fedavg", "--grid", "seed=1", "--repeat", "0.5", "--out", "o"], "--repeat"
    ),
    "a budget that no plan meets": (
        ["dp-fedavg-gaussian", "--grid", "budget.epsilon=1e-300", "--out", "o"],
        "noise multiplier above",
    ),
    "a budget that asks for infinite noise": (
        ["dp-fedavg", "--grid", "budget.epsilon=5,1e-300", "--out", "o"],
        "cell budget.epsilon=1e-300",
    ),
    "a negative epsilon": (["dp-fedavg", "--grid", "budget.epsilon=-1", "--out", "o"], "positive"),
    "epsilon -inf": (["dp-fedavg", "--grid", "budget.epsilon=-inf", "--out", "o"], "positive"),
    "epsilon nan": (["dp-fedavg", "--grid", "budget.epsilon=nan", "--out", "o"], "positive"),
    "more clients per round than clients": (
        ["dp-fedavg", "--grid", "sample.size=70,351", "--out", "o"],
        "cell sample.size=351: sample.size is 351",
    ),
    "iterations that steps do not divide": (
        ["dp-fedavg", "--set", "rounds=none", "--set", "iterations=10", "--grid", "client.steps=3",
         "--out", "o"],
        "not a multiple of client.steps, 3",
    ),
    "an unknown recipe": (["nothing", "--grid", "seed=1", "--out", "o"], "'nothing' is unknown"),
    "no directory": (["dp-fedavg", "--grid", "seed=1"], "--out"),
    "a negative number of workers": (
        ["dp-fedavg", "--grid", "seed=1", "--out", "o", "--workers", "-1"],
        "--workers is -1",
    ),
    "data that are not there": (
        ["dp-fedavg", "--set", "data.name=mnist", "--grid", "seed=1", "--out", "o"],
        "FEDVEIL_DATA",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "mentions"), BAD.values(), ids=BAD)
def test_nonsense_is_one_line_and_leaves_nothing(cli, arguments, mentions):
    told = cli("sweep", *arguments)
    assert mentions in told.error
    assert told.out == ""
    assert files() == []


def test_a_directory_of_something_else(cli):
    Path("mine").mkdir()
    Path("mine", "thesis.tex").touch()
    assert "holds thesis.tex and no sweep" in cli(*command("mine")).error
    assert files() == ["mine", "mine/thesis.tex"]


class Forked:
    """A command as a process of its own, without the seconds that starting Python takes."""

    def __init__(self, folder, arguments):
        self.out, self.err = folder / "stdout", folder / "stderr"
        self.pid, self.code = os.fork(), None
        if self.pid == 0:
            self._become(arguments)

    def _become(self, arguments):
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, path in ((1, self.out), (2, self.err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
            sys.argv = ["fedveil", *map(str, arguments)]
            commands.main()
        except SystemExit as end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        finally:
            os._exit(99)

    def wait(self):
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def stop_at(self, folder, count):
        """Hold it and its workers still as soon as so many trials are on disk."""
        self.wait_for_lines(folder, count)
        os.killpg(self.pid, signal.SIGSTOP)

    def kill(self):
        """Kill it, and let its workers go on, whom nobody killed."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)

    def wait_for_lines(self, folder, count):
        while lines_of(folder) < count:
            assert os.waitpid(self.pid, os.WNOHANG) == (0, 0), self.err.read_text()
            time.sleep(0.002)


@pytest.fixture
def fork(tmp_path):
    """Start a command in a copy of this process; what is still running is killed."""
    started = []

    def forked(*arguments):
        started.append(Forked(tmp_path, arguments))
        return started[-1]

    yield forked
    for process in started:
        for member in members(process.pid):
            os.kill(int(member), signal.SIGKILL)
        process.wait()


LONG = {"rounds": 30, "repeat": 4}
TRIALS = 16


@pytest.mark.slow
def test_killed_with_its_workers_and_started_again(cli, fork, tmp_path):
    """Kill a sweep over two workers twice; another one may not have its directory."""
    folder, kept = tmp_path / "killed", []
    wanted = command(folder, "--workers", "2", "--quiet", **LONG)
    for count in (1, 6):
        process = fork(*wanted)
        process.stop_at(folder, count)
        assert "in use by another process" in cli(*wanted).error
        process.kill()
        deadline = time.monotonic() + 100
        while members(process.pid):
            assert time.monotonic() < deadline, "workers outlive a sweep that was killed"
            time.sleep(0.002)
        lines = (folder / "trials.jsonl").read_text().splitlines()
        assert all(line in lines for line in kept)
        kept = lines
    assert len(kept) < TRIALS
    assert not (folder / "summary.csv").exists()
    copy, whole = tmp_path / "copy", tmp_path / "whole"
    shutil.copytree(folder, copy)
    assert cli(*wanted).code == 0
    lines = (folder / "trials.jsonl").read_text().splitlines()
    assert lines[: len(kept)] == kept
    assert len(lines) == TRIALS
    assert cli(*command(copy, **LONG)).code == 0
    assert cli(*command(whole, **LONG)).code == 0
    for name in TABLES:
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
        assert (copy / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_ctrl_c_and_the_same_command_again(cli, fork, tmp_path):
    folder = tmp_path / "interrupted"
    wanted = command(folder, "--workers", "2", "--quiet", **LONG)
    process = fork(*wanted)
    process.stop_at(folder, 2)
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGCONT)
    assert process.wait() == 1
    assert process.out.read_text() == ""
    assert process.err.read_text() == f"interrupted: the same command resumes it in {folder}\n"
    assert members(process.pid) == []
    kept = (folder / "trials.jsonl").read_text()
    assert kept.count("\n") < TRIALS
    assert cli(*wanted).code == 0
    assert (folder / "trials.jsonl").read_text().startswith(kept)


def test_a_worker_that_is_killed_is_one_line(fork, tmp_path):
    folder = tmp_path / "lost"
    process = fork(*command(folder, "--workers", "2", "--quiet", **LONG))
    process.wait_for_lines(folder, 1)
    worker = next(int(member) for member in members(process.pid) if int(member) != process.pid)
    os.kill(worker, signal.SIGKILL)
    assert process.wait() == 1
    err = process.err.read_text()
    assert err.startswith("error: a process that trained was killed")
    assert err.endswith(f"the same command resumes it in {folder}\n")
    assert err.count("\n") == 1
