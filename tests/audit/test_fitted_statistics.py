"""Features standardised by their own records show it; by others' they do not.

False-alarm rate 1e-6 where it is stated.
"""

import numpy as np
import pytest
from scipy.stats import binom

from fedveil.audit.observations import real_records
from fedveil.audit.record_audits import NoNoiseBound, standard_p_value
from fedveil.data.federated import FederatedData

RECORDS = (50, 200, 2000)


def standardised(raw, by, ddof=0):
    return ((raw - by.mean(axis=0)) / by.std(axis=0, ddof=ddof)).astype(np.float32)


@pytest.mark.parametrize("records", RECORDS)
@pytest.mark.parametrize("ddof", [0, 1])
def test_features_standardised_by_their_own_records_are_found(records, ddof):
    generator = np.random.default_rng(records)
    ages = generator.integers(20, 90, size=(records, 3)).astype(np.float64)
    lengths = generator.gamma(2.0, size=(records, 3))
    for raw in (ages, lengths):
        p, standard = standard_p_value(standardised(raw, raw, ddof))
        assert p < 1e-5
        assert standard == 3


def test_one_standardised_feature_among_others_is_found():
    raw = np.random.default_rng(1).normal(3.0, 2.0, size=(500, 20))
    raw[:, 7] = standardised(raw[:, 7], raw[:, 7])
    assert standard_p_value(raw) == (pytest.approx(0, abs=1e-5), 1)


def test_images_standardised_by_all_pixels_are_found():
    raw = np.random.default_rng(2).gamma(2.0, np.arange(1.0, 17.0), size=(300, 16))
    whole = ((raw - raw.mean()) / raw.std()).astype(np.float32)
    p, standard = standard_p_value(whole)
    assert (p < 1e-5, standard) == (True, 0)
    assert standard_p_value(raw) == (1.0, 0)


def test_clients_and_test_records_together_are_found():
    generator = np.random.default_rng(3)
    own, test = generator.normal(1.0, 3.0, size=(400, 4)), generator.normal(1.0, 3.0, size=(90, 4))
    both = np.concatenate([own, test])
    own, test = standardised(own, both), standardised(test, both)
    assert standard_p_value(own)[0] == 1.0
    assert standard_p_value(own, test)[0] < 1e-5


@pytest.mark.parametrize("kind", ["held out", "whole numbers", "two values"])
def test_statistics_from_elsewhere_are_no_alarm(kind):
    """`p` is below 0.05 in 5 % of data sets at most. False-alarm rate 1e-6."""
    generator, sets, low = np.random.default_rng(4), 300, 0
    for _ in range(sets):
        raw = generator.normal(size=(400, 5))
        if kind == "held out":
            raw = standardised(raw, generator.normal(size=(300, 5)))
        elif kind == "whole numbers":
            raw = generator.choice(
                [-2.0, -1.0, 0.0, 1.0, 2.0], p=[0.05, 0.3, 0.3, 0.3, 0.05], size=raw.shape
            )
        else:
            raw = np.sign(raw)
        low += standard_p_value(raw)[0] <= 0.05
    assert low <= binom.isf(1e-6, sets, 0.05)


def test_a_skewed_feature_of_two_values_is_no_alarm():
    """Standardised by a public rate, it has a deviation that follows from its mean."""
    generator = np.random.default_rng(4)
    for records in (1_000, 10_000):
        for _ in range(300):
            skewed = np.where(generator.random((records, 1)) < 0.1, 3.0, -1 / 3)
            assert standard_p_value(skewed)[0] == 1.0


def test_whole_numbers_are_standard_by_chance_now_and_then():
    """Mean 0 and deviation 1, exactly: of 400 small whole numbers that is no proof."""
    column = np.tile([-2.0, 2.0, -1.0, 1.0, 0, 0, 0, 0, 0, 0], 40)[:, None]
    assert (column.mean(), column.std()) == (0.0, 1.0)
    assert 1e-4 < standard_p_value(column)[0] < 1e-2


def test_edges():
    assert standard_p_value(np.zeros((9, 2))) == (1.0, 0)
    assert standard_p_value(np.zeros((50, 2))) == (1.0, 0)
    balanced = np.tile([[1.0], [-1.0]], (50, 1))  # mean 0 and deviation 1, of a coin
    assert standard_p_value(balanced) == (1.0, 0)
    assert NoNoiseBound(1e-6, 5).lower_bound(1e-4) == np.inf
    assert NoNoiseBound(1e-3, 5).lower_bound(1e-4) == 0


def test_only_real_numbers_in_one_array_are_tested():
    for dtype, real in ((np.float32, True), (np.int64, False)):
        x, y = np.zeros((2, 3), dtype=dtype), np.zeros(2, dtype=np.int64)
        data = FederatedData.from_clients([("a", x, y)], test=(x, y), classes=1)
        assert real_records(data) == real
