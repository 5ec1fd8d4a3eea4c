"""The diabetes data of scikit-learn: a number to predict."""

import numpy as np

from fedveil.data import diabetes


def test_load():
    records = diabetes.load()
    assert len(records.x) + len(records.test_x) == 442
    assert records.x.shape[1:] == records.test_x.shape[1:] == (10,)
    assert (records.x.dtype, records.y.dtype, records.classes) == (np.float32, np.float32, 0)
    both = np.concatenate([records.x, records.test_x])
    np.testing.assert_allclose(both.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(both.std(0), 1, rtol=1e-5)
    assert 0.2 < records.y.min() < records.y.max() < 4


def test_the_split_is_fixed():
    first, second = diabetes.load(), diabetes.load()
    np.testing.assert_array_equal(first.x, second.x)
    np.testing.assert_array_equal(first.test_y, second.test_y)
