"""Next words: a column of texts that is the target."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.data.load import load_records
from fedveil.data.partition import partition

REAL = os.environ.get("FEDVEIL_DATA")
TEXTS = ["a b c", "b a", "c", "a z b c a"]
SAID = {"length": 3, "words": ["a", "b", "c"]}


def made(texts=TEXTS, said=SAID, **options):
    rows = {"text": texts * 10, "who": [f"w{k // 4}" for k in range(10 * len(texts))]}
    return fv.FederatedData.from_table(
        rows, client="who", target="text", columns={"text": said}, test="by-client", **options
    )


def test_targets_are_the_words_that_follow():
    data = made()
    assert data.x[:4].tolist() == [[2, 3, 4], [3, 2, 0], [4, 0, 0], [2, 1, 3]]
    none = -100  # where no word follows, or one that nobody knows
    assert data.y[:4].tolist() == [[3, 4, none], [2, none, none], [none] * 3, [none, 3, 4]]
    assert (data.classes, data.target.shape, data.record_shape) == (5, (3,), (3,))
    assert data.assumptions == ()
    data.check()


def test_words_are_fitted_where_tables_are():
    data = made(said={"length": 3, "min_texts": 1})
    assert data.assumptions == (
        "words of 'text' were fitted on the test records, which no claim covers",
    )
    with pytest.raises(BadInput, match="'secure' and words of 'text' were fitted on clients'"):
        made(said={"length": 3}, statistics="clients").check_secure()


def test_predictions_are_words_after_the_end_and_never_padding_or_unknown():
    schema = made().schema
    outputs = np.zeros((2, 3, 5))
    outputs[..., 0], outputs[..., 1] = 9, 8
    outputs[0, 0, 2], outputs[0, 1, 3], outputs[0, 2, 4] = 1, 1, 1
    outputs[1, :, 3] = 1
    records = schema.encode({"text": ["a b", "a b c a"]})
    assert schema.decode(outputs, records)["prediction"].tolist() == ["b", "b"]
    everywhere = schema.decode(outputs)["prediction"].tolist()
    assert everywhere == [["a", "b", "c"], ["b", "b", "b"]]
    again = fv.data.TableSchema.from_dict(schema.to_dict())
    assert again == schema


def test_hashed_words_are_predicted_by_number():
    schema = made(said={"length": 3, "buckets": 4}).schema
    outputs = np.eye(6)[None, [3, 4, 5]]
    assert schema.decode(outputs, schema.encode({"text": ["a"]}))["prediction"].tolist() == ["<1>"]


def test_a_text_without_features_is_all_there_is():
    with pytest.raises(BadInput, match="next words are predicted from the words before: leave"):
        made(features=["who"])


def write(root, **changes):
    (root / "reddit").mkdir()
    columns = {"author": np.arange(200) % 50, "text": [f"so it goes {k % 3}" for k in range(200)],
               "subreddit": [None] * 200}  # fmt: skip
    pq.write_table(pa.table({**columns, **changes}), root / "reddit/comments.parquet")
    return root


def test_comments_are_next_words_by_author(tmp_path):
    records = load_records("reddit", write(tmp_path))
    assert (records.x.shape, records.y.shape) == ((len(records.x), 20), (len(records.x), 20))
    words = records.schema.feature_columns[0].text.vocabulary
    assert words.decode(records.y[:1, :2]) == ["it goes"]
    assert not set(records.record_owners) & set(records.test_owners)
    data = partition(records, kind="grouped", clients=3, seed=1, test="records")
    assert data.classes == words.size == 8
    assert [said.split(" ")[0] for said in data.assumptions] == ["words", "clients"]


def test_comments_that_are_missing_are_refused(tmp_path):
    write(tmp_path, text=["so it goes"] * 199 + [None])
    with pytest.raises(BadInput, match="row 200 of column 'text' is empty"):
        load_records("reddit", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="FEDVEIL_DATA is not set")
def test_real():
    records = load_records("reddit", Path(REAL))
    assert len(records.x) + len(records.test_x) == 44_645
    assert len(np.unique(records.record_owners)) + len(np.unique(records.test_owners)) == 33_949
    known = records.y != -100
    assert 0.6 < known.mean() < 0.7
    assert records.schema.vocabulary_size == records.classes == 4002
    assert records.y[known].min() == 2
