"""Handle interrupts that would be lost: during an import, and during a fork."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)


def end_at_once() -> None:
    """Until `listen()`, Ctrl-C prints "interrupted" and exits.

    Handlers set by others are left alone. For the time in which everything is imported: nothing has
    been written, and an import may swallow a KeyboardInterrupt, or make another error of it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def listen() -> None:
    """Restore Python's KeyboardInterrupt for Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def held() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM until the block ends.

    A fork calls functions that libraries have registered, `logging` among them, and what a handler
    raises while one of these runs is printed and dropped: the process would go on. And whoever is
    interrupted between starting something and writing down that it runs would leave it behind.
    Signals that no function of Python's handles are left alone, and so are other threads than the
    main one, in which nothing is handled.
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
    os.write(2, b"interrupted\n")
    os._exit(1)
