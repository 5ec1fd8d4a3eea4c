"""`SignedHead`: a ledger's head under the signature of a site, which no operator can make.

A site signs the last hash of the server's ledger with its node key, and only if the ledger extends
the one that it signed last. The signature covers every hash up to there (`history`), so that one
signature at the end speaks for the whole ledger. The proof note is docs/proofs/evidence.md.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.privacy.ledger.hash_chain import digest

SIGNATURES = "signatures.jsonl"
"""The file of a run directory with every signature that the server has from a site."""

_ALGORITHM = ec.ECDSA(hashes.SHA384())
_WHAT = "head of a fedveil ledger"
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)


def history_of(history: str, ledger_hashes: Iterable[str]) -> str:
    """Return the history of a ledger that went on with these hashes.

    A history is a SHA-256 over all hashes of a ledger in order. That of nothing is "". Two ledgers
    have the same history only if they have the same hashes, from the one before the first entry on.
    """
    for each in ledger_hashes:
        history = digest(history + each)
    return history


@dataclass(frozen=True)
class SignedHead:
    """A head of the server's ledger, as one site signed it.

    Guarantee: `check` passes only if the owner of `key` signed exactly these values.

    | edge | behaviour |
    |---|---|
    | any field but the signature differs | BadInput |
    | another key, or one that is no public key on a NIST curve | BadInput |
    | the key with a comment, or the signature not in lower-case hexadecimal | BadInput |
    | something else that the key has signed | BadInput: what is signed begins with what it is |

    Attributes:
        run: The run's id.
        plan: The digest of the plan, by the site's own copy of the recipe.
        site: The name of the site.
        length: How many entries of the ledger the signature covers.
        hash: The ledger's hash after these entries.
        history: `history_of` all hashes up to there.
        server_software: The digest of the server's software, as the server stated it.
        software: The digest of the site's own software.
        key: The site's public key: type and key of a .pub file, without a comment.
        signature: The signature, in hexadecimal.
    """

    run: str
    plan: str
    site: str
    length: int
    hash: str
    history: str
    server_software: str
    software: str
    key: str = ""
    signature: str = ""

    @property
    def content(self) -> bytes:
        """Return the bytes that are signed."""
        values = {key: value for key, value in asdict(self).items() if key != "signature"}
        return f"{_WHAT}\n{json.dumps(values, sort_keys=True)}".encode()

    def sign(self, private_key: ec.EllipticCurvePrivateKey) -> "SignedHead":
        """Return the head with this key and its signature."""
        unsigned = replace(self, key=key_line(private_key.public_key()), signature="")
        signature = private_key.sign(unsigned.content, _ALGORITHM)
        return replace(unsigned, signature=signature.hex())

    def check(self) -> None:
        """Raise BadInput unless the signature is that of `key` over this head."""
        try:
            key = load_ssh_public_key(self.key.encode())
            if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _CURVES):
                raise ValueError("it is on no NIST curve")
            if key_line(key) != self.key:
                raise ValueError("it is not written as fedveil writes it")
            signature = bytes.fromhex(self.signature)
            if signature.hex() != self.signature:
                raise ValueError("the signature is not in lower-case hexadecimal digits")
            key.verify(signature, self.content, _ALGORITHM)
        except InvalidSignature as e:
            raise BadInput(
                f"the signature of {self.site!r} at entry {self.length} is not that of its key"
            ) from e
        except (ValueError, UnsupportedAlgorithm) as e:
            raise BadInput(
                f"the signature of {self.site!r} at entry {self.length} cannot be checked: {e}"
            ) from e

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values under the names of the fields."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: object) -> "SignedHead":
        """Return the head with these values, unchecked. Raises BadInput if there are others.

        Texts are texts, and the length is a whole number from 0.
        """
        kinds = {field.name: field.type for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != set(kinds):
            raise BadInput(f"a signed head has other parts than it has: {shown(values)}")
        for name, kind in kinds.items():
            if type(values[name]) is not kind:
                raise BadInput(f"{name} of a signed head is {shown(values[name])}")
        head = cls(**values)
        if head.length < 0:
            raise BadInput(f"length of a signed head is {head.length}")
        return head


def key_fingerprint(line: str) -> str:
    """Return the fingerprint of a line as in a .pub file, as ssh-keygen -lf prints it.

    Raises ValueError for another text.
    """
    words = line.split()
    if len(words) < 2:
        raise ValueError("it is no line of a .pub file")
    blob = hashlib.sha256(base64.b64decode(words[1], validate=True)).digest()
    return f"SHA256:{base64.b64encode(blob).decode().rstrip('=')}"


def key_line(key: ec.EllipticCurvePublicKey) -> str:
    """Return a public key as in a .pub file, without its comment."""
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def read_signatures(path: Path, run: str) -> dict[str, SignedHead]:
    """Return the longest signed head of each site in a file of signatures, unchecked.

    {} without a file. Lines that cannot be read, and those of other runs, are left out.
    """
    last = dict[str, SignedHead]()
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return last
    except (OSError, ValueError) as e:
        raise BadInput(f"{path} cannot be read: {e}") from e
    for line in lines:
        try:
            head = SignedHead.from_dict(json.loads(line))
        except (BadInput, ValueError, RecursionError):
            continue
        if head.run == run and (head.site not in last or last[head.site].length <= head.length):
            last[head.site] = head
    return last
