"""Handle interrupts that would be lost: during an import, and during a fork."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)


def end_at_once() -> None:
    """Let Ctrl-C print "interrupted" and end the process with status 1, until `listen()`.

    Sets the handler of SIGINT, unless somebody else has set one. For the time in which everything
    is imported: nothing has been written, and an import may swallow a KeyboardInterrupt, or make
    another error of it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def listen() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, after `end_at_once`.

    Does nothing if the handler of SIGINT is not that of `end_at_once`.
    """
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Context manager: hold back Ctrl-C and SIGTERM until the block ends.

    The first signal that arrived is then raised, later ones are dropped. Signals without a Python
    handler are left alone. Outside of the main thread nothing is held back.

    Without it, what a handler raises during a fork is printed and dropped, because a fork calls
    functions that libraries have registered. An interrupt between the start of a process and the
    note that it runs would leave the process behind.
    """
    arrived: list[int] = []
    before: dict[int, Callable[[int, FrameType | None], object]] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                handler = signal.getsignal(number)
                if callable(handler):
                    before[number] = handler
                    signal.signal(number, lambda number, frame: arrived.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in arrived[:1]:
            signal.raise_signal(number)


def _end(number: int, frame: FrameType | None) -> None:
    """Signal handler: print "interrupted" to standard error and exit with 1, without clean-up."""
    os.write(2, b"interrupted\n")
    os._exit(1)
