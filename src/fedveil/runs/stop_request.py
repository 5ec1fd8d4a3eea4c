"""A request to end a run after its current round: a file in the run directory.

Anybody who may write the directory may make one. A run checks for it between rounds: the current
round is finished, charged and noised as planned.

Guarantee: a request ends the training early and changes nothing else. Fewer rounds are charged than
were planned, and the claim is about those. The run does not read what the file holds.

| edge | behaviour |
|---|---|
| left over from an earlier start | removed before the first round: it ends nothing |
| made after the last round | the run has ended already, and removes it |
| made while nothing runs | the next start removes it |
| a folder of that name | the run cannot begin, and says so |
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedveil.runs.disk import write_atomic

NAME = "stop"


def ask(folder: Path) -> None:
    """Ask the run that is going on in `folder` to end after its round."""
    write_atomic(folder / NAME, b"asked to end after this round\n")


def asked(folder: Path) -> bool:
    """Whether there is a request."""
    return (folder / NAME).is_file()


@contextmanager
def cleared(folder: Path) -> Iterator[None]:
    """Context manager: remove a request that is left over, and at the end one that came since."""
    (folder / NAME).unlink(missing_ok=True)
    try:
        yield
    finally:
        (folder / NAME).unlink(missing_ok=True)
