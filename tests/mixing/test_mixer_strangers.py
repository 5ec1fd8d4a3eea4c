"""Whoever talks to a mixer badly, slowly or too often leaves no trace in its counts."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from fedveil.mixing.protocol import Status
from tests.mixing.loopback import (
    CONFIG,
    EVERY,
    HOST,
    ONE,
    PATIENCE,
    POSITIONS,
    TWO,
    ask,
    assert_counts,
    frame,
    hello,
    outcome,
    send,
    send_both,
    status_of,
    talk,
    with_mixer,
)

MALFORMED = {
    "nothing": b"",
    "garbage": b"GET / HTTP/1.1\r\nHost: mixer\r\n\r\n",
    "short hello": hello()[:9],
    "hello of the protocol before": b"FVM1R" + hello()[5:9] + hello()[13:] + frame(*EVERY),
    "other kind": hello(kind=b"FVM2X"),
    "no messages": hello(),
    "too few messages": hello() + frame(*EVERY[:5]),
    "empty frame": hello() + frame() + frame(*EVERY),
    "oversized frame": hello() + frame(*EVERY, count=4097) + bytes(4 * 4097),
    "cut frame": hello() + frame(*EVERY, count=7),
    "position out of range": hello() + frame(*EVERY[:5], 2 * POSITIONS),
    "position far out of range": hello() + frame(*EVERY[:5], 2**32 - 1),
    "repeated in a frame": hello() + frame(*EVERY[:5], EVERY[0]),
    "both values of a position": hello() + frame(*EVERY[:5], EVERY[0] + 1),
    "repeated in another frame": hello() + frame(*EVERY[:5]) + frame(EVERY[2]) + frame(EVERY[5]),
    "more messages than positions": hello() + frame(*EVERY, EVERY[0]),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_report_leaves_no_trace(data):
    """It is neither counted nor in the way of others, before, while and after."""

    async def scenario(port, task):
        await send(port, ONE)
        answer = await talk(port, data)
        assert answer in (b"", bytes([Status.OK]))
        await send(port, TWO)
        await assert_counts(port)

    with_mixer(CONFIG, scenario)


def test_a_frame_holds_4096_messages_and_no_more():
    async def scenario(port, task):
        words = range(0, 2 * 4097, 2)
        assert await talk(port, hello(positions=4097) + frame(*words)) in (b"", bytes([Status.OK]))
        assert await status_of(ask(port, positions=4097)) is Status.OPEN
        await talk(port, hello(positions=4097) + frame(*words[1:]) + frame(words[0]))
        assert await outcome(port, positions=4097) is Status.OK

    with_mixer(replace(CONFIG, positions=4097, minimum=1, expected=1), scenario)


def test_what_follows_a_complete_report_is_not_read():
    async def scenario(port, task):
        await send(port, ONE)
        await talk(port, hello() + frame(*(2 * np.arange(6) + TWO)) + frame(*EVERY) * 50)
        await assert_counts(port)

    with_mixer(CONFIG, scenario)


@pytest.mark.parametrize(
    ("round", "positions"), [(0, POSITIONS), (4, POSITIONS), (2**64 - 1, POSITIONS), (1, 5), (1, 7)]
)
def test_rounds_and_sizes_of_others_are_unknown(round, positions):
    async def scenario(port, task):
        assert await status_of(send(port, np.ones(positions, bool), round)) is Status.UNKNOWN
        assert await status_of(ask(port, round, positions)) is Status.UNKNOWN

    with_mixer(CONFIG, scenario)


@pytest.mark.parametrize(
    "said",
    [b"", hello()[:3], hello() + frame(*EVERY[:5])],
    ids=["nothing", "half a hello", "half a report"],
)
def test_an_idle_connection_is_closed(said):
    async def scenario(port, task):
        answer = await talk(port, said, end=False)
        assert answer in (b"", bytes([Status.OK]))
        await send_both(port)
        await assert_counts(port)

    with_mixer(replace(CONFIG, idle=0.4), scenario)


def test_a_connection_that_drips_is_closed_at_the_deadline():
    async def scenario(port, task):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(hello() + b"\0")
        await send_both(port)
        for word in (b"\x06", b"\0", b"\0"):
            await asyncio.sleep(0.1)
            writer.write(word)
        assert await asyncio.wait_for(reader.read(), PATIENCE) == bytes([Status.OK])
        writer.close()
        assert await outcome(port) is Status.OK
        await assert_counts(port)

    with_mixer(replace(CONFIG, deadline=0.8, expected=9), scenario)


def test_a_collector_that_does_not_read_has_not_been_told():
    async def scenario(port, task):
        await send_both(port)
        await talk(port, hello(kind=b"FVM2C"))
        assert not task.done()
        await assert_counts(port)
        await asyncio.wait_for(task, PATIENCE)

    with_mixer(replace(CONFIG, rounds=1, idle=0.5), scenario)


def test_connections_are_bounded_and_free_places_are_used_again():
    async def scenario(port, task):
        idle = [await asyncio.open_connection(HOST, port) for _ in range(3)]
        assert await talk(port, hello(), end=False) == b""
        assert await status_of(send(port, ONE)) is Status.LOST
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()
        while await status_of(ask(port)) is Status.LOST:
            await asyncio.sleep(0.02)
        await send_both(port)
        await assert_counts(port)

    with_mixer(replace(CONFIG, connections=3), scenario)
