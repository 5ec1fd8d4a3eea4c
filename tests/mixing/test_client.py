"""What a client sends to a mixer, and which answers it does not believe."""

import asyncio
import math
import struct
from contextlib import asynccontextmanager

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.mixing.protocol import Refused, Status, _entropy, send_report
from fedveil.privacy.noise.streams import Streams
from tests.mixing.loopback import HOST, ONE, ask, hello, send, status_of


@asynccontextmanager
async def pretending(answer, received):
    """A peer that answers anything with `answer`; what it was sent ends up in `received`."""

    async def converse(reader, writer):
        writer.write(answer)
        while chunk := await reader.read(1000):
            received.extend(chunk)
        writer.close()

    server = await asyncio.start_server(converse, HOST, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_a_report_is_every_message_once_in_random_order(spread):
    """Sorted by chance has probability 1 / 300!."""
    high, received = Streams(1).generator("bits").random(300) < 0.5, bytearray()

    async def scenario():
        async with pretending(bytes([Status.OK, Status.OK]), received) as port:
            await send(port, high, spread=spread)

    asyncio.run(scenario())
    rest, words, frames = bytes(received[21:]), [], 0
    while rest:
        (count,) = struct.unpack_from(">H", rest)
        words += struct.unpack_from(f">{count}I", rest, 2)
        rest, frames = rest[2 + 4 * count :], frames + 1
    assert received[:21] == hello(positions=300)
    assert sorted(words) == (2 * np.arange(300) + high).tolist()
    assert words != sorted(words)
    assert (frames == 1) if spread == 0 else (10 <= frames <= 21)


def test_latencies_without_a_seed_come_from_the_operating_system(monkeypatch):
    """Two reports without a seed share no latency; equal words have probability 300 x 2^-64."""
    first, second = _entropy(None, 1, 300), _entropy(None, 1, 300)
    assert not (first == second).any()
    assert len(np.unique(first)) == 300
    assert np.array_equal(_entropy(7, 1, 300), _entropy(7, 1, 300))
    drawn = []

    def urandom(size):
        drawn.append(size)
        return bytes(range(8)) * (size // 8)

    monkeypatch.setattr("os.urandom", urandom)
    words = np.frombuffer(bytes(range(8)), dtype=np.uint64)
    assert np.array_equal(_entropy(None, 1, 5), np.repeat(words, 5))
    assert drawn == [40]


def test_two_clients_without_a_seed_send_in_different_orders():
    """The same bits twice; the same order has probability 1 / 300!."""
    high, sent = np.zeros(300, dtype=bool), [bytearray(), bytearray()]

    async def scenario():
        for received in sent:
            async with pretending(bytes([Status.OK, Status.OK]), received) as port:
                await send(port, high, spread=0.05)

    asyncio.run(scenario())
    assert sent[0][:21] == sent[1][:21]
    assert sent[0] != sent[1]


def test_answers_that_make_no_sense_are_refused():
    async def scenario():
        async with pretending(bytes([99]), bytearray()) as port:
            assert await status_of(send(port, ONE)) is Status.LOST
        impossible = bytes([Status.OK]) + struct.pack(">7I", 2, 0, 1, 2, 3, 0, 0)
        async with pretending(impossible, bytearray()) as port:
            with pytest.raises(BadInput, match="more high reports"):
                await ask(port)
        few = bytes([Status.OK]) + struct.pack(">7I", 2, 0, 1, 2, 1, 0, 0)
        async with pretending(few, bytearray()) as port:
            with pytest.raises(BadInput, match=r"has 2 reports and minimum is 3"):
                await ask(port, minimum=3)

    asyncio.run(scenario())


def test_refusals_are_one_line():
    for status in set(Status) - {Status.OK}:
        assert "\n" not in str(Refused(7, status))
        assert str(Refused(7, status)).startswith("round 7 ")


@pytest.mark.parametrize("spread", [-1.0, math.nan, math.inf])
def test_a_report_that_cannot_be_sent_is_bad_input(spread):
    with pytest.raises(BadInput, match="finite seconds"):
        asyncio.run(send_report(HOST, 1, 1, ONE, minimum=1, spread=spread))
    with pytest.raises(BadInput, match=r"bits \[P\]"):
        asyncio.run(send_report(HOST, 1, 1, ONE[:0], minimum=1))
    with pytest.raises(BadInput, match="no mixer has such a round"):
        asyncio.run(send_report(HOST, 1, -1, ONE, minimum=1))
    with pytest.raises(BadInput, match="and 0 reports: no mixer"):
        asyncio.run(send_report(HOST, 1, 1, ONE, minimum=0))
