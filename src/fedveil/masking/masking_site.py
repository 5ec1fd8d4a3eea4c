"""`MaskingSite`: the state of one site in a secure sum, and what it answers."""

import os
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedveil.base.errors import BadArgument
from fedveil.masking.journal import PAIRS, SELF, Journal
from fedveil.masking.masks import (
    Steps,
    add_masks_,
    deal,
    packed,
    round_seed,
    run_secret,
    seal,
    unseal,
    words_of,
)
from fedveil.masking.sum_messages import (
    AGREED,
    SEED,
    STATEMENT,
    Advert,
    Kind,
    MessageRefused,
    Parts,
    Place,
    Roster,
    SumTerms,
    VectorStatement,
    answer_start,
    read_answer,
    set_digest,
)


@dataclass(eq=False)
class _SiteRound:
    """What a site knows in a round, and forgets when the next one begins.

    Attributes:
        roster: The sites that were asked.
        seeds: The seeds of the pairwise masks, by the other site.
        own_seed: The seed of the self mask.
        own_statement: This site's own statement, once it has masked.
        own_shares: This site's shares of its own secrets: the self mask, then each pair's.
        counted_sites: The sites whose vectors count, by their closing.
        vectors: The digest of their statements.
        shares: By dealer, this site's shares of the self mask's seed, then of each pair's.
    """

    roster: Roster
    seeds: dict[int, bytes]
    own_seed: bytes = b""
    own_statement: VectorStatement | None = None
    own_shares: list[bytes] = field(default_factory=list)
    counted_sites: list[int] = field(default_factory=list)
    vectors: bytes = b""
    shares: dict[int, list[bytes]] = field(default_factory=dict)


class MaskingSite:
    """A site of secure sums. Its keys live as long as the object: a new one has others.

    Guarantee (docs/proofs/secure-sum.md): if at least `terms.honest` sites use this class, with a
    journal each that they keep, whoever sees every message, and is all the other parties, learns
    one sum per attempt at a round, over at least `terms.threshold` sites.

    | edge | behaviour |
    |---|---|
    | a message of another kind, run, round, roster or length, or not signed | refused |
    | a roster of an attempt that was begun before, here or by an earlier process | refused |
    | `mask` for a second time | refused: the difference of two vectors would tell noise |
    | a vector of another length or type | ValueError, and nothing is sent |
    | a closing that leaves this site out, or is below the threshold | refused |
    | another closing of the same round | refused; the same one again gets the same answer |
    | `reveal` without enough sites that agree to the same vectors | refused |

    Args:
        terms: The terms, which the site has from its federation and not from the server.
        site: Its number.
        node_key: Its private node key, which signs its advert.
        journal: What it has answered so far.
    """

    def __init__(
        self, terms: SumTerms, site: int, node_key: ec.EllipticCurvePrivateKey, journal: Journal
    ) -> None:
        public = node_key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if not 0 <= site < terms.sites or terms.node_keys[site] != public:
            raise BadArgument(
                f"{{node_key}} is not that of site {site} of the terms: use the key with which the "
                "site joined",
                "node_key",
            )
        self._terms, self._site, self._journal = terms, site, journal
        self._exchange, self._signing = X25519PrivateKey.generate(), Ed25519PrivateKey.generate()
        keys = [key.public_key().public_bytes_raw() for key in (self._exchange, self._signing)]
        self._advert = Advert.signed(terms, site, keys[0], keys[1], node_key)
        self._known: dict[bytes, Advert] = {}
        self._secrets: dict[bytes, bytes] = {}
        self._now: _SiteRound | None = None

    @property
    def advert(self) -> bytes:
        """The message with this site's keys, to be sent before the first round."""
        return self._advert.message

    def begin(self, roster_message: bytes) -> Place:
        """Take part in the round of a roster, and forget the one before. Returns the round."""
        roster = Roster.read(roster_message, self._terms, self._known)
        mine = roster.adverts.get(self._site)
        if mine is None or mine.message != self._advert.message:
            raise MessageRefused(
                f"the roster of {roster.place} does not have this site's keys: it was left out, "
                "or has started again since"
            )
        seeds = {}
        for other in roster.others(self._site):
            low, high = sorted((self._site, other))
            secret = self._run_secret(roster.adverts[other])
            seeds[other] = round_seed(secret, roster, b"mask", low, high)
        self._journal.record_begin(self._terms.hash, roster.place)
        self._now = _SiteRound(roster, seeds)
        return roster.place

    def mask(self, vector: Steps) -> bytes:
        """The message with the masked vector, int64 [P], of the round that was begun.

        Of each number its lowest `terms.bits` bits are masked and sent.
        """
        now, terms, site = self._now, self._terms, self._site
        if now is None or now.own_statement is not None:
            raise MessageRefused("there is no round whose vector this site has still to send")
        if vector.shape != (terms.words,) or vector.dtype != np.int64:
            raise ValueError(f"a vector {vector.dtype} {vector.shape}: int64 [{terms.words}]")
        own_seed = os.urandom(SEED)
        masked = words_of(vector, terms.bits)
        add_masks_(
            masked,
            [own_seed, *(seed for other, seed in now.seeds.items() if other > site)],
            [seed for other, seed in now.seeds.items() if other < site],
        )
        holders = len(now.roster.adverts)
        dealt = [deal(seed, terms.threshold, holders) for seed in (own_seed, *now.seeds.values())]
        by_holder = [[shares[place] for shares in dealt] for place in range(holders)]
        boxes = []
        for other in now.roster.others(site):
            key = self._box_key(now.roster, site, other)
            shares = by_holder[now.roster.holder(other) - 1]
            boxes.append(seal(key, shares, self._advert.message))
        content = packed(masked, terms.bits)
        statement = VectorStatement.signed(
            terms, now.roster, site, b"".join(boxes), content, self._signing
        )
        now.own_seed, now.own_shares = own_seed, by_holder[now.roster.holder(site) - 1]
        now.own_statement = statement
        return statement.message + b"".join(boxes) + content

    def answer(self, closing: bytes) -> bytes:
        """The answer to a closing: a *reveal* if all sites' vectors count, otherwise *agreed*."""
        now, terms, site = self._masked(), self._terms, self._site
        parts = Parts(closing, Kind.CLOSING, terms)
        parts.take_place(now.roster.place)
        count = parts.take_count(terms.threshold, len(now.roster.adverts))
        statements = [
            VectorStatement.read(parts.take(STATEMENT), terms, now.roster) for _ in range(count)
        ]
        members = [each.site for each in statements]
        if members != sorted(set(members)):
            raise MessageRefused("a closing has a site twice, or not in order")
        if now.own_statement not in statements:
            raise MessageRefused("a closing does not have this site's own vector")
        shares = {site: now.own_shares}
        for dealer in members:
            if dealer == site:
                continue
            key = self._box_key(now.roster, dealer, site)
            about = now.roster.adverts[dealer].message
            shares[dealer] = unseal(key, parts.take(now.roster.box_size), about)
        parts.expect_end()
        vectors = set_digest(statements)
        secrets = {other: SELF if other in members else PAIRS for other in now.roster.adverts}
        self._journal.record_answer(terms.hash, now.roster.place, secrets, vectors)
        now.counted_sites, now.vectors, now.shares = members, vectors, shares
        if len(members) < len(now.roster.adverts):
            return self._signed(Kind.AGREED, now)
        return self._signed(Kind.REVEAL, now, self._opened(now, []))

    def reveal(self, certificate: bytes) -> bytes:
        """The answer to a certificate: shares of what opens the sum, and its own seeds."""
        now, terms = self._masked(), self._terms
        if not now.counted_sites:
            raise MessageRefused("this site has agreed to no vectors")
        parts = Parts(certificate, Kind.CERTIFICATE, terms)
        parts.take_place(now.roster.place)
        agreed = set()
        for _ in range(parts.take_count(terms.threshold, len(now.counted_sites))):
            message = parts.take(AGREED)
            who, _ = read_answer(message, Kind.AGREED, terms, now.roster, now.vectors)
            agreed.add(who)
        parts.expect_end()
        if len(agreed & set(now.counted_sites)) < terms.threshold:
            raise MessageRefused(
                f"{len(agreed)} sites agree to these vectors: {terms.threshold} are needed"
            )
        missing = [other for other in now.roster.adverts if other not in now.counted_sites]
        own = b"".join([now.own_seed, *(now.seeds[other] for other in missing)])
        return self._signed(Kind.REVEAL, now, self._opened(now, missing) + own)

    def _masked(self) -> _SiteRound:
        """The round, refused if there is none or its vector was not sent."""
        if self._now is None or self._now.own_statement is None:
            raise MessageRefused("this site has sent no vector")
        return self._now

    def _opened(self, now: _SiteRound, missing: list[int]) -> bytes:
        """The shares of the members' self masks, and of their pairs with whoever is missing."""
        opened = []
        for dealer in now.counted_sites:
            pairs = now.roster.others(dealer)
            own, *rest = now.shares[dealer]
            opened += [own, *(rest[pairs.index(other)] for other in missing)]
        return b"".join(opened)

    def _signed(self, kind: Kind, now: _SiteRound, rest: bytes = b"") -> bytes:
        """A signed answer about the members' vectors."""
        start = answer_start(kind, self._terms, now.roster.place, self._site, now.vectors)
        return start + rest + self._signing.sign(start + rest)

    def _box_key(self, roster: Roster, sender: int, receiver: int) -> bytes:
        """The key of the box from one site to another, of which this site is one."""
        other = receiver if sender == self._site else sender
        secret = self._run_secret(roster.adverts[other])
        return round_seed(secret, roster, b"box", sender, receiver)

    def _run_secret(self, other: Advert) -> bytes:
        """The run secret with the site of an advert, computed once."""
        if other.message not in self._secrets:
            self._secrets[other.message] = run_secret(
                self._terms, self._advert, other, self._exchange
            )
        return self._secrets[other.message]
