"""Processes are started, waited for, and ended: in order, by force, or when we are."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fedveil.flower import local_federation
from fedveil.flower.certificates import Authority
from fedveil.flower.local_federation import (
    Process,
    ProcessFailed,
    is_healthy,
    own_environment,
    stop_all,
)

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(code):
        process = Process.launch("it", [sys.executable, "-c", code], tmp_path / "it.log")
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()


def test_waits_until_it_is_ready(start):
    process = start("print('up', flush=True); import time; time.sleep(60)")
    process.wait_for(lambda: "up" in process.output, "it was up", seconds=120)
    assert process.running


def test_says_why_it_ended_before_it_was_ready(start):
    process = start("print('no port left')")
    with pytest.raises(ProcessFailed, match="it ended before it was up: no port left"):
        process.wait_for(lambda: False, "it was up", seconds=120)


def test_does_not_wait_for_ever(start):
    process = start("import time; time.sleep(60)")
    with pytest.raises(ProcessFailed, match=r"in 0\.2 s: it said nothing"):
        process.wait_for(lambda: False, "up", seconds=0.2)
    with pytest.raises(ProcessFailed, match=r"did not end in 0\.1 s"):
        process.wait(0.1)


def test_all_are_asked_to_end_and_then_made_to(start, monkeypatch):
    monkeypatch.setattr(local_federation, "_GRACE", 0.3)
    gentle, deaf = start("import time; time.sleep(60)"), start(DEAF)
    deaf.wait_for(lambda: "up" in deaf.output, "up", seconds=120)
    stop_all([gentle, deaf])
    assert gentle.popen.returncode == -signal.SIGTERM
    assert deaf.popen.returncode == -signal.SIGKILL
    stop_all([gentle, deaf])


def test_ctrl_c_while_stopping_leaves_nobody_behind(start, monkeypatch):
    process = start(DEAF)
    process.wait_for(lambda: "up" in process.output, "up", seconds=120)

    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(local_federation.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stop_all([process])
    assert not process.running


def test_what_it_started_is_killed_with_it(start):
    process = start(
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(60)']); print('child', p.pid, flush=True); p.wait()"
    )
    process.wait_for(lambda: "\n" in process.output, "up", seconds=120)
    child = int(process.output.split()[1])
    process.kill()
    for _ in range(100):
        if not _alive(child):
            return
        time.sleep(0.05)
    raise AssertionError("the child lives on")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells of a parent's end")
def test_it_ends_when_whoever_started_it_is_killed(tmp_path):
    code = (
        "from pathlib import Path; import sys, time; "
        "from fedveil.flower.local_federation import Process; "
        "p = Process.launch('it', [sys.executable, '-c', 'import time; time.sleep(60)'], "
        "Path('it.log')); print(p.popen.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    for _ in range(100):
        if not _alive(child):
            return
        time.sleep(0.05)
    raise AssertionError("it lives on")


def test_the_programs_beside_this_python_come_first():
    first = own_environment()["PATH"].split(os.pathsep)[0]
    assert first == os.path.dirname(sys.executable)
    assert own_environment(A="b")["A"] == "b"


def test_nobody_answers_where_nobody_listens(tmp_path):
    Authority.new("test authority").save(tmp_path)
    assert not is_healthy("https://127.0.0.1:9/health", tmp_path / "ca.crt")


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
