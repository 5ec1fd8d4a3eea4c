"""`SumServer`: collects masked vectors, and opens their sum with the shares of enough sites."""

from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from fedveil.masking.masks import (
    MaskWords,
    Steps,
    add_masks_,
    open_shares,
    signed,
    unpacked,
    words_of,
)
from fedveil.masking.sum_messages import (
    SEED,
    STATEMENT,
    Advert,
    Kind,
    MessageRefused,
    Place,
    Roster,
    SumTerms,
    VectorStatement,
    counted,
    read_answer,
    set_digest,
    start,
)


@dataclass(eq=False)
class _SumRound:
    """What the server knows in a round.

    Attributes:
        roster: The sites that were asked.
        masked_sum: The sum of the masked vectors so far.
        statements: The sites' statements.
        boxes: Their boxes, by sender and receiver.
        vectors: The digest of the statements that count, b"" as long as vectors may arrive.
        agreed: The sites' agreements.
        revealed: The shares of the sites that revealed: by site, then by dealer.
    """

    roster: Roster
    masked_sum: MaskWords
    statements: dict[int, VectorStatement] = field(default_factory=dict)
    boxes: dict[tuple[int, int], bytes] = field(default_factory=dict)
    vectors: bytes = b""
    agreed: dict[int, bytes] = field(default_factory=dict)
    revealed: dict[int, bytes] = field(default_factory=dict)

    @property
    def absent(self) -> list[int]:
        """The sites that were asked and whose vectors do not count."""
        return [site for site in self.roster.adverts if site not in self.statements]


class SumServer:
    """The server of secure sums. It trusts no site to be there, and needs no secret of its own.

    Guarantee: `sum` is exact modulo 2^bits whoever drops out when, as long as at least
    `terms.threshold` sites answer at each step and all of these follow the protocol.

    | edge | behaviour |
    |---|---|
    | a message of another kind, run, round, roster or length, or not signed | refused |
    | a vector for the second time, after the closing, or of a site that was not asked | refused |
    | fewer sites than the threshold at any step | refused: charge the round and throw it away |
    | the sum is beyond the limit | refused: some site did not follow the protocol |

    Args:
        terms: The terms, the same as those of all sites.
    """

    def __init__(self, terms: SumTerms) -> None:
        self._terms = terms
        self._adverts: dict[int, Advert] = {}
        self._now: _SumRound | None = None

    def add_advert(self, message: bytes) -> int:
        """Keep a site's keys, in place of its earlier ones. Returns the site.

        It takes part from the next round on.
        """
        advert = Advert.read(message, self._terms)
        self._adverts[advert.site] = advert
        return advert.site

    def open(self, place: Place, invited: Collection[int] | None = None) -> bytes:
        """Begin an attempt at a round with all sites that have sent keys, or the `invited` of them.

        Returns the roster's message. An earlier attempt that was not summed is dropped. Refused,
        with nothing dropped, if fewer of these sites than the threshold have sent keys.
        """
        adverts = {
            site: advert
            for site, advert in self._adverts.items()
            if invited is None or site in invited
        }
        self._need(len(adverts), "have keys")
        roster = Roster.assemble(self._terms, place, adverts)
        nothing = np.zeros(self._terms.words, dtype=np.int64)
        self._now = _SumRound(roster, words_of(nothing, self._terms.bits))
        return roster.message

    def forget(self, site: int) -> None:
        """Leave a site that is not online out of later rosters, until it sends its keys again."""
        self._adverts.pop(site, None)

    def add_masked(self, message: bytes) -> int:
        """Add a site's masked vector to the sum. Returns the site."""
        now = self._round()
        if now.vectors:
            raise MessageRefused("the round is closed: a vector came too late")
        statement = VectorStatement.read(message, self._terms, now.roster)
        site, box_size = statement.site, now.roster.box_size
        if site in now.statements:
            raise MessageRefused(f"site {site} has sent its vector before")
        size = now.roster.boxes_size
        if len(message) != STATEMENT + size + self._terms.vector_size:
            raise MessageRefused(f"the vector of site {site} has another length")
        rest = memoryview(message)[STATEMENT:]
        boxes, content = rest[:size], rest[size:]
        if sha256(boxes).digest() != statement.boxes:
            raise MessageRefused(f"the boxes of site {site} are not those of its statement")
        if sha256(content).digest() != statement.vector:
            raise MessageRefused(f"the vector of site {site} is not that of its statement")
        for number, other in enumerate(now.roster.others(site)):
            now.boxes[site, other] = bytes(boxes[number * box_size : (number + 1) * box_size])
        now.masked_sum += unpacked(content, self._terms.words, self._terms.bits)
        now.statements[site] = statement
        return site

    def close(self) -> dict[int, bytes]:
        """Take no more vectors. Returns the closing for each site whose vector counts."""
        now = self._round()
        self._need(len(now.statements), "sent vectors")
        now.statements = dict(sorted(now.statements.items()))
        ordered = list(now.statements.values())
        now.vectors = set_digest(ordered)
        begin = start(Kind.CLOSING, self._terms) + now.roster.place.bytes
        begin += counted([each.message for each in ordered])
        return {
            site: begin
            + b"".join(now.boxes[dealer, site] for dealer in now.statements if dealer != site)
            for site in now.statements
        }

    def add_agreed(self, message: bytes) -> int:
        """Keep a site's agreement to the vectors that count. Returns the site."""
        now = self._closed()
        site, _ = read_answer(message, Kind.AGREED, self._terms, now.roster, now.vectors)
        self._check_first(now, site, now.agreed)
        now.agreed[site] = message
        return site

    def certify(self) -> bytes:
        """The message that enough sites agree, for every site whose vector counts."""
        now = self._closed()
        self._need(len(now.agreed), "agreed")
        messages = [message for _, message in sorted(now.agreed.items())]
        return start(Kind.CERTIFICATE, self._terms) + now.roster.place.bytes + counted(messages)

    def add_reveal(self, message: bytes) -> int:
        """Keep a site's shares. Returns the site."""
        now = self._closed()
        each = 1 + len(now.absent)  # seeds of a dealer. After a certificate its own follow
        size = SEED * each * (len(now.statements) + bool(now.absent))
        site, shares = read_answer(message, Kind.REVEAL, self._terms, now.roster, now.vectors, size)
        self._check_first(now, site, now.revealed)
        now.revealed[site] = shares
        return site

    @property
    def needs_agreement(self) -> bool:
        """Whether a site of the roster is missing, so that the others have to agree on that."""
        return bool(self._closed().absent)

    @property
    def counted_sites(self) -> list[int]:
        """The sites whose vectors count."""
        return list(self._closed().statements)

    def sum(self, limit: int) -> Steps:
        """The sum of the vectors that count, int64 [P]. The round is then over.

        Refused if a number of it is beyond +-`limit`, which the plan excludes.
        """
        now, threshold = self._closed(), self._terms.threshold
        self._need(len(now.revealed), "revealed shares")
        used = sorted(now.revealed.items())[:threshold]
        subjects, plus, minus = len(now.absent) + 1, list[bytes](), list[bytes]()
        for number, dealer in enumerate(now.statements):
            for place, other in enumerate((dealer, *now.absent)):
                at = SEED * (number * subjects + place)
                if now.absent and dealer in now.revealed:
                    own = now.revealed[dealer][-SEED * subjects :]
                    seed = own[SEED * place : SEED * (place + 1)]
                else:
                    shares = {now.roster.holder(site): part[at : at + SEED] for site, part in used}
                    seed = open_shares(shares, threshold)
                (plus if other < dealer else minus).append(seed)
        add_masks_(now.masked_sum, plus, minus)
        total = signed(now.masked_sum, self._terms.bits)
        self._now = None
        if int(total.max()) > limit or int(total.min()) < -limit:
            raise MessageRefused(
                f"the sum of {now.roster.place} is beyond {limit:,} steps, which its plan "
                "excludes: a site did not follow the protocol"
            )
        return total

    def _need(self, count: int, what: str) -> None:
        """Refuse to go on with fewer sites than the threshold."""
        if count < self._terms.threshold:
            raise MessageRefused(
                f"{count} of {self._terms.sites} sites {what}, and a sum needs "
                f"{self._terms.threshold}: nothing is handed on"
            )

    def _round(self) -> _SumRound:
        """The round, refused if there is none."""
        if self._now is None:
            raise MessageRefused("no round is open")
        return self._now

    def _closed(self) -> _SumRound:
        """The current round.

        Raises MessageRefused unless it is closed, that is, takes no more vectors.
        """
        if not self._round().vectors:
            raise MessageRefused("the round is not closed")
        return self._round()

    @staticmethod
    def _check_first(now: _SumRound, site: int, before: dict[int, bytes]) -> None:
        """Refuse an answer of a site whose vector does not count, or that has answered."""
        if site not in now.statements:
            raise MessageRefused(f"the vector of site {site} does not count, and it answers")
        if site in before:
            raise MessageRefused(f"site {site} has answered before")
