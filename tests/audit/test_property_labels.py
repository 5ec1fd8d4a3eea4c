"""Who has a property, and what the attacker has to learn it from."""

from dataclasses import replace

import numpy as np
import pytest

from fedveil.audit.property_labels import property_labels
from fedveil.base.errors import BadInput
from fedveil.data.image_sets import load_digits
from fedveil.data.partition import partition


@pytest.fixture(scope="module")
def data():
    return partition(load_digits(), kind="iid", clients=80, seed=1)


def images(x):
    return [image.tobytes() for image in np.asarray(x)]


def test_a_trait_is_that_of_half_of_the_clients(data):
    asked = property_labels("thickness", data, 30, 0)
    assert asked.has.sum() == 40
    assert asked.own_has.sum() == 30
    assert asked.data is data
    assert set(asked.own.sizes) == {int(np.median(data.sizes))}


def test_the_attackers_clients_have_what_they_are_said_to_have(data):
    asked = property_labels("brightness", data, 30, 0)
    x = np.asarray(asked.own.x)
    bright = x.reshape(len(asked.own_has), -1).mean(axis=1)
    assert bright[asked.own_has].mean() > bright[~asked.own_has].mean()


def test_the_attacker_has_test_records_only(data):
    public, private = set(images(data.test_x)), set(images(data.x))
    for name in ("planted", "slant"):
        own = property_labels(name, data, 30, 0).own
        known = [image in public for image in images(own.x)]
        assert np.mean(known) >= 0.5
        assert not any(image in private - public for image in images(own.x))
        shown = dict(zip(images(data.test_x), data.test_y.tolist(), strict=True))
        labels = [shown[i] for i, k in zip(images(own.x), known, strict=True) if k]
        assert labels == own.y[np.array(known)].tolist()


def test_planting_changes_those_who_have_it_and_nobody_else(data):
    asked = property_labels("planted", data, 30, 0)
    rows = np.repeat(asked.has, data.sizes)
    before, after = np.asarray(data.x), np.asarray(asked.data.x)
    np.testing.assert_array_equal(after[~rows], before[~rows])
    np.testing.assert_allclose(after[rows], 0.6 * before[rows], rtol=1e-6)
    assert asked.has.sum() == 40


def test_a_property_that_nobody_has_is_refused(data):
    x, test_x = (np.ones_like(np.asarray(each)) for each in (data.x, data.test_x))
    with pytest.raises(BadInput, match="property 'brightness': nobody of 80 clients"):
        property_labels("brightness", replace(data, x=x, test_x=test_x), 30, 0)
    with pytest.raises(BadInput, match="all test records are alike"):
        property_labels("slant", replace(data, test_x=test_x), 30, 0)
    alone = partition(load_digits(), kind="iid", clients=1, seed=1)
    with pytest.raises(BadInput, match="property 'planted': nobody of 1 clients"):
        property_labels("planted", alone, 30, 0)


def test_texts_and_named_inputs_are_refused(data):
    x, test_x = np.asarray(data.x), np.asarray(data.test_x)
    words = replace(data, x=x.astype(np.int64), test_x=test_x.astype(np.int64))
    named = replace(data, x={"a": x, "b": x}, test_x={"a": test_x, "b": test_x})
    for other, said in ((words, "texts or whole numbers"), (named, "inputs a, b")):
        with pytest.raises(BadInput, match=said):
            property_labels("planted", other, 30, 0)
