"""How a process computes: with one thread, on memory it keeps.

Cores are used by workers, so that rounding does not depend on the number of threads.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_KEPT, _LARGE = 1 << 28, 1 << 25

LARGE_MODEL = 1 << 24
"""Parameters from which on memory counts for more than time."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside, and with as many as before afterwards.

    A process that was forked from one with several would wait for them for ever.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_memory(size: int) -> None:
    """Tell malloc what to keep of what is freed, for a model of `size` parameters.

    By default it returns large blocks at once, and every step then waits for the same pages to be
    mapped and cleared again, which is a fifth of a ResNet's or an LSTM's time and more. A large
    model's rows are better returned: keeping them would cost more memory than the waiting is worth.
    Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if size <= LARGE_MODEL:
        mallopt(_TRIM_THRESHOLD, max(_KEPT, 64 * size))
        mallopt(_MMAP_MAX, 0)
    else:
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_THRESHOLD, _LARGE)
