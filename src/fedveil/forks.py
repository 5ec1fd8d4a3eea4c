"""Compute something in a fork of this process, which keeps nothing of it.

A fork begins with everything this process has and ends with its answer. Whatever the code in it
writes to in memory ends with it. A sealed fork cannot write to files or to memory that it shares
with others either, and has none of this process's connections.
"""

import ctypes
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fedveil.errors import BadInput, FedveilError
from fedveil.interrupts import held

T = TypeVar("T")

_DIE_WITH_PARENT = 1
_READ = 1
_MOST_FILES = 1 << 16
_WROTE = "the model's own code writes to a file, where it could remember ({}): leave that out"
_depth = 0


class ForkLost(BadInput):
    """A fork ended without an answer."""


def can_fork() -> bool:
    """Whether processes of this platform can be forked safely."""
    return sys.platform == "linux"


def in_fork() -> bool:
    """Whether this process is a fork that `forked` made."""
    return _depth > 0


def forked(function: Callable[[], T], *, sealed: bool = False) -> T:
    """The function's result, computed in a fork; an exception is raised here as it was there.

    The answer is copied by pickle. Tensors are copied by value, not shared.

    | what the code in a sealed fork does | what happens |
    |---|---|
    | writes to a file | OSError |
    | writes to memory that processes share | the fork ends: ForkLost |
    | writes to a connection that this process has open, or prints | OSError, or it is dropped |
    | signals by names of files, or opens a connection of its own | not prevented |
    """
    if not can_fork():
        raise AssertionError("this platform has no fork")
    reading, writing = os.pipe()
    parent = os.getpid()
    with held():
        child = os.fork()
        if child == 0:
            _answer(function, parent, reading, writing, sealed=sealed)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    if not answer:
        raise ForkLost(
            "a fork died: memory ran out (lower engine.workers), or the model's own code wrote to "
            "memory that processes share, where it could remember (leave that out)"
        )
    fine, content = pickle.loads(answer)
    if not fine:
        raise content
    result: T = content
    return result


def _answer(
    function: Callable[[], Any], parent: int, reading: int, writing: int, *, sealed: bool
) -> None:
    """The life of a fork."""
    global _depth
    status = 1
    try:
        _depth += 1
        os.close(reading)
        begin_worker(parent)
        if sealed:
            _seal(writing)
        try:
            answer = _pickled((True, function()))
        except Exception as e:
            if sealed and isinstance(e, OSError):
                e = BadInput(_WROTE.format(e))
            e.add_note("in a fork:\n" + traceback.format_exc())
            answer = _pickled((False, e))
        with os.fdopen(writing, "wb") as stream:
            stream.write(answer)
        status = 0
    finally:
        os._exit(status)


def _seal(writing: int) -> None:
    """Leave this process nothing to write to but its own memory and its answer."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(3, writing)
    os.closerange(writing + 1, most if 0 < most < _MOST_FILES else _MOST_FILES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as maps:
        places = [line.split()[:2] for line in maps]
    for place, rights in places:
        if rights[1] == "w" and rights[3] == "s":
            start, stop = (int(end, 16) for end in place.split("-"))
            if protect(start, stop - start, _READ):
                raise OSError("shared memory could not be protected")


def _pickled(answer: tuple[bool, Any]) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as e:  # an answer or exception of a user's class
        return pickle.dumps((False, FedveilError(f"a fork's answer cannot be sent: {e}")))


def begin_worker(parent: int) -> None:
    """Settle a process that was just forked: one thread, and signals of its own.

    Ctrl-C is for its parent. SIGTERM ends it, and so does the parent's end, however that happens;
    at once if it has ended already.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    torch.set_num_threads(1)
