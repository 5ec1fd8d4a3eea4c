"""The shuffler at once, and message by message: the same numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.base.errors import BadInput
from fedveil.privacy.noise.mechanisms import TwoPointMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.shuffle import Multisets, highs, multisets
from tests.mixing.delays import Messages, dispatch, mix_all


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
    return np.array_equal(one.high_counts, other.high_counts) and np.array_equal(
        one.report_counts, other.report_counts
    )


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
    assert same(at_once, mix_all(sent, clients))
    assert at_once.sums(centres, reach).tolist() == exact_sums(rows)


def test_many_rows_are_counted_in_blocks():
    rows, centre, reach = reported(700, 3000)
    made = multisets(rows, centre, reach, 700)
    assert np.array_equal(made.high_counts, bits_of(rows, centre, reach).sum(axis=0))
    assert torch.allclose(made.sums(centre, reach), rows.double().sum(dim=0), rtol=0, atol=1e-10)


def test_the_order_of_reports_does_not_matter():
    rows, centre, reach = reported(30, 50)
    assert same(multisets(rows, centre, reach, 1), multisets(rows.flip(0), centre, reach, 1))


@pytest.mark.parametrize("count", [0, 1, 9])
def test_too_few_reports_hand_nothing_on(count):
    rows, centre, reach = reported(9, 20)
    with pytest.raises(BadInput, match=rf"has {count} reports and minimum is 10"):
        multisets(rows[:count], centre, reach, 10)
    if count:
        sent = dispatch(random_bits(count, 20), Streams(1), 1, spread=1.0)
        with pytest.raises(BadInput, match="nothing is handed on"):
            mix_all(sent, 10)


def test_one_lost_message_is_enough_to_hand_nothing_on():
    sent = dispatch(random_bits(5, 20), Streams(1), 1, spread=1.0)
    kept = np.arange(100) != 42
    arrays = (sent.time, sent.position, sent.is_high, sent.sender)
    lossy = Messages(*(array[kept] for array in arrays), 20)
    assert mix_all(lossy, 4).report_counts.tolist() == [4 if j == 2 else 5 for j in range(20)]
    with pytest.raises(BadInput, match="has 4 reports"):
        mix_all(lossy, 5)


@pytest.mark.parametrize("minimum", [0, -3])
def test_a_minimum_below_one_is_refused(minimum):
    rows, centre, reach = reported(3, 5)
    with pytest.raises(BadInput, match=r"^minimum is "):
        multisets(rows, centre, reach, minimum)
    with pytest.raises(BadInput, match=r"^minimum is "):
        mix_all(dispatch(random_bits(3, 5), Streams(1), 1, spread=1.0), minimum)


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
        assert made.high_counts.tolist() == [0]


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
    assert made.high_counts.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        made.high_counts[0] = 2
