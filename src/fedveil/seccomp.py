"""Confine this process to its own memory, by a filter of system calls that the kernel keeps.

After `confine`, the calls below are left, for this process and whatever threads it starts. Others,
such as those that write to files, make connections, share memory, send signals or start processes,
fail with PermissionError, also from C. The filter cannot be taken off. Reading files is allowed,
since modules are imported when they are first used. Linux on x86-64 only.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

_CALLS = {
    "read": 0,
    "close": 3,
    "stat": 4,
    "fstat": 5,
    "lstat": 6,
    "poll": 7,
    "lseek": 8,
    "mprotect": 10,
    "munmap": 11,
    "brk": 12,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "pread64": 17,
    "access": 21,
    "sched_yield": 24,
    "mremap": 25,
    "nanosleep": 35,
    "getpid": 39,
    "exit": 60,
    "uname": 63,
    "getcwd": 79,
    "readlink": 89,
    "gettimeofday": 96,
    "getrusage": 98,
    "sysinfo": 99,
    "getuid": 102,
    "getgid": 104,
    "geteuid": 107,
    "getegid": 108,
    "getppid": 110,
    "sigaltstack": 131,
    "gettid": 186,
    "time": 201,
    "futex": 202,
    "sched_getaffinity": 204,
    "getdents64": 217,
    "restart_syscall": 219,
    "clock_gettime": 228,
    "clock_getres": 229,
    "clock_nanosleep": 230,
    "exit_group": 231,
    "newfstatat": 262,
    "readlinkat": 267,
    "faccessat": 269,
    "set_robust_list": 273,
    "getrandom": 318,
    "statx": 332,
    "rseq": 334,
    "faccessat2": 439,
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


def can_confine() -> bool:
    """Whether processes of this platform can be confined."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def confine(writing: int) -> None:
    """Leave this process its own memory, files to read, and one descriptor to write to.

    Memory that is shared already stays so: the caller sees to it that none is.

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
    """The steps of the filter. A call that none of them allows fails."""
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number in _CALLS.values():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, argument, refused in (
        (_MMAP, 3, _MAP_SHARED),
        (_OPENAT, 2, _OPEN_CHANGES),
    ):
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
