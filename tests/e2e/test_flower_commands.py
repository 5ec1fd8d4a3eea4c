"""`fedveil deploy`, its demonstration, and the way from a simulation to three sites."""

import json
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from fedveil.flower.local_federation import Process, free_ports, own_environment
from tests.e2e.federations import PATIENCE, QUICK, SAID, processes_of, wait_for

pytest.importorskip("flwr")

PAGE = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
HEADING = "### From a simulation to three sites"
DEPLOY = (sys.executable, "-m", "fedveil", "deploy", "ldp-sgd")
SMALL = [
    part
    for setting in ("sample.kind=all", "rounds=1", "budget.epsilon=10")
    for part in ("--set", setting)
]
slow = pytest.mark.slow
patient = pytest.mark.timeout(1800)


def documented_commands():
    _, _, rest = PAGE.partition(HEADING)
    block = rest.split("```")[1]
    return [line for line in block.splitlines() if line]


def test_at_most_six_commands():
    assert 1 <= len(documented_commands()) <= 6


@slow
@patient
def test_the_documented_commands(tmp_path):
    (port,) = free_ports(1)
    commands = documented_commands()
    (written,) = [k for k, command in enumerate(commands) if command.startswith("fedveil deploy")]
    commands[written] += f" --address 127.0.0.1:{port}"  # tests run side by side
    process = Process.launch(
        "documented",
        ["sh", "-e", "-c", "\n".join(commands)],
        tmp_path / "documented.log",
        folder=tmp_path,
        environment=own_environment(**QUICK),
    )
    try:
        assert process.wait(2 * PATIENCE) == 0, process.output
    finally:
        process.kill()  # and the processes behind it
    wait_for(lambda: not processes_of(tmp_path), "all ended")
    federated = json.loads((tmp_path / "federation/server/run/result.json").read_text())
    (simulated,) = (tmp_path / "runs").glob("*/result.json")
    theirs = json.loads(simulated.read_text())
    assert federated["rounds"] == theirs["rounds"] == 3
    for ours, other in zip(federated["claims"], theirs["claims"], strict=True):
        assert ours["noise"] == "secure"
        same = [key for key in SAID if key not in ("noise", "epsilon")]
        assert [ours[key] for key in same] == [other[key] for key in same]
        assert ours["epsilon"] == pytest.approx(other["epsilon"], rel=1e-6)  # what sampling slips
    assert "3 of 3 sites answered" in process.output


@pytest.fixture
def deploy(tmp_path):
    """Start `fedveil deploy`, in a folder of its own; it is ended at last."""
    started = []

    def begin(*arguments):
        process = Process.launch(
            "deploy",
            [*DEPLOY, "demo", *arguments, *SMALL],
            tmp_path / "deploy.log",
            folder=tmp_path,
            environment=own_environment(**QUICK),
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
    wait_for(lambda: not processes_of(tmp_path), "all ended")


@slow
@patient
def test_a_demonstration_shows_its_rounds_and_leaves_nobody_behind(deploy, tmp_path):
    process = deploy("--demo", "2")
    assert process.wait(2 * PATIENCE) == 0, process.output
    lines = process.output.splitlines()
    assert lines[0].startswith("written: demo/README.md")
    assert lines[1].startswith("SuperLink is up: https://127.0.0.1:")
    assert lines[2] == "sites are connected: site-1, site-2"
    assert lines[3].startswith("round 1 | ")
    claim = r"epsilon (9\.99\d*|10) at delta 1e-05 per client \(replace, local trust"
    assert re.search(claim, lines[3])
    assert len(re.findall(claim, process.output)) >= 2  # and in the result
    wait_for(lambda: not processes_of(tmp_path), "all ended")


@slow
@patient
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demonstration_leaves_nobody_behind(deploy, tmp_path, number):
    process = deploy("--demo", "2")
    process.wait_for(lambda: "SuperLink is up" in process.output, "up", PATIENCE)
    assert processes_of(tmp_path)
    process.popen.send_signal(number)
    assert process.wait(PATIENCE) == 1
    assert process.last_line == "interrupted"
    wait_for(lambda: not processes_of(tmp_path), "all ended")


@slow
@patient
@pytest.mark.parametrize("start", [1, 3, 5], ids=["superlink", "site", "run"])
def test_a_demonstration_that_is_ended_while_it_starts_something_ends(tmp_path, start):
    """SIGTERM in the middle of a fork, of which the parent is told in a function that is called."""
    code = (
        "import os, signal, sys\n"
        "us, forks = os.getpid(), []\n"
        "def forking():\n"
        "    forks.append(1)\n"
        f"    if os.getpid() == us and len(forks) == {start}:\n"
        "        os.kill(us, signal.SIGTERM)\n"
        "os.register_at_fork(before=forking)\n"
        "from fedveil.__main__ import main\n"
        "main()\n"
    )
    process = Process.launch(
        "deploy",
        [sys.executable, "-c", code, *DEPLOY[3:], "demo", "--demo", "2", *SMALL],
        tmp_path / "deploy.log",
        folder=tmp_path,
        environment=own_environment(**QUICK),
    )
    try:
        assert process.wait(2 * PATIENCE) == 1
        assert process.last_line == "interrupted"
        wait_for(lambda: not processes_of(tmp_path), "all ended")
    finally:
        process.kill()


@slow
@patient
def test_a_demonstration_that_cannot_begin_says_why(deploy, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = deploy("--demo", "1", "--address", f"127.0.0.1:{port}")
        assert process.wait(PATIENCE) == 1
    assert process.last_line.startswith("error: superlink ended before it answered")
    wait_for(lambda: not processes_of(tmp_path), "all ended")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name the sites"),
        (("--demo", "2", "--sites", "a,b"), "name the sites"),
        (("--demo", "0"), "--demo is 0"),
        (("--demo", "100"), "--demo is 100"),
        (("--sites", "a,,b"), "site is ''"),
        (("--sites", "a,a"), "a name of its own each"),
        (("--sites", "a,b", "--address", "here"), "HOST:PORT"),
        (("--sites", "a b,c"), "site is 'a b'"),
        (("--sites", "a,b", "--divide", "--deadline", "0"), "deadline is 0.0"),
        (("--sites", "a,b", "--divide", "--address", "a..b:1", *SMALL), "no name or address of a"),
        (("--sites", "a,b"), "site 'a' has no key: its owner makes one (fedveil site init)"),
        (("--sites", "a,b", "--key", "c=c.pub"), "--key names 'c', which is no site"),
        (("--sites", "a,b", "--key", "a"), "write it as NAME=VALUE"),
        (("--sites", "a,b", "--key", "a=nowhere.pub"), "nowhere.pub cannot be read"),
        (("--sites", "a,b", "--records", "a=none"), "a whole number from 1"),
        (("--sites", "a,b", "--divide", "--test", "t.csv"), "leave out --demo and --divide"),
        (("--sites", "a,b", "--divide", "--set", "sample.size=9"), "size"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(cli, arguments, message):
    assert message in cli("deploy", "ldp-sgd", "new", *arguments).error
    assert not list(Path().iterdir())


def test_a_folder_that_is_in_use_is_left_alone(cli):
    Path("mine").mkdir()
    Path("mine/file").touch()
    assert "not empty" in cli("deploy", "ldp-sgd", "mine", "--sites", "a,b", "--divide").error
    assert [path.name for path in Path("mine").iterdir()] == ["file"]


def test_writing_is_said_and_nothing_is_started(cli):
    done = cli("deploy", "central", "fed", "--sites", "a,b", "--divide", "--set", "rounds=2")
    written, whole, note = done.out.splitlines()
    assert (done.code, written) == (0, "written: fed/README.md says how to start server and sites")
    assert whole.startswith("note: a round takes as long as every other, at most 600 s")
    assert note.startswith("note: central hides each of the 2 sites as a whole")
    assert note.endswith("if protecting each record is enough, deploy dp-sgd or sites")
    assert sorted(path.name for path in Path("fed").iterdir()) == [
        *("README.md", "app", "bundles", "owners", "server", "shares", "sites"),
    ]
    shutil.rmtree("fed")
