"""Sums are exact modulo 2^64, over the protocol's own messages, whoever drops out when."""

from itertools import chain, combinations

import numpy as np
import pytest

from fedveil.masking.rehearsal import rehearse
from fedveil.masking.sum_messages import MessageRefused, Place
from tests.masking.parties import Parties, modular_sum


def subsets(sites, least):
    return chain.from_iterable(combinations(sites, k) for k in range(least, len(sites) + 1))


@pytest.mark.parametrize(("threshold", "honest"), [(3, 5), (4, 4), (5, 5)])
def test_every_set_of_dropouts_of_five_sites_at_every_step(threshold, honest):
    """Sites without keys, without a vector, without an agreement, without a reveal."""
    tried = 0
    everyone = Parties(5, threshold, honest)
    vectors = everyone.vectors()
    for roster in subsets(range(5), threshold):
        begun = everyone.copied()
        for site in set(range(5)) - set(roster):
            begun.server.forget(site)
        messages = begun.masked(vectors)
        assert list(messages) == list(roster)
        for sent in subsets(roster, threshold):
            agreements = [sent] if sent == roster else subsets(sent, threshold)
            for agreeing in agreements:
                for revealing in subsets(agreeing, threshold):
                    world = begun.copied()
                    total = world.finish({s: messages[s] for s in sent}, agreeing, revealing)
                    assert np.array_equal(total, modular_sum(vectors[list(sent)]))
                    tried += 1
    assert tried == {3: 126, 4: 16, 5: 1}[threshold]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_random_dropouts_of_twenty_sites(part):
    draw = np.random.default_rng(part)
    parties = Parties(20, 11)
    vectors = parties.vectors(part)
    messages = parties.masked(vectors)
    for _ in range(100):
        sent = np.sort(draw.choice(20, draw.integers(11, 21), replace=False)).tolist()
        agreeing = sorted(draw.choice(sent, draw.integers(11, len(sent) + 1), replace=False))
        revealing = sorted(draw.choice(agreeing, draw.integers(11, len(agreeing) + 1), False))
        world = parties.copied()
        total = world.finish({s: messages[s] for s in sent}, agreeing, revealing)
        assert np.array_equal(total, modular_sum(vectors[sent]))


def test_rounds_follow_each_other_with_other_sites_missing():
    parties = Parties(4, 3)
    for round in range(1, 9):
        vectors = parties.vectors(round)
        messages = parties.masked(vectors, round, attempt=round % 3)
        missing = round % 5
        messages.pop(missing, None)
        assert np.array_equal(parties.finish(messages), modular_sum(vectors[list(messages)]))


def test_a_site_that_restarts_is_back_in_the_next_round():
    parties = Parties(3, 2)
    vectors = parties.vectors()
    messages = parties.masked(vectors)
    closings = None
    for message in messages.values():
        parties.server.add_masked(message)
    closings = parties.server.close()
    parties.sites[1] = parties.restarted(1)
    with pytest.raises(MessageRefused, match="has sent no vector"):
        parties.sites[1].answer(closings[1])
    for site in (0, 2):
        parties.server.add_reveal(parties.sites[site].answer(closings[site]))
    assert np.array_equal(parties.server.sum(2**63), modular_sum(vectors))
    roster = parties.server.open(Place(2))
    with pytest.raises(MessageRefused, match="does not have this site's keys"):
        parties.sites[1].begin(roster)
    parties.server.add_advert(parties.sites[1].advert)
    assert np.array_equal(parties.finish(parties.masked(vectors, 2, 1)), modular_sum(vectors))


@pytest.mark.parametrize("step", ["keys", "sent vectors", "agreed", "revealed"])
def test_below_the_threshold_nothing_is_handed_on(step):
    parties = Parties(5, 3)
    if step == "keys":
        for site in range(3):
            parties.server.forget(site)
        with pytest.raises(MessageRefused, match="2 of 5 sites have keys"):
            parties.server.open(Place(1))
        return
    messages = parties.masked(parties.vectors())
    sent = {s: messages[s] for s in range(2 if step == "sent vectors" else 4)}
    few = {"agreed": ([0, 1], None), "revealed": (None, [0, 1])}.get(step, (None, None))
    with pytest.raises(MessageRefused, match=f"2 of 5 sites {step}.*: nothing is handed on"):
        parties.finish(sent, *few)


def test_vectors_longer_than_a_piece_of_a_mask():
    words = 3 * (1 << 17) + 5
    vectors = np.random.default_rng(0).integers(-(2**40), 2**40, size=(3, words))
    assert np.array_equal(rehearse(list(vectors), 2, 3, 2**53), vectors.sum(axis=0))


def test_sums_beyond_their_limit_are_refused():
    vectors = [np.array([5, -5]), np.array([4, 0]), np.array([2, 0])]
    assert rehearse(vectors, 2, 3, 11).tolist() == [11, -5]
    with pytest.raises(MessageRefused, match="beyond 10 steps"):
        rehearse(vectors, 2, 3, 10)
    vectors = [-vector for vector in vectors]
    with pytest.raises(MessageRefused, match="beyond 10 steps"):
        rehearse(vectors, 2, 3, 10)
