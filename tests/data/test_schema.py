"""Schemas: rows to records and outputs to predictions, kept with the data."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil import FederatedData
from fedveil.base.errors import BadInput
from fedveil.data import TableSchema
from fedveil.data.columns import Column
from fedveil.data.tables import read_table

AGE, CITY = Column("age", low=0, high=100), Column("city", values=("bonn", "rome"), other=True)
LABELS = TableSchema((AGE, CITY), Column("well", values=("no", "yes", "don't know")))
NUMBER = TableSchema((AGE,), Column("dose", low=10, high=30))
ROWS = {"age": [50, 100], "city": ["rome", "oslo"], "well": ["yes", "no"], "dose": [10, 25]}


def federated(schema=LABELS, **changes):
    arrays = {
        "x": schema.encode(ROWS),
        "y": schema.targets(ROWS),
        "offsets": np.array([0, 1, 2]),
        "test_x": schema.encode(ROWS),
        "test_y": schema.targets(ROWS),
        "classes": schema.classes,
        "schema": schema,
    }
    return FederatedData(**{**arrays, **changes})


def test_rows_become_records_and_other_columns_are_ignored():
    found = LABELS.encode(ROWS)
    assert (found.dtype, found.tolist()) == (np.float32, [[0, 0, 1], [1, 0, 0]])
    assert (LABELS.targets(ROWS).dtype, LABELS.targets(ROWS).tolist()) == (np.int64, [1, 0])
    assert (NUMBER.targets(ROWS).dtype, NUMBER.targets(ROWS).tolist()) == (np.float32, [-1, 0.5])
    assert (LABELS.classes, NUMBER.classes) == (3, 0)
    assert (LABELS.record_shape, NUMBER.record_shape) == ((3,), (1,))


def test_features_are_encoded_without_a_target():
    features = {name: ROWS[name] for name in ("city", "age")}
    np.testing.assert_array_equal(LABELS.encode(features), LABELS.encode(ROWS))
    with pytest.raises(BadInput, match="the table has no column 'well': its columns are 'city'"):
        LABELS.targets(features)


def test_outputs_become_labels_with_probabilities():
    found = LABELS.decode(np.array([[0.0, np.log(3), -np.inf], [1000.0, 0, 0]]))
    assert list(found) == ["prediction", "p(no)", "p(yes)", "p(don't know)"]
    assert found["prediction"].tolist() == ["yes", "no"]
    np.testing.assert_allclose(found["p(yes)"], [0.75, 0])
    np.testing.assert_allclose(sum(found[key] for key in list(found)[1:]), [1, 1])


@pytest.mark.parametrize("labels", [(0, 7), (False, True), ("a", "b"), (0.5, 1.5)])
def test_decoding_undoes_encoding_of_labels(labels):
    schema = TableSchema((AGE,), Column("y", values=labels))
    codes = schema.targets({"y": [labels[1], labels[0], labels[1]]})
    found = schema.decode(np.eye(2, dtype=np.float32)[codes])["prediction"]
    assert found.tolist() == [labels[1], labels[0], labels[1]]
    assert type(found.tolist()[0]) is type(labels[0])


@given(st.lists(st.floats(10, 30), min_size=1, max_size=9), st.booleans())
def test_decoding_undoes_encoding_of_numbers(numbers, standard):
    target = Column("dose", mean=18, std=4) if standard else NUMBER.target_column
    schema = TableSchema((AGE,), target)
    found = schema.decode(schema.targets({"dose": numbers})[:, None])
    assert list(found) == ["prediction"]
    np.testing.assert_allclose(found["prediction"], numbers, rtol=1e-5)


@pytest.mark.parametrize("outputs", [np.zeros((2, 2)), np.zeros(3), np.zeros((2, 4))])
def test_outputs_of_another_shape_are_refused(outputs):
    with pytest.raises(
        BadInput, match="one row per record and \\(3,\\) numbers in each are needed"
    ):
        LABELS.decode(outputs)


def test_a_schema_survives_as_plain_values():
    array = TableSchema((Column("words", shape=(4,), whole=True),), Column("y", values=(0, 1)))
    for schema in (LABELS, NUMBER, array):
        assert TableSchema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"features": [], "target": {"name": "y"}},
        {"features": [{"name": "a", "size": 3}], "target": {"name": "y"}},
        {"features": [{"name": "a", "low": 3}], "target": {"name": "y"}},
        {"features": 5, "target": {"name": "y"}},
        {"features": [[]], "target": {"name": "y"}},
    ],
)
def test_what_is_no_schema_is_refused(plain):
    with pytest.raises(BadInput, match="is no schema of a table: ") as refused:
        TableSchema.from_dict(plain)
    assert "\n" not in str(refused.value)


def test_an_array_beside_others_is_an_input_by_name_and_a_target_has_labels():
    words = Column("words", shape=(4,), whole=True)
    schema = TableSchema((AGE, words), Column("y", values=(0, 1)))
    found = schema.encode({"age": [50.0], "words": [[1, 2, 3, 4]]})
    assert {name: value.tolist() for name, value in found.items()} == {
        "age": AGE.encode_entries(read_table({"age": [50.0]})).tolist(),
        "words": [[1, 2, 3, 4]],
    }
    assert schema.record_shape == {"age": (1,), "words": (4,)}
    assert TableSchema.from_dict(schema.to_dict()) == schema
    with pytest.raises(
        BadInput, match="target 'words' holds arrays of whole numbers: say how many"
    ):
        TableSchema((AGE,), words)


def test_data_keep_their_schema(tmp_path):
    data = federated(remarks=("it rained",))
    data.save(tmp_path / "saved")
    opened = FederatedData.open(tmp_path / "saved")
    assert opened.schema == data.schema == replace(data, fitted="means").schema
    assert opened.remarks == ("it rained",)
    assert opened.fingerprint == data.fingerprint


def test_the_fingerprint_covers_the_schema_and_no_remark():
    data = federated()
    other = TableSchema((replace(AGE, fill=3), CITY), LABELS.target_column)
    prints = {data.fingerprint, replace(data, schema=None).fingerprint,
              replace(data, schema=other).fingerprint}  # fmt: skip
    assert len(prints) == 3
    assert replace(data, remarks=("it rained",)).fingerprint == data.fingerprint


def test_a_schema_of_other_records_is_refused():
    with pytest.raises(BadInput, match=r"the schema is of 0 labels and records of shape \(1,\)"):
        replace(federated(), schema=NUMBER)


@pytest.mark.parametrize("odd", ['"schema": 5', '"schema": {"a": 1}', '"remarks": "x"'])
def test_saved_words_that_save_did_not_write_are_refused(tmp_path, odd):
    federated(schema=NUMBER).save(tmp_path / "odd")
    (tmp_path / "odd" / "meta.json").write_text(f'{{"classes": 0, {odd}}}')
    with pytest.raises(BadInput, match=r"not what save writes|is no schema of a table"):
        FederatedData.open(tmp_path / "odd")
