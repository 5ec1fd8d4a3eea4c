"""Ctrl-C while everything is being imported: nothing has been written, so the process just ends.

An import may swallow a KeyboardInterrupt, or make another error of it; a handler that ends the
process cannot be swallowed.
"""

import os
import signal
from types import FrameType


def end_at_once() -> None:
    """From here on Ctrl-C ends the process with one word; not where somebody has decided on it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def listen() -> None:
    """From here on Ctrl-C is Python's KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(1)
