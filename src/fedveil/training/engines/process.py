"""How a process computes: with one thread, and on memory it keeps.

Cores are used by workers, so that rounding does not depend on the number of threads.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT, _LARGE = 1 << 28, 1 << 25


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside, and with as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_memory() -> None:
    """Have malloc keep up to 256 MiB of what is freed, in blocks of up to 32 MiB.

    By default it returns large blocks at once, and every step then waits for the same pages to be
    mapped and cleared again. Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_THRESHOLD, _LARGE)
