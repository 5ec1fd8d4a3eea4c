"""A sealed fork changes nothing but its own memory, whatever the code in it calls."""

import ctypes
import fcntl
import mmap
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from fedveil.base import forks
from fedveil.base.errors import BadInput
from fedveil.base.forks import run_in_sealed_fork

LIBC = ctypes.CDLL(None, use_errno=True)
CREATE = 0o1600


def called(name, *arguments):
    """A call of libc, whose failure is an OSError."""
    found = getattr(LIBC, name)(*arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def syscall(number, *arguments):
    return called("syscall", ctypes.c_long(number), *(ctypes.c_long(value) for value in arguments))


def handle_of(path, flags):
    return os.close(os.open(path, flags))


WAYS = {
    "write": lambda path: path.write_text("1"),
    "append": lambda path: handle_of(path, os.O_WRONLY | os.O_APPEND),
    "create": lambda path: handle_of(path.with_name("new"), os.O_RDONLY | os.O_CREAT),
    "truncate": lambda path: handle_of(path, os.O_RDONLY | os.O_TRUNC),
    "truncate by name": lambda path: os.truncate(path, 0),
    "unnamed file": lambda path: handle_of(path.parent, os.O_TMPFILE | os.O_RDWR),
    "read and write": lambda path: handle_of(path, os.O_RDWR),
    "old open": lambda path: syscall(2, id(bytes(path)) + 32, os.O_RDWR),
    "openat2": lambda path: syscall(437, -100, 0, 0, 24),
    "times": lambda path: os.utime(path, (1, 1)),
    "rename": lambda path: path.rename(path.with_name("other")),
    "remove": lambda path: path.unlink(),
    "folder": lambda path: path.with_name("folder").mkdir(),
    "link": lambda path: path.with_name("link").symlink_to(path),
    "rights": lambda path: path.chmod(0o600),
    "attribute": lambda path: os.setxattr(path, "user.kept", b"1"),
    "memory file": lambda path: os.memfd_create("kept"),
    "map": lambda path: mmap.mmap(-1, 16),
    "system V": lambda path: called("shmget", 4711, 4096, CREATE),
    "message queue": lambda path: called("msgget", 4711, CREATE),
    "semaphore": lambda path: called("semget", 4711, 1, CREATE),
    "signal": lambda path: os.kill(os.getppid(), signal.SIGCONT),
    "queued signal": lambda path: signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0),
    "priority": lambda path: os.setpriority(os.PRIO_PROCESS, os.getppid(), 1),
    "limits": lambda path: syscall(302, os.getppid(), 7, 0, 0),
    "connection": lambda path: socket.socket(),
    "pair": lambda path: socket.socketpair(),
    "pipe": lambda path: os.pipe(),
    "fork": lambda path: os.fork(),
    "program": lambda path: subprocess.run([sys.executable, "-c", ""]),
    "exec": lambda path: os.execv(sys.executable, [sys.executable, "-c", ""]),
    "key": lambda path: syscall(248, 0, 0, 0, 0, -2),
    "other's memory": lambda path: syscall(311, os.getppid(), 0, 0, 0, 0, 0),
    "trace": lambda path: called("ptrace", 16, os.getppid(), None, None),
    "ring": lambda path: syscall(425, 1, 0),
    "flags": lambda path: fcntl.fcntl(1, fcntl.F_SETFL, os.O_APPEND),
    "lock": lambda path: fcntl.flock(1, fcntl.LOCK_SH),
    "x32": lambda path: syscall(0x40000000 + 39),
    "another filter": lambda path: syscall(317, 0, 0, 0),
    "host name": lambda path: socket.sethostname("kept"),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_would_outlive_a_sealed_fork_is_refused(way, tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    stat = path.stat()

    def remember():
        WAYS[way](path)
        return {"remembered": torch.ones(1)}

    with pytest.raises(BadInput, match=r"does more than compute.*not permitted"):
        run_in_sealed_fork(remember)
    assert path.read_text() == "before"
    assert (path.stat().st_mtime, path.stat().st_mode) == (stat.st_mtime, stat.st_mode)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("rights", [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE])
def test_what_a_fork_writes_to_shared_memory_ends_with_it(tmp_path, rights):
    path = tmp_path / "file"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("rb+") as stream:
        mapped = mmap.mmap(stream.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    mapped[1] = 7
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    protect = LIBC.mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert protect(address, mmap.PAGESIZE, rights) == 0

    def remember():
        assert protect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        mapped[0] = 1
        return {"seen": torch.tensor([mapped[0], mapped[1]])}

    assert run_in_sealed_fork(remember)["seen"].tolist() == [1, 7]
    assert (mapped[0], path.read_bytes()[0]) == (0, 0)


def test_shared_memory_cannot_be_thrown_away():
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    memory[0] = 1

    def remember():
        memory.madvise(mmap.MADV_REMOVE)
        return {}

    with pytest.raises(BadInput, match="does more than compute"):
        run_in_sealed_fork(remember)
    assert memory[0] == 1


def test_a_thread_is_refused():
    def started():
        threading.Thread(target=time.time).start()
        return {}

    with pytest.raises(BadInput, match="start new thread"):
        run_in_sealed_fork(started)


def test_computing_reading_printing_and_importing_go_on(tmp_path, capfd):
    path = tmp_path / "file"
    path.write_text("2")

    def computed():
        import colorsys  # noqa: F401

        print("dropped", file=sys.__stderr__, flush=True)
        a = torch.randn(600, 600, requires_grad=True)
        ((a @ a).sum() * float(path.read_text())).backward()
        return {"gradient": a.grad}

    sys.modules.pop("colorsys", None)
    assert run_in_sealed_fork(computed)["gradient"].shape == (600, 600)
    assert "colorsys" not in sys.modules
    assert capfd.readouterr() == ("", "")


def test_from_a_thread_memory_can_be_had():
    found = []

    def in_thread():
        many = range(5000)
        found.append(run_in_sealed_fork(lambda: {"sum": sum(torch.ones(1000) for _ in many)}))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert float(found[0]["sum"][0]) == 5000


def test_where_a_process_cannot_be_confined_the_work_is_refused(monkeypatch):
    monkeypatch.setattr(forks.platform, "machine", lambda: "riscv64")
    with pytest.raises(BadInput, match="confined on Linux on x86-64 only"):
        run_in_sealed_fork(lambda: {"answer": torch.ones(1)})


def test_what_is_allowed_is_what_is_named():
    """The numbers are the kernel's own, as far as its header is installed."""
    header = pathlib.Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("the kernel's header is not installed")
    lines = (line.split() for line in header.read_text().splitlines())
    numbers = {
        line[1].removeprefix("__NR_"): int(line[2])
        for line in lines
        if len(line) == 3 and line[1].startswith("__NR_")
    }
    assert {name: numbers[name] for name in forks._CALLS} == forks._CALLS
    special = ("write", "mmap", "fcntl", "openat")
    mine = tuple(getattr(forks, f"_{name.upper()}") for name in special)
    assert tuple(numbers[name] for name in special) == mine
