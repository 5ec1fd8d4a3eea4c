"""The mixer on loopback: what it counts, how its rounds end, when it stops."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedveil
from fedveil.base.errors import BadInput
from fedveil.mixing.protocol import Status
from fedveil.privacy.noise.mechanisms import TwoPointMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.shuffle import highs, multisets
from tests.mixing.loopback import (
    CONFIG,
    EVERY,
    HOST,
    ONE,
    PATIENCE,
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
        assert np.array_equal(found.high_counts, at_once.high_counts)
        assert np.array_equal(found.report_counts, at_once.report_counts)
        assert torch.equal(found.sums(centre, reach), at_once.sums(centre, reach))
        await asyncio.wait_for(task, PATIENCE)

    with_mixer(
        replace(CONFIG, positions=positions, minimum=clients, expected=clients, rounds=1), scenario
    )


def test_a_long_report_is_split_into_frames():
    high = Streams(1).generator("bits").random(20_000) < 0.5

    async def scenario(port, task):
        await send(port, high)
        found = await ask(port, positions=len(high))
        assert np.array_equal(found.high_counts, high)

    with_mixer(replace(CONFIG, positions=20_000, minimum=1, expected=1), scenario)


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
        assert await talk(port, hello(kind=b"FVM2C")) == bytes([Status.OPEN])

    with_mixer(CONFIG, scenario)


def test_at_its_deadline_a_round_with_too_few_reports_is_discarded():
    async def scenario(port, task):
        await send(port, ONE)
        assert await outcome(port) is Status.TOO_FEW
        assert await status_of(send(port, TWO)) is Status.FINISHED
        assert await talk(port, hello(kind=b"FVM2C")) == bytes([Status.TOO_FEW])
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

    with_mixer(replace(CONFIG, rounds_in_memory=2), scenario)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": 0}, "mixer.positions is 0"),
        ({"positions": 2**31}, "mixer.positions is 2147483648"),
        ({"minimum": 0}, "mixer.minimum is 0"),
        ({"rounds": 0}, "mixer.rounds is 0"),
        ({"rounds_in_memory": 0}, "mixer.rounds_in_memory is 0"),
        ({"connections": 0}, "mixer.connections is 0"),
        ({"expected": 1}, "below mixer.minimum 2"),
        ({"deadline": 0.0}, "mixer.deadline is 0.0"),
        ({"idle": math.nan}, "mixer.idle is nan"),
        ({"seconds": math.inf}, "mixer.seconds is inf"),
        ({"port": 65536}, "mixer.port is 65536"),
        ({"host": "localhost"}, "an IP address is needed"),
        ({"host": "0.0.0.0"}, "on this machine only"),
        ({"host": "192.0.2.1"}, "on this machine only"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(BadInput) as caught:
        replace(CONFIG, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_loopback_has_another_address():
    assert replace(CONFIG, host="::1").host == "::1"


ENDINGS = """
from fedveil.mixing.mixer import MixerConfig, run_mixer
for seconds in (60.0, 60.0, 60.0, 0.1):
    run_mixer(MixerConfig(positions=6, minimum=2, expected=2, seconds=seconds, simulated=True))
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
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "")
