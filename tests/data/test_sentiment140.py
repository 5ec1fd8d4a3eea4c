"""Tweets by user."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedveil.base.errors import BadInput
from fedveil.data.load import load_records
from fedveil.data.partition import partition

REAL = os.environ.get("FEDVEIL_DATA")


def write(root, users=40, **changes):
    random = np.random.default_rng(0)
    label = random.integers(0, 2, 3 * users) * 4
    text = [f"@somebody what a {('bad', 'good')[k // 4]} day {k} http://x.y" for k in label]
    columns = {"label": label.astype(np.int8), "date": ["2009"] * len(label), "text": text,
               "user": np.arange(3 * users, dtype=np.int32) % users, **changes}  # fmt: skip
    (root / "sentiment140").mkdir()
    pq.write_table(pa.table(columns), root / "sentiment140/subset.parquet")
    return root


def test_tweets_are_rows_of_hashed_words_owned_by_users(tmp_path):
    records = load_records("sentiment140", write(tmp_path))
    assert (records.x.shape[1:], records.x.dtype, records.classes) == ((30,), np.int64, 2)
    assert len(records.x) + len(records.test_x) == 120
    assert not set(records.record_owners) & set(records.test_owners)
    assert (records.fitted, records.remarks) == ("", ())
    assert records.schema.label_names == (0, 4)
    words = records.schema.feature_columns[0].text.vocabulary
    good = words.encode(["good"], 1)[0, 0]
    np.testing.assert_array_equal((records.x == good).any(axis=1), records.y == 1)


def test_users_are_merged_or_stay_alone(tmp_path):
    records = load_records("sentiment140", write(tmp_path), min_records=2)
    alone = partition(records, kind="natural", clients=None, seed=1, test="records")
    assert set(alone.sizes) == {3}
    assert alone.assumptions == (
        "which clients have at least 2 records is public: the others were left out",
    )
    merged = partition(records, kind="grouped", clients=4, seed=1, test="records")
    assert (merged.clients, len(merged.x)) == (4, len(alone.x))
    assert "clients are 4 groups of owners" in merged.assumptions[-1]


def test_other_words_may_be_declared_or_counted_in_held_out_tweets(tmp_path):
    write(tmp_path)
    counted = load_records("sentiment140", tmp_path, columns={"text": {"most_words": 3}})
    assert (counted.x.shape[1], counted.schema.vocabulary_size) == (30, 5)
    assert (counted.remarks, counted.fitted_on_test) == ((), "words of 'text'")
    short = load_records("sentiment140", tmp_path, columns={"text": {"length": 7}})
    assert (short.x.shape[1], short.schema.vocabulary_size) == (7, 4098)
    theirs = load_records(
        "sentiment140", tmp_path, columns={"text": {"min_texts": 2}}, statistics="clients"
    )
    assert theirs.fitted == "words of 'text'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"user": {"low": 0, "high": 1}}}, "columns.user is declared and sentiment140"),
        ({"statistics": "clients"}, "statistics is 'clients', every column is declared"),
        ({"columns": {"text": 3}}, "columns.text is 3: use"),
        ({"test": "records"}, "test is 'records': a table has no split of its own"),
        ({"min_records": 4}, "no client has 4 records, the most is 3"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(BadInput, match=message):
        load_records("sentiment140", write(tmp_path), **options)


def test_another_label_is_refused(tmp_path):
    write(tmp_path, label=np.full(120, 2))
    with pytest.raises(BadInput, match="column 'label' is 2, which is none of its values 0, 4"):
        load_records("sentiment140", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="FEDVEIL_DATA is not set")
def test_real():
    records = load_records("sentiment140", Path(REAL))
    assert len(records.x) + len(records.test_x) == 59_791
    assert len(np.unique(records.record_owners)) + len(np.unique(records.test_owners)) == 52_252
    assert 0.5 < records.y.mean() < 0.57
    assert records.x.min() == 0
    assert records.x.max() < records.schema.vocabulary_size == 4098
