"""Masks are uniform and follow from every bit of their seeds; shares open from the threshold on.

Statistical tests have a false-alarm rate of 1e-6 each.
"""

import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from fedveil.masking.masks import add_masks_, deal, open_shares, run_secret, seal, unseal
from fedveil.masking.sum_messages import Advert, MessageRefused, Place, Roster
from tests.masking.parties import Parties, node_key

ALARM = 1e-6


def mask(seed, words=64):
    out = np.zeros(words, dtype=np.uint64)
    add_masks_(out, [seed])
    return out


def test_a_mask_is_the_keystream_of_aes_256_in_counter_mode():
    seed, words = os.urandom(32), (1 << 17) + 3
    stream = Cipher(algorithms.AES256(seed), modes.CTR(bytes(16))).encryptor()
    assert mask(seed, words).tobytes() == stream.update(bytes(8 * words))


def test_what_is_added_is_subtracted_again():
    words = np.frombuffer(os.urandom(8 * 1000), dtype=np.uint64).copy()
    before, seeds = words.copy(), [os.urandom(32) for _ in range(5)]
    add_masks_(words, seeds)
    assert not np.array_equal(words, before)
    add_masks_(words, [], seeds)
    assert np.array_equal(words, before)
    add_masks_(words, seeds[:2], seeds[2:])
    add_masks_(words, seeds[2:], seeds[:2])
    assert np.array_equal(words, before)


def test_flipping_any_bit_of_a_seed_changes_the_mask():
    seed = int.from_bytes(os.urandom(32), "big")
    whole = mask(seed.to_bytes(32, "big"))
    for bit in range(256):
        other = mask((seed ^ (1 << bit)).to_bytes(32, "big"))
        assert not (whole == other).any()


def test_seeds_of_another_length_are_refused():
    with pytest.raises(ValueError, match="32 are needed"):
        mask(bytes(16))
    with pytest.raises(ValueError, match="32 are needed"):
        deal(bytes(16), 2, 3)


def p_value(words):
    """Of uniform bytes at each of the eight places of a word."""
    table = np.stack(
        [np.bincount(column, minlength=256) for column in words.view(np.uint8).reshape(-1, 8).T]
    )
    expected = len(words) / 256
    return stats.chi2.sf(((table - expected) ** 2 / expected).sum(), 8 * 255)


@pytest.mark.parametrize("count", [10**5, pytest.param(10**7, marks=pytest.mark.slow)])
def test_masked_vectors_are_uniform_also_to_a_site_that_colludes(count):
    """Site 2 tells the server all that it shares with site 0, whose vector is zeros."""
    parties = Parties(3, 2, words=count)
    zeros = np.zeros((3, count), dtype=np.int64)
    messages = parties.masked(zeros)
    vectors = [
        np.frombuffer(message[-8 * count :], dtype=np.uint64) for message in messages.values()
    ]
    colluder = parties.sites[2]._now
    less = vectors[0].copy()
    add_masks_(less, [], [colluder.seeds[0]])
    both = less + vectors[1]
    add_masks_(both, [], [colluder.seeds[1]])
    assert not np.array_equal(less, vectors[0])
    for words in (*vectors, less, both):
        assert ALARM < p_value(words) < 1 - ALARM


def test_masked_vectors_of_one_round_are_uncorrelated_with_those_of_the_next():
    parties = Parties(3, 2, words=10**5)
    zeros = np.zeros((3, 10**5), dtype=np.int64)
    rounds = [parties.masked(zeros, 1), parties.masked(zeros, 1, 1), parties.masked(zeros, 2)]
    vectors = [np.frombuffer(r[0][-8 * 10**5 :], dtype=np.uint64) for r in rounds]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert ALARM < p_value(vectors[first] - vectors[second]) < 1 - ALARM


@pytest.mark.parametrize(("threshold", "holders"), [(1, 3), (2, 3), (3, 5), (11, 20)])
def test_any_threshold_of_shares_opens_a_secret_and_fewer_do_not(threshold, holders):
    secret = os.urandom(32)
    shares = dict(enumerate(deal(secret, threshold, holders), 1))
    draw = np.random.default_rng(0)
    for _ in range(5):
        some = draw.choice(holders, threshold, replace=False) + 1
        assert open_shares({int(h): shares[h] for h in some}, threshold) == secret
    assert open_shares(shares, threshold) == secret
    few = dict(list(shares.items())[: threshold - 1])
    with pytest.raises(MessageRefused, match=f"{threshold} are needed"):
        open_shares(few, threshold)
    if few:
        assert open_shares(few, threshold - 1) != secret


def test_shares_of_the_same_secret_differ_and_halves_are_shared_by_themselves():
    secret = bytes(32)
    first, second = deal(secret, 2, 3), deal(secret, 2, 3)
    assert len({*first, *second}) == 6
    assert all(share[:16] != share[16:] for share in first)


def test_fewer_shares_than_the_threshold_say_nothing():
    """One of two: its bytes are uniform whatever the secret is."""
    counts = np.zeros(256)
    for _ in range(400):
        share = deal(bytes(32), 2, 3)[1]
        counts += np.bincount(np.frombuffer(share, dtype=np.uint8), minlength=256)
    expected = counts.sum() / 256
    p = stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), 255)
    assert ALARM < p < 1 - ALARM


def test_boxes_open_for_their_key_and_about_their_subject():
    key, shares = os.urandom(32), [os.urandom(32), os.urandom(32)]
    box = seal(key, shares, b"site 1")
    assert unseal(key, box, b"site 1") == shares
    for wrong in (
        (os.urandom(32), box, b"site 1"),
        (key, box, b"site 2"),
        (key, box[:-1], b"site 1"),
    ):
        with pytest.raises(MessageRefused, match="does not open"):
            unseal(*wrong)


def advert_of(terms, site, key):
    public = key.public_key().public_bytes_raw()
    return Advert.signed(terms, site, public, bytes(32), node_key(site))


def test_two_sites_share_a_secret_that_depends_on_terms_and_keys():
    here, there = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    secrets = set()
    for terms in (Parties(3, 2).terms, Parties(3, 3).terms):
        for other in (1, 2):
            mine, theirs = advert_of(terms, 0, here), advert_of(terms, other, there)
            secret = run_secret(terms, mine, theirs, here)
            assert secret == run_secret(terms, theirs, mine, there)
            secrets.add(secret)
    assert len(secrets) == 4


def test_a_key_that_would_make_the_secret_public_is_refused():
    terms, key = Parties(3, 2).terms, X25519PrivateKey.generate()
    weak = Advert.signed(terms, 1, bytes(32), bytes(32), node_key(1))
    with pytest.raises(MessageRefused, match="exchange key of site 1"):
        run_secret(terms, advert_of(terms, 0, key), weak, key)


def test_seeds_of_rounds_attempts_rosters_pairs_and_purposes_all_differ():
    parties = Parties(4, 3)
    from fedveil.masking.masks import round_seed

    adverts, secret, seeds = parties.server._adverts, os.urandom(32), set()
    fewer = {site: adverts[site] for site in range(3)}
    for place in (Place(1), Place(1, 1), Place(2), Place(256)):
        for who in (adverts, fewer):
            roster = Roster.assemble(parties.terms, place, who)
            for label in (b"mask", b"box"):
                for pair in ((0, 1), (1, 0), (0, 2)):
                    seeds.add(round_seed(secret, roster, label, *pair))
    assert len(seeds) == 4 * 2 * 2 * 3
