"""Whose records the test split holds: by memory, by line, by name, and by contents."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.data import provenance
from fedveil.data.federated import FederatedData
from fedveil.data.provenance import (
    FALSE_ALARM,
    PUBLIC,
    check_copies,
    digests,
    held_out_number,
    owners_in_memory,
)


def arrays(rows, seed=0, width=4):
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, width)).astype(np.float32), random.integers(3, size=rows)


def clients_of(x, y, each=5):
    return [
        (f"c{k}", x[each * k : each * (k + 1)], y[each * k : each * (k + 1)])
        for k in range(len(y) // each)
    ]


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_rows_in_the_clients_memory_are_the_clients(kind):
    x, y = map(kind, arrays(60))
    data = FederatedData.from_clients(clients_of(x[:50], y[:50]), test=(x[43:], y[43:]), classes=3)
    assert data.owners_of_test.tolist() == [8, 8, *[9] * 5, *[PUBLIC] * 10]
    assert data.test_of_clients
    with pytest.raises(BadInput, match="test records are the clients' own"):
        data.check_secure()


def test_every_other_row_and_columns_of_a_wider_array_are_traced_too():
    x, y = arrays(40, width=6)
    left = x[:, :4]
    parts = [left[:10], left[10:20]]
    assert owners_in_memory(parts, left[::5]).tolist() == [0, 0, 1, 1, *[PUBLIC] * 4]
    named = [{"a": x[:10], "b": y[:10]}, {"a": x[10:20], "b": y[10:20]}]
    tested = {"b": y[5:15], "a": x[30:].copy()}
    assert owners_in_memory(named, tested).tolist() == [0] * 5 + [1] * 5
    mask = np.ones((10, 2))
    masked = [{"a": x[:10], "m": mask}, {"a": x[10:20], "m": mask}]
    assert owners_in_memory(masked, {"a": x[20:30], "m": mask}).tolist() == [PUBLIC] * 10
    assert owners_in_memory([x[:10], x[:10]], x[:3]).tolist() == [1, 1, 1]


def test_names_say_who_is_held_out_and_cannot_hide_a_client():
    x, y = arrays(40)
    train = clients_of(x[:30], y[:30])
    data = FederatedData.from_clients(
        train, test=(x[30:34], y[30:34]), test_owners=["p", "q", "p", "c2"], classes=3
    )
    assert data.owners_of_test.tolist() == [-2, -3, -2, 2]
    assert data.held_out_owners == 2
    hidden = FederatedData.from_clients(
        train, test=(x[:4], y[:4]), test_owners=["p", "q", "r", "s"], classes=3
    )
    assert hidden.owners_of_test.tolist() == [0] * 4
    with pytest.raises(BadInput, match="one name for each of 4 test records"):
        FederatedData.from_clients(train, test=(x[:4], y[:4]), test_owners=["p"], classes=3)


def assumptions_about_test(owners, clients):
    """The assumptions of data with these owners of test records."""
    x, y = arrays(clients)
    offsets, rows = np.arange(clients + 1), np.zeros(len(owners), dtype=np.int64)
    data = FederatedData(x, y, offsets, x[rows], y[rows], classes=3, test_owners=owners)
    return data.test_assumptions


def test_sentences_count_owners_and_not_records():
    owners = np.array([-2, -2, -3, PUBLIC, 4])
    assert assumptions_about_test(owners, 10) == (
        "test records of the clients themselves are measured in the clear: outside this claim",
        "2 owners are held out of 12 for testing, measured in the clear, and not protected by this "
        "claim",
        "the test records are taken as public",
    )
    assert assumptions_about_test(held_out_number([0, 0]), 5)[0].startswith(
        "1 owner is held out of 6 for testing"
    )
    assert assumptions_about_test(held_out_number([0, 1]), 5) == (
        "2 records are held out for testing, measured in the clear, and nobody whose they are is "
        "protected by this claim",
    )
    assert assumptions_about_test(np.array([], dtype=np.int64), 5) == ()


def copied(x, y, test):
    check_copies(x, y, x[test].copy(), y[test].copy())


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_copies_of_another_type_are_refused(kind):
    x, y = arrays(50)
    with pytest.raises(BadInput, match="50 of 50 test records"):
        check_copies(x.astype(np.float64), y, x.astype(kind), y)
    numbers = y.astype(np.float32) + np.float32(0.1)
    with pytest.raises(BadInput, match="50 of 50 test records"):
        check_copies(x, numbers, x, numbers.astype(np.float64))


@pytest.mark.parametrize("count", [6, 20, 50])
def test_copies_are_refused(count):
    x, y = arrays(50)
    with pytest.raises(BadInput, match=rf"{count} of {count} test records equal clients' records"):
        copied(x, y, np.random.default_rng(1).permutation(50)[:count])


def test_copies_among_many_others_are_refused():
    """Ten of the clients' records among a thousand of nobody's."""
    x, y = arrays(3000)
    more_x, more_y = arrays(990, seed=9)
    tested = np.concatenate([more_x, x[:10]]), np.concatenate([more_y, y[:10]])
    with pytest.raises(BadInput, match="10 of 1,000 test records"):
        check_copies(x, y, *tested)


@pytest.mark.parametrize("seed", range(20))
def test_records_that_coincide_by_chance_are_not_refused(seed):
    """A table with 64 different rows: nearly every test record equals some client's.

    The false-alarm rate is 1e-6 for each seed.
    """
    random = np.random.default_rng(seed)
    x = random.integers(2, size=(900, 6)).astype(np.float32)
    y = np.zeros(900, dtype=np.int64)
    check_copies(x[:800], y[:800], x[800:], y[800:])
    few = random.integers(40, size=(900, 1)) * random.integers(1, 200, size=(900, 1))
    check_copies(few[:800], y[:800], few[800:], y[800:])


def test_one_record_that_is_repeated_is_no_copy():
    x, y = arrays(50)
    tested = np.concatenate([np.repeat(x[:1], 40, axis=0), arrays(10, seed=9)[0]])
    check_copies(x, y, tested, np.full(50, y[0]))


@pytest.mark.parametrize("seed", range(20))
def test_records_that_everybody_has_are_no_copies(seed):
    """Few common records and many that are one's own; the false-alarm rate is 1e-6 for a seed."""
    random = np.random.default_rng(seed)
    common = random.normal(size=(10, 4))
    x = np.where(
        random.random((1000, 1)) < 0.7, common[random.integers(10, size=1000)],
        random.normal(size=(1000, 4)),
    )  # fmt: skip
    y = np.zeros(1000, dtype=np.int64)
    check_copies(x[:800], y[:800], x[800:], y[800:])


def test_one_record_of_three_may_coincide():
    x, y = np.array([[0.0], [1.0], [2.0]]), np.array([0, 1, 1])
    check_copies(x, y, x[1:2], y[1:2])
    check_copies(x, y, x[:0], y[:0])
    check_copies(x[:0], y[:0], x, y)
    assert FALSE_ALARM == 1e-6


def test_digests_are_those_of_contents():
    x, y = arrays(100)
    first = digests(x, y)
    assert len(np.unique(first)) == 100
    wide = x.astype(np.float64)
    np.testing.assert_array_equal(digests(wide, y.astype(np.int32), like=(x, y)), first)
    np.testing.assert_array_equal(digests(x, y, like=(wide, y)), first)
    np.testing.assert_array_equal(digests(x[::-1], y[::-1]), first[::-1])
    zero, minus = np.zeros((1, 4), np.float32), np.full((1, 4), -0.0, np.float32)
    assert digests(zero, y[:1]) == digests(minus, y[:1])
    other = x.copy()
    other[0, 3] = np.nextafter(other[0, 3], np.float32(9))
    assert (digests(other, y) != first).tolist() == [True] + [False] * 99
    assert (digests(x, 1 - y) != first)[y != 1 - y].all()
    odd = np.arange(30, dtype=np.float32).reshape(10, 3)  # no whole number of words
    assert len(np.unique(digests(odd, y[:10]))) == 10
    assert len(np.unique(digests(odd > 14, y[:10]))) > 1
    swapped = digests({"a": x, "b": 2 * x}, y)
    assert (swapped != digests({"a": 2 * x, "b": x}, y)).all()


def test_long_arrays_are_read_in_pieces(monkeypatch):
    x, y = arrays(100)
    whole = digests(x, y)
    monkeypatch.setattr(provenance, "_AT_ONCE", 40)
    np.testing.assert_array_equal(digests(x, y), whole)


def test_examples_are_nobody_s_or_made_up():
    x, y = arrays(60)
    train = clients_of(x[:50], y[:50])
    public = FederatedData.from_clients(train, test=(x[50:].copy(), y[50:]), classes=3)
    np.testing.assert_array_equal(public.examples(3)[0], x[50:53])
    own = FederatedData.from_clients(train, test=(x[:10], y[:10]), classes=3)
    none = FederatedData.from_clients(train, classes=3)
    for data in (own, none):
        made, labels = data.examples(8)
        assert (made.shape, made.dtype, labels.dtype) == ((8, 4), np.float32, np.int64)
        assert not np.isin(made, x).any()
        assert set(labels) <= {0, 1, 2}
    np.testing.assert_array_equal(own.examples(8)[0], none.examples(8)[0])
    words = FederatedData.from_clients([("a", [[5, 6], [7, 8]], [0.5, 1.5])], classes=0)
    assert set(words.examples(9)[0].ravel()) == {0, 1}


def test_joined_data_forget_nothing():
    x, y = arrays(60)
    parts = [
        FederatedData.from_clients(
            clients_of(x[a : a + 20], y[a : a + 20]),
            test=(x[a : a + 5], y[a : a + 5]) if a == 0 else None,
            classes=3,
            fitted=fitted,
            declared_public=bool(fitted) and a == 0,
        )
        for a, fitted in ((0, "means"), (20, "words"), (40, ""))
    ]
    joined = parts[0].concatenated(*parts[1:])
    assert (joined.clients, joined.test_of_clients) == (12, True)
    assert (joined.fitted, joined.declared_public) == ("means, words", False)
    with pytest.raises(BadInput, match="'secure' and means, words were fitted"):
        joined.check_secure()
    assert parts[0].concatenated(parts[2]).assumptions == ("declared public: means",)
    with pytest.raises(BadInput, match="cannot be joined"):
        parts[0].concatenated(parts[1].at_sites(["a"]))


def test_what_others_fitted_on_their_test_records_is_fitted_on_clients_after_joining():
    x, y = arrays(60)
    first, other = (
        replace(
            FederatedData.from_clients(clients_of(x[a : a + 20], y[a : a + 20]), classes=3),
            fitted_on_test=f"means {a}",
        )
        for a in (0, 20)
    )
    joined = first.concatenated(other)
    assert (joined.fitted, joined.fitted_on_test) == ("means 20", "means 0")
    first.check_secure()
    with pytest.raises(BadInput, match="'secure' and means 20 were fitted"):
        joined.check_secure()
