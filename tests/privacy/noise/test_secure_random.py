"""Words are secure and uniform, never repeat, and what is made of them is exact.

Tests of the operating system's words cannot be seeded; each has a false-alarm rate of 1e-6.
"""

import copy
import itertools
import math
import os
import pickle
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from fedveil.base.errors import BadInput
from fedveil.privacy.noise.secure_random import DISTANCE, SecureRandom

ALARM = 1e-6
PIECE = 1 << 17  # words per key


class Seeded(SecureRandom):
    """Words from a seed, so that a test repeats itself."""

    def __init__(self, seed):
        self.generator = np.random.Generator(np.random.Philox(seed))

    def words(self, count):
        return self.generator.integers(0, 2**64, count, dtype=np.uint64)


class Played(SecureRandom):
    """The words of a list, in order."""

    def __init__(self, *words):
        self.left = list(words)

    def words(self, count):
        given, self.left = self.left[:count], self.left[count:]
        assert len(given) == count
        return np.array(given, dtype=np.uint64)


# --- words ---


def counter_mode(secure, count):
    """AES-256 of nonce, nonce + 1, ..., block by block, as 64-bit words."""
    key, nonce = secure[:32], int.from_bytes(secure[32:], "big")
    cipher = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    blocks = [((nonce + i) % 2**128).to_bytes(16, "big") for i in range(-(-count // 2))]
    return np.frombuffer(cipher.update(b"".join(blocks)), dtype=np.uint64)[:count]


@pytest.mark.parametrize("count", [1, 2, 3, 1001, PIECE, PIECE + 1, 2 * PIECE + 5])
def test_every_piece_is_a_keystream_of_its_own_key(count, monkeypatch):
    secrets = []

    def urandom(size):
        secrets.append(np.random.default_rng(len(secrets)).bytes(size))
        return secrets[-1]

    monkeypatch.setattr(os, "urandom", urandom)
    words = SecureRandom().words(count)
    assert [len(s) for s in secrets] == [48] * math.ceil(count / PIECE)
    for secure, start in zip(secrets, range(0, count, PIECE), strict=True):
        piece = words[start : start + PIECE]
        assert np.array_equal(piece, counter_mode(secure, len(piece)))


def test_every_call_asks_the_operating_system_again(monkeypatch):
    asked = []
    real = os.urandom
    monkeypatch.setattr(os, "urandom", lambda size: asked.append(size) or real(size))
    source = SecureRandom()
    for _ in range(3):
        source.words(4)
    assert asked == [48] * 3
    assert vars(source) == {}


def test_no_words_need_no_key(monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda size: pytest.fail("a key for nothing"))
    assert SecureRandom().words(0).shape == (0,)
    with pytest.raises(ValueError, match="-1 words"):
        SecureRandom().words(-1)


def test_failing_operating_system_is_not_papered_over(monkeypatch):
    def urandom(size):
        raise NotImplementedError("no entropy")

    monkeypatch.setattr(os, "urandom", urandom)
    with pytest.raises(NotImplementedError, match="no entropy"):
        SecureRandom().words(1)


def test_words_can_be_written_to_and_are_not_shared():
    source = SecureRandom()
    first, second = source.words(8), source.words(8)
    kept = second.copy()
    first[:] = 0
    assert np.array_equal(second, kept)


def test_no_word_comes_twice():
    """Among 2^18 words of 64 bits two are alike with probability 2^-29."""
    one, other = SecureRandom(), SecureRandom()
    words = np.concatenate([one.words(PIECE), other.words(PIECE // 2), one.words(PIECE // 2)])
    assert len(np.unique(words)) == len(words)


def test_forked_children_draw_their_own_words():
    source = SecureRandom()
    source.words(3)
    drawn = []
    for _ in range(2):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, source.words(100).tobytes())
            os._exit(0)
        drawn.append(np.frombuffer(os.read(reader, 800), dtype=np.uint64))
        assert os.waitpid(child, 0)[1] == 0
        os.close(reader)
        os.close(writer)
    drawn.append(source.words(100))
    assert len(np.unique(np.concatenate(drawn))) == 300


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_source_is_not_duplicated(duplicate):
    with pytest.raises(TypeError, match="not copied"):
        duplicate(SecureRandom())


def test_source_takes_no_seed():
    with pytest.raises(TypeError):
        SecureRandom(1)


@pytest.fixture(scope="module")
def sample():
    return SecureRandom().words(3 * PIECE)


def test_every_bit_is_fair(sample):
    for position in range(64):
        ones = int(((sample >> np.uint64(position)) & np.uint64(1)).sum())
        assert stats.binomtest(ones, len(sample)).pvalue > ALARM / 64


def test_bits_change_as_often_as_they_stay(sample):
    """The runs test: among fair bits the number of changes is binomial."""
    bits = np.unpackbits(sample.view(np.uint8))
    changes = int((bits[1:] != bits[:-1]).sum())
    assert stats.binomtest(changes, len(bits) - 1).pvalue > ALARM


@pytest.mark.parametrize("width", [np.uint8, np.uint16])
def test_bytes_and_pairs_of_bytes_are_equally_frequent(sample, width):
    counts = np.bincount(sample.view(width), minlength=np.iinfo(width).max + 1)
    assert stats.chisquare(counts).pvalue > ALARM


@pytest.mark.parametrize("lag", [1, 2, PIECE])
def test_words_do_not_depend_on_earlier_words(sample, lag):
    """Also across the border of two keys."""
    differing = int(np.bitwise_count(sample[lag:] ^ sample[:-lag]).sum())
    assert stats.binomtest(differing, 64 * (len(sample) - lag)).pvalue > ALARM


def test_distance_per_word_covers_the_longest_keystream():
    blocks = 2**16
    assert Fraction(blocks * (blocks - 1), 2**129) <= 2 * blocks * Fraction(DISTANCE)
    for words in (1, 2, 3, 1000):
        blocks = -(-words // 2)
        assert Fraction(blocks * (blocks - 1), 2**129) <= words * Fraction(DISTANCE)


# --- subsets ---


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_subset_is_equally_likely(size):
    source = Seeded(2)
    counts = Counter(tuple(source.subset(6, size).tolist()) for _ in range(12_000))
    assert set(counts) == set(itertools.combinations(range(6), size))
    assert stats.chisquare(list(counts.values())).pvalue > ALARM


def test_everyone_is_chosen_equally_often_from_many():
    source = Seeded(3)
    counts = sum(np.bincount(source.subset(1000, 100), minlength=1000) for _ in range(400))
    spread = ((counts - 40) ** 2 / (40 * 0.9)).sum() * 999 / 1000
    assert ALARM / 2 < stats.chi2.sf(spread, 999) < 1 - ALARM / 2


def test_a_subset_is_the_first_different_ones():
    assert Played(13, 5).subset(10, 2).tolist() == [3, 5]
    source = Played(13, 3, 8, 7, 27, 1)
    assert source.subset(10, 4).tolist() == [1, 3, 7, 8]
    assert source.left == []


def test_more_than_half_are_those_that_are_left():
    assert Played(13, 5).subset(10, 8).tolist() == [0, 1, 2, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("population", [3, 10, 2**32 + 1])
def test_words_that_would_favour_small_numbers_are_skipped(population):
    """As many words are used as each number has an equal share of."""
    last = 2**64 - 1 - 2**64 % population
    assert (last + 1) % population == 0
    assert 2**64 - 1 - last < population
    assert Played(last).subset(population, 1).tolist() == [population - 1]
    source = Played(last + 1, 2**64 - 1, 4)
    assert source.subset(population, 1).tolist() == [4 % population]
    assert source.left == []


def test_no_word_is_skipped_where_all_are_fair():
    assert Played(2**64 - 1).subset(2**20, 1).tolist() == [2**20 - 1]


def test_subsets_at_the_ends():
    assert SecureRandom().subset(5, 0).tolist() == []
    assert SecureRandom().subset(5, 5).tolist() == [0, 1, 2, 3, 4]
    assert SecureRandom().subset(0, 0).tolist() == []


@pytest.mark.parametrize(("population", "size"), [(3, 4), (3, -1), (0, 1)])
def test_subset_that_does_not_exist_is_refused(population, size):
    with pytest.raises(BadInput, match="cannot be chosen"):
        SecureRandom().subset(population, size)
