"""A malicious server, with the sites that side with it, gets one sum per attempt or nothing."""

import os
from collections import defaultdict
from itertools import chain, combinations, product

import numpy as np
import pytest

from fedveil.masking.masking_site import MaskingSite
from fedveil.masking.masks import add_masks_, open_shares
from fedveil.masking.sum_messages import (
    SEED,
    SIGNATURE,
    STATEMENT,
    Advert,
    Kind,
    MessageRefused,
    Place,
    Roster,
    counted,
    start,
    with_length,
)
from tests.masking.parties import ANY, Parties, copied_site, modular_sum, node_key

_HEADER = 5 + 1 + 32 + 12 + 2 + 32


class Enemy:
    """A server that keeps all it sees, and sites on its side, whose copies answer everything.

    `opened` has the seeds that it can compute: the self mask (dealer, dealer), and pairs' seeds.
    """

    def __init__(self, sites, threshold, honest):
        self.parties = Parties(sites, threshold, honest)
        self.threshold, self.honest = threshold, list(range(honest))
        self.vectors = self.parties.vectors()
        self.messages = self.parties.masked(self.vectors)
        self.roster = self.parties.server._now.roster
        self.begun = self.parties.copied()
        for message in self.messages.values():
            self.parties.server.add_masked(message)
        self.state = self.parties.server._now

    def restart(self):
        """All sites as they were when they had masked."""
        self.world = self.begun.copied()
        self.shares = defaultdict(dict)
        self.direct = {}

    def closing(self, members, site):
        server = self.state
        boxes = [server.boxes[dealer, site] for dealer in members if dealer != site]
        message = start(Kind.CLOSING, self.parties.terms) + self.roster.place.bytes
        statements = [server.statements[member].message for member in members]
        return message + counted(statements) + b"".join(boxes)

    def certificate(self, agreed):
        message = start(Kind.CERTIFICATE, self.parties.terms) + self.roster.place.bytes
        return message + counted(agreed)

    def take(self, site, members, reveal):
        """Read a reveal as the server does."""
        missing = [s for s in self.roster.adverts if s not in members]
        body = reveal[_HEADER:-SIGNATURE]
        seeds = [body[at : at + SEED] for at in range(0, len(body), SEED)]
        subjects = 1 + len(missing)
        for number, dealer in enumerate(members):
            for place, other in enumerate((dealer, *missing)):
                share = seeds[number * subjects + place]
                self.shares[dealer, other][self.roster.holder(site)] = share
        if missing:
            for other, seed in zip((site, *missing), seeds[-subjects:], strict=True):
                self.direct[site, other] = seed

    def ask(self, views):
        """Show each honest site a view; certify every view that can be, with the enemy's sites."""
        self.restart()
        enemies = [s for s in self.roster.adverts if s not in self.honest]
        agreed = defaultdict(dict)
        full = tuple(self.roster.adverts)
        for site in self.honest:
            members = views[site]
            answer = self.world.sites[site].answer(self.closing(members, site))
            if members == full:
                self.take(site, members, answer)
            else:
                agreed[members][site] = answer
        for members, signed in agreed.items():
            for enemy in set(enemies) & set(members):
                other = copied_site(self.begun.sites[enemy])
                signed[enemy] = other.answer(self.closing(members, enemy))
            certificate = self.certificate(list(signed.values()))
            for site in set(signed) & set(self.honest):
                try:
                    reveal = self.world.sites[site].reveal(certificate)
                except MessageRefused:
                    continue
                self.take(site, members, reveal)
        for enemy in enemies:  # their own copies open every box
            for members in {full, *agreed}:
                if enemy in members:
                    other = copied_site(self.begun.sites[enemy])
                    other.answer(self.closing(members, enemy))
                    now = other._now
                    for dealer in members:
                        subjects = (dealer, *self.roster.others(dealer))
                        for subject, share in zip(subjects, now.shares[dealer], strict=True):
                            self.shares[dealer, subject][self.roster.holder(enemy)] = share

    def opened(self):
        seeds = dict(self.direct)
        for pair, shares in self.shares.items():
            if len(shares) >= self.threshold:
                seeds[pair] = open_shares(shares, self.threshold)
        for enemy in set(self.roster.adverts) - set(self.honest):
            for other in self.roster.others(enemy):
                seeds[other, enemy] = self.begun.sites[enemy]._now.seeds[other]
        return seeds

    def sums(self, seeds):
        """Every set of honest sites of whose vectors the enemy can compute the sum."""
        found = []
        for group in chain.from_iterable(
            combinations(self.honest, k) for k in range(1, len(self.honest) + 1)
        ):
            outside = [other for other in self.roster.adverts if other not in group]
            needed = [(s, s) for s in group] + [(s, other) for s in group for other in outside]
            if all(
                (one, two) in seeds or (one != two and (two, one) in seeds) for one, two in needed
            ):
                total = np.zeros(4, dtype=np.uint64)
                plus, minus = [], []
                for one, two in needed:
                    seed = seeds.get((one, two)) or seeds[two, one]
                    (plus if two < one else minus).append(seed)
                for site in group:
                    total += np.frombuffer(self.messages[site][-32:], dtype=np.uint64)
                add_masks_(total, plus, minus)
                expected = modular_sum(self.vectors[list(group)])
                assert np.array_equal(total.astype(np.int64), expected)
                found.append(group)
        return found


def views_of(site, sites, threshold):
    sets = chain.from_iterable(combinations(range(sites), k) for k in range(threshold, sites + 1))
    return [members for members in sets if site in members]


def check_views(enemy, all_views, sites, threshold, honest):
    outcomes = set()
    for views in all_views:
        enemy.ask(dict(enumerate(views)))
        seeds = enemy.opened()
        for site in enemy.honest:
            pairs = [other for other in enemy.honest if other != site and (site, other) in seeds]
            assert not (
                (site, site) in seeds
                and any((other, site) in seeds for other in enemy.honest if other != site)
            ), views
            assert len(pairs) < honest
        sums = enemy.sums(seeds)
        assert len(sums) <= 1, (views, sums)
        for group in sums:
            assert len(group) >= threshold - (sites - honest), (views, group)
        outcomes.add(tuple(sums))
    return outcomes


@pytest.mark.parametrize(
    ("sites", "threshold", "honest"),
    [
        (3, 2, 3),
        pytest.param(4, 3, 4, marks=pytest.mark.slow),
        pytest.param(4, 3, 3, marks=pytest.mark.slow),
        pytest.param(5, 4, 4, marks=pytest.mark.slow),
    ],
)
def test_whatever_views_a_server_shows_it_opens_one_sum_or_none(sites, threshold, honest):
    """All combinations of one view per honest site, and all that colluding sites can add."""
    enemy = Enemy(sites, threshold, honest)
    choices = [views_of(site, sites, threshold) for site in range(honest)]
    outcomes = check_views(enemy, product(*choices), sites, threshold, honest)
    assert () in outcomes
    assert (tuple(range(honest)),) in outcomes


def test_random_views_of_five_sites_of_which_one_sides_with_the_server():
    enemy, draw = Enemy(5, 4, 4), np.random.default_rng(0)
    choices = [views_of(site, 5, 4) for site in range(4)]
    some = [[views[draw.integers(len(views))] for views in choices] for _ in range(25)]
    some += [[(0, 1, 2, 4)] * 3 + [(0, 1, 2, 3, 4)], [(0, 1, 2, 3, 4)] * 4]
    some[-2][3] = (0, 1, 2, 3, 4)
    outcomes = check_views(enemy, some, 5, 4, 4)
    assert {((0, 1, 2),), ((0, 1, 2, 3),)} <= outcomes


def test_the_enemy_of_these_tests_wins_where_the_numbers_do_not_protect(monkeypatch):
    """With 2 t = n + c two views both have enough: the tests above would see it."""
    monkeypatch.setattr("fedveil.masking.sum_messages.least_honest", lambda *numbers: 1)
    enemy = Enemy(4, 2, 4)
    choices = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    enemy.ask(choices)
    assert enemy.sums(enemy.opened()) == [(0, 1), (2, 3), (0, 1, 2, 3)]


def test_a_server_cannot_ask_one_site_for_both_secrets():
    parties = Parties(4, 3)
    messages = parties.masked(parties.vectors())
    for site in range(4):
        parties.server.add_masked(messages[site])
    state = parties.server._now
    closings = parties.server.close()
    honest = parties.sites[0]
    honest.answer(closings[0])
    del state.statements[3]
    state.vectors = b""
    others = parties.server.close()
    with pytest.raises(MessageRefused, match="has answered otherwise"):
        honest.answer(others[0])
    assert honest._now.counted_sites == [0, 1, 2, 3]
    agreed = [parties.sites[site].answer(others[site]) for site in (1, 2)]
    for message in agreed:
        parties.server.add_agreed(message)
    with pytest.raises(MessageRefused, match="2 of 4 sites agreed"):
        parties.server.certify()


def begin_with(parties, adverts, site=0):
    roster = start(Kind.ROSTER, parties.terms) + Place(1).bytes
    return parties.sites[site].begin(roster + counted([with_length(each) for each in adverts]))


def test_a_server_cannot_put_its_own_keys_between_two_sites():
    """Signed by its own node key, by another site's, or taken from the site's other run."""
    parties, other_run = Parties(3, 2), Parties(3, 2)
    mine, second, third = (site.advert for site in parties.sites)
    theirs = Advert.read(second, parties.terms)
    own = os.urandom(32)
    for key in (node_key(99), node_key(2)):
        forged = Advert.signed(parties.terms, 1, own, theirs.signing_key, key).message
        with pytest.raises(MessageRefused, match="advert of site 1 is not signed by its key"):
            begin_with(parties, [mine, forged, third])
    with pytest.raises(MessageRefused, match="other terms"):
        begin_with(parties, [mine, other_run.sites[1].advert, third])
    swapped = second.replace(theirs.exchange_key, own)
    with pytest.raises(MessageRefused, match="is not signed by its key"):
        begin_with(parties, [mine, swapped, third])
    with pytest.raises(MessageRefused, match="does not have this site's keys"):
        begin_with(parties, [parties.restarted(0).advert, second, third])
    begin_with(parties, [mine, second, third])


def test_keys_are_verified_again_though_a_signature_was_seen_with_others():
    parties = Parties(3, 2)
    adverts = [site.advert for site in parties.sites]
    begin_with(parties, adverts)
    changed = adverts[1][:60] + bytes([adverts[1][60] ^ 1]) + adverts[1][61:]
    parties.sites[0]._journal = parties.restarted(0)._journal
    with pytest.raises(MessageRefused, match="not signed"):
        begin_with(parties, [adverts[0], changed, adverts[2]])


def test_a_server_cannot_ask_for_the_same_round_twice():
    """The difference of two vectors under the same masks would be that of their noise."""
    parties = Parties(3, 2)
    roster = parties.server.open(Place(1))
    site = parties.sites[0]
    site.begin(roster)
    site.mask(parties.vectors()[0])
    fewer = Roster.assemble(
        parties.terms,
        Place(1),
        {number: Advert.read(parties.sites[number].advert, parties.terms) for number in (0, 1)},
    )
    for message in (roster, fewer.message):
        with pytest.raises(MessageRefused, match="is not after it"):
            site.begin(message)


def test_two_rosters_of_a_round_do_not_mix():
    """A site that masked for one does not answer about statements of the other."""
    parties = Parties(4, 3)
    rosters = [
        Roster.assemble(
            parties.terms,
            Place(1),
            {number: Advert.read(parties.sites[number].advert, parties.terms) for number in who},
        )
        for who in ((0, 1, 2, 3), (1, 2, 3))
    ]
    statements = {}
    for site, roster in ((0, 0), (1, 0), (2, 1), (3, 1)):
        parties.sites[site].begin(rosters[roster].message)
        message = parties.sites[site].mask(parties.vectors()[site])
        statements[site] = message[:STATEMENT]
    box = bytes(rosters[0].box_size)
    closing = start(Kind.CLOSING, parties.terms) + Place(1).bytes
    closing += counted([statements[s] for s in (0, 1, 2)]) + 2 * box
    with pytest.raises(MessageRefused, match="masked for another roster"):
        parties.sites[0].answer(closing)


def closed(parties, missing):
    messages = parties.masked(parties.vectors())
    for site, message in messages.items():
        if site not in missing:
            parties.server.add_masked(message)
    return parties.server.close()


def test_agreements_count_once_each_and_only_about_the_same_vectors():
    parties = Parties(5, 3)
    closings = closed(parties, [4])
    agreed = {site: parties.sites[site].answer(closings[site]) for site in closings}
    twin = parties.copied()
    begin = start(Kind.CERTIFICATE, parties.terms) + Place(1).bytes

    def certificate(*who):
        return begin + counted([agreed[site] for site in who])

    for who in ((0, 1), (0, 0, 0), (0, 1, 1), (1, 1, 2, 2)):
        with pytest.raises(MessageRefused):
            twin.sites[0].reveal(certificate(*who))
    twin.sites[0].reveal(certificate(1, 2, 3))
    other = Parties(5, 3, run=parties.terms.run)
    foreign = closed(other, [4])
    strange = [other.sites[site].answer(foreign[site]) for site in foreign]
    with pytest.raises(MessageRefused):
        parties.sites[0].reveal(begin + counted(strange))


def test_agreements_to_another_set_of_the_same_round_do_not_count():
    """Sites 1 and 2 were shown vectors without site 3, site 0 vectors without site 4."""
    enemy = Enemy(5, 3, 5)
    enemy.restart()
    sites, mine, theirs = enemy.world.sites, (0, 1, 2, 3), (0, 1, 2, 4)
    own = sites[0].answer(enemy.closing(mine, 0))
    others = [sites[site].answer(enemy.closing(theirs, site)) for site in (1, 2)]
    other_own = copied_site(enemy.begun.sites[0]).answer(enemy.closing(theirs, 0))
    for agreed in ([own, *others], [other_own, *others]):
        with pytest.raises(MessageRefused, match="answers about other vectors"):
            sites[0].reveal(enemy.certificate(agreed))
    third = sites[3].answer(enemy.closing(mine, 3))
    with pytest.raises(MessageRefused, match="answers about other vectors"):
        sites[0].reveal(enemy.certificate([own, others[0], third]))
    agreed = [own, copied_site(enemy.begun.sites[1]).answer(enemy.closing(mine, 1)), third]
    sites[0].reveal(enemy.certificate(agreed))


def test_a_site_that_is_not_among_the_vectors_does_not_make_a_quorum():
    """Site 4 sides with the server and agrees, though its vector does not count."""
    parties = Parties(5, 4, 4)
    closings = closed(parties, [4])
    agreed = {site: parties.sites[site].answer(closings[site]) for site in (0, 1, 2)}
    enemy = parties.sites[4]
    enemy._now.vectors = parties.sites[0]._now.vectors
    agreed[4] = enemy._signed(Kind.AGREED, enemy._now)
    certificate = start(Kind.CERTIFICATE, parties.terms) + Place(1).bytes
    with pytest.raises(MessageRefused, match="4 are needed"):
        parties.sites[0].reveal(certificate + counted(list(agreed.values())))


def test_closings_that_leave_the_site_out_or_are_too_small_are_refused():
    enemy = Enemy(5, 3, 5)
    for members in ((0, 1), (1, 2, 3), (0, 1, 1), (1, 0, 2)):
        enemy.restart()
        with pytest.raises(MessageRefused):
            enemy.world.sites[0].answer(enemy.closing(members, 0))
    enemy.restart()
    enemy.world.sites[0].answer(enemy.closing((0, 1, 2), 0))


def test_no_two_boxes_are_sealed_with_one_key():
    """Also not the two boxes of a pair: their nonce is the same."""
    parties, keys = Parties(4, 3), set()
    for attempt in (0, 1):
        parties.masked(parties.vectors(), 1, attempt)
        roster = parties.server._now.roster
        for sender in range(4):
            for receiver in range(4):
                if sender != receiver:
                    key = parties.sites[sender]._box_key(roster, sender, receiver)
                    assert key == parties.sites[receiver]._box_key(roster, sender, receiver)
                    keys.add(key)
        keys |= {seed for site in parties.sites for seed in site._now.seeds.values()}
    assert len(keys) == 2 * (4 * 3 + 6)


def test_boxes_of_other_receivers_senders_and_rounds_do_not_open():
    enemy = Enemy(3, 2, 3)
    enemy.restart()
    full = enemy.closing((0, 1, 2), 0)
    size = enemy.roster.box_size
    body, first, second = full[: -2 * size], full[-2 * size : -size], full[-size:]
    others = enemy.state.boxes
    for boxes in (second + first, others[1, 2] + second, others[0, 1] + second, first + first):
        with pytest.raises(MessageRefused, match="does not open"):
            enemy.world.sites[0].answer(body + boxes)
    enemy.world.sites[0].answer(full)


def test_after_a_dropout_no_transcript_of_another_round_opens():
    """All that the server could rebuild in round 2 is of no use for rounds 1 and 3."""
    parties = Parties(4, 3)
    vectors = parties.vectors()
    transcripts, known = {}, set()
    for round, sent in ((1, (0, 1, 2, 3)), (2, (0, 1, 2)), (3, (1, 2, 3))):
        messages = parties.masked(vectors, round)
        transcripts[round] = messages
        world = parties.copied()
        for site in sent:
            world.server.add_masked(messages[site])
        closings, reveals = world.server.close(), {}
        answers = {site: world.sites[site].answer(closings[site]) for site in sent}
        if len(sent) < 4:
            for answer in answers.values():
                world.server.add_agreed(answer)
            certificate = world.server.certify()
            reveals = {site: world.sites[site].reveal(certificate) for site in sent}
        if round != 2:
            continue
        missing = [3]
        for message in reveals.values():
            body = message[_HEADER:-SIGNATURE][-2 * SEED :]
            known |= {body[:SEED], body[SEED:]}
        assert len(known) == 6
        pair_seeds = {parties.sites[3]._now.seeds[site] for site in (0, 1, 2)}
        assert pair_seeds < known
        assert missing == [3]
    for round in (1, 3):
        target = np.frombuffer(transcripts[round][3][-32:], dtype=np.uint64)
        for size in range(len(known) + 1):
            for seeds in combinations(sorted(known), size):
                for signs in product((0, 1), repeat=size):
                    words = target.copy()
                    add_masks_(
                        words,
                        [s for s, sign in zip(seeds, signs, strict=True) if sign],
                        [s for s, sign in zip(seeds, signs, strict=True) if not sign],
                    )
                    assert not np.array_equal(words.astype(np.int64), vectors[3])


def test_no_message_has_a_key_from_which_other_rounds_follow():
    parties, sent = Parties(4, 3), []
    for round, missing in ((1, [3]), (2, []), (3, [0])):
        closings = closed_at(parties, round, missing, sent)
        for site, closing in closings.items():
            sent.append(closing)
            sent.append(parties.sites[site].answer(closing))
            if parties.server.needs_agreement:
                parties.server.add_agreed(sent[-1])
        if parties.server.needs_agreement:
            certificate = parties.server.certify()
            sent += [parties.sites[site].reveal(certificate) for site in closings]
    everything = b"".join(sent)
    for site in parties.sites:
        assert site._exchange.private_bytes_raw() not in everything
        assert site._signing.private_bytes_raw() not in everything
        assert len(site._secrets) == 3
        for secret in site._secrets.values():
            assert secret not in everything


def closed_at(parties, round, missing, sent):
    messages = parties.masked(parties.vectors(), round)
    sent += messages.values()
    for site, message in messages.items():
        if site not in missing:
            parties.server.add_masked(message)
    return parties.server.close()


def test_a_late_vector_stays_hidden_though_its_pairs_are_known():
    enemy = Enemy(4, 3, 4)
    enemy.ask({0: (0, 1, 2), 1: (0, 1, 2), 2: (0, 1, 2), 3: (0, 1, 2, 3)})
    seeds = enemy.opened()
    assert all((site, 3) in seeds for site in (0, 1, 2))
    assert (3, 3) not in seeds
    assert enemy.sums(seeds) == [(0, 1, 2)]


def test_a_vector_that_comes_after_the_closing_is_refused_and_changes_nothing():
    parties = Parties(4, 3)
    vectors = parties.vectors()
    messages = parties.masked(vectors)
    late = messages.pop(2)
    for message in messages.values():
        parties.server.add_masked(message)
    closings = parties.server.close()
    with pytest.raises(MessageRefused, match="came too late"):
        parties.server.add_masked(late)
    for site in messages:
        parties.server.add_agreed(parties.sites[site].answer(closings[site]))
    certificate = parties.server.certify()
    with pytest.raises(MessageRefused):
        parties.sites[2].reveal(certificate)
    for site in messages:
        parties.server.add_reveal(parties.sites[site].reveal(certificate))
    assert np.array_equal(parties.server.sum(ANY), modular_sum(vectors[[0, 1, 3]]))


def test_wrong_shares_of_a_site_are_noticed_as_a_sum_beyond_its_limit():
    """A chance of 2^-10 per word: with 4 words below 1e-12."""
    parties = Parties(3, 2)
    vectors = np.zeros((3, 4), dtype=np.int64)
    messages = parties.masked(vectors)
    for message in messages.values():
        parties.server.add_masked(message)
    closings = parties.server.close()
    bad = parties.sites[0]
    bad._now.own_shares = [bytes(32)] * 3
    for site in (0, 1):
        parties.server.add_reveal(parties.sites[site].answer(closings[site]))
    with pytest.raises(MessageRefused, match="did not follow the protocol"):
        parties.server.sum(2**53)
    assert ANY > 2**53
    assert isinstance(bad, MaskingSite)
