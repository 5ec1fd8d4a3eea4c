"""How to talk to a mixer: its messages, TLS, and clients that report and collect.

The messages are those that the package docstring lists. Whoever connects verifies the mixer's
certificate and the name in it. A mixer may ask for certificates in turn: then only those whom an
authority has signed are heard, and the name in their certificate says whether they may report or
collect.
"""

import asyncio
import math
import os
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import BadInput, FedveilError
from fedveil.privacy.noise.streams import Streams, bits
from fedveil.privacy.shuffle import Flags, Multisets, multisets_if_enough

HELLO = struct.Struct(">5sIIQ")
COUNT = struct.Struct(">H")
REPORT, COLLECT = b"FVM2R", b"FVM2C"
MOST_WORDS = 4096
THANKS = b"\0"
GONE = (OSError, asyncio.IncompleteReadError)  # broken or closed; OSError includes timeouts

Words = npt.NDArray[np.uint32]
Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


def round_number(round: int, attempt: int, rounds: int) -> int:
    """The mixer's number of an attempt at a round.

    Args:
        round: The round, counted from 1.
        attempt: The attempt, counted from 0.
        rounds: The number of rounds in all.

    >>> round_number(2, 0, 10), round_number(2, 1, 10)
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
    Status.FORBIDDEN: "was refused to this certificate: only members may report, and only the "
    "collector may collect",
    Status.REPEATED: "has a report of this member already: it counts once",
}


class Refused(FedveilError):
    """Raised when the mixer counted or handed on nothing, for the reason in `status`."""

    def __init__(self, round: int, status: Status) -> None:
        super().__init__(f"round {round} {MEANING[status]}")
        self.status = status


OLDEST = ssl.TLSVersion.TLSv1_3
COLLECTOR = "collector"
"""The common name of the certificate that may collect, and not report; all others report."""


def server_tls(
    certificate: Path | str, key: Path | str, clients: Path | str | None = None
) -> ssl.SSLContext:
    """The TLS context of a mixer, with its certificate and key.

    `clients` is the authority that signs the certificates of members and collector.

    | edge | behaviour |
    |---|---|
    | a file that is missing, or holds no such thing | BadInput |
    | `clients` is given and somebody has no certificate of that authority | not heard |
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = OLDEST
    _read("certificate", certificate, lambda: context.load_cert_chain(certificate, key))
    if clients is not None:
        _read("clients' authority", clients, lambda: context.load_verify_locations(clients))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls(
    authority: Path | str | None = None,
    certificate: Path | str | None = None,
    key: Path | str | None = None,
) -> ssl.SSLContext:
    """The TLS context of a client: the mixer's certificate must be `authority`'s and name its host.

    `certificate` and `key` are the client's own, where the mixer asks for them.

    | edge | behaviour |
    |---|---|
    | no `authority` | those that this machine trusts |
    | another authority, an expired certificate, another host | no connection |
    | a certificate without its key, or the reverse | BadInput |
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which verifies, and checks the host
    context.minimum_version = OLDEST
    if authority is None:
        context.load_default_certs()
    else:
        _read("authority", authority, lambda: context.load_verify_locations(authority))
    if (certificate is None) != (key is None):
        raise BadInput("a certificate and its private key go together: give both, or neither")
    if certificate is not None:
        _read("certificate", certificate, lambda: context.load_cert_chain(certificate, key))
    return context


def peer_name(writer: asyncio.StreamWriter) -> str:
    """The common name in the peer's certificate. "" without a certificate or with several names."""
    subject = (writer.get_extra_info("peercert") or {}).get("subject", ())
    names = [value for part in subject for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else ""


def _read(what: str, path: Path | str, load: Callable[[], None]) -> None:
    """Call `load`, which reads a file for TLS, and raise BadInput with its name if that fails.

    `what` is the kind of file, for the message.
    """
    try:
        load()
    except OSError as e:  # ssl.SSLError is one
        raise BadInput(f"the {what} {path} cannot be used: {e.strerror or e}") from e


_SLOT = 0.01  # seconds; messages due within one slot leave together at its end
_ANSWER_SECONDS = 30.0  # seconds a client waits for a connection or an answer


async def send_report(
    host: str,
    port: int,
    round: int,
    high: Flags,
    *,
    minimum: int,
    spread: float = 0.0,
    seed: int | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Send the bits `high` [P] of one client, each after a latency U(0, spread) of its own.

    Returns when the mixer has counted the report.

    Args:
        host: The mixer's host.
        port: Its port.
        round: The mixer's number of the round (`round_number`).
        high: The bits.
        minimum: The number of reports that the client's claim relies on. A mixer that hands on
            fewer gets no report.
        spread: The largest latency in seconds. Latencies are rounded up to slots of 10 ms.
        seed: For simulations, where every client needs a seed of its own. With None, latencies come
            from the operating system.
        tls: Shows the mixer which member this is, and refuses any mixer but the one that its
            certificate names (`client_tls`).

    | edge | behaviour |
    |---|---|
    | spread negative, NaN or infinite; no bits | BadInput |
    | the mixer does not count the report, or cannot be reached | Refused |
    """
    if not (spread >= 0 and math.isfinite(spread)) or high.ndim != 1 or not len(high):
        raise BadInput(f"{high.shape} bits over {spread} s: bits [P] and finite seconds are needed")
    clock = asyncio.get_running_loop().time
    hello = REPORT, len(high), minimum, round
    async with _conversation(host, port, hello, tls) as (reader, writer):
        began = clock()
        for due, words in _schedule(high, spread, _entropy(seed, round, len(high))):
            await asyncio.sleep(began + due - clock())
            for start in range(0, len(words), MOST_WORDS):
                frame = words[start : start + MOST_WORDS]
                writer.write(COUNT.pack(len(frame)) + frame.tobytes())
            async with asyncio.timeout(_ANSWER_SECONDS):
                await writer.drain()
        await _expect_ok(reader, round)


async def collect(
    host: str,
    port: int,
    round: int,
    positions: int,
    *,
    minimum: int,
    tls: ssl.SSLContext | None = None,
) -> Multisets:
    """Collect the multisets of a closed round. Every call returns the same.

    `positions` is the number of bits of a report, `minimum` the fewest reports to accept.

    | edge | behaviour |
    |---|---|
    | the round is open or not yet begun | Refused, status OPEN |
    | the round was discarded | Refused, status TOO_FEW |
    | more high reports than reports, or fewer reports than `minimum` | BadInput |
    | the mixer cannot be reached | Refused, status LOST |
    """
    hello = COLLECT, positions, minimum, round
    async with _conversation(host, port, hello, tls) as (reader, writer):
        async with asyncio.timeout(_ANSWER_SECONDS):
            counts = np.frombuffer(await reader.readexactly(4 + 4 * positions), dtype=">u4")
        high, reports = counts[1:].astype(np.int64), np.full(positions, counts[0], dtype=np.int64)
        made = multisets_if_enough(high, reports, minimum)
        writer.write(THANKS)
        return made


@asynccontextmanager
async def _conversation(
    host: str, port: int, hello: tuple[bytes, int, int, int], tls: ssl.SSLContext | None
) -> AsyncIterator[tuple[Reader, Writer]]:
    """Context manager: connect, send `hello`, and yield reader and writer after the mixer's OK.

    `hello` is (REPORT or COLLECT, positions, minimum, round). Raises BadInput for numbers that do
    not fit, and Refused without an OK or if the line breaks.
    """
    _, positions, minimum, round = hello
    if not (0 <= round < 2**64 and 1 <= positions < 2**31 and 1 <= minimum < 2**31):
        raise BadInput(
            f"round {round} of {positions} positions and {minimum} reports: no mixer has such a "
            "round"
        )
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
        try:
            writer.write(HELLO.pack(*hello))
            await _expect_ok(reader, round)
            yield reader, writer
        except BaseException:
            writer.transport.abort()
            raise
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    except GONE as error:
        raise Refused(round, Status.LOST) from error


async def _expect_ok(reader: Reader, round: int) -> None:
    """Read one status byte. Raises Refused unless it is OK, and a timeout after 30 seconds."""
    async with asyncio.timeout(_ANSWER_SECONDS):
        code = (await reader.readexactly(1))[0]
    if code != Status.OK:
        raise Refused(round, Status(code) if code in MEANING else Status.LOST)


def _schedule(
    high: Flags, spread: float, entropy: npt.NDArray[np.uint64]
) -> Iterator[tuple[float, npt.NDArray[np.uint32]]]:
    """Yield (seconds after the start, words to send then) in order of time.

    A word is 2 x position + bit, big-endian. `entropy` has one uniform 64-bit word per bit of
    `high`, whose upper 53 bits make the latency.
    """
    latency = (entropy >> np.uint64(11)).astype(np.float64) * 2.0**-53
    order = np.argsort(latency)
    slot = np.ceil(latency[order] * spread / _SLOT)
    words = (2 * order + high[order]).astype(">u4")
    first = np.flatnonzero(np.diff(slot, prepend=-1.0))
    for due, together in zip(slot[first], np.split(words, first[1:]), strict=True):
        yield float(due) * _SLOT, together


def _entropy(seed: int | None, round: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` uniform 64-bit words, from the operating system, or from `seed` and `round`."""
    if seed is None:
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
    return bits(Streams(seed).keys("latency", round, [0]), count).ravel()
