"""The two parties that talk to a mixer: clients that report, and the server that collects."""

import asyncio
import math
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import BadInput
from fedveil.mixing.delays import unit_interval
from fedveil.mixing.protocol import (
    COLLECT,
    COUNT,
    GONE,
    HELLO,
    MEANING,
    MOST_WORDS,
    REPORT,
    THANKS,
    Reader,
    Refused,
    Status,
    Writer,
)
from fedveil.privacy.noise.streams import Streams, bits
from fedveil.privacy.shuffle import Flags, Multisets, handed_on

_SLOT = 0.01  # seconds; messages due within one slot leave together at its end
_PATIENCE = 30.0  # seconds a client waits for a connection or an answer


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

    `minimum` is the number of reports that the client's claim relies on: a mixer that hands on
    fewer gets no report. `tls` shows the mixer which member this is.

    Latencies are rounded up to slots of 10 ms. They come from the operating system, or from `seed`
    in a simulation, where every client needs a seed of its own. `tls` (`mixing.tls.connecting`)
    refuses any mixer but the one that its certificate names.

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
            async with asyncio.timeout(_PATIENCE):
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

    | edge | behaviour |
    |---|---|
    | the round is open or not yet begun | Refused, status OPEN |
    | the round was discarded | Refused, status TOO_FEW |
    | more high reports than reports, or fewer reports than `minimum` | BadInput |
    | the mixer cannot be reached | Refused, status LOST |
    """
    hello = COLLECT, positions, minimum, round
    async with _conversation(host, port, hello, tls) as (reader, writer):
        async with asyncio.timeout(_PATIENCE):
            counts = np.frombuffer(await reader.readexactly(4 + 4 * positions), dtype=">u4")
        high, reports = counts[1:].astype(np.int64), np.full(positions, counts[0], dtype=np.int64)
        made = handed_on(high, reports, minimum)
        writer.write(THANKS)
        return made


@asynccontextmanager
async def _conversation(
    host: str, port: int, hello: tuple[bytes, int, int, int], tls: ssl.SSLContext | None
) -> AsyncIterator[tuple[Reader, Writer]]:
    """Context manager: connect and say hello. `Refused` without an OK, or if the line breaks."""
    _, positions, minimum, round = hello
    if not (0 <= round < 2**64 and 1 <= positions < 2**31 and 1 <= minimum < 2**31):
        raise BadInput(
            f"round {round} of {positions} positions and {minimum} reports: no mixer has such a "
            "round"
        )
    try:
        async with asyncio.timeout(_PATIENCE):
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
    async with asyncio.timeout(_PATIENCE):
        code = (await reader.readexactly(1))[0]
    if code != Status.OK:
        raise Refused(round, Status(code) if code in MEANING else Status.LOST)


def _schedule(
    high: Flags, spread: float, entropy: npt.NDArray[np.uint64]
) -> Iterator[tuple[float, npt.NDArray[np.uint32]]]:
    """(seconds after the start, words due then), in order, for bits `high` and 64 bits for each."""
    latency = unit_interval(entropy)
    order = np.argsort(latency)
    slot = np.ceil(latency[order] * spread / _SLOT)
    words = (2 * order + high[order]).astype(">u4")
    first = np.flatnonzero(np.diff(slot, prepend=-1.0))
    for due, together in zip(slot[first], np.split(words, first[1:]), strict=True):
        yield float(due) * _SLOT, together


def _entropy(seed: int | None, round: int, count: int) -> npt.NDArray[np.uint64]:
    """One uniform word per message, from the operating system unless there is a seed."""
    if seed is None:
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
    return bits(Streams(seed).keys("latency", round, [0]), count).ravel()
