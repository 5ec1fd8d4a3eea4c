"""Texts in a table: which words are known, who decided it, and what claims say of it."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedveil as fv
from fedveil.base.errors import BadInput

WORDS = ["the", "film", "was", "good", "bad", "plot", "very"]
LABELS = {"label": {"values": ["no", "yes"]}}
ON_TEST = "words of 'review' were fitted on the test records, which no claim covers"


def table(changed=None, users=20):
    """Reviews of users, with those of user u0 replaced."""
    random = np.random.default_rng(0)
    rows = [(f"u{k}", " ".join(random.choice(WORDS, 6))) for k in range(users) for _ in range(4)]
    if changed is not None:
        rows = [row for row in rows if row[0] != "u0"] + [("u0", text) for text in changed]
    names, texts = zip(*rows, strict=True)
    labels = ["yes" if "good" in text else "no" for text in texts]
    return {"user": list(names), "review": list(texts), "label": labels}


def made(rows, said, **options):
    columns = {"review": said, **LABELS}
    return fv.FederatedData.from_table(
        rows, client="user", target="label", columns=columns, test="by-client", **options
    )


def vocabulary(data):
    return data.schema.feature_columns[0].text.vocabulary


@pytest.mark.parametrize(
    ("said", "size", "assumptions"),
    [
        ({"length": 5, "words": ["good", "bad"]}, 4, ()),
        ({"length": 5, "buckets": 30}, 32, ()),
        (
            {"length": 5, "public": ["a good film", "a bad film"]},
            4,
            ("the words of 'review' were counted in texts that were declared public",),
        ),
        ({"length": 5}, 9, (ON_TEST,)),
    ],
)
def test_where_words_come_from(said, size, assumptions):
    data = made(table(), said)
    assert (vocabulary(data).size, data.schema.vocabulary_size) == (size, size)
    assert data.assumptions == assumptions
    assert (data.record_shape, data.x.dtype, data.classes) == ((5,), np.int64, 2)
    assert data.x.max() < size
    data.check_secure()


def test_public_text_and_words_may_be_files(tmp_path):
    (tmp_path / "p.txt").write_text("a good film\na bad film\nA plot")
    public = str(tmp_path / "p.txt")
    assert vocabulary(made(table(), {"length": 5, "public": public})).words == ("a", "film")
    fewer = {"length": 5, "public": public, "min_texts": 1, "most_words": 3}
    assert vocabulary(made(table(), fewer)).words == ("a", "film", "bad")
    (tmp_path / "w.txt").write_text("Plot\n")
    given = {"length": 5, "words": str(tmp_path / "w.txt")}
    assert vocabulary(made(table(), given)).words == ("plot",)


def test_words_that_are_declared_are_known_beside_those_that_are_counted(tmp_path):
    public = ["a good film", "a bad film"]
    (tmp_path / "more.txt").write_text("London\nfilm\n")
    for also in (["London", "film"], str(tmp_path / "more.txt")):
        said = {"length": 5, "public": public, "also": also}
        assert vocabulary(made(table(), said)).words == ("a", "film", "london")


def test_words_counted_in_clients_texts_are_a_release():
    data = made(table(), {"length": 5}, statistics="clients")
    assert data.fitted == "words of 'review'"
    (said,) = data.assumptions
    assert said.endswith("fitted on clients' records in the clear: outside this claim")
    with pytest.raises(BadInput, match="'secure' and words of 'review' were fitted on clients'"):
        data.check_secure()
    public = made(table(), {"length": 5}, statistics="public")
    assert public.assumptions == ("declared public: words of 'review'",)
    public.check_secure()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
@pytest.mark.parametrize("said", [{"length": 5}, {"length": 5, "buckets": 30}])
def test_one_client_s_texts_decide_about_nothing_but_its_own_records(said, texts):
    before, after = made(table(), said), made(table(texts), said)
    assert "u0" in before.names
    assert (before.schema, before.assumptions) == (after.schema, after.assumptions)
    np.testing.assert_array_equal(before.test_x, after.test_x)
    owners = [np.repeat(data.names, data.sizes) for data in (before, after)]
    np.testing.assert_array_equal(before.x[owners[0] != "u0"], after.x[owners[1] != "u0"])


def test_a_rare_word_of_a_client_is_in_no_vocabulary_of_the_test_split():
    data = made(table(["hapax", "hapax hapax", "hapax"]), {"length": 5})
    assert "hapax" not in vocabulary(data).words
    rows = data.x[np.repeat(data.names, data.sizes) == "u0"]
    assert rows.tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]


@pytest.mark.parametrize("said", [{"length": 5}, {"length": 5, "buckets": 9}])
def test_the_schema_reads_new_texts_and_survives_json_and_disk(said, tmp_path):
    data = made(table(), said)
    again = fv.data.TableSchema.from_dict(json.loads(json.dumps(data.schema.to_dict())))
    new = {"review": ["A good, good film!", "zzz"]}
    np.testing.assert_array_equal(again.encode(new), data.schema.encode(new))
    data.save(tmp_path / "saved")
    opened = fv.FederatedData.open(tmp_path / "saved")
    assert opened.fingerprint == data.fingerprint
    np.testing.assert_array_equal(opened.schema.encode(new), data.schema.encode(new))
    other = made(table(), {**said, "length": 6})
    assert other.fingerprint != data.fingerprint


def test_missing_texts_are_refused_or_filled():
    rows = table()
    rows["review"][7] = None
    with pytest.raises(BadInput, match=r"row 8 of column 'review' is empty: declare a public"):
        made(rows, {"length": 5, "buckets": 9})
    filled = made(rows, {"length": 5, "buckets": 9, "fill": ""})
    assert (filled.x == 0).all(axis=1).sum() + (filled.test_x == 0).all(axis=1).sum() == 1


def test_numbers_in_a_column_of_texts_are_words():
    data = made({**table(), "review": list(range(80))}, {"length": 2, "words": ["7", "8"]})
    assert sorted({*data.x.ravel(), *data.test_x.ravel()}) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"buckets": 5}, "columns.review.buckets is of texts and columns.review.length is missing"),
        ({"length": 0}, "columns.review.length is 0: at least one word"),
        ({"length": 2.5}, "columns.review.length is 2.5: a whole number"),
        ({"length": True}, "columns.review.length is True: a whole number"),
        ({"length": 5, "buckets": 0}, "columns.review.buckets is 0: at least 1"),
        ({"length": 5, "buckets": 5, "words": ["a"]}, "has words and also buckets"),
        ({"length": 5, "buckets": 5, "min_texts": 2}, "min_texts has no effect beside .*buckets"),
        ({"length": 5, "buckets": 5, "also": ["a"]}, "also has no effect beside .*buckets"),
        ({"length": 5, "also": ["a b"]}, "columns.review.also has 'a b', which is 2 tokens"),
        ({"length": 5, "low": 0, "high": 1}, "has low and high and also length"),
        ({"length": 5, "values": ["a"]}, "has values and also length"),
        ({"length": 5, "fill": 3}, "columns.review.fill is 3: a text is needed"),
        ({"length": 5, "words": ["a b"]}, "columns.review.words has 'a b', which is 2 tokens"),
        ({"length": 5, "public": 3}, "columns.review.public is 3: give a list of texts"),
        ({"length": 5, "public": []}, r"columns.review.public is \[\]: give a list of texts"),
        ({"length": 5, "min_texts": 900}, "column 'review': no word is in 900 texts or more"),
    ],
)
def test_what_is_no_column_of_texts_is_refused(said, message):
    with pytest.raises(BadInput, match=message):
        made(table(), said)


def test_texts_that_are_no_categories_are_refused_with_the_word_for_texts():
    with pytest.raises(BadInput, match=r"different texts in .*, or columns.review.length if its"):
        made(table(users=60), {})


def test_texts_beside_other_features_are_an_input_by_name():
    rows = {**table(), "age": list(range(80))}
    both = made(rows, {"length": 5, "buckets": 9})
    assert both.record_shape == {"review": (5,), "age": (1,)}
    assert both.x["review"].dtype == np.int64
    assert made(rows, {"length": 5, "buckets": 9}, features=["review"]).record_shape == (5,)


def test_arrays_are_no_texts():
    rows = {**table(), "review": [[1, 2]] * 80}
    with pytest.raises(BadInput, match=r"row \d+ of column 'review' is \[1, 2\]: a text is needed"):
        made(rows, {"length": 5, "buckets": 9})
