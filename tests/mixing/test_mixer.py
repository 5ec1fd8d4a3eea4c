"""The mixer on loopback: what it counts, what it refuses, when it stops."""

import asyncio
import json
import math
import os
import selectors
import signal
import struct
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedveil
from fedveil.errors import BadInput
from fedveil.mixing.client import collect, send_report
from fedveil.mixing.mixer import MixerConfig, serve
from fedveil.mixing.protocol import Refused, Status
from fedveil.privacy.noise.mechanisms import TwoPointMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.shuffle import highs, multisets

HOST = "127.0.0.1"
POSITIONS = 6
PATIENCE = 10.0
CONFIG = MixerConfig(positions=POSITIONS, minimum=2, expected=2, rounds=3)


class Patient(selectors.DefaultSelector):
    """Instead of waiting for a time to come it lets that time pass, once nothing else happens."""

    passed = 0.0

    def select(self, timeout=None):
        found = super().select(timeout and min(timeout, 0.005))
        if not found and timeout:
            self.passed += timeout
        return found


class PatientLoop(asyncio.SelectorEventLoop):
    """Deadlines pass only where client and mixer have nothing left to do, however slow they are."""

    def __init__(self):
        self.selector = Patient()
        super().__init__(self.selector)

    def time(self):
        return self.selector.passed


@asynccontextmanager
async def mixing(config):
    """A running mixer: yields its port and its task, and fails if the task failed."""
    port, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
    task = asyncio.create_task(serve(config, port.set_result, stop))
    try:
        yield await asyncio.wait_for(port, PATIENCE), task
    finally:
        stop.set()
        await asyncio.wait_for(task, PATIENCE)


def with_mixer(config, scenario):
    """Run scenario(port, task) against a mixer in which no connection may fail unexpectedly."""
    unexpected = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, what: unexpected.append(what))
        async with mixing(config) as (port, task):
            await scenario(port, task)

    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        runner.run(main())
    assert unexpected == []


def bits(*values):
    return np.array(values, dtype=bool)


ONE = bits(1, 0, 1, 0, 1, 0)
TWO = bits(1, 1, 0, 0, 1, 1)


def send(port, high, round=1, **options):
    return send_report(HOST, port, round, high, **options)


async def send_both(port, round=1):
    await send(port, ONE, round)
    await send(port, TWO, round)


def ask(port, round=1, positions=POSITIONS):
    return collect(HOST, port, round, positions)


async def status_of(awaitable):
    with pytest.raises(Refused) as caught:
        await awaitable
    return caught.value.status


def hello(round=1, kind=b"FVM1R", positions=POSITIONS):
    return struct.pack(">5sIQ", kind, positions, round)


def frame(*words, count=None):
    announced = len(words) if count is None else count
    return struct.pack(f">H{len(words)}I", announced, *words)


async def talk(port, data, *, end=True):
    """Send raw bytes, and return all that comes back until the mixer hangs up."""
    reader, writer = await asyncio.open_connection(HOST, port)
    received = b""
    try:
        writer.write(data)
        if end and writer.can_write_eof():
            writer.write_eof()
        while chunk := await asyncio.wait_for(reader.read(1000), PATIENCE):
            received += chunk
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return received


async def outcome(port, round=1, positions=POSITIONS):
    """Wait for a round to finish: OK, or why nothing is handed on."""
    while True:
        try:
            await ask(port, round, positions)
        except Refused as refused:
            if refused.status is not Status.OPEN:
                return refused.status
            await asyncio.sleep(0.02)
        else:
            return Status.OK


async def assert_counts(port, round=1):
    """The counts of ONE and TWO, and of nothing else."""
    found = await ask(port, round)
    assert found.high.tolist() == [2, 1, 1, 0, 2, 1]
    assert found.reports.tolist() == [2] * POSITIONS


@pytest.mark.parametrize("seeded", [True, False])
def test_twenty_clients_end_to_end_as_if_shuffled_at_once(seeded):
    clients, positions = 20, 300
    rows = 0.1 * torch.randn(clients, positions, generator=torch.Generator().manual_seed(1))
    centre, radius = torch.full((positions,), 0.01), torch.full((positions,), 0.075)
    mechanism = TwoPointMechanism(1.0)
    mechanism.report_(rows, centre, radius, Streams(1).keys("noise", 1, np.arange(clients)))
    reach = radius * mechanism.kappa
    high = highs(rows, centre, reach).numpy()

    async def scenario(port, task):
        await asyncio.gather(
            *(
                send(port, row, spread=0.2, seed=number if seeded else None)
                for number, row in enumerate(high)
            )
        )
        found = await ask(port, positions=positions)
        at_once = multisets(rows, centre, reach, clients)
        assert np.array_equal(found.high, at_once.high)
        assert np.array_equal(found.reports, at_once.reports)
        assert torch.equal(found.sums(centre, reach), at_once.sums(centre, reach))
        await asyncio.wait_for(task, PATIENCE)

    with_mixer(MixerConfig(positions=positions, minimum=clients, expected=clients), scenario)


def test_a_long_report_is_split_into_frames():
    high = Streams(1).generator("bits").random(20_000) < 0.5

    async def scenario(port, task):
        await send(port, high)
        found = await ask(port, positions=len(high))
        assert np.array_equal(found.high, high)

    with_mixer(MixerConfig(positions=20_000, minimum=1, expected=1), scenario)


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
    rest, words, frames = bytes(received[17:]), [], 0
    while rest:
        (count,) = struct.unpack_from(">H", rest)
        words += struct.unpack_from(f">{count}I", rest, 2)
        rest, frames = rest[2 + 4 * count :], frames + 1
    assert received[:17] == hello(positions=300)
    assert sorted(words) == (2 * np.arange(300) + high).tolist()
    assert words != sorted(words)
    assert (frames == 1) if spread == 0 else (10 <= frames <= 21)


def test_answers_that_make_no_sense_are_refused():
    async def scenario():
        async with pretending(bytes([99]), bytearray()) as port:
            assert await status_of(send(port, ONE)) is Status.LOST
        impossible = bytes([Status.OK]) + struct.pack(">7I", 2, 0, 1, 2, 3, 0, 0)
        async with pretending(impossible, bytearray()) as port:
            with pytest.raises(BadInput, match="more high reports"):
                await ask(port)

    asyncio.run(scenario())


def test_collecting_twice_gives_the_same_and_late_reports_change_nothing():
    async def scenario(port, task):
        await send_both(port)
        await assert_counts(port)
        assert await status_of(send(port, ONE)) is Status.FINISHED
        await assert_counts(port)

    with_mixer(CONFIG, scenario)


def test_a_report_under_way_when_its_round_closes_does_not_count():
    async def scenario(port, task):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(hello() + frame(*EVERY[:5]))
        assert await reader.readexactly(1) == bytes([Status.OK])
        await send_both(port)
        writer.write(frame(EVERY[5]))
        assert await reader.read() == bytes([Status.FINISHED])
        writer.close()
        await assert_counts(port)

    with_mixer(CONFIG, scenario)


def test_rounds_are_kept_apart():
    async def scenario(port, task):
        await send(port, ONE, 2)
        await send_both(port, 3)
        assert await status_of(ask(port, 2)) is Status.OPEN
        await send(port, TWO, 2)
        await assert_counts(port, 2)
        await assert_counts(port, 3)

    with_mixer(CONFIG, scenario)


def test_nothing_is_handed_on_while_a_round_is_open():
    async def scenario(port, task):
        assert await status_of(ask(port)) is Status.OPEN
        await send(port, ONE)
        assert await status_of(ask(port)) is Status.OPEN
        assert await talk(port, hello(kind=b"FVM1C")) == bytes([Status.OPEN])

    with_mixer(CONFIG, scenario)


def test_at_its_deadline_a_round_with_too_few_reports_is_discarded():
    async def scenario(port, task):
        await send(port, ONE)
        assert await outcome(port) is Status.TOO_FEW
        assert await status_of(send(port, TWO)) is Status.FINISHED
        assert await talk(port, hello(kind=b"FVM1C")) == bytes([Status.TOO_FEW])
        await send_both(port, 2)
        await assert_counts(port, 2)

    with_mixer(replace(CONFIG, deadline=0.5), scenario)


def test_at_its_deadline_a_round_with_enough_reports_closes():
    async def scenario(port, task):
        await send_both(port)
        assert await status_of(ask(port)) is Status.OPEN
        assert await outcome(port) is Status.OK
        await assert_counts(port)

    with_mixer(replace(CONFIG, deadline=0.5, expected=5), scenario)


EVERY = [0, 3, 4, 7, 8, 11]  # a complete report: 2 x position + bit
MALFORMED = {
    "nothing": b"",
    "garbage": b"GET / HTTP/1.1\r\nHost: mixer\r\n\r\n",
    "short hello": hello()[:9],
    "other kind": hello(kind=b"FVM1X"),
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

    with_mixer(MixerConfig(positions=4097, minimum=1, expected=1), scenario)


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
        await talk(port, hello(kind=b"FVM1C"))
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


def test_open_rounds_are_bounded():
    async def scenario(port, task):
        await send(port, ONE, 1)
        await send(port, ONE, 2)
        assert await status_of(send(port, ONE, 3)) is Status.BUSY
        await send(port, TWO, 1)
        await assert_counts(port, 1)
        await send_both(port, 3)
        await assert_counts(port, 3)
        assert await status_of(ask(port, 1)) is Status.FORGOTTEN
        assert await status_of(send(port, ONE, 1)) is Status.FINISHED

    with_mixer(replace(CONFIG, held=2), scenario)


def test_it_stops_when_every_outcome_has_been_told():
    async def scenario(port, task):
        await send_both(port, 1)
        await send(port, ONE, 2)
        await assert_counts(port, 1)
        assert not task.done()
        assert await outcome(port, 2) is Status.TOO_FEW
        await asyncio.wait_for(task, PATIENCE)
        assert await status_of(ask(port, 1)) is Status.LOST

    with_mixer(replace(CONFIG, rounds=2, deadline=0.5), scenario)


def test_it_stops_after_its_seconds_with_connections_open():
    async def scenario(port, task):
        pending = asyncio.create_task(send(port, ONE, spread=30.0))
        await asyncio.wait_for(task, PATIENCE)
        assert await status_of(ask(port)) is Status.LOST
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)

    with_mixer(replace(CONFIG, seconds=0.2), scenario)


def test_refusals_are_one_line():
    for status in set(Status) - {Status.OK}:
        assert "\n" not in str(Refused(7, status))
        assert str(Refused(7, status)).startswith("round 7 ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": 0}, "mixer.positions is 0"),
        ({"positions": 2**31}, "mixer.positions is 2147483648"),
        ({"minimum": 0}, "mixer.minimum is 0"),
        ({"rounds": 0}, "mixer.rounds is 0"),
        ({"held": 0}, "mixer.held is 0"),
        ({"connections": 0}, "mixer.connections is 0"),
        ({"expected": 1}, "below mixer.minimum 2"),
        ({"deadline": 0.0}, "mixer.deadline is 0.0"),
        ({"idle": math.nan}, "mixer.idle is nan"),
        ({"seconds": math.inf}, "mixer.seconds is inf"),
        ({"port": 65536}, "mixer.port is 65536"),
        ({"host": "localhost"}, "an IP address is needed"),
        ({"host": "0.0.0.0"}, "set mixer.exposed"),
        ({"host": "192.0.2.1"}, "set mixer.exposed"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(BadInput) as caught:
        replace(CONFIG, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_hosts_can_be_asked_for():
    assert replace(CONFIG, host="0.0.0.0", exposed=True).exposed
    assert replace(CONFIG, host="::1").host == "::1"


@pytest.mark.parametrize("spread", [-1.0, math.nan, math.inf])
def test_a_report_that_cannot_be_sent_is_bad_input(spread):
    with pytest.raises(BadInput, match="finite seconds"):
        asyncio.run(send_report(HOST, 1, 1, ONE, spread=spread))
    with pytest.raises(BadInput, match=r"bits \[P\]"):
        asyncio.run(send_report(HOST, 1, 1, ONE[:0]))
    with pytest.raises(BadInput, match="no mixer has such a round"):
        asyncio.run(send_report(HOST, 1, -1, ONE))


ENDINGS = """
from fedveil.mixing.mixer import MixerConfig, run_mixer
for seconds in (60.0, 60.0, 60.0, 0.1):
    run_mixer(MixerConfig(positions=6, minimum=2, expected=2, seconds=seconds))
"""


@pytest.mark.slow
def test_a_process_ends_cleanly_after_its_rounds_at_a_signal_and_after_its_seconds():
    """Four mixers one after the other, because starting Python takes longest."""

    async def one_round(port):
        await send_both(port)
        await assert_counts(port)

    with subprocess.Popen(
        [sys.executable, "-c", ENDINGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(fedveil.__file__).parents[1])},
    ) as process:

        def announced():
            ready = json.loads(process.stdout.readline())
            assert ready["host"] == HOST
            return ready["port"]

        asyncio.run(one_round(announced()))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.run(send(announced(), ONE))
            process.send_signal(number)
        assert announced() > 0
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")
