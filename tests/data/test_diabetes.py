"""The diabetes data of scikit-learn: a number to predict."""

import numpy as np
import sklearn.datasets

from fedveil.data.provenance import holdout
from fedveil.data.tabular_sets import load_diabetes


def test_load():
    records = load_diabetes()
    assert len(records.x) + len(records.test_x) == 442
    assert records.x.shape[1:] == records.test_x.shape[1:] == (10,)
    assert (records.x.dtype, records.y.dtype, records.classes) == (np.float32, np.float32, 0)
    both = np.concatenate([records.x, records.test_x])
    np.testing.assert_allclose(both.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(both.std(0), 1, rtol=1e-5)
    assert 0.2 < records.y.min() < records.y.max() < 4


def test_the_split_is_fixed():
    first, second = load_diabetes(), load_diabetes()
    np.testing.assert_array_equal(first.x, second.x)
    np.testing.assert_array_equal(first.test_y, second.test_y)


def test_standardised_over_all_patients_it_says_so():
    assert load_diabetes().fitted == "means and standard deviations of the features"


def test_held_out_features_depend_on_the_test_split_alone(monkeypatch):
    records = load_diabetes(held_out=True)
    assert records.fitted == ""
    np.testing.assert_allclose(records.test_x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(records.test_x.std(0), 1, rtol=1e-5)
    np.testing.assert_array_equal(records.y, load_diabetes().y)
    raw = sklearn.datasets.load_diabetes(return_X_y=True, scaled=False)
    train, _ = holdout(442)
    raw[0][train[7]] += 1000
    monkeypatch.setattr(sklearn.datasets, "load_diabetes", lambda **_: raw)
    after = load_diabetes(held_out=True)
    moved = np.flatnonzero((after.x != records.x).any(axis=1))
    assert moved.tolist() == [7]
    np.testing.assert_array_equal(after.test_x, records.test_x)
