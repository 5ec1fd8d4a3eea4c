"""Secure sums of words of 16 to 32 bits: exact modulo 2^bits, uniform, and no longer than needed.

Statistical tests have a false-alarm rate of 1e-6 each.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedveil.base.errors import BadInput
from fedveil.masking.masks import add_masks_, packed, signed, unpacked, words_of
from fedveil.masking.rehearsal import rehearse
from fedveil.masking.sum_messages import STATEMENT, MessageRefused, SumTerms, vector_size
from tests.masking.parties import Parties, modular_sum
from tests.masking.test_sums import subsets

ALARM = 1e-6
BITS = [16, 17, 23, 24, 31, 32, 64]


def reduced(steps, bits):
    """Numbers modulo 2^bits, from -2^(bits - 1) on, by Python's integers."""
    half = 1 << (bits - 1)
    return [(int(x) + half) % (1 << bits) - half for x in steps]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 5, 8, 1000, (1 << 17) + 3])
def test_words_are_packed_in_as_few_bytes_as_they_need(bits, count):
    draw = np.random.default_rng(bits)
    steps = draw.integers(-(2**62), 2**62, count)
    words = words_of(steps, bits)
    content = packed(words, bits)
    assert len(content) == vector_size(count, bits) == -(-count * bits // 8)
    again = unpacked(content, count, bits)
    mask = (1 << bits) - 1 if bits < 64 else 2**64 - 1
    assert np.array_equal(again.astype(np.uint64), steps.astype(np.uint64) & np.uint64(mask))
    assert signed(again, bits).tolist() == reduced(steps, bits)
    assert signed(words, bits).tolist() == reduced(steps, bits)


@pytest.mark.parametrize("bits", [16, 21, 32])
def test_sums_are_exact_for_every_set_of_dropouts(bits):
    everyone = Parties(4, 3, bits=bits)
    vectors = everyone.vectors()
    for roster in subsets(range(4), 3):
        begun = everyone.copied()
        for site in set(range(4)) - set(roster):
            begun.server.forget(site)
        messages = begun.masked(vectors)
        for sent in subsets(roster, 3):
            world = begun.copied()
            total = world.finish({s: messages[s] for s in sent})
            assert total.dtype == np.int64
            assert total.tolist() == reduced(modular_sum(vectors[list(sent)]), bits)


@pytest.mark.parametrize("bits", [16, 21, 32])
def test_masked_vectors_are_uniform_also_to_a_site_that_colludes(bits):
    count = 10**5
    parties = Parties(3, 2, words=count, bits=bits)
    messages = parties.masked(np.zeros((3, count), dtype=np.int64))
    size = vector_size(count, bits)
    less = unpacked(messages[0][-size:], count, bits).copy()
    vectors = [less.copy()]
    add_masks_(less, [], [parties.sites[2]._now.seeds[0]])
    for words in (*vectors, less & np.uint32((1 << bits) - 1 & 0xFFFFFFFF)):
        high = words >> np.uint32(bits - 8)
        for part in (high, words & np.uint32(255)):
            counts = np.bincount(part.astype(np.int64), minlength=256)
            assert len(counts) == 256
            assert ALARM < stats.chisquare(counts).pvalue < 1 - ALARM


@pytest.mark.parametrize("bits", [16, 21, 32])
def test_vectors_of_another_length_are_refused(bits):
    parties = Parties(3, 2, words=9, bits=bits)
    messages = parties.masked(np.ones((3, 9), dtype=np.int64))
    boxes = 2 * (32 * 3 + 16)
    assert len(messages[0]) == STATEMENT + boxes + vector_size(9, bits)
    for wrong in (messages[0][:-1], messages[0] + b"\0"):
        with pytest.raises(MessageRefused, match="another length"):
            parties.server.add_masked(wrong)
    parties.server.add_masked(messages[0])


def test_terms_of_other_bits_are_other_terms():
    terms = Parties(3, 2).terms
    digests = {replace(terms, bits=bits).hash for bits in BITS}
    assert len(digests) == len(BITS)
    for wrong in (0, 8, 15, 33, 48, 63, 65):
        with pytest.raises(BadInput, match=r"64, or 16 to 32"):
            SumTerms(bytes(32), terms.node_keys, 2, 3, 4, wrong)


def test_a_mask_is_a_stream_of_its_words_own_width():
    seed = os.urandom(32)
    narrow, wide = np.zeros(8, dtype="<u4"), np.zeros(4, dtype="<u8")
    add_masks_(narrow, [seed])
    add_masks_(wide, [seed])
    assert narrow.tobytes() == wide.tobytes()
    add_masks_(narrow, [], [seed])
    assert not narrow.any()


def test_a_rehearsal_wraps_around():
    vectors = [np.array([2**15 - 1, -5]), np.array([1, 2]), np.array([0, 0])]
    assert rehearse(vectors, 2, 3, 2**53, 16).tolist() == [-(2**15), -3]
    assert rehearse(vectors, 2, 3, 2**53, 17).tolist() == [2**15, -3]
