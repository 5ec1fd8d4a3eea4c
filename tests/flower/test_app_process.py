"""Flower's threads draw from a generator of their own, and an app ends with its parent."""

import random
import subprocess
import sys

import pytest

from fedveil.flower.flwr_private.app_process import separate_flower_random

APP = """
import sys, threading
from fedveil.flower.flwr_private import app_process
app_process._GRACE_SECONDS = app_process._POLL_SECONDS = 0.05
app_process.end_with_parent()
print("up", flush=True)
threading.Event().wait(60)
"""

USED = ("flwr.supercore.heartbeat", "flwr.supercore.retry.retry_invoker")


@pytest.fixture
def flower(monkeypatch):
    pytest.importorskip("flwr.supernode.cli")
    for name, module in tuple(sys.modules.items()):
        if name.split(".")[0] == "flwr" and getattr(module, "random", None) is not None:
            monkeypatch.setattr(module, "random", random)


@pytest.mark.usefixtures("flower")
@pytest.mark.slow
def test_a_heartbeat_leaves_the_common_generator_as_it_was():
    separate_flower_random()
    before = random.getstate()
    for name in USED:
        module = sys.modules[name]
        assert 0.7 <= module.random.uniform(0.7, 0.9) <= 0.9
    assert random.getstate() == before


@pytest.mark.usefixtures("flower")
@pytest.mark.parametrize("name", ["client_app", "server_app"])
def test_an_app_sees_to_it_in_the_process_that_runs_it(monkeypatch, name):
    """A site's was forked from the one that imported the app, and is named another parent."""
    from fedveil.flower import flower_apps

    watched = []
    monkeypatch.setattr(flower_apps, "end_with_parent", lambda: watched.append(True))
    heartbeat = sys.modules["flwr.supercore.heartbeat"]
    assert heartbeat.random is random
    with getattr(flower_apps, name)._lifespan(None):
        assert heartbeat.random is not random
        assert watched


@pytest.fixture
def app():
    started = []

    def begin(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", APP, *arguments], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "up\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_it_ends_when_its_parent_does(app):
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = app("--token", "x", "--parent-pid", str(parent.pid))
    assert process.poll() is None
    parent.kill()
    parent.wait()
    assert process.wait(60) == 1


@pytest.mark.parametrize("arguments", [(), ("--parent-pid",), ("--token", "x")])
def test_nobody_is_watched_who_was_not_named(app, arguments):
    process = app(*arguments)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)


FREED = """
import re
from fedveil.flower.flwr_private.app_process import return_freed_memory
if {returning}:
    return_freed_memory()

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

first = b"x" * (31 << 20)
del first  # after which the C library keeps blocks of that length
before = resident()
chunks = [b"x" * (5 << 20) for _ in range(40)]
kept = chunks[7::8]
del chunks
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_memory_of_chunks_goes_back_to_the_system_when_they_are_freed():
    def left(returning):
        program = FREED.format(returning=returning)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        return int(done.stdout)

    assert left(True) < 40
    assert left(False) > 100  # or else there is nothing to do
