"""A mixer on loopback for the tests: how to start it, and how to talk to it well and badly."""

import asyncio
import selectors
import struct
from contextlib import asynccontextmanager

import numpy as np
import pytest

from fedveil.mixing.mixer import MixerConfig, serve
from fedveil.mixing.protocol import Refused, Status, collect, send_report

HOST = "127.0.0.1"
POSITIONS = 6
PATIENCE = 60.0
CONFIG = MixerConfig(positions=POSITIONS, minimum=2, expected=2, rounds=3, simulated=True)


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
EVERY = [0, 3, 4, 7, 8, 11]  # a complete report: 2 x position + bit


def send(port, high, round=1, **options):
    return send_report(HOST, port, round, high, **{"minimum": 1, **options})


async def send_both(port, round=1):
    await send(port, ONE, round)
    await send(port, TWO, round)


def ask(port, round=1, positions=POSITIONS, **options):
    return collect(HOST, port, round, positions, **{"minimum": 1, **options})


async def status_of(awaitable):
    with pytest.raises(Refused) as caught:
        await awaitable
    return caught.value.status


def hello(round=1, kind=b"FVM2R", positions=POSITIONS, minimum=1):
    return struct.pack(">5sIIQ", kind, positions, minimum, round)


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
    assert found.high_counts.tolist() == [2, 1, 1, 0, 2, 1]
    assert found.report_counts.tolist() == [2] * POSITIONS
