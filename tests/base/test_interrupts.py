"""Ctrl-C and SIGTERM that arrive where they would be lost."""

import signal
import subprocess
import sys
import threading

import pytest

from fedveil.base.interrupts import hold_signals

FORKING = """
import os, signal, subprocess, sys, time
from pathlib import Path

number, us, coming = signal.Signals[sys.argv[1]], os.getpid(), [True]
signal.signal(number, signal.default_int_handler)

def meanwhile():
    if os.getpid() == us and coming:
        coming.clear()
        os.kill(us, number)

os.register_at_fork(before=meanwhile)
try:
    START
    print("went on")
except KeyboardInterrupt:
    print("interrupted")
"""
PROCESS = """
    from fedveil.flower.local_federation import Process
    Process.launch("it", [sys.executable, "-c", "import time; time.sleep(60)"], Path("it.log"))
"""
WORKERS = """
    from unittest.mock import MagicMock
    from fedveil.training.engines.processes import Workers
    from fedveil.training.reports import CohortSum
    engine = MagicMock()
    engine.job.zero.return_value = CohortSum.zero(1, 0, noisy=False)
    engine.job.task.size, engine.job.plan.width, engine.job.plan.release.adds_noise = 1, 0, False
    Workers(engine, 1)
"""
TRIAL_POOL = """
    from fedveil.tuning.trials import TrialPool
    with TrialPool([1], lambda cell, numbers: [cell], 2) as pool:
        next(pool.outcomes([(1, [0])]))
"""


@pytest.fixture(autouse=True)
def listening():
    """Whoever starts tests in the background has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("start", "name"),
    [(PROCESS, "SIGINT"), (PROCESS, "SIGTERM"), (WORKERS, "SIGINT"), (TRIAL_POOL, "SIGTERM")],
    ids=["process", "process, SIGTERM", "workers", "trial pool"],
)
def test_an_interrupt_during_a_fork_is_not_lost(tmp_path, start, name):
    """What a handler raises in a function that is called by a fork, Python prints and drops."""
    program = FORKING.replace("    START\n", start)
    found = subprocess.run(
        [sys.executable, "-c", program, name], cwd=tmp_path, capture_output=True, text=True
    )
    assert (found.stdout, found.stderr) == ("interrupted\n", "")


def test_what_arrives_inside_is_handled_at_the_end_and_once():
    done = []

    @hold_signals()
    def work():
        with hold_signals():
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
            done.append("inside")
        done.append("still inside")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inside", "still inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_inside_leaves_the_handlers_as_they_were():
    with pytest.raises(ValueError, match="no"), hold_signals():
        raise ValueError("no")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_python_does_not_handle_is_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with hold_signals():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_may_start_things_too():
    done = []

    def work():
        with hold_signals():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
