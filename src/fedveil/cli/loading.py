"""A word on the terminal while libraries and data are loaded, which takes seconds."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_WORD = "loading ..."


@contextmanager
def loading(*, quiet: bool) -> Iterator[None]:
    """Show that something happens, and leave nothing behind; a file or a pipe is told nothing.

    The cursor waits at the beginning of the line, so that whatever ends the process writes over it.
    """
    if quiet or not sys.stderr.isatty():
        yield
        return
    print(_WORD, end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(" " * len(_WORD), end="\r", file=sys.stderr, flush=True)
