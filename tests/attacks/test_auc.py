"""The area under the ROC curve, beside a count of pairs, and how often its interval holds."""

import numpy as np
import pytest
from scipy.special import ndtr

from fedveil.attacks.auc import auc, auc_interval


def test_the_area_is_a_count_of_pairs():
    generator = np.random.default_rng(0)
    scores, has = generator.integers(6, size=40).astype(float), generator.random(40) < 0.4
    pairs = [(a > b) + (a == b) / 2 for a in scores[has] for b in scores[~has]]
    assert auc(scores, has) == pytest.approx(np.mean(pairs))


def test_ends_of_the_scale():
    has = np.array([False] * 5 + [True] * 5)
    assert auc(np.arange(10.0), has) == 1.0
    assert auc(-np.arange(10.0), has) == 0.0
    assert auc(np.zeros(10), has) == 0.5
    low, high = auc_interval(1.0, 5, 5, 0.95)
    assert 0.4 < low < 0.95
    assert high == 1.0
    assert auc_interval(0.0, 5, 5, 0.95) == pytest.approx((0.0, 1 - low))


@pytest.mark.parametrize("apart", [0.0, 1.0, 2.5])
def test_intervals_hold(apart):
    """Of 400 at 95 %, fewer than 345 hold once in a million (binomial)."""
    generator = np.random.default_rng(1)
    true, has = float(ndtr(apart / 2**0.5)), np.arange(40) % 2 == 0
    held = 0
    for _ in range(400):
        scores = generator.normal(size=40) + apart * has
        low, high = auc_interval(auc(scores, has), 20, 20, 0.95)
        held += low <= true <= high
    assert held >= 345
