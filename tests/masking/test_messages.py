"""Messages that were replayed, reordered, dropped, made for others or altered are refused."""

import os

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.masking.masking_site import MaskingSite
from fedveil.masking.sum_messages import MessageRefused, Place, SumTerms, least_honest
from fedveil.masking.sum_server import SumServer
from tests.masking.parties import ANY, Parties, modular_sum, node_key, public

TRIES = 1000
N, MISSING = 4, 3


class Recorded:
    """A round in which site 3 drops out: each message, and who took it in which state."""

    def __init__(self, parties=None, round=1):
        self.parties = parties = parties or Parties(N, 3)
        self.vectors = parties.vectors()
        server, sites, self.takers = parties.server, parties.sites, []
        self.takers += [(site.advert, "add_advert", SumServer(parties.terms)) for site in sites]
        roster = server.open(Place(round))
        present = [site for number, site in enumerate(sites) if number != MISSING]
        masked = []
        for number, site in enumerate(present):
            self.taken(roster, "begin", site, number)
            site.begin(roster)
            masked.append(site.mask(self.vectors[number]))
        self.taken_by_server(masked, "add_masked")
        closings = server.close()
        agreed = []
        for number, site in enumerate(present):
            self.taken(closings[number], "answer", site, number)
            agreed.append(site.answer(closings[number]))
        self.taken_by_server(agreed, "add_agreed")
        certificate, reveals = server.certify(), []
        for number, site in enumerate(present):
            self.taken(certificate, "reveal", site, number)
            reveals.append(site.reveal(certificate))
        self.taken_by_server(reveals, "add_reveal")
        self.total = server.sum(ANY)

    def taken(self, message, method, site, number):
        self.takers.append((message, method, self.parties.copied().sites[number]))

    def taken_by_server(self, messages, method):
        """Each message, with the server just before it came."""
        for message in messages:
            self.takers.append((message, method, self.parties.copied().server))
            getattr(self.parties.server, method)(message)


@pytest.fixture(scope="module")
def recorded():
    return Recorded()


def call(method, taker, message):
    """What a fresh copy of the taker does with a message."""
    from tests.masking.parties import copied_server, copied_site

    other = copied_site(taker) if isinstance(taker, MaskingSite) else copied_server(taker)
    return getattr(other, method)(message)


def test_every_message_is_taken_in_its_own_place(recorded):
    assert np.array_equal(recorded.total, modular_sum(recorded.vectors[:3]))
    assert len(recorded.takers) == 4 + 3 + 3 + 3 + 3 + 3 + 3
    for message, method, taker in recorded.takers:
        call(method, taker, message)


def refused(method, taker, message):
    with pytest.raises(MessageRefused):
        call(method, taker, message)


def test_altered_messages_are_refused(recorded):
    """One bit, a few bytes, a byte more, a byte less, or parts of it in another order."""
    draw = np.random.default_rng(1)
    for number in range(TRIES):
        message, method, taker = recorded.takers[number % len(recorded.takers)]
        changed = bytearray(message)
        place = int(draw.integers(len(message)))
        match number // len(recorded.takers) % 5:
            case 0:
                changed[place] ^= 1 << int(draw.integers(8))
            case 1:
                changed[place : place + 9] = os.urandom(len(changed[place : place + 9]))
            case 2:
                changed.insert(place, changed[place])
            case 3:
                del changed[place]
            case _:
                changed = changed[place:] + changed[:place] if place else changed + b"\0"
        if bytes(changed) != message:
            refused(method, taker, bytes(changed))


def test_every_single_bit_of_the_signed_messages_counts(recorded):
    """In a roster and a closing the signatures inside carry it; numbers of parts are checked."""
    for message, method, taker in recorded.takers[4:]:
        if method in ("add_agreed", "add_reveal", "reveal"):
            for place in range(0, len(message), 7):
                changed = bytearray(message)
                changed[place] ^= 1 << place % 8
                refused(method, taker, bytes(changed))


def test_every_bit_of_the_beginning_of_a_message_counts(recorded):
    """Magic, kind and terms, also of messages that nobody signs as a whole."""
    for message, method, taker in recorded.takers[:: len(recorded.takers) // 10]:
        for bit in range(8 * 38):
            changed = bytearray(message)
            changed[bit // 8] ^= 1 << bit % 8
            refused(method, taker, bytes(changed))
    for message, method, taker in recorded.takers:
        for kind in {*range(9)} - {message[5]}:
            refused(method, taker, message[:5] + bytes([kind]) + message[6:])


def test_truncated_messages_are_refused(recorded):
    for message, method, taker in recorded.takers:
        for size in {0, 1, 5, 6, 37, 38, 50, len(message) // 2, len(message) - 1}:
            refused(method, taker, message[:size])


def test_reordered_messages_are_refused(recorded):
    """A message of the right round where another kind, or a later one, is due."""
    draw, tried = np.random.default_rng(2), 0
    while tried < TRIES:
        (_, method, taker), (message, other, _) = (
            recorded.takers[int(n)] for n in draw.integers(len(recorded.takers), size=2)
        )
        if method != other:
            refused(method, taker, message)
            tried += 1


def test_steps_out_of_order_are_refused():
    parties = Parties(3, 2)
    site, server = parties.sites[0], parties.server
    for early in (
        lambda: site.mask(parties.vectors()[0]),
        lambda: site.answer(b""),
        lambda: site.reveal(b""),
        lambda: server.add_masked(b""),
        server.close,
        server.certify,
        lambda: server.add_agreed(b""),
        lambda: server.sum(1),
    ):
        with pytest.raises(MessageRefused):
            early()
    roster = server.open(Place(1))
    site.begin(roster)
    for early in (lambda: site.answer(b""), lambda: site.reveal(b""), lambda: server.sum(1)):
        with pytest.raises(MessageRefused):
            early()
    site.mask(parties.vectors()[0])
    with pytest.raises(MessageRefused, match="agreed to no vectors"):
        site.reveal(b"")


def refused_here(method, taker, message):
    """Refused by the party itself, which has its journal."""
    with pytest.raises(MessageRefused):
        getattr(taker, method)(message)


def test_replayed_messages_are_refused():
    """Every message of a round, to the same parties in later rounds and attempts."""
    parties = Parties(N, 3)
    first = Recorded(parties, round=1)
    tried, round = 0, 1
    while tried < TRIES:
        round += 1
        messages = {
            site: m
            for site, m in parties.masked(parties.vectors(round), round).items()
            if site != MISSING
        }
        old = [(m, method) for m, method, _ in first.takers if method != "add_advert"]
        for message, method in old:
            takers = parties.sites if method in ("begin", "answer", "reveal") else [parties.server]
            for taker in takers:
                refused_here(method, taker, message)
                tried += 1
        for message in messages.values():
            parties.server.add_masked(message)
            refused_here("add_masked", parties.server, message)
            tried += 1
        closings = parties.server.close()
        for message, method in old:
            if method in ("add_agreed", "add_reveal", "add_masked"):
                refused_here(method, parties.server, message)
                tried += 1
        for site in messages:
            parties.server.add_agreed(parties.sites[site].answer(closings[site]))
        certificate = parties.server.certify()
        for site in messages:
            for message, method in old:
                if method == "reveal":
                    refused_here(method, parties.sites[site], message)
                    tried += 1
            reveal = parties.sites[site].reveal(certificate)
            parties.server.add_reveal(reveal)
            refused_here("add_reveal", parties.server, reveal)
        assert np.array_equal(parties.server.sum(ANY), modular_sum(parties.vectors(round)[:3]))


def test_foreign_messages_are_refused(recorded):
    """Of another run, other terms, sites with other node keys, and of random bytes."""
    tried, number = 0, 0
    others = [
        Recorded(Parties(N, 3)).takers,
        Recorded(Parties(N, 3, words=5, run=recorded.parties.terms.run)).takers,
        Recorded(Parties(N, 3, honest=4, run=os.urandom(32))).takers,
    ]
    while tried < TRIES:
        for (message, method, taker), *foreign in zip(recorded.takers, *others, strict=True):
            for other, same, _ in foreign:
                assert same == method
                refused(method, taker, other)
            refused(method, taker, os.urandom(len(message)))
            refused(method, taker, message[:38] + os.urandom(len(message) - 38))
            tried += 5
        number += 1


@pytest.mark.parametrize("tries", [100, pytest.param(TRIES, marks=pytest.mark.slow)])
def test_dropped_messages_lose_a_site_or_the_round_and_never_change_a_sum(tries):
    draw, parties = np.random.default_rng(3), Parties(4, 3)
    vectors, whole, lost = parties.vectors(), 0, 0
    messages = parties.masked(vectors)
    for _ in range(tries):
        world = parties.copied()
        kept = [[s for s in range(4) if draw.random() < 0.9] for _ in range(3)]
        sent = {site: messages[site] for site in kept[0]}
        agreeing = [site for site in kept[1] if site in sent]
        revealing = [
            site for site in kept[2] if site in agreeing or (len(sent) == 4 and site in sent)
        ]
        if min(len(sent), len(agreeing) if len(sent) < 4 else 4, len(revealing)) < 3:
            with pytest.raises(MessageRefused, match="a sum needs 3: nothing is handed on"):
                world.finish(sent, agreeing, revealing)
            lost += 1
        else:
            total = world.finish(sent, agreeing, revealing)
            assert np.array_equal(total, modular_sum(vectors[list(sent)]))
            whole += 1
    assert min(whole, lost) > tries / 10


def test_a_roster_with_a_site_twice_or_out_of_order_is_refused():
    from fedveil.masking.sum_messages import Kind, counted, start, with_length

    parties = Parties(4, 3)
    adverts = [with_length(site.advert) for site in parties.sites]
    for order in ([0, 1, 1, 2], [1, 0, 2, 3], [0, 1], [0, 1, 2, 3, 3]):
        message = start(Kind.ROSTER, parties.terms) + Place(1).bytes
        with pytest.raises(MessageRefused):
            parties.sites[0].begin(message + counted([adverts[n] for n in order]))


def test_terms_that_differ_in_anything_have_another_digest():
    keys = tuple(public(node_key(site)) for site in range(5))
    terms = [
        SumTerms(run, order, threshold, honest, words)
        for run in (bytes(32), bytes([1] * 32))
        for order in (keys, keys[::-1], keys[:4])
        for threshold, honest in ((4, 4), (4, 3))
        for words in (7, 8)
        if honest < len(order)
    ]
    assert len({each.hash for each in terms}) == len(terms) > 15


REFUSED_TERMS = {
    "at least 3 are needed": {"node_keys": 2, "threshold": 2, "honest": 2},
    "has a key twice": {"twice": True},
    "no public key of": {"wrong": b"\x30\x00"},
    "32 are needed": {"run": b"short"},
    "words is 0": {"words": 0},
    "two views": {"threshold": 2, "honest": 3, "node_keys": 4},
}


@pytest.mark.parametrize("message", REFUSED_TERMS)
def test_terms_that_would_not_protect_are_refused(message):
    given = {"run": bytes(32), "threshold": 3, "honest": 4, "words": 1, **REFUSED_TERMS[message]}
    keys = [public(node_key(site)) for site in range(given.pop("node_keys", 4))]
    if given.pop("twice", False):
        keys[1] = keys[0]
    if "wrong" in given:
        keys[1] = given.pop("wrong")
    with pytest.raises(BadInput, match=message):
        SumTerms(node_keys=tuple(keys), **given)


def test_the_numbers_that_protect():
    """By brute force: some honest site in every sum, and no two views that both have enough."""
    for sites in range(3, 12):
        for honest in range(1, sites + 1):
            for threshold in range(1, sites + 1):
                bad = sites - honest
                views = any(
                    first + bad >= threshold and honest - first + bad >= threshold
                    for first in range(honest + 1)
                )
                fine = threshold > bad and not views
                if fine:
                    assert least_honest(sites, threshold, honest) == threshold - bad
                else:
                    with pytest.raises(BadInput, match="honest"):
                        least_honest(sites, threshold, honest)


def test_a_site_has_the_node_key_of_its_number():
    parties = Parties(3, 2)
    for site, key in ((0, 1), (3, 0), (-1, 2)):
        with pytest.raises(BadInput, match="is not that of site"):
            MaskingSite(parties.terms, site, node_key(key), parties.journals[0])


def test_vectors_of_another_form_are_not_sent():
    parties = Parties(3, 2)
    parties.sites[0].begin(parties.server.open(Place(1)))
    for vector in (np.zeros(5, dtype=np.int64), np.zeros(4), np.zeros((1, 4), dtype=np.int64)):
        with pytest.raises(ValueError, match=r"int64 \[4\]"):
            parties.sites[0].mask(vector)
    parties.sites[0].mask(np.zeros(4, dtype=np.int64))
    with pytest.raises(MessageRefused, match="still to send"):
        parties.sites[0].mask(np.zeros(4, dtype=np.int64))


@pytest.mark.parametrize("place", [(-1, 0), (2**63, 0), (1, -1), (1, 2**32), (True, 0), (1.5, 0)])
def test_rounds_are_whole_numbers_that_fit(place):
    with pytest.raises(BadInput, match="is needed"):
        Place(*place)
