"""Columns: declared in public, encoded entry by entry."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.base.errors import BadInput
from fedveil.data.columns import MOST_VALUES, Column
from fedveil.data.tables import read_table


def table(*entries):
    return read_table({"c": list(entries)})


def encoded(entries, **said):
    return Column("c", **said).encode_entries(table(*entries)).tolist()


def test_a_range_is_scaled_and_clamped():
    assert encoded([0, 5, 10, -100, 1e29], low=0, high=10) == [[-1], [0], [1], [-1], [1]]


def test_a_number_is_standardised():
    assert encoded([4, "10", None], mean=4, std=3, fill=1) == [[0], [2], [-1]]


def test_categories_are_one_hot_and_others_zeros():
    assert encoded(["b", " a "], values=("a", "b")) == [[0, 1], [1, 0]]
    assert encoded(["z", "b"], values=("a", "b"), other=True) == [[0, 0], [0, 1]]


def test_numbers_are_categories_by_value_and_texts_by_their_letters():
    assert encoded(["1.0", 2, "02"], values=(1, 2)) == [[1, 0], [0, 1], [0, 1]]
    assert encoded(["01", 1], values=("1", "01")) == [[0, 1], [1, 0]]
    assert encoded([True, "false"], values=(False, True)) == [[0, 1], [1, 0]]
    assert encoded(["x", 1], values=(1, 2), other=True) == [[0, 0], [1, 0]]


def test_missing_categories_are_filled():
    assert encoded([None, ""], values=("a", "b"), fill="b") == [[0, 1], [0, 1]]
    assert encoded([None, 2], values=(1, 2), fill=1) == [[1, 0], [0, 1]]
    assert encoded([None, "a"], values=("a", "b"), fill="c", other=True) == [[0, 0], [1, 0]]
    assert encoded([None, True], values=(False, True), fill=False) == [[1, 0], [0, 1]]


def test_the_encoding_of_an_entry_does_not_depend_on_others():
    entries = ["3", 5, None, "1e2", True]
    alone = [encoded([entry], low=0, high=10, fill=2)[0] for entry in entries]
    assert encoded(entries, low=0, high=10, fill=2) == alone


@given(
    st.floats(-1e6, 1e6),
    st.floats(1e-3, 1e6),
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5),
)
def test_scaled_numbers_are_restored(centre, half, numbers):
    rows = table(*numbers)
    standard = Column("c", mean=centre, std=half)
    np.testing.assert_allclose(standard.restored(standard.scaled_numbers(rows)), numbers, atol=1e-6)
    ranged = Column("c", low=centre - half, high=centre + half)
    np.testing.assert_allclose(
        ranged.restored(ranged.scaled_numbers(rows)),
        np.clip(numbers, ranged.low, ranged.high),
        atol=1e-6,
    )
    assert np.abs(ranged.scaled_numbers(rows)).max() <= 1 + 1e-9


def test_arrays_keep_their_shape():
    column = Column("c", shape=(2,), whole=True)
    found = column.encode_entries(table([1, 2], [3, 4]))
    assert (found.dtype, found.tolist()) == (np.int64, [[1, 2], [3, 4]])
    pixels = read_table({"c": np.array([[0, 255], [51, 300]], dtype=np.int16)})
    scaled = Column("c", shape=(2,), low=0, high=255).encode_entries(pixels)
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled, [[-1, 1], [-0.6, 1]], rtol=1e-6)
    plain = Column("c", shape=(2,)).encode_entries(pixels)
    assert (plain.dtype, plain.tolist()) == (np.float32, [[0, 255], [51, 300]])


def test_fractions_are_no_whole_numbers():
    with pytest.raises(BadInput, match=r"row 1 of column 'c' is .* whole numbers of shape \(2,\)"):
        Column("c", shape=(2,), whole=True).encode_entries(read_table({"c": np.array([[1, 2.5]])}))


def test_arrays_are_scaled_piece_by_piece(monkeypatch):
    values = np.arange(24.0).reshape(6, 4)
    whole = Column("c", shape=(4,), mean=3, std=2).encode_entries(read_table({"c": values}))
    monkeypatch.setattr("fedveil.data.columns._PIECE", 8)
    pieces = Column("c", shape=(4,), mean=3, std=2).encode_entries(read_table({"c": values}))
    np.testing.assert_array_equal(whole, pieces)
    values[4, 1] = np.nan
    with pytest.raises(BadInput, match=r"row 5 of column 'c' is .* a finite number"):
        Column("c", shape=(4,)).encode_entries(read_table({"c": values}))


@pytest.mark.parametrize(
    ("entries", "said", "message"),
    [
        ([[1, 2], [3]], {"shape": (2,)}, r"row 2 .* is \[3\]: numbers of shape \(2,\) are needed"),
        ([[1, 2], [3, 4.5]], {"shape": (2,), "whole": True}, "row 2 .* whole numbers of shape"),
        ([[1, 2], None], {"shape": (2,)}, "row 2 .* is empty: remove the row"),
        ([[1, 2], [[1], [2, 3]]], {"shape": (2,)}, "row 2 .* numbers of shape"),
        ([[1, 2], ["a", "b"]], {"shape": (2,)}, "numbers of shape"),
        ([1, 2], {"shape": (2,)}, r"row 1 .* is 1: numbers of shape \(2,\)"),
        ([[1, 2], [3, 4]], {"low": 0, "high": 9}, "row 1 .* a number is needed"),
        ([1e31], {"mean": 0, "std": 1}, r"row 1 .* is 1e\+31: a finite number of at most 1e\+30"),
        ([1e10], {"mean": 0, "std": 1e-25}, "a finite number of at most"),
        ([math.inf], {"low": 0, "high": 1}, "is inf: a finite number"),
    ],
)
def test_entries_that_do_not_fit_are_refused(entries, said, message):
    with pytest.raises(BadInput, match=message):
        Column("c", **said).encode_entries(table(*entries))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"low": 0}, "columns.c has one of low and high: give both"),
        ({"std": 1}, "columns.c has one of mean and std: give both"),
        ({"low": 1, "high": 1}, "columns.c.low is 1 and high is 1: low < high"),
        ({"mean": 0, "std": 0}, "columns.c.std is 0: a positive number"),
        ({"mean": 0, "std": -1}, "columns.c.std is -1: a positive number"),
        ({"low": "a", "high": 1}, "columns.c.low is 'a': a number, or a date such as"),
        ({"low": True, "high": 2}, "columns.c.low is True: a finite number"),
        ({"low": 0, "high": math.inf}, "columns.c.high is inf: a finite number"),
        ({"low": math.nan, "high": 1}, "columns.c.low is nan: a finite number"),
        ({"low": 0, "high": 1, "mean": 0, "std": 1}, "has low and high and also mean and std"),
        ({"values": ["a"], "mean": 0, "std": 1}, "has mean and std and also values"),
        ({"values": []}, "columns.c.values is empty: list the categories"),
        ({"values": "abc"}, "columns.c.values is 'abc': a list is needed"),
        ({"values": 3}, "columns.c.values is 3: a list is needed"),
        ({"values": ["a", 1]}, r"columns.c.values is \['a', 1\]: use texts only, or numbers only"),
        ({"values": [math.nan]}, "use texts only, or numbers only"),
        ({"values": [None]}, "use texts only, or numbers only"),
        ({"values": ["a", "a "]}, "has an entry twice or an empty one"),
        ({"values": [1, 1.0]}, "has an entry twice"),
        ({"values": [0, False]}, "has an entry twice"),
        ({"values": ["a", " "]}, "or an empty one"),
        ({"values": range(MOST_VALUES + 1)}, f"columns.c has {MOST_VALUES + 1} values: at most"),
        (
            {"values": ["a"], "fill": "b"},
            "columns.c.fill is 'b', which is none of columns",
        ),
        ({"low": 0, "high": 1, "fill": "b"}, "columns.c.fill is 'b': a number is needed"),
        ({"fill": math.nan}, "columns.c.fill is nan: a number or a text"),
        ({"fill": [1]}, r"columns.c.fill is \[1\]: a number or a text"),
        ({"other": 1}, "columns.c.other is 1: use true or false"),
        ({"lowest": 1}, "unknown key columns.c.lowest: use one of low, high, mean, std, values"),
        ({"shape": (2,)}, "unknown key columns.c.shape"),
        (5, "columns.c is 5: use low"),
    ],
)
def test_declarations_that_make_no_sense_are_refused(said, message):
    with pytest.raises(BadInput, match=f"{message}") as refused:
        Column.declared("c", said)
    assert "\n" not in str(refused.value)


def test_arrays_have_no_categories_and_are_not_filled():
    with pytest.raises(BadInput, match=r"columns\.c holds arrays, which have no values"):
        Column("c", shape=(2,), values=("a", "b"))
    with pytest.raises(BadInput, match="arrays are not filled in, remove the rows"):
        Column("c", shape=(2,), fill=0)


@pytest.mark.parametrize(
    "said",
    [
        {"low": 0, "high": 1, "fill": 0},
        {"mean": 0.0, "std": 1.5},
        {"values": ("a", "b"), "other": True},
        {"values": (0, 1), "fill": 0, "other": True},
        {"values": (False, True), "fill": False},
        {"shape": (2, 3), "whole": True},
        {},
    ],
)
def test_plain_values_say_everything(said):
    column = Column("c", **said)
    plain = json.loads(json.dumps(column.to_dict()))
    again = Column(**{k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()})
    assert again == column
    assert set(plain) == {"name", *said}


def test_numbers_of_numpy_become_plain():
    column = Column.declared("c", {"values": np.array([1, 2]), "fill": np.int64(1)})
    assert json.loads(json.dumps(column.to_dict())) == {"name": "c", "values": [1, 2], "fill": 1}
