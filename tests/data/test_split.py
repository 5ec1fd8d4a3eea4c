"""Which records are held out: published ones by number, a user's rows by themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.base.errors import BadInput
from fedveil.data.provenance import choose_held_out, holdout, places, row_words


@given(n=st.integers(2, 500))
def test_holdout_is_a_fixed_80_20_split(n):
    train, test = holdout(n)
    assert sorted([*train, *test]) == list(range(n))
    assert len(train) == max(1, n * 4 // 5)
    np.testing.assert_array_equal(train, holdout(n)[0])


@pytest.mark.parametrize("n", [0, 1])
def test_holdout_of_too_few(n):
    with pytest.raises(BadInput, match=f"{n} records cannot be split"):
        holdout(n)


def test_places_are_uniform_and_differ_by_purpose():
    """Means and a correlation of 20,000 places, each within 5 standard deviations: 1e-6."""
    words = row_words([np.arange(20_000)])
    one, other = places(words, "a"), places(words, "b")
    assert len(np.unique(one)) == len(one)
    for found in (one, other):
        assert abs(found.mean() - 0.5) < 5 * 0.2887 / len(found) ** 0.5
        assert abs((found < 0.2).mean() - 0.2) < 5 * 0.4 / len(found) ** 0.5
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / len(one) ** 0.5


def test_a_word_is_the_same_however_an_entry_was_written():
    plain = row_words([np.array([0.5, 2.0, 7.0]), np.array(["a", "b", None], dtype=object)])
    written = np.array(["0.50", "2", "7.0"], dtype=object)
    assert row_words([written, np.array([" a", "b ", ""], dtype=object)]).tolist() == plain.tolist()
    days = [np.array([day], dtype=object) for day in ("2026-01-31", "2026-01-31T00:00:00")]
    assert row_words(days[:1]).tolist() == row_words(days[1:]).tolist()
    arrays = np.arange(6).reshape(3, 2)
    lists = np.empty(3, dtype=object)
    lists[:] = arrays.astype(float).tolist()
    assert row_words([arrays]).tolist() == row_words([lists]).tolist()


def test_equal_rows_have_words_of_their_own_and_other_rows_have_none_of_them():
    words = row_words([np.array([1, 1, 2, 1])]).tolist()
    assert len(set(words)) == 4
    assert set(row_words([np.array([1, 1, 2])]).tolist()) == {*words[:3]}
    assert set(row_words([np.array([2, 1, 1])]).tolist()) == {*words[:3]}


def test_rows_that_are_written_differently_do_not_count_each_other():
    """'007' may be another category than '7': one row less must not move the other."""
    both = row_words([np.array(["007", "7"], dtype=object)])
    assert both[1:].tolist() == row_words([np.array(["7"], dtype=object)]).tolist()


def test_an_entry_is_not_its_neighbour_s():
    one, other = (
        row_words([np.array([a], dtype=object), np.array([b], dtype=object)])
        for a, b in (("x', 'y", "z"), ("x", "y', 'z"))
    )
    assert one.tolist() != other.tolist()


NAMES = np.array([f"n{k}" for k in range(400)])


@given(gone=st.sets(st.integers(0, 399), max_size=390), share=st.sampled_from([0.1, 0.2, 0.6]))
def test_nobody_moves_anybody_else(gone, share):
    everyone = choose_held_out(np.arange(400), NAMES, share)
    left = np.setdiff1d(np.arange(400), [*gone])
    expected = np.setdiff1d(everyone, [*gone])
    if not len(expected):
        with pytest.raises(BadInput, match="no name falls into the share"):
            choose_held_out(left, NAMES, share)
        return
    np.testing.assert_array_equal(choose_held_out(left, NAMES, share), expected)


def test_nobody_is_held_out_for_want_of_others():
    """Not even the nearest: whoever joined with a nearer name would send somebody into training."""
    trained = np.setdiff1d(np.arange(400), choose_held_out(np.arange(400), NAMES))
    for few in (trained[:1], trained[:3], trained):
        with pytest.raises(BadInput, match=r"share of 0\.2 that is held out"):
            choose_held_out(few, NAMES)
