"""Messages on their way, and why latency is no shuffler.

Statistical tests use fixed seeds and a false-alarm rate of 1e-6 each.
"""

import math

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.noise.streams import Streams
from tests.mixing.delays import Linkage, Messages, dispatch, linkage

ALARM = 1e-6


def random_bits(clients, positions, seed=3):
    return Streams(seed).generator("bits").random((clients, positions)) < 0.5


def test_messages_outside_a_report_are_refused():
    one, flag = np.zeros(1), np.zeros(1, dtype=bool)
    index = np.zeros(1, dtype=np.int32)
    for position in (-1, 3):
        with pytest.raises(BadInput, match="outside the 3 positions"):
            Messages(one, index + np.int32(position), flag, index, 3)
    with pytest.raises(BadInput, match="lengths"):
        Messages(np.zeros(2), index, flag, index, 3)


def test_latencies_are_a_function_of_seed_round_client_and_position():
    bits = random_bits(6, 40)
    sent = dispatch(bits, Streams(1), 2, spread=1.0)
    assert np.array_equal(sent.time, dispatch(bits, Streams(1), 2, spread=1.0).time)
    assert np.array_equal(sent.time[:80], dispatch(bits[:2], Streams(1), 2, spread=1.0).time)
    assert not np.array_equal(sent.time, dispatch(bits, Streams(1), 3, spread=1.0).time)
    assert not np.array_equal(sent.time, dispatch(bits, Streams(2), 2, spread=1.0).time)
    assert len(np.unique(sent.time)) == sent.time.size


def test_latency_lies_within_the_spread_of_a_clients_start():
    starts = np.array([0.0, 5.0, 100.0])
    sent = dispatch(random_bits(3, 1000), Streams(1), 1, spread=2.0, starts=starts)
    latency = sent.time - starts[sent.sender]
    assert latency.min() >= 0
    assert latency.max() < 2.0 + 1e-12


@pytest.mark.parametrize("spread", [-1.0, math.nan, math.inf])
def test_a_spread_that_is_no_time_is_refused(spread):
    with pytest.raises(BadInput, match="spread is"):
        dispatch(random_bits(2, 2), Streams(1), 1, spread=spread)


@pytest.mark.parametrize("starts", [-1.0, math.inf, [0.0, math.nan], [0.0, 1.0, 2.0]])
def test_starts_that_are_no_times_are_refused(starts):
    with pytest.raises(BadInput, match="starts"):
        dispatch(random_bits(2, 2), Streams(1), 1, spread=1.0, starts=starts)


@pytest.mark.parametrize("clients", [2, 50])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_equal_starts_leave_the_observer_at_chance(clients, spread):
    """Exact binomial tests, false-alarm rate 1e-6 on either side."""
    sent = dispatch(random_bits(clients, 20_000), Streams(7), 1, spread=spread, starts=3.0)
    found = linkage(sent, Streams(7))
    assert found.trials == 10_000
    assert found.chance == 1 / clients
    assert found.p_value > ALARM
    unlucky = Linkage(found.trials - found.successes, found.trials, 1 - found.chance)
    assert unlucky.p_value > ALARM


def test_starts_further_apart_than_the_spread_give_every_client_away():
    sent = dispatch(random_bits(50, 2000), Streams(7), 1, spread=1.0, starts=2.0 * np.arange(50))
    found = linkage(sent, Streams(7))
    assert found.success_rate == 1.0
    assert found.p_value < ALARM


def test_random_starts_wider_than_the_spread_are_far_above_chance():
    starts = 10.0 * Streams(7).generator("starts").random(50)
    found = linkage(
        dispatch(random_bits(50, 2000), Streams(7), 1, spread=1.0, starts=starts), Streams(7), 500
    )
    assert found.trials == 500
    assert found.success_rate > 5 * found.chance
    assert found.z > 10
    assert found.p_value < ALARM


def test_linkage_statistics_are_those_of_the_binomial():
    found = Linkage(successes=3, trials=4, chance=0.5)
    assert found.success_rate == 0.75
    assert found.z == pytest.approx(1.0)
    assert found.p_value == pytest.approx(5 / 16)
    assert Linkage(successes=0, trials=4, chance=0.5).p_value == 1.0


def test_linkage_needs_clients_complete_reports_and_room():
    with pytest.raises(BadInput, match="at least two"):
        linkage(dispatch(random_bits(1, 10), Streams(1), 1, spread=1.0), Streams(1))
    sent = dispatch(random_bits(3, 10), Streams(1), 1, spread=1.0)
    missing = Messages(sent.time[1:], sent.position[1:], sent.is_high[1:], sent.sender[1:], 10)
    with pytest.raises(BadInput, match="exactly one message"):
        linkage(missing, Streams(1))
    for trials in (0, 6):
        with pytest.raises(BadInput, match="1 to 5 fit 10 positions"):
            linkage(sent, Streams(1), trials)
