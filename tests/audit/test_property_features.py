"""Features of images and of tables, measured on records whose features are known."""

from dataclasses import replace

import numpy as np
import pytest

from fedveil.audit.property_labels import (
    brightness,
    feature_of,
    slant,
    subtract_label_medians,
    thickness,
)
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData


def bar(width, lean=0.0, size=28):
    """A bar of `width` pixels from top to bottom that leans to the right by `lean` per row up."""
    image = np.zeros((1, size, size), dtype=np.float32)
    for row in range(4, size - 4):
        first = size / 2 - width / 2 + lean * (size / 2 - row)
        image[0, row, round(first) : round(first) + width] = 1.0
    return image


def data_of(x, y=None, **more):
    y = np.arange(len(x)) % 2 if y is None else y
    return FederatedData.from_clients([("a", x, y), ("b", x, y)], test=(x, y), classes=2, **more)


def test_thickness_is_in_pixels():
    found = thickness(np.stack([bar(width) for width in (1, 2, 4)]))
    np.testing.assert_allclose(found, [1, 2, 4], rtol=0.2)


@pytest.mark.parametrize("lean", [-0.5, 0.0, 0.5])
def test_slant_is_what_a_bar_leans_by(lean):
    assert slant(bar(3, lean)[None])[0] == pytest.approx(lean, abs=0.05)


def test_brightness_is_the_mean():
    x = np.random.default_rng(0).random((4, 1, 5, 5)).astype(np.float32)
    np.testing.assert_allclose(brightness(x), [image.mean() for image in x], rtol=1e-6)


def test_labels_do_not_show_in_relative_traits():
    values, y = np.array([1.0, 2.0, 3.0, 11.0, 12.0, 13.0]), np.array([0, 0, 0, 1, 1, 1])
    assert subtract_label_medians(values, y, values, y, 2).tolist() == [-1, 0, 1, -1, 0, 1]
    assert subtract_label_medians(values, y, values, y, 0).tolist() == (values - 7).tolist()


@pytest.fixture
def loans():
    rows = 40
    table = {
        "who": [f"c{k % 4}" for k in range(rows)],
        "amount": [float(k) for k in range(rows)],
        "purpose": [("car", "house")[k % 5 == 0] for k in range(rows)],
        "rate": [0.37 * k for k in range(rows)],
    }
    return FederatedData.from_table(table, target="rate", client="who", statistics="clients")


def test_the_share_of_a_value_in_a_table(loans):
    x = np.asarray(loans.x)
    share = feature_of("purpose=house", loans)(x)
    assert set(share) == {0.0, 1.0}
    assert share.mean() == pytest.approx(0.2, abs=0.1)
    assert feature_of("amount", loans)(x).shape == (len(x),)
    house, car = (feature_of(f"purpose={value}", loans)(x) for value in ("house", "car"))
    assert (house + car == 1).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("purpose=boat", "'purpose' has the values car, house; name one"),
        ("purpose", "name one, purpose=value"),
        ("state", "is of no feature: use planted, or one of amount, purpose"),
        ("slant", "is of images .* name a column of the table"),
    ],
)
def test_a_trait_that_a_table_does_not_have(loans, name, words):
    with pytest.raises(BadInput, match=words):
        feature_of(name, loans)


def test_traits_that_records_do_not_have():
    images = data_of(np.random.default_rng(0).random((6, 1, 5, 5)).astype(np.float32))
    with pytest.raises(BadInput, match="use planted, brightness, thickness, slant"):
        feature_of("colour", images)
    words = data_of(np.zeros((6, 5), dtype=np.int64))
    with pytest.raises(BadInput, match="texts or whole numbers"):
        feature_of("brightness", words)
    several = {"a": np.zeros((6, 2), dtype=np.float32), "b": np.zeros((6, 3), dtype=np.float32)}
    named = replace(
        images, x={k: np.concatenate([v, v]) for k, v in several.items()}, test_x=several
    )
    with pytest.raises(BadInput, match="inputs a, b"):
        feature_of("brightness", named)
