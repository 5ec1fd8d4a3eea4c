"""Entries are read one by one: numbers, texts, or nothing."""

import math
from decimal import Decimal

import numpy as np
import pytest

from fedveil.data.entries import are_arrays, are_bits, are_floats, as_numbers, as_texts


def column(*entries):
    made = np.empty(len(entries), dtype=object)
    made[:] = entries
    return made


@pytest.mark.parametrize(
    ("entry", "number"),
    [
        ("1.5", 1.5),
        (" -2 ", -2.0),
        ("1e3", 1000.0),
        (7, 7.0),
        (True, 1.0),
        ("True", 1.0),
        ("FALSE", 0.0),
        (np.float32(0.5), 0.5),
        (Decimal("0.25"), 0.25),
        ("inf", math.inf),
    ],
)
def test_numbers(entry, number):
    for others in ([], ["x"]):  # with and without the short way
        found, odd = as_numbers(column(entry, *others))
        assert found[0] == number
        assert not odd[0]


@pytest.mark.parametrize("entry", [None, "", "  ", "NA", "n/a", "NaN", "null", "None", math.nan])
def test_no_number_is_there(entry):
    found, odd = as_numbers(column(entry, "1"))
    assert np.isnan(found[0])
    assert odd.tolist() == [False, False]


@pytest.mark.parametrize("entry", ["x", "1,5", "12 kg", [1, 2], {}, object(), 10**400, "yes"])
def test_no_numbers(entry):
    found, odd = as_numbers(column("1", entry))
    assert odd.tolist() == [False, True]
    assert found[0] == 1.0


def test_arrays_are_no_numbers():
    assert as_numbers(np.ones((2, 3)))[1].all()


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (" a b ", "a b"),
        (1, "1"),
        (1.0, "1"),
        (1.5, "1.5"),
        (True, "True"),
        ("NA", "NA"),
        ("", None),
        (" ", None),
        (None, None),
        (math.nan, None),
        (2**60 + 1, str(2**60 + 1)),
    ],
)
def test_texts(entry, text):
    assert as_texts(column(entry)) == [text]


def test_whole_numbers_of_every_type_are_the_same_text():
    for kind in (np.int8, np.uint64, np.float32, np.float64):
        assert as_texts(np.array([3, 40], dtype=kind)) == ["3", "40"]


def test_bits():
    assert are_bits(np.array([True, False]))
    assert are_bits(column("true", " FALSE ", True))
    assert not are_bits(np.array([0, 1]))
    assert not are_bits(column("true", "maybe"))
    assert not are_bits(column("true", None))


def test_floats():
    assert are_floats(np.array([1.0]))
    assert are_floats(column("1", "2.0"))
    assert are_floats(column(1, 2.0))
    assert not are_floats(column("1", " -2 ", 3))
    assert not are_floats(np.array([1, 2]))


def test_arrays():
    assert are_arrays(np.ones((2, 3)))
    assert are_arrays(column(None, [1, 2]))
    assert are_arrays(column(np.ones(2), None))
    assert not are_arrays(column(None, "x"))
    assert not are_arrays(np.ones(2))
