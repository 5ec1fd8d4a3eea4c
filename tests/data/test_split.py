"""Which records are held out: it follows from counts and names."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.base.errors import BadInput
from fedveil.data.provenance import holdout, share_of_each


@given(n=st.integers(2, 500))
def test_holdout_is_a_fixed_80_20_split(n):
    train, test = holdout(n)
    assert sorted([*train, *test]) == list(range(n))
    assert len(train) == max(1, n * 4 // 5)
    np.testing.assert_array_equal(train, holdout(n)[0])


@pytest.mark.parametrize("n", [0, 1])
def test_holdout_of_too_few(n):
    with pytest.raises(BadInput, match=f"{n} records cannot be split"):
        holdout(n)


@given(n=st.integers(2, 500), share=st.floats(0.001, 0.999))
def test_a_share_is_held_out_and_never_all_or_nothing(n, share):
    train, test = holdout(n, share)
    assert sorted([*train, *test]) == list(range(n))
    assert min(len(train), len(test)) >= 1
    assert abs(len(test) - n * share) <= 1


@given(
    sizes=st.lists(st.integers(2, 30), min_size=1, max_size=6),
    share=st.floats(0.01, 0.99),
    more=st.integers(0, 20),
)
def test_a_share_of_each_owner_does_not_depend_on_the_others(sizes, share, more):
    names = np.array([f"n{k}" for k in range(len(sizes))])
    owners = np.repeat(np.arange(len(sizes)), sizes)
    tested = share_of_each(owners, names, share)
    assert len(set(tested)) == len(tested)
    for owner, size in enumerate(sizes):
        count = (owners[tested] == owner).sum()
        assert 1 <= count <= size - 1
        assert abs(count - size * share) <= 1
    longer = np.concatenate([np.zeros(more, dtype=int), owners])  # the first has more rows
    again = share_of_each(longer, names, share)
    assert [row - more for row in again if longer[row] > 0] == [
        row for row in tested if owners[row] > 0
    ]
    shuffled = share_of_each(owners[::-1], names, share)  # everybody's own order is what counts
    assert len(shuffled) == len(tested)


def test_different_owners_hold_out_different_records():
    owners, names = np.repeat(np.arange(20), 10), np.array([f"n{k}" for k in range(20)])
    tested = share_of_each(owners, names, 0.2).reshape(20, 2) % 10
    assert len({tuple(row) for row in tested.tolist()}) > 10


def test_an_owner_of_one_record_is_named():
    with pytest.raises(BadInput, match=r"^client 'b' has one record, .*\(min_records = 2\)"):
        share_of_each(np.array([0, 0, 1]), np.array(["a", "b"]), 0.5)
