"""Which records are held out: it follows from counts and names."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.data.split import holdout
from fedveil.errors import BadInput


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
