"""Words of a text, and their numbers: given, hashed, or counted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.base.errors import BadInput
from fedveil.data.vocabulary import Vocabulary, tokens


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's GOOD, isn't it?", ["it's", "good", ",", "isn't", "it", "?"]),
        ("it\N{RIGHT SINGLE QUOTATION MARK}s", ["it's"]),
        ("see HTTP://A.b/C?d=1, or www.x.org.", ["see", "<url>", "or", "<url>"]),
        ("@Ada_1 and ada@mail", ["<user>", "and", "ada", "@", "mail"]),
        ("<url>", ["<", "url", ">"]),
        ("nai\u0308ve na\u00efve", ["na\u00efve", "na\u00efve"]),
        ("ein Straße 2nd", ["ein", "straße", "2nd"]),
        ("...", [".", ".", "."]),
        (" \n\t ", []),
    ],
)
def test_words_and_marks_in_lower_case(text, words):
    assert tokens(text) == words


@given(st.text())
def test_a_token_is_read_as_itself_and_nothing_but_spaces_is_lost(text):
    found = tokens(text)
    assert all(word in ("<url>", "<user>") or tokens(word) == [word] for word in found)
    assert bool(found) == bool(text.strip())


def test_a_list_of_words_counts_each_once_in_lower_case():
    words = Vocabulary.given(["Good", "film", "good", "<url>", "!"])
    assert words.words == ("good", "film", "<url>", "!")
    rows = words.encode(["GOOD film! http://x.y", "bad", ""], 5)
    assert rows.tolist() == [[2, 3, 5, 4, 0], [1, 0, 0, 0, 0], [0] * 5]
    assert rows.dtype == np.int64
    assert words.decode(rows) == ["good film ! <url>", "<unknown>", ""]


def test_long_texts_are_cut():
    assert Vocabulary(("a", "b")).encode(["a b a b"], 3).tolist() == [[2, 3, 2]]


def test_a_file_has_one_word_in_each_line(tmp_path):
    (tmp_path / "w.txt").write_text("\ufeffGood\n\n  film \n", encoding="utf-8")
    assert Vocabulary.given(tmp_path / "w.txt").words == ("good", "film")
    assert Vocabulary.given(str(tmp_path / "w.txt")).size == 4


def test_hashed_words_have_the_same_numbers_everywhere_and_for_ever():
    assert Vocabulary(buckets=1000).encode(["A good film"], 4).tolist() == [[252, 584, 844, 0]]


def test_no_word_is_unknown_to_buckets_and_all_of_them_are_used():
    rows = Vocabulary(buckets=10).encode([" ".join(f"w{k}" for k in range(500))], 500)
    assert set(rows.ravel().tolist()) == set(range(2, 12))
    assert Vocabulary(buckets=10).size == 12
    assert Vocabulary(buckets=10).decode([[2, 11, 1, 0]]) == ["<0> <9> <unknown>"]


def test_counted_words_are_those_that_the_most_texts_have():
    texts = ["a a a a b c", "b c", "c d", "e e e"]
    counted = Vocabulary.counted(texts, most=10, least=2)
    assert counted.words == ("c", "b")  # of one text, however often, is nobody's
    assert Vocabulary.counted(texts, most=1, least=1).words == ("c",)
    assert Vocabulary.counted(texts[::-1], most=3, least=1).words == ("c", "b", "a")


@given(st.lists(st.text(max_size=30), min_size=1, max_size=30), st.integers(1, 8))
def test_known_words_come_back(texts, length):
    try:
        words = Vocabulary.counted(texts, most=900, least=1)  # there cannot be more of them
    except BadInput:
        assert not any(tokens(text) for text in texts)
        return
    rows = words.encode(texts, length)
    assert words.decode(rows) == [" ".join(tokens(text)[:length]) for text in texts]
    assert rows.max() < words.size


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Vocabulary(), "words, or a number of buckets"),
        (lambda: Vocabulary(("a",), 3), "words, or a number of buckets"),
        (lambda: Vocabulary(buckets=10**7), "10,000,000 words: at most 1,000,000"),
        (lambda: Vocabulary.given(["ice cream"], "w"), r"w has 'ice cream', .* 2 tokens"),
        (lambda: Vocabulary.given(["a", " "], "w"), "w has ' ', which is no word"),
        (lambda: Vocabulary.given([3], "w"), "w has 3, which is no word"),
        (lambda: Vocabulary.given(7, "w"), "w is 7: give a list of words"),
        (lambda: Vocabulary.given("/none/w.txt"), "'/none/w.txt' cannot be read: No such file"),
        (lambda: Vocabulary.given("/"), "'/' cannot be read: Is a directory"),
        (lambda: Vocabulary.counted(["a b"], most=9, least=2), "no word is in 2 texts .* of 2"),
        (lambda: Vocabulary(("a",)).word(3), "3 is no word: numbers are 0 to 2"),
    ],
)
def test_what_is_no_vocabulary_is_refused(make, message):
    with pytest.raises(BadInput, match=message):
        make()


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty"), (b"\n \n", "is empty"), (b"\xff\xfe\x00", "UTF-8")]
)
def test_files_without_words_are_refused(tmp_path, content, message):
    (tmp_path / "w.txt").write_bytes(content)
    with pytest.raises(BadInput, match=message):
        Vocabulary.given(tmp_path / "w.txt")
