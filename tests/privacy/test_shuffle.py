"""The shuffler at once, the shuffler message by message, and why latency is neither.

Statistical tests use fixed seeds and a false-alarm rate of 1e-6 each.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import BadInput
from fedveil.privacy.noise.mechanisms import TwoPointMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.shuffle import (
    Linkage,
    Messages,
    Multisets,
    arrivals,
    dispatch,
    highs,
    linkage,
    mix,
    multisets,
)

ALARM = 1e-6


def reported(clients, positions, *, seed=1, epsilon=1.0, scale=0.1, centre=0.02):
    """(rows as reported, centre, reach) of clients with normal weights."""
    draw = torch.Generator().manual_seed(seed)
    rows = scale * torch.randn(clients, positions, generator=draw)
    centres = centre + scale * torch.randn(positions, generator=draw)
    radius = scale * torch.rand(positions, generator=draw)
    radius[::7] = 0
    mechanism = TwoPointMechanism(epsilon)
    keys = Streams(seed).keys("client-noise", 1, np.arange(clients))
    mechanism.report_(rows, centres, radius, keys)
    return rows, centres, radius * mechanism.kappa


def exact_sums(rows):
    return [math.fsum(column) for column in rows.double().T.tolist()]


def bits_of(rows, centre, reach):
    return highs(rows, centre, reach).numpy()


def random_bits(clients, positions, seed=3):
    return Streams(seed).generator("bits").random((clients, positions)) < 0.5


def same(one, other):
    return np.array_equal(one.high, other.high) and np.array_equal(one.reports, other.reports)


@given(
    clients=st.integers(1, 40),
    positions=st.integers(1, 400),
    seed=st.integers(0, 2**32),
    epsilon=st.sampled_from([0.1, 1.0, 10.0]),
    scale=st.sampled_from([1e-6, 0.1, 1e4]),
    centre=st.sampled_from([0.0, 1.0, -1.0, 1024.0]),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 1e6]),
)
@settings(max_examples=150, deadline=None)
def test_at_once_message_by_message_and_column_sums_agree(
    clients, positions, seed, epsilon, scale, centre, spread
):
    rows, centres, reach = reported(
        clients, positions, seed=seed, epsilon=epsilon, scale=scale, centre=centre
    )
    at_once = multisets(rows, centres, reach, clients)
    starts = np.linspace(0, 3 * spread, clients)
    bits = bits_of(rows, centres, reach)
    sent = dispatch(bits, Streams(seed), 1, spread=spread, starts=starts)
    assert same(at_once, mix(sent, clients))
    assert at_once.sums(centres, reach).tolist() == exact_sums(rows)


def test_many_rows_are_counted_in_blocks():
    rows, centre, reach = reported(700, 3000)
    made = multisets(rows, centre, reach, 700)
    assert np.array_equal(made.high, bits_of(rows, centre, reach).sum(axis=0))
    assert torch.allclose(made.sums(centre, reach), rows.double().sum(dim=0), rtol=0, atol=1e-10)


def test_the_order_of_reports_does_not_matter():
    rows, centre, reach = reported(30, 50)
    assert same(multisets(rows, centre, reach, 1), multisets(rows.flip(0), centre, reach, 1))


@pytest.mark.parametrize("count", [0, 1, 9])
def test_too_few_reports_hand_nothing_on(count):
    rows, centre, reach = reported(9, 20)
    with pytest.raises(BadInput, match=rf"has {count} reports and shuffle\.minimum is 10"):
        multisets(rows[:count], centre, reach, 10)
    if count:
        sent = dispatch(random_bits(count, 20), Streams(1), 1, spread=1.0)
        with pytest.raises(BadInput, match="nothing is handed on"):
            mix(sent, 10)


def test_one_lost_message_is_enough_to_hand_nothing_on():
    sent = dispatch(random_bits(5, 20), Streams(1), 1, spread=1.0)
    kept = np.arange(100) != 42
    lossy = Messages(sent.time[kept], sent.position[kept], sent.high[kept], sent.sender[kept], 20)
    assert mix(lossy, 4).reports.tolist() == [4 if j == 2 else 5 for j in range(20)]
    with pytest.raises(BadInput, match="has 4 reports"):
        mix(lossy, 5)


@pytest.mark.parametrize("minimum", [0, -3])
def test_a_minimum_below_one_is_refused(minimum):
    rows, centre, reach = reported(3, 5)
    with pytest.raises(BadInput, match=r"shuffle\.minimum"):
        multisets(rows, centre, reach, minimum)
    with pytest.raises(BadInput, match=r"shuffle\.minimum"):
        mix(dispatch(random_bits(3, 5), Streams(1), 1, spread=1.0), minimum)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_what_is_no_two_point_report_is_refused(value):
    rows, centre, reach = reported(4, 10)
    rows[2, 3] = value
    with pytest.raises(BadInput, match=r"report 2 holds .* at position 3"):
        multisets(rows, centre, reach, 1)


def test_shapes_that_do_not_fit_are_refused():
    rows, centre, reach = reported(4, 10)
    for bad in [(rows[0], centre, reach), (rows, centre[1:], reach), (rows, centre, reach[1:])]:
        with pytest.raises(BadInput, match=r"\[K, P\]"):
            highs(*bad)


@pytest.mark.parametrize("centre", [0.0, 1.0, -1.0, 0.3])
@pytest.mark.parametrize("reach", [0.0, 2.0**-25, 1.1 * 2.0**-25])
def test_a_reach_lost_in_rounding_keeps_the_sums(centre, reach):
    """Next to a power of two one value may round to the centre and the other not."""
    centres, reaches = torch.full((1,), centre), torch.full((1,), reach)
    rows = centres + torch.tensor([[1.0], [-1.0], [1.0]]) * reaches
    made = multisets(rows, centres, reaches, 1)
    assert made.sums(centres, reaches).tolist() == exact_sums(rows)
    if reach == 0:
        assert made.high.tolist() == [0]


@pytest.mark.parametrize(
    ("high", "reports"),
    [([1], [1, 1]), ([], []), ([2], [1]), ([-1], [1]), ([[1]], [[1]])],
)
def test_impossible_multisets_are_refused(high, reports):
    with pytest.raises(BadInput, match="multisets"):
        Multisets(np.array(high, dtype=np.int64), np.array(reports, dtype=np.int64))


def test_multisets_do_not_change():
    counts = np.array([1, 2])
    made = Multisets(counts, np.array([2, 2]))
    counts[0] = 2
    assert made.high.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        made.high[0] = 2


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


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_arrivals_are_in_time_and_say_nothing_of_the_order_of_clients(spread):
    sent = dispatch(random_bits(10, 30), Streams(1), 1, spread=spread)
    seen = arrivals(sent)
    assert (np.diff(seen.time) >= 0).all()
    order = Streams(5).generator("order").permutation(len(sent.time))
    again = arrivals(
        Messages(sent.time[order], sent.position[order], sent.high[order], sent.sender[order], 30)
    )
    for name in ("time", "position", "high"):
        assert np.array_equal(getattr(seen, name), getattr(again, name))


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
    assert found.rate == 1.0
    assert found.p_value < ALARM


def test_random_starts_wider_than_the_spread_are_far_above_chance():
    starts = 10.0 * Streams(7).generator("starts").random(50)
    found = linkage(
        dispatch(random_bits(50, 2000), Streams(7), 1, spread=1.0, starts=starts), Streams(7), 500
    )
    assert found.trials == 500
    assert found.rate > 5 * found.chance
    assert found.z > 10
    assert found.p_value < ALARM


def test_linkage_statistics_are_those_of_the_binomial():
    found = Linkage(successes=3, trials=4, chance=0.5)
    assert found.rate == 0.75
    assert found.z == pytest.approx(1.0)
    assert found.p_value == pytest.approx(5 / 16)
    assert Linkage(successes=0, trials=4, chance=0.5).p_value == 1.0


def test_linkage_needs_clients_complete_reports_and_room():
    with pytest.raises(BadInput, match="at least two"):
        linkage(dispatch(random_bits(1, 10), Streams(1), 1, spread=1.0), Streams(1))
    sent = dispatch(random_bits(3, 10), Streams(1), 1, spread=1.0)
    missing = Messages(sent.time[1:], sent.position[1:], sent.high[1:], sent.sender[1:], 10)
    with pytest.raises(BadInput, match="exactly one message"):
        linkage(missing, Streams(1))
    for trials in (0, 6):
        with pytest.raises(BadInput, match="1 to 5 fit 10 positions"):
            linkage(sent, Streams(1), trials)
