"""Data that are known by their declaration alone."""

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.data.declared import declared_data, declared_schema
from fedveil.data.own_table import TableOptions
from fedveil.runs.recipe import load_recipe

COLUMNS = {
    "age": {"low": 0, "high": 100},
    "ward": {"values": ["er", "icu"]},
    "well": {"values": ["no", "yes"]},
}
TEST = {
    "age": [50, 100, 0],
    "ward": ["icu", "er", "er"],
    "well": ["yes", "no", ""],
    "more": [1] * 3,
}


def options(**keys):
    given = {"target": "well", "declared_columns": COLUMNS, **keys}
    return TableOptions(**given)


def test_no_row_is_needed():
    data = declared_data(options(), None, ["a", "b"], [5, 0])
    assert (data.clients, data.elsewhere, data.records) == (2, (5, 0), 5)
    assert (data.record_shape, data.classes, len(data.test_y)) == ((3,), 2, 0)
    assert data.client_name(1) == "b"
    assert data.test_assumptions == ()


def test_a_public_table_is_encoded_as_sites_encode_theirs():
    data = declared_data(options(missing="fill"), TEST, ["a"])
    np.testing.assert_array_equal(data.test_x, [[0, 0, 1], [1, 1, 0]])  # without the last row
    np.testing.assert_array_equal(data.test_y, [1, 0])
    assert data.test_assumptions == ("the test records are taken as public",)
    assert any("rows without a target" in text for text in data.assumptions)
    with pytest.raises(BadInput, match="'well'"):
        declared_data(options(), TEST, ["a"])


def test_features_have_an_order():
    assert [c.name for c in declared_schema(options()).feature_columns] == ["age", "ward"]
    chosen = declared_schema(options(features=["ward", "age"]))
    assert [c.name for c in chosen.feature_columns] == ["ward", "age"]
    apart = declared_schema(options(client="site", person="who"))
    assert [c.name for c in apart.feature_columns] == ["age", "ward"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"features": ["age", "ward", "dose"]},
            "nothing is declared of 'dose', and sites have no rows",
        ),
        ({"declared_columns": {"age": COLUMNS["age"]}}, "nothing is declared of 'well'"),
        ({"declared_columns": {"well": COLUMNS["well"]}}, "no column is left to be a feature"),
        ({"test": 0.2}, "test is 0.2, and sites measure nothing"),
        ({"declared_columns": {**COLUMNS, "who": {"low": 0, "high": 1}}, "person": "who"}, "who"),
    ],
)
def test_what_sites_could_not_agree_on_is_refused(keys, words):
    with pytest.raises(BadInput, match=words):
        declared_data(options(**keys), None, ["a"])


@pytest.mark.parametrize(
    "test",
    [{"age": [1], "well": ["yes"]}, {"age": [1], "ward": ["out"], "well": ["yes"]}],
    ids=["column", "category"],
)
def test_a_public_table_that_does_not_fit_is_refused(test):
    with pytest.raises(BadInput, match="'ward'"):
        declared_data(options(), test, ["a"])


def test_a_recipe_declares_it_too():
    settings = {"data.name": "table", "data.target": "well", "model.name": "softmax"}
    columns = {f"data.columns.{c}.{k}": v for c, keys in COLUMNS.items() for k, v in keys.items()}
    section = load_recipe("central", {**settings, **columns}).data
    schema = section.declared_data(None, ["a"]).schema
    assert schema == declared_schema(options())
