"""A message is answered in a fork of a process that has imported everything, and knows nothing."""

import json
import signal
import subprocess
import sys

import pytest

from fedveil.flower.flwr_private import fork_server
from fedveil.flower.flwr_private.fork_server import ForkedPrograms
from fedveil.flower.flwr_private.guard import GUARDED

pytest.importorskip("flwr")

FORK_SERVER = """
import sys
from fedveil.flower.flwr_private import fork_server, guard

def answer(arguments):
    {answer}

guard.answer_message = answer
guard.run_canary = lambda: None
guard.guard = lambda: {guard}
fork_server._reset_fork = {begin}
fork_server.IMPORTED = {imported}
fork_server.serve_forks()
"""

BEGIN = "fork_server._reset_fork"

DRAWN = """
import random, secrets, torch, numpy as np
drawn = random.random(), np.random.random(), torch.rand(1, dtype=float).item(), secrets.randbits(64)
sys.stdout.write(" ".join(map(str, [arguments[0], *drawn])) + "\\n")
"""

SETTLED = """
import os, signal
signals = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD)
usual = signals == (signal.default_int_handler, signal.SIG_DFL)
nothing = os.path.samestat(os.fstat(0), os.stat(os.devnull))
sys.stdout.write(f"{nothing} {usual} {sys.stdin.read()!r}\\n")
"""

ENDING = """
import os, signal
if arguments[0] == "exit": sys.exit("it says why")
if arguments[0] == "error": raise ValueError("nobody saw that coming")
if arguments[0] == "interrupt": raise KeyboardInterrupt
if arguments[0] == "kill": os.kill(os.getpid(), signal.SIGKILL)
sys.stdout.write("still there\\n")
"""


def server(answer, imported=(), guard="None", begin="lambda: None"):
    """The fork server with another answer than Flower's, as a command; PyTorch takes seconds."""
    indented = answer.strip().replace("\n", "\n    ")
    text = FORK_SERVER.format(answer=indented, imported=imported, guard=guard, begin=begin)
    return (sys.executable, "-c", text)


def asked(command, *asks):
    """What a fork server says to some asks, until its input ends."""
    lines = "".join(f"{json.dumps(list(ask))}\n" for ask in asks)
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_it_answers_with_the_app_that_is_installed():
    """What forks is `answer_message`: Flower's own program, told to load our app and no other."""
    command = fork_server.FORK_SERVER
    done = asked(command, ["--help"])
    assert done.stdout.startswith(f"usage: {GUARDED}")
    assert done.returncode == 0


def test_everything_is_imported_before_it_forks():
    done = asked(
        server("sys.stdout.write(f'{\"colorsys\" in sys.modules} ')", ("colorsys",)), ["x"], ["y"]
    )
    assert done.stdout.split() == ["True", "True"]
    assert "fedveil.flower.flower_apps" in fork_server.IMPORTED


def test_no_two_forks_draw_the_same():
    """Two of four 50-bit numbers agree by chance once in 10^14."""
    done = asked(server(DRAWN, ("numpy.random", "torch"), begin=BEGIN), ["a"], ["b"], ["c"], ["d"])
    lines = [line.split() for line in done.stdout.splitlines()]
    assert sorted(line[0] for line in lines) == ["a", "b", "c", "d"]
    for column in (1, 2, 3, 4):
        assert len({line[column] for line in lines}) == 4


@pytest.mark.slow
def test_a_fork_is_as_if_it_had_been_started():
    """It reads nothing of what others are asked, and has the signals of a program."""
    done = asked(server(SETTLED, ("torch",), begin=BEGIN), ["a"], ["b"])
    assert done.stdout.splitlines() == ["True True ''"] * 2


@pytest.mark.parametrize("how", ["exit", "error", "interrupt", "kill"])
def test_whatever_ends_a_fork_ends_that_fork_alone(how):
    done = asked(server(ENDING), [how], ["nothing"])
    assert done.stdout == "still there\n"
    assert done.returncode == 0
    assert {"exit": "it says why", "error": "nobody saw that"}.get(how, "") in done.stderr


def test_a_flower_that_cannot_be_guarded_is_noticed_before_any_message():
    done = asked(
        server("sys.stdout.write('answered')", guard="sys.exit('error: not this one')"), "a"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "error: not this one\n", 1)


def test_ctrl_c_is_for_the_supernode():
    process = subprocess.Popen(
        server("print('still there', flush=True)"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        process.stdin.write(b'["a"]\n')
        process.stdin.flush()
        assert process.stdout.readline() == b"still there\n"
        process.send_signal(signal.SIGINT)
        process.stdin.write(b'["b"]\n')
        process.stdin.flush()
        assert process.stdout.readline() == b"still there\n"
    finally:
        process.communicate()  # its input ends, and so does it


@pytest.fixture
def programs(tmp_path):
    found = []

    def start(answer):
        found.append(ForkedPrograms(server(answer)))
        return found[-1]

    yield start
    for one in found:
        one.close()


def test_a_fork_server_that_died_is_replaced(programs, tmp_path):
    answer = "open(arguments[0], 'w').write(str(__import__('os').getppid()))"
    ours = programs(answer)

    def parent_of(name):
        ours.Popen([GUARDED, str(tmp_path / name)])
        while not (tmp_path / name).exists() or not (tmp_path / name).read_text():
            assert ours._running.poll() is None
        return int((tmp_path / name).read_text())

    first = parent_of("first")
    assert parent_of("second") == first
    ours._running.kill()
    ours._running.wait()
    assert parent_of("third") != first


def test_a_fork_server_that_reads_nothing_is_replaced_before_it_holds_up_the_site(tmp_path):
    hangs = ForkedPrograms((sys.executable, "-c", "import time; time.sleep(600)"))
    first = hangs._running
    try:
        for _ in range(1_000_000):  # until the pipe is full
            hangs.Popen([GUARDED, "--token", "x" * 256])
            if hangs._running is not first:
                break
        assert first.returncode == -signal.SIGKILL
        assert hangs._running.poll() is None
    finally:
        hangs.close()


@pytest.mark.parametrize("command", ["flwr-model", "anything"])
def test_other_programs_are_started_as_ever(programs, monkeypatch, command):
    started = []
    ours = programs("raise AssertionError('not this')")
    monkeypatch.setattr(fork_server.subprocess, "Popen", lambda *a, **k: started.append((a, k)))
    ours.Popen([command, "--token", "x"])
    ours.Popen([GUARDED, "--token", "x"], stdout=ForkedPrograms.DEVNULL)
    assert started == [
        (([command, "--token", "x"],), {}),
        (([GUARDED, "--token", "x"],), {"stdout": subprocess.DEVNULL}),
    ]


def test_flower_starts_programs_where_they_are_replaced(monkeypatch):
    """SuperExec starts programs by `subprocess` in one module."""
    from flwr.supercore.superexec.executor import factory, subprocess_executor

    launch = subprocess_executor.SubprocessExecutor.launch.__code__
    assert {"subprocess", "Popen"} <= set(launch.co_names)
    assert factory.SubprocessExecutor is subprocess_executor.SubprocessExecutor
    monkeypatch.setattr(fork_server, "ForkedPrograms", lambda server: server)
    monkeypatch.setattr(subprocess_executor, "subprocess", subprocess)
    fork_server.install_forks(["ours"])
    assert subprocess_executor.subprocess == ["ours"]


def test_a_flower_that_starts_them_elsewhere_is_not_started(monkeypatch):
    from flwr.supercore.superexec.executor import subprocess_executor

    monkeypatch.delattr(subprocess_executor, "subprocess")
    with pytest.raises(SystemExit, match=r"no subprocess in .*which is replaced"):
        fork_server.install_forks([])
