"""PropertyClassifier updates apart: as well as noise allows, and not at all where nothing shows."""

import numpy as np
import pytest
from scipy.special import ndtr

from fedveil.audit.findings import auc
from fedveil.audit.property_attack import PropertyClassifier

HAS = np.arange(80) % 2 == 1


def updates(generator, count, apart, noise=0.0, size=300):
    """Rows in a few directions; those of odd number lie `apart` along one of them."""
    has = np.arange(count) % 2 == 1
    rows = np.zeros((count, size))
    rows[:, :5] = generator.normal(size=(count, 5)) * 0.2
    rows[:, 7] += apart * has
    return (rows + noise * generator.normal(size=rows.shape)).astype(np.float32), has


def test_kinds_that_lie_apart_are_told():
    generator = np.random.default_rng(0)
    made, has = updates(generator, 80, 1.0)
    found = PropertyClassifier.fit(made, made, has)
    rows, kinds = updates(generator, 60, 1.0)
    assert auc(found.scores(rows), kinds) == 1.0
    assert ((found.scores(rows) > 0) == kinds).all()


def test_under_noise_it_is_close_to_the_best_there_is():
    """Noise of deviation s in all directions leaves Phi(apart / s / sqrt 2); with 2,000 rows the
    area has a deviation of 0.012, so 0.06 below is a false alarm of less than 1e-6.
    """
    generator = np.random.default_rng(1)
    made, has = updates(generator, 80, 1.0)
    seen = np.concatenate([made + generator.normal(size=made.shape) for _ in range(3)])
    found = PropertyClassifier.fit(made, seen.astype(np.float32), has)
    rows, kinds = updates(generator, 2000, 1.0, noise=1.0)
    assert auc(found.scores(rows), kinds) > float(ndtr(1 / 2**0.5)) - 0.06


def test_nothing_is_told_where_nothing_lies_apart():
    """2,000 rows: 0.5 with a deviation of 0.013, five of them are a false alarm of 6e-7."""
    generator = np.random.default_rng(2)
    made, has = updates(generator, 80, 0.0)
    found = PropertyClassifier.fit(made, made, has)
    rows, kinds = updates(generator, 2000, 0.0)
    assert auc(found.scores(rows), kinds) == pytest.approx(0.5, abs=0.065)


def test_updates_that_are_all_the_same_tell_nothing():
    same = np.ones((80, 12), dtype=np.float32)
    assert np.ptp(PropertyClassifier.fit(same, same, HAS).scores(same[:5])) == 0.0


def test_that_something_moves_at_all_is_told_where_there_is_no_noise():
    """A weight that moves up or down, or not at all: no direction, and still a property."""
    generator = np.random.default_rng(3)

    def rows(count):
        has = np.arange(count) % 2 == 1
        found = (0.1 * generator.normal(size=(count, 20))).astype(np.float32)
        found[:, 7] = has * generator.choice([-1.0, 1.0], size=count)
        return found, has

    made, has = rows(80)
    tried, kinds = rows(200)
    assert auc(PropertyClassifier.fit(made, made, has).scores(tried), kinds) > 0.99
