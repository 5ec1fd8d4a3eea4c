"""`LedgerTail`: the end of the server's ledger, as an ask carries it to sites."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput, one_line
from fedveil.privacy.ledger.signed_head import SignedHead

MOST_HASHES = 1024
"""The most hashes of an ask. A site that is further behind is brought up to date in several."""

_HASH_DIGITS, _PER_SITE = 64, 2048


@dataclass(frozen=True)
class LedgerTail:
    """The hashes of a ledger from one head to another, and what sites have signed of it.

    Every hash covers an entry and all before it. So they show a site in which order the ledger
    grew, and nothing of what its entries say.

    Attributes:
        since: The number of entries before the first of the hashes.
        hashes: The ledger's hash after `since` entries, then one for each later entry.
        software: The digest of the server's software.
        last_signed: By site, the last head that the server has from it. Sites that have signed none
            are left out.
    """

    since: int
    hashes: Sequence[str]
    software: str
    last_signed: Mapping[str, SignedHead] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Return the number of entries of the ledger at the last of the hashes."""
        return self.since + len(self.hashes) - 1

    def to_bytes(self) -> bytes:
        """Return the tail as JSON."""
        signed = {name: head.to_dict() for name, head in self.last_signed.items()}
        return json.dumps(
            {
                "since": self.since,
                "hashes": "".join(self.hashes),
                "software": self.software,
                "signed": signed,
            }
        ).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "LedgerTail":
        """Return the tail in these bytes.

        | edge | behaviour |
        |---|---|
        | no bytes, no JSON, other keys, a value of another type | BadInput |
        | hashes that are not 64 lower-case digits each, none, or too many | BadInput |
        | a head under the name of another site | BadInput |
        """
        try:
            raw = json.loads(content)
            since, text, software = raw["since"], raw["hashes"], raw["software"]
            heads = {str(name): SignedHead.from_dict(head) for name, head in raw["signed"].items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            raise BadInput(f"the server's ledger in an ask cannot be read: {one_line(e)}") from e
        if type(since) is not int or since < 0:
            raise BadInput(f"the server's ledger in an ask begins at {shown(since)}")
        for name, value in (("hashes", text), ("software", software)):
            if not isinstance(value, str) or not {*value} <= {*"0123456789abcdef"}:
                raise BadInput(f"{name} of the server's ledger are no hexadecimal digits")
        count, rest = divmod(len(text), _HASH_DIGITS)
        if rest or not 1 <= count <= MOST_HASHES or len(software) != _HASH_DIGITS:
            raise BadInput(f"the server's ledger in an ask has {len(text)} digits of hashes")
        for name, head in heads.items():
            if head.site != name:
                raise BadInput(f"a head of {head.site!r} is under the name {name!r}")
        hashes = [text[_HASH_DIGITS * k : _HASH_DIGITS * (k + 1)] for k in range(count)]
        return cls(since, hashes, software, heads)


def most_tail_bytes(sites: int) -> int:
    """Return the most bytes that a tail takes in a federation of so many sites."""
    return _HASH_DIGITS * MOST_HASHES + _PER_SITE * (sites + 1)
