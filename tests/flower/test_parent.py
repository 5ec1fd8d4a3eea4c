"""An app ends with the process that it belongs to, even while it waits for ever."""

import subprocess
import sys

import pytest

APP = """
import sys, threading
from fedveil.flower import parent
parent._GRACE = parent._LOOK = 0.05
parent.end_with_parent()
print("up", flush=True)
threading.Event().wait(60)
"""


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
