"""The digits of scikit-learn."""

import numpy as np

from fedveil.data.image_sets import load_digits


def test_load():
    records = load_digits()
    assert (records.x.shape, records.test_x.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert (records.x.dtype, records.y.dtype) == (np.float32, np.int64)
    assert (records.x.min(), records.x.max()) == (0.0, 1.0)
    assert np.bincount(records.y).min() > 130
    assert np.bincount(records.test_y).min() > 20


def test_the_split_is_fixed():
    first, second = load_digits(), load_digits()
    np.testing.assert_array_equal(first.x, second.x)
    np.testing.assert_array_equal(first.test_y, second.test_y)


def test_nobody_shares_arrays():
    load_digits().x[:] = 0
    assert load_digits().x.max() == 1
