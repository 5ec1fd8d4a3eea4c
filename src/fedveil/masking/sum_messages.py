"""Terms of a secure sum, and its messages: bytes of a fixed form, decoded strictly.

Numbers are big-endian. Every message begins with `MAGIC`, its kind (u8) and the digest of the
terms (32 bytes). A round is its number (u64) and attempt (u32). What follows:

    advert       site u16, X25519 key 32, Ed25519 key 32, length u16, node key's signature
    roster       round, count u16, and for each site an advert after its length u16
    masked       round, site u16, digests of roster, boxes, vector (3 x 32), signature 64; this much
                 is the statement. Then the boxes and the vector, little-endian: 8 bytes per word,
                 or one word's bits after the other's, from the lowest on
    closing      round, count u16, the statements, the boxes for the receiver
    agreed       round, site u16, digest of the closing's statements 32, signature 64
    certificate  round, count u16, the agreed messages
    reveal       round, site u16, digest of the statements 32, the shares, signature 64
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import sha256

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from fedveil.base.checks import SUM_BITS, Limits
from fedveil.base.errors import BadArgument, FedveilError

MAGIC = b"FVSS1"
DIGEST, KEY, SIGNATURE, SEED, TAG = 32, 32, 64, 32, 16
_SITE, _SHORT, _PLACE = struct.Struct(">H"), struct.Struct(">H"), struct.Struct(">QI")
_TERMS = struct.Struct(">32sHHHQH")

LEAST_SITES, MOST_SITES, MOST_WORDS = 3, 1000, 1 << 32
WIDE = 64
"""The bits of a word, unless sums are of fewer."""
_ROUND = Limits(((lambda v: 0 <= v < 1 << 63, "0 up to 2^63 is needed"),), whole=True)
_ATTEMPT = Limits(((lambda v: 0 <= v < 1 << 32, "0 up to 2^32 is needed"),), whole=True)
_CURVES = ("secp256r1", "secp384r1", "secp521r1")


class MessageRefused(FedveilError):
    """Raised for a message, or a call, that is not what the protocol expects now.

    Nothing was answered, and nothing about the round has changed.
    """


class Kind(IntEnum):
    """The kinds of messages."""

    ADVERT = 1
    ROSTER = 2
    MASKED = 3
    CLOSING = 4
    AGREED = 5
    CERTIFICATE = 6
    REVEAL = 7


def least_honest(sites: int, threshold: int, honest: int) -> int:
    """How many honest sites every sum is sure to contain: threshold - (sites - honest).

    Raises BadArgument for numbers with which the protocol does not protect (sites below 3, a
    divisor below 1, thresholds that two views of a round could both reach).

    >>> least_honest(5, 3, 5), least_honest(5, 4, 4)
    (3, 3)
    """
    for name, value in (("threshold", threshold), ("honest", honest)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= sites:
            raise BadArgument(
                f"{{{name}}} is {value} of {sites} sites: a whole number from 1 to {sites} is "
                "needed",
                name,
            )
    if sites < LEAST_SITES:
        raise BadArgument(
            f"a secure sum of {sites} sites: at least {LEAST_SITES} are needed, since a sum of one "
            "hides nothing and a sum of two hides neither from the other; use {share} = 'whole'",
            "share",
        )
    dishonest = sites - honest
    if threshold - dishonest < 1:
        raise BadArgument(
            f"{{threshold}} is {threshold} and {dishonest} of {sites} sites may be dishonest "
            f"({{honest}} is {honest}): a sum may then hold no honest site's noise; use at least "
            f"{dishonest + 1}",
            "threshold",
            "honest",
        )
    if 2 * threshold <= sites + dishonest:
        raise BadArgument(
            f"{{threshold}} is {threshold} and {{honest}} is {honest} of {sites} sites: a server "
            f"with {dishonest} of them could show the others two views of a round, since 2 x "
            f"{threshold} is not above {sites} + {dishonest}; use at least "
            f"{(sites + dishonest) // 2 + 1}",
            "threshold",
            "honest",
        )
    return threshold - dishonest


def vector_size(words: int, bits: int) -> int:
    """The length of a vector of words of so many bits, in bytes.

    >>> vector_size(3, 64), vector_size(3, 20)
    (24, 8)
    """
    return -(-words * bits // 8)


@dataclass(frozen=True)
class SumTerms:
    """What all parties of a secure sum have agreed on. Messages of other terms are refused.

    Attributes:
        run: 32 bytes that name the run, such as the digest of its recipe and federation.
        node_keys: The sites' public node keys, DER, in the order of their numbers.
        threshold: The least number of sites in a sum.
        honest: How many sites the claim takes to be honest.
        words: The number of words of a vector.
        bits: The number of bits of a word, 64 or 16 to 32: sums are modulo 2^bits.
        hash: SHA-256 of all of these.

    | edge | behaviour |
    |---|---|
    | numbers that `least_honest` refuses, more than 1,000 sites, no words | BadInput |
    | another number of bits | BadInput |
    | a node key twice, or that is no key of an elliptic curve of NIST | BadInput |
    """

    run: bytes
    node_keys: tuple[bytes, ...]
    threshold: int
    honest: int
    words: int
    bits: int = WIDE
    hash: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sites = len(self.node_keys)
        least_honest(sites, self.threshold, self.honest)
        if sites > MOST_SITES:
            raise BadArgument(
                f"{{node_keys}} are {sites}: a secure sum has at most {MOST_SITES} sites",
                "node_keys",
            )
        if not 1 <= self.words <= MOST_WORDS:
            raise BadArgument(
                f"{{words}} is {self.words}: 1 to {MOST_WORDS:,} are possible", "words"
            )
        SUM_BITS.check("bits", self.bits)
        if len(self.run) != DIGEST:
            raise BadArgument(f"{{run}} has {len(self.run)} bytes: 32 are needed", "run")
        if len(set(self.node_keys)) < sites:
            raise BadArgument("{node_keys} has a key twice: each site has its own", "node_keys")
        for site in range(sites):
            self.node_key(site)
        hashed = sha256(b"fedveil secure sum 2\0")
        numbers = sites, self.threshold, self.honest, self.words, self.bits
        hashed.update(_TERMS.pack(self.run, *numbers))
        for key in self.node_keys:
            hashed.update(_SHORT.pack(len(key)) + key)
        object.__setattr__(self, "hash", hashed.digest())

    @property
    def sites(self) -> int:
        """The number of sites."""
        return len(self.node_keys)

    @property
    def vector_size(self) -> int:
        """The length of a masked vector in bytes."""
        return vector_size(self.words, self.bits)

    def node_key(self, site: int) -> ec.EllipticCurvePublicKey:
        """The public node key of a site. BadArgument for bytes that are none."""
        try:
            key = serialization.load_der_public_key(self.node_keys[site])
        except ValueError:
            key = None
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
            raise BadArgument(
                f"{{node_keys}}: that of site {site} is no public key of P-256, P-384 or P-521",
                "node_keys",
            )
        return key


@dataclass(frozen=True, order=True)
class Place:
    """One attempt at one round. Later ones are larger."""

    round: int
    attempt: int = 0

    def __post_init__(self) -> None:
        _ROUND.check("round", self.round)
        _ATTEMPT.check("attempt", self.attempt)

    @property
    def bytes(self) -> bytes:
        """Both numbers, 12 bytes."""
        return _PLACE.pack(self.round, self.attempt)

    def __str__(self) -> str:
        return f"round {self.round}, attempt {self.attempt}"


class Parts:
    """The parts of a message that is read from its beginning to its end.

    Raises MessageRefused for another kind, other terms, or another length than what is read.
    """

    def __init__(self, message: bytes, kind: Kind, terms: SumTerms) -> None:
        self._name = kind.name.lower()
        self._left = memoryview(bytes(message))
        self._whole, self._at = self._left, 0
        if self.take(len(MAGIC) + 1) != MAGIC + bytes([kind]):
            raise MessageRefused(f"a message is no {self._name}")
        if self.take(DIGEST) != terms.hash:
            raise MessageRefused(f"a {self._name} is of other terms: run, node keys or numbers")

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > len(self._left) - self._at:
            raise MessageRefused(f"a {self._name} is too short")
        self._at += size
        return bytes(self._left[self._at - size : self._at])

    def take_site(self, terms: SumTerms) -> int:
        """The next two bytes as the number of a site."""
        (site,) = _SITE.unpack(self.take(_SITE.size))
        if site >= terms.sites:
            raise MessageRefused(f"a {self._name} is of site {site} of {terms.sites}")
        return int(site)

    def take_count(self, least: int, most: int) -> int:
        """The next two bytes as a number of parts from `least` to `most`."""
        (count,) = _SHORT.unpack(self.take(_SHORT.size))
        if not least <= count <= most:
            raise MessageRefused(f"a {self._name} has {count} parts, not {least} to {most}")
        return int(count)

    def take_place(self, expected: Place | None = None) -> Place:
        """The next twelve bytes as a round, which has to be `expected` unless that is None."""
        number, attempt = _PLACE.unpack(self.take(_PLACE.size))
        if number >= 1 << 63:
            raise MessageRefused(f"a {self._name} is of round {number}")
        place = Place(number, attempt)
        if expected is not None and place != expected:
            raise MessageRefused(f"a {self._name} is of {place}, not of {expected}")
        return place

    def taken(self) -> bytes:
        """All bytes that were taken so far."""
        return bytes(self._whole[: self._at])

    def rest(self, size: int) -> memoryview:
        """The rest of the message, which has to be `size` bytes. They are not copied."""
        left = self._left[self._at :]
        if len(left) != size:
            raise MessageRefused(f"a {self._name} has {len(left)} bytes at its end, not {size}")
        self._at += size
        return left

    def expect_end(self) -> None:
        """Refuse a message that goes on."""
        self.rest(0)


def start(kind: Kind, terms: SumTerms) -> bytes:
    """The beginning of every message of a kind."""
    return MAGIC + bytes([kind]) + terms.hash


def counted(parts: list[bytes]) -> bytes:
    """The number of `parts`, two bytes, and the parts one after the other."""
    return _SHORT.pack(len(parts)) + b"".join(parts)


def with_length(part: bytes) -> bytes:
    """A part after its length, two bytes."""
    return _SHORT.pack(len(part)) + part


def verified(check: Callable[[], None], what: str) -> None:
    """Call `check`, which verifies a signature, and raise MessageRefused if it is not right."""
    try:
        check()
    except InvalidSignature:
        raise MessageRefused(f"{what} is not signed by its key") from None


@dataclass(frozen=True)
class Advert:
    """A site's keys for as long as its process runs.

    Attributes:
        site: The site's number.
        exchange_key: Its X25519 public key.
        signing_key: Its Ed25519 public key.
        message: The advert as it was sent.
    """

    site: int
    exchange_key: bytes
    signing_key: bytes
    message: bytes

    @classmethod
    def signed(
        cls,
        terms: SumTerms,
        site: int,
        exchange_key: bytes,
        signing_key: bytes,
        node_key: ec.EllipticCurvePrivateKey,
    ) -> "Advert":
        """The advert of a site's two public keys, signed by its node key."""
        body = start(Kind.ADVERT, terms) + _SITE.pack(site) + exchange_key + signing_key
        signature = node_key.sign(body, ec.ECDSA(hashes.SHA384()))
        return cls(site, exchange_key, signing_key, body + with_length(signature))

    @classmethod
    def read(cls, message: bytes, terms: SumTerms) -> "Advert":
        """The advert in a message. Refused unless the node key of its site has signed it."""
        parts = Parts(message, Kind.ADVERT, terms)
        site, exchange_key, signing_key = parts.take_site(terms), parts.take(KEY), parts.take(KEY)
        body = parts.taken()
        signature = parts.take(parts.take_count(1, 200))
        parts.expect_end()
        key = terms.node_key(site)
        verified(
            lambda: key.verify(signature, body, ec.ECDSA(hashes.SHA384())),
            f"the advert of site {site}",
        )
        return cls(site, exchange_key, signing_key, message)

    def check(self, signature: bytes, body: bytes, what: str) -> None:
        """Refuse a signature that is not this site's. `what` names the message."""
        key = Ed25519PublicKey.from_public_bytes(self.signing_key)
        verified(lambda: key.verify(signature, body), f"the {what} of site {self.site}")


@dataclass(frozen=True)
class Roster:
    """The sites of a round, in ascending order, with their keys.

    Attributes:
        place: The round.
        adverts: The adverts by site.
        hash: SHA-256 of the message.
        message: The roster as it was sent.
    """

    place: Place
    adverts: dict[int, Advert]
    hash: bytes
    message: bytes

    @classmethod
    def assemble(cls, terms: SumTerms, place: Place, adverts: dict[int, Advert]) -> "Roster":
        """The roster of these sites."""
        ordered = dict(sorted(adverts.items()))
        parts = [with_length(advert.message) for advert in ordered.values()]
        message = start(Kind.ROSTER, terms) + place.bytes + counted(parts)
        return cls(place, ordered, sha256(message).digest(), message)

    @classmethod
    def read(cls, message: bytes, terms: SumTerms, known: dict[bytes, Advert]) -> "Roster":
        """The roster in a message. Refused if one of its adverts is, or below the threshold.

        `known` are adverts that were verified before, by message. New ones are added.
        """
        parts = Parts(message, Kind.ROSTER, terms)
        place, adverts, last = parts.take_place(), dict[int, Advert](), -1
        for _ in range(parts.take_count(terms.threshold, terms.sites)):
            each = parts.take(parts.take_count(1, 1000))
            advert = known.get(each) or Advert.read(each, terms)
            known[each] = advert
            if advert.site <= last:
                raise MessageRefused(f"a roster has site {advert.site} after site {last}")
            adverts[advert.site], last = advert, advert.site
        parts.expect_end()
        return cls(place, adverts, sha256(message).digest(), message)

    def others(self, site: int) -> list[int]:
        """All sites but one, in ascending order."""
        return [other for other in self.adverts if other != site]

    def holder(self, site: int) -> int:
        """The number under which a site holds Shamir shares, from 1."""
        return list(self.adverts).index(site) + 1

    @property
    def box_size(self) -> int:
        """The length of a box in bytes: shares of the seeds of all masks, and the tag."""
        return SEED * len(self.adverts) + TAG

    @property
    def boxes_size(self) -> int:
        """The length of all boxes of one site."""
        return self.box_size * (len(self.adverts) - 1)


STATEMENT = len(MAGIC) + 1 + DIGEST + _PLACE.size + _SITE.size + 3 * DIGEST + SIGNATURE
AGREED = len(MAGIC) + 1 + DIGEST + _PLACE.size + _SITE.size + DIGEST + SIGNATURE


@dataclass(frozen=True)
class VectorStatement:
    """A site's signed word about its masked vector: the part of it that other sites see.

    Attributes:
        site: The site.
        roster: The digest of the roster for which it masked.
        boxes: The digest of its boxes.
        vector: The digest of its masked vector.
        message: The statement as it was signed, with the signature.
    """

    site: int
    roster: bytes
    boxes: bytes
    vector: bytes
    message: bytes

    @classmethod
    def signed(
        cls,
        terms: SumTerms,
        roster: Roster,
        site: int,
        boxes: bytes,
        vector: bytes,
        key: Ed25519PrivateKey,
    ) -> "VectorStatement":
        """The statement of a site about these boxes and this masked vector."""
        digests = roster.hash, sha256(boxes).digest(), sha256(vector).digest()
        body = start(Kind.MASKED, terms) + roster.place.bytes + _SITE.pack(site)
        body += b"".join(digests)
        return cls(site, *digests, body + key.sign(body))

    @classmethod
    def read(cls, message: bytes, terms: SumTerms, roster: Roster) -> "VectorStatement":
        """The statement in the first bytes of a message. Refused unless it is of the roster."""
        parts = Parts(message[:STATEMENT], Kind.MASKED, terms)
        parts.take_place(roster.place)
        site = parts.take_site(terms)
        digests = parts.take(DIGEST), parts.take(DIGEST), parts.take(DIGEST)
        body = parts.taken()
        signature = parts.take(SIGNATURE)
        parts.expect_end()
        if site not in roster.adverts:
            raise MessageRefused(f"site {site} is not in the roster of {roster.place}")
        if digests[0] != roster.hash:
            raise MessageRefused(f"site {site} masked for another roster of {roster.place}")
        roster.adverts[site].check(signature, body, "statement")
        return cls(site, *digests, bytes(message[:STATEMENT]))


def set_digest(statements: list[VectorStatement]) -> bytes:
    """The digest of a closing's statements, to which sites agree."""
    return sha256(b"".join(each.message for each in statements)).digest()


def answer_start(kind: Kind, terms: SumTerms, place: Place, site: int, digest: bytes) -> bytes:
    """The beginning of an answer to a closing: of an *agreed*, which ends there, or a *reveal*."""
    return start(kind, terms) + place.bytes + _SITE.pack(site) + digest


def read_answer(
    message: bytes, kind: Kind, terms: SumTerms, roster: Roster, digest: bytes, size: int = 0
) -> tuple[int, bytes]:
    """The site and the `size` further bytes of an answer about the statements of `digest`.

    Refused unless it is signed by a site of the roster, for its round and these statements.
    """
    parts = Parts(message, kind, terms)
    parts.take_place(roster.place)
    site, about = parts.take_site(terms), parts.take(DIGEST)
    shares = parts.take(size)
    body = parts.taken()
    signature = parts.take(SIGNATURE)
    parts.expect_end()
    if site not in roster.adverts:
        raise MessageRefused(f"site {site} is not in the roster of {roster.place}")
    if about != digest:
        raise MessageRefused(f"site {site} answers about other vectors of {roster.place}")
    roster.adverts[site].check(signature, body, kind.name.lower())
    return site, shares
