"""Writing TOML: what is written is what is read."""

import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.runs.recipe import to_toml

texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.lists(st.integers(0, 100) | texts, max_size=3)
)
keys = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
inner = st.dictionaries(texts, scalars | st.dictionaries(texts, scalars, max_size=2), max_size=3)
documents = st.dictionaries(keys, scalars | inner, max_size=4)


@given(texts)
def test_any_text_survives(text):
    assert tomllib.loads(to_toml({"name": text})) == {"name": text}


@given(documents)
def test_any_document_survives(document):
    read = tomllib.loads(to_toml(document))
    assert read == document
    assert repr(sorted(read.items())) == repr(sorted(document.items()))


def test_none_is_left_out():
    assert tomllib.loads(to_toml({"a": None, "b": {"c": None, "d": 1}})) == {"b": {"d": 1}}


def test_scalars_come_before_sections():
    assert tomllib.loads(to_toml({"data": {"clients": 1}, "rounds": 3}))["rounds"] == 3


@pytest.mark.parametrize("value", [1e-5, 0.1, 1e300, 5e-324, -0.0, 2.0])
def test_numbers_keep_every_bit_and_their_type(value):
    read = tomllib.loads(to_toml({"x": value}))["x"]
    assert (repr(read), type(read)) == (repr(value), float)


def test_numbers_that_are_not_finite():
    read = tomllib.loads(to_toml({"a": math.inf, "b": -math.inf, "c": math.nan}))
    assert (read["a"], read["b"]) == (math.inf, -math.inf)
    assert math.isnan(read["c"])


def test_other_types_are_a_mistake():
    with pytest.raises(AssertionError, match="no TOML for set"):
        to_toml({"a": {1}})
