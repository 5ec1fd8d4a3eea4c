"""Files, locks and functions that platforms have or lack, and imports on those that lack them."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest

from fedveil.base import checks, platforms, spawning
from fedveil.base.errors import BadInput
from fedveil.base.platforms import c_function, can_fork, open_unfollowed, start_method, take_lock
from fedveil.flower.flwr_private.fork_server import run_superexec
from fedveil.runs.run_directory import in_use, lock_held

EVERY_MODULE = """
import ctypes, importlib, mmap, os, pkgutil, signal, sys

def import_all():
    package = importlib.import_module("fedveil")
    names = [module.name for module in pkgutil.walk_packages(package.__path__, "fedveil.")]
    for name in names:
        importlib.import_module(name)
    return names

before = import_all()  # with the libraries, which have what they need on every platform
for name in [name for name in sys.modules if name.split(".")[0] == "fedveil"]:
    del sys.modules[name]
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for module, names in (
    (os, "fork forkpty sched_getaffinity O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_DIRECTORY killpg getuid "
         "geteuid setsid fchmod register_at_fork uname waitid mkfifo statvfs"),
    (mmap, "PROT_READ PROT_WRITE MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS"),
    (signal, "SIGKILL SIGCHLD SIGHUP SIGALRM SIGUSR1 SIGPIPE pthread_sigmask"),
):
    for name in names.split():
        delattr(module, name)

def no_library(name, *_, **__):
    raise TypeError("bad argument type for built-in operation")

ctypes.CDLL = no_library
sys.platform = PLATFORM
assert import_all() == before
print(len(before))
"""


@pytest.mark.parametrize("platform", [pytest.param("darwin", marks=pytest.mark.slow), "win32"])
def test_every_module_is_imported_where_posix_is_missing(platform):
    program = EVERY_MODULE.replace("PLATFORM", repr(platform))
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 200


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_workers_are_forked_on_linux_alone(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    assert can_fork() == (platform == "linux")
    assert start_method() == ("fork" if platform == "linux" else "spawn")


def test_without_fork_workers_are_spawned(monkeypatch):
    monkeypatch.delattr(os, "fork")
    assert not can_fork()
    assert start_method() == "spawn"


def test_cores_are_counted_without_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert checks.cores() == 7


def test_functions_of_the_c_library(monkeypatch):
    assert c_function("getpid")() == os.getpid()
    assert c_function("no_such_function") is None

    def no_library(name, **_):
        raise TypeError("bad argument type for built-in operation")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert c_function("getpid") is None


@pytest.mark.parametrize("missing", [(), ("O_NOFOLLOW", "O_NONBLOCK")])
def test_a_link_is_not_followed_on_any_platform(tmp_path, monkeypatch, missing):
    for name in missing:
        monkeypatch.delattr(os, name)
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("content")
    link.symlink_to(file)
    with open(open_unfollowed(file), "rb") as stream:
        assert stream.read() == b"content"
    with pytest.raises(OSError, match="symbolic links"):
        open_unfollowed(link)


def test_a_lock_ends_when_its_file_is_closed(tmp_path):
    path = tmp_path / "lock"
    one, other = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert take_lock(one)
    assert not take_lock(other)
    threading.Timer(0.1, os.close, (one,)).start()
    began = time.monotonic()
    assert take_lock(other, 10)
    assert time.monotonic() - began < 5
    os.close(other)


def test_a_lock_ends_with_its_process(tmp_path):
    program = f"""
from pathlib import Path
from fedveil.runs.run_directory import lock_held
with lock_held(Path({str(tmp_path / "lock")!r}), 0) as free:
    print(free, flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"True\n"
        with lock_held(tmp_path / "lock", 0) as free:
            assert not free
        assert in_use(tmp_path)
        process.kill()
        process.wait()
        with lock_held(tmp_path / "lock", 10) as free:
            assert free
    assert not in_use(tmp_path)


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    """A weaker lock in its place would let two runs charge one ledger."""

    def no_lock(descriptor, **_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(platforms, "lock_descriptor", no_lock)
    with (
        pytest.raises(BadInput, match="lock cannot be locked: Function not implemented"),
        lock_held(tmp_path / "lock", 0),
    ):
        raise AssertionError("it is not locked")
    assert not in_use(tmp_path)


def test_whoever_asks_whether_a_directory_is_in_use_leaves_nothing(tmp_path):
    assert not in_use(tmp_path)
    assert not list(tmp_path.iterdir())


def test_two_who_ask_at_once_are_not_taken_for_a_run(tmp_path, monkeypatch):
    """The lock is taken at the first look, by somebody who only asks, and free at the second."""
    (tmp_path / "lock").touch()
    looks = iter([False, True])
    monkeypatch.setattr(platforms, "lock_descriptor", lambda *_, **__: next(looks))
    assert not in_use(tmp_path)


def test_arrays_are_not_copied_to_find_out_whether_they_can_be_sent(monkeypatch):
    import numpy as np

    written = []
    monkeypatch.setattr(spawning._Nowhere, "write", lambda self, b: written.append(len(b)))
    assert spawning.can_send({"x": np.zeros(1 << 20)})
    assert sum(written) < 1000
    assert not spawning.can_send(lambda: 0)


def test_a_site_is_refused_where_there_is_no_fork(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(SystemExit, match=r"error: a site forks a process .* on Linux only"):
        run_superexec([])
