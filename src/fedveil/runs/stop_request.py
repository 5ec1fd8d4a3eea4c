"""A request to end a run after its round: a file in the run directory, whoever runs it and where.

Whoever may write the directory may ask, as whoever may signal the process may press Ctrl-C. A run
looks between rounds: the round that is under way is finished, charged and noised as planned.

Guarantee: a request ends a training early and changes nothing else. Fewer rounds are charged than
were planned, and the claim is of those that were; the file holds nothing that a run reads.

| edge | behaviour |
|---|---|
| left over from an earlier start | removed before the first round: it ends nothing |
| made after the last round | the run has ended already, and removes it |
| made when nobody runs | `ask` is not for that: the next start removes it |
| a folder of that name | the run cannot begin, and says so |
"""

from pathlib import Path

from fedveil.runs.disk import write_atomic

NAME = "stop"


def ask(folder: Path) -> None:
    """Ask the run that is going on in `folder` to end after its round."""
    write_atomic(folder / NAME, b"asked to end after this round\n")


def asked(folder: Path) -> bool:
    """Whether somebody has asked."""
    return (folder / NAME).is_file()


def clear(folder: Path) -> None:
    """Forget what was asked."""
    (folder / NAME).unlink(missing_ok=True)
