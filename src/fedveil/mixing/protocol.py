"""Messages between clients, mixer and server, as the package docstring lists them."""

import asyncio
import struct
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import FedveilError

HELLO = struct.Struct(">5sIIQ")
COUNT = struct.Struct(">H")
REPORT, COLLECT = b"FVM2R", b"FVM2C"
MOST_WORDS = 4096
THANKS = b"\0"
GONE = (OSError, asyncio.IncompleteReadError)  # broken or closed; OSError includes timeouts

Words = npt.NDArray[np.uint32]
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


def number_of(round: int, attempt: int, rounds: int) -> int:
    """What a mixer of `rounds` rounds calls attempt `attempt` (from 0) at `round` (from 1).

    >>> number_of(2, 0, 10), number_of(2, 1, 10)
    (2, 12)
    """
    return attempt * rounds + round


class Status(IntEnum):
    """The mixer's answers, and LOST for a connection without one."""

    OK = 0
    OPEN = 1
    TOO_FEW = 2
    FINISHED = 3
    FORGOTTEN = 4
    UNKNOWN = 5
    BUSY = 6
    LOST = 7
    FORBIDDEN = 8
    REPEATED = 9


MEANING = {
    Status.OPEN: "is still open: ask again later",
    Status.TOO_FEW: "ended with too few reports: nothing is handed on",
    Status.FINISHED: "had finished before the report was complete: it does not count",
    Status.FORGOTTEN: "is forgotten: it was collected too late, or the mixer was started again",
    Status.UNKNOWN: "is not one of this mixer's, or it has other positions or a smaller minimum: "
    "start it with the recipe's numbers",
    Status.BUSY: "cannot open while so many rounds are open: try again later",
    Status.LOST: "got no answer from the mixer: it is not there, full, or was sent something wrong",
    Status.FORBIDDEN: "is not for this certificate: members report, and the collector collects",
    Status.REPEATED: "has a report of this member already: it counts once",
}


class Refused(FedveilError):
    """The mixer counted or handed on nothing, for the reason in `status`."""

    def __init__(self, round: int, status: Status) -> None:
        super().__init__(f"round {round} {MEANING[status]}")
        self.status = status
