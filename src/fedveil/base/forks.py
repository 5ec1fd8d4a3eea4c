"""Compute something in a fork of this process, which keeps nothing of it.

A fork begins with everything this process has and ends with its answer. Whatever the code in it
writes to in memory ends with it. A sealed fork can change nothing else (docs/proofs/isolation.md):
`confine` limits it to its own memory, by a filter of system calls that the kernel applies.
"""

import ctypes
import errno
import gc
import mmap
import multiprocessing
import os
import pickle
import platform
import re
import signal
import struct
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import safetensors.torch
import torch

from fedveil.base.errors import BadInput, FedveilError
from fedveil.base.interrupts import hold_signals
from fedveil.base.platforms import c_function, can_fork

T = TypeVar("T")
Tensors = dict[str, torch.Tensor]

_TENSORS, _ERROR, _LONGEST = b"t", b"e", 1000

_DIE_WITH_PARENT = 1
_FIXED = 0x10
_MOST_FILES = 1 << 16
_MORE = (
    "the model's own code does more than compute, so that it could remember ({}): leave that out"
)
_depth = 0

_CALLS = {
    name: int(number)
    for name, number in re.findall(
        r"(\w+)=(\d+)",
        """
    read=0 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mprotect=10 munmap=11 brk=12
    rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 pread64=17 access=21 sched_yield=24
    mremap=25 nanosleep=35 getpid=39 exit=60 uname=63 getcwd=79 readlink=89 gettimeofday=96
    getrusage=98 sysinfo=99 getuid=102 getgid=104 geteuid=107 getegid=108 getppid=110
    sigaltstack=131 gettid=186 time=201 futex=202 sched_getaffinity=204 getdents64=217
    restart_syscall=219 clock_gettime=228 clock_getres=229 clock_nanosleep=230 exit_group=231
    newfstatat=262 readlinkat=267 faccessat=269 set_robust_list=273 getrandom=318 statx=332
    rseq=334 faccessat2=439
    """,
    )
}
"""Calls that change nothing outside this process."""

_WRITE, _MMAP, _FCNTL, _OPENAT = 1, 9, 72, 257
_MAP_SHARED = 1
_OPEN_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_OUTPUTS = (1, 2)
_DESCRIPTOR_FLAGS = (1, 2, 3)

_X86_64 = 0xC000003E
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2

Step = tuple[int, int, int, int]
"""An instruction of the filter: code, steps to skip if true, steps to skip if false, value."""


class ForkLost(BadInput):
    """A fork ended without an answer, because it was killed or ended itself."""


def in_fork() -> bool:
    """Whether this process is a fork that a function of this module made."""
    return _depth > 0


def run_in_fork(function: Callable[[], T]) -> T:
    """Run a function in a fork, and return its result or raise its exception here.

    Both are copied by pickle, which can run code here: so no client's records may be in the fork.
    If the result cannot be pickled, the error of pickle is raised. If the exception cannot be, a
    FedveilError with its message is. Raises ForkLost if the fork dies without an answer, and
    AssertionError where there is no fork.
    """
    fine, content = pickle.loads(_ask(lambda: _pickled(function), sealed=False))
    if not fine:
        raise content
    result: T = content
    return result


def run_in_sealed_fork(function: Callable[[], Tensors]) -> Tensors:
    """Run a function in a fork, and return the tensors by name that it returns.

    Nothing else comes back: the answer is read as tensors, or as the text of an error, and runs no
    code here. The tensors are detached copies. An exception of the function becomes BadInput with
    its message. Raises ForkLost if the fork dies without an answer, and AssertionError where there
    is no fork (`can_fork`).

    | what the code in it does | what happens |
    |---|---|
    | writes to a file, makes or maps one to share it | BadInput |
    | opens a connection, sends a signal, starts a process or a thread | BadInput |
    | writes to memory that processes share | it writes to a copy, which ends with the fork |
    | prints | it is dropped |
    | answers with something else than tensors | BadInput |
    | runs where processes can be forked but not confined (`can_confine`) | BadInput |
    """
    answer = _ask(lambda: _as_tensors(function), sealed=True)
    if answer[:1] == _ERROR:
        raise BadInput(answer[1 : 1 + _LONGEST].decode(errors="replace"))
    try:
        found: Tensors = safetensors.torch.load(answer[1:])
    except (safetensors.SafetensorError, ValueError) as e:
        raise BadInput(f"a fork's answer is not tensors: {e}") from e
    return found


def _ask(function: Callable[[], bytes], *, sealed: bool) -> bytes:
    """Run a function in a fork and return its bytes. With `sealed`, the fork is confined first.

    Raises ForkLost if there are none, because the fork died. Signals are held back during the fork.
    """
    if not can_fork():
        raise AssertionError("this platform has no fork")
    reading, writing = os.pipe()
    parent = os.getpid()
    with hold_signals():
        child = os.fork()
        if child == 0:
            _answer(function, parent, reading, writing, sealed=sealed)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    if not answer:
        raise ForkLost(
            "a fork died: memory ran out (lower engine.workers), or the model's own code ended it"
        )
    return answer


def _answer(
    function: Callable[[], bytes], parent: int, reading: int, writing: int, *, sealed: bool
) -> None:
    """In the fork: compute, write the answer to the pipe and exit. Never returns.

    Args:
        function: Computes the answer.
        parent: The id of the process that forked.
        reading: The parent's end of the pipe, which is closed here.
        writing: The end of the pipe to write to.
        sealed: Whether to confine this process. If that fails, the error is the answer.
    """
    global _depth
    status = 1
    try:
        _depth += 1
        gc.freeze()  # what the parent has stays shared, since nothing looks through it
        os.close(reading)
        begin_worker(parent)
        answer = _seal(writing) if sealed else b""
        answer = answer or function()
        with os.fdopen(writing, "wb") as stream:
            stream.write(answer)
        status = 0
    finally:
        os._exit(status)


def _as_tensors(function: Callable[[], Tensors]) -> bytes:
    """The function's answer as bytes: b"t" and safetensors, or b"e" and an error message."""
    try:
        values = {name: value.detach().contiguous() for name, value in function().items()}
        return _TENSORS + safetensors.torch.save(values)
    except OSError as e:
        return _ERROR + _MORE.format(e).encode()
    except Exception as e:
        return _ERROR + (str(e) or type(e).__name__).encode()


def _seal(writing: int) -> bytes:
    """Leave this process nothing to write to but its own memory and the pipe `writing`.

    Closes all other files, and standard input, output and error lead nowhere. Returns b"" or, if it
    fails, an error as bytes: b"e" and a message.
    """
    import resource

    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        os.closerange(3, writing)
        os.closerange(writing + 1, most if 0 < most < _MOST_FILES else _MOST_FILES)
        _copy_shared_memory()
        confine(writing)
    except OSError as e:
        return _ERROR + f"a process of its own for each client: {e}".encode()
    return b""


def _copy_shared_memory() -> None:
    """Replace writable memory that processes share by private copies at the same addresses.

    Memory mapped from a file that was opened for reading stays: nothing can make it writable.
    Raises OSError if a copy fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    own_at_this_place = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
    for start, size, readable in _shared_places():
        content = ctypes.string_at(start, size) if readable else b""
        if libc.mmap(start, size, access, own_at_this_place, -1, 0) != start:
            raise OSError(ctypes.get_errno(), "shared memory could not be copied")
        ctypes.memmove(start, content, len(content))


def _shared_places() -> list[tuple[int, int, bool]]:
    """(address, size in bytes, readable) of each shared mapping that may be made writable."""
    places, last = [], None
    with open("/proc/self/smaps") as maps:
        for line in maps:
            words = line.split()
            if words[0] != "VmFlags:":
                ends = words[0].split("-")
                if len(ends) == 2 and not words[0].endswith(":"):
                    last = int(ends[0], 16), int(ends[1], 16), "r" in words[1]
            elif last is not None and {"sh", "mw"} <= set(words):
                places.append((last[0], last[1] - last[0], last[2]))
    return places


def _pickled(function: Callable[[], Any]) -> bytes:
    """The pickle of (True, result) or, if the function raises, of (False, exception).

    An exception that cannot be pickled becomes a FedveilError with its message.
    """
    try:
        return pickle.dumps((True, function()))
    except Exception as e:
        e.add_note("in a fork:\n" + traceback.format_exc())
        try:
            return pickle.dumps((False, e))
        except Exception:  # an exception of a user's class
            return pickle.dumps((False, FedveilError(f"a fork's answer cannot be sent: {e}")))


def begin_worker(parent: int) -> None:
    """Prepare this process, which was just started: one thread of torch's, and its signals.

    Ctrl-C is ignored, for the parent to handle. SIGTERM ends the process. It also ends when its
    parent ends, however that happens, and at once if the parent has ended already: Linux kills it,
    elsewhere a thread waits for the parent. `parent` is the parent's process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prctl = c_function("prctl")
    if prctl is not None:
        prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
    else:
        threading.Thread(target=_end_with_parent, daemon=True, name="parent").start()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """Wait for the end of the process that started this one with multiprocessing, then exit."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def can_confine() -> bool:
    """Whether this platform can limit a process to certain system calls."""
    return can_fork() and platform.machine() == "x86_64"


def confine(writing: int) -> None:
    """Leave this process its own memory, files to read, and the pipe `writing`.

    After it, the system calls in `_CALLS` are left, for this process and whatever threads it
    starts. All others, such as those that write to files, make connections, share memory, send
    signals or start processes, fail with PermissionError, also from C. The filter cannot be taken
    off. Files can be read, since modules are imported when they are first used. Memory that is
    shared already stays so: the caller sees to it that none is.

    | edge | behaviour |
    |---|---|
    | standard output and error | can be written to: the caller says where they lead |
    | memory is mapped to share it | PermissionError |
    | a thread or a process is started | RuntimeError or PermissionError |
    | another platform, or a kernel without filters | OSError |
    """
    if not can_confine():
        raise OSError("processes can be confined on Linux on x86-64 only")
    steps = _filter(writing)
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(kept))
    control = ctypes.CDLL(None, use_errno=True).prctl
    control.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    given = ctypes.create_string_buffer(program, len(program))
    if control(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or control(
        _SET_SECCOMP, _FILTER, ctypes.addressof(given), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "this kernel filters no system calls")


def _filter(writing: int) -> list[Step]:
    """The seccomp filter as a list of steps. A system call that no step allows fails with EPERM.

    `writing` is the one descriptor, besides standard output and error, that may be written to.
    """
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number in _CALLS.values():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, argument, refused in ((_MMAP, 3, _MAP_SHARED), (_OPENAT, 2, _OPEN_CHANGES)):
        steps += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
            (_ANY_BIT, 0, 1, refused),
            (_RETURN, 0, 0, _FAIL),
            (_RETURN, 0, 0, _ALLOW),
        ]
    for number, argument, allowed in (
        (_WRITE, 0, (*_OUTPUTS, writing)),
        (_FCNTL, 1, _DESCRIPTOR_FLAGS),
    ):
        steps += [
            (_EQUAL, 0, 2 + 2 * len(allowed), number),
            (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
        ]
        for value in allowed:
            steps += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
        steps += [(_RETURN, 0, 0, _FAIL)]
    return [*steps, (_RETURN, 0, 0, _FAIL)]
