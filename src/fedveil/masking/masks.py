"""Masks, and the secrets that they follow from: streams, pairs' run secrets, shares, boxes.

Nothing here is our own below the protocol: X25519, HKDF, AES-256-CTR and ChaCha20-Poly1305 are
those of `cryptography`, Shamir's scheme over GF(2^128) that of PyCryptodome.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from fedveil.masking.sum_messages import (
    SEED,
    WIDE,
    Advert,
    MessageRefused,
    Roster,
    SumTerms,
    vector_size,
)

MaskWords = npt.NDArray[np.uint64] | npt.NDArray[np.uint32]
Steps = npt.NDArray[np.int64]

_PIECE = 1 << 20  # bytes
_TOGETHER = 1 << 17  # words that are packed at a time, a multiple of eight
_HALF = SEED // 2
_ONCE = bytes(12)  # the nonce of a key that seals one box


def add_masks_(words: MaskWords, plus: Iterable[bytes], minus: Iterable[bytes] = ()) -> None:
    """Add the masks of the 32-byte seeds `plus` to words [P] modulo 2^64, subtract `minus`.

    Modulo 2^32 for words of 32 bits. A mask is the AES-256-CTR keystream of its seed, 8, or 4,
    little-endian bytes a word. Masks are made a
    piece at a time, which stays in the cache.

    Guarantee: a seed's mask is a function of all its 256 bits, and adding it and subtracting it
    again leaves the words as they were.

    | edge | behaviour |
    |---|---|
    | a seed of another length | ValueError |
    | no seeds | the words stay |

    >>> words = np.zeros(3, dtype=np.uint64)
    >>> add_masks_(words, [bytes(32)], [bytes(32)])
    >>> words.tolist()
    [0, 0, 0]
    """
    streams = []
    for seeds, sign in ((plus, np.add), (minus, np.subtract)):
        for seed in seeds:
            if len(seed) != SEED:
                raise ValueError(f"a seed of {len(seed)} bytes: 32 are needed")
            streams.append(
                (Cipher(algorithms.AES256(seed), modes.CTR(bytes(16))).encryptor(), sign)
            )
    size = words.itemsize
    per_piece = _PIECE // size
    zeros = memoryview(bytes(_PIECE))
    room = np.empty(per_piece + 16 // size, dtype=f"<u{size}")  # update_into wants a block to spare
    view = room.data.cast("B")
    for begin in range(0, len(words), per_piece):
        piece = words[begin : begin + per_piece]
        for stream, sign in streams:
            if stream.update_into(zeros[: size * len(piece)], view) != size * len(piece):
                raise AssertionError("a keystream ended early")
            sign(piece, room[: len(piece)], out=piece)


def words_of(steps: Steps, bits: int) -> MaskWords:
    """Steps [P] as new words to which masks are added: modulo 2^64, or 2^32 for fewer bits.

    2^bits divides the modulus, so that words that are cut to `bits` in the end are right.
    """
    return steps.astype("<u8") if bits == WIDE else steps.astype("<u8").astype("<u4")


def packed(words: MaskWords, bits: int) -> bytes:
    """The lowest `bits` bits of each word [P], one after the other, `vector_size` bytes.

    Guarantee: a uniform word has uniform lowest bits, so what is cut off a mask costs nothing.

    >>> packed(np.array([1, 2**20 - 1], dtype="<u4"), 20).hex()
    '0100f0ffff'
    """
    if bits == WIDE:
        return words.tobytes()
    out = np.empty(vector_size(len(words), bits), dtype=np.uint8)
    for a in range(0, len(words), _TOGETHER):
        piece = words[a : a + _TOGETHER].astype("<u4").view(np.uint8).reshape(-1, 4)
        each = np.unpackbits(piece, axis=1, count=bits, bitorder="little")
        part = np.packbits(each.reshape(-1), bitorder="little")
        out[a * bits // 8 : a * bits // 8 + len(part)] = part
    return out.tobytes()


def unpacked(content: bytes | memoryview, count: int, bits: int) -> MaskWords:
    """The `count` words of which `packed` has made the bytes `content`, each below 2^bits."""
    if bits == WIDE:
        return np.frombuffer(content, dtype="<u8")
    data = np.frombuffer(content, dtype=np.uint8)
    out = np.empty(count, dtype="<u4")
    for a in range(0, count, _TOGETHER):
        some = min(_TOGETHER, count - a)
        part = data[a * bits // 8 : a * bits // 8 + vector_size(some, bits)]
        each = np.unpackbits(part, count=some * bits, bitorder="little").reshape(some, bits)
        wide = np.zeros((some, 32), dtype=np.uint8)
        wide[:, :bits] = each
        out[a : a + some] = np.packbits(wide, axis=1, bitorder="little").view("<u4")[:, 0]
    return out


def signed(words: MaskWords, bits: int) -> Steps:
    """Words modulo 2^bits as the numbers from -2^(bits - 1) to below 2^(bits - 1), int64 [P].

    >>> signed(np.array([2**20 - 1, 2**19 - 1], dtype="<u4"), 20).tolist()
    [-1, 524287]
    """
    if bits == WIDE:
        return words.view("<i8")
    half = 1 << (bits - 1)
    return ((words.astype(np.int64) + half) & ((1 << bits) - 1)) - half


def run_secret(
    terms: SumTerms, mine: Advert, other: Advert, exchange_key: X25519PrivateKey
) -> bytes:
    """The secret that two sites share as long as both processes run. It never leaves them.

    Raises MessageRefused for a key with which the secret would be known to everybody.
    """
    first, second = sorted((mine, other), key=lambda advert: advert.site)
    keys = first.exchange_key + second.exchange_key + first.signing_key + second.signing_key
    numbers = first.site.to_bytes(2, "big") + second.site.to_bytes(2, "big")
    try:
        agreed = exchange_key.exchange(X25519PublicKey.from_public_bytes(other.exchange_key))
    except ValueError:
        raise MessageRefused(f"the exchange key of site {other.site} is none") from None
    derive = HKDF(hashes.SHA256(), SEED, salt=terms.hash, info=b"fedveil pair" + numbers + keys)
    return derive.derive(agreed)


def round_seed(secret: bytes, roster: Roster, label: bytes, first: int, second: int) -> bytes:
    """What two sites derive from their run secret for one round, attempt and roster, 32 bytes.

    Args:
        secret: The run secret of the two.
        roster: The roster of the round.
        label: b"mask" for their pairwise mask, b"box" for the key of a box.
        first: The lower site of a mask, the sender of a box.
        second: The other site.
    """
    info = b"fedveil " + label + roster.place.bytes + roster.hash
    info += first.to_bytes(2, "big") + second.to_bytes(2, "big")
    return HKDFExpand(hashes.SHA256(), SEED, info).derive(secret)


def deal(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """The shares of a 32-byte secret for holders 1 .. n: any `threshold` of them open it.

    Fewer say nothing about it. Each half of the secret is shared by itself.
    """
    if len(secret) != SEED:
        raise ValueError(f"a secret of {len(secret)} bytes: 32 are needed")
    halves = [
        Shamir.split(threshold, holders, half, False) for half in (secret[:_HALF], secret[_HALF:])
    ]
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def open_shares(shares: dict[int, bytes], threshold: int) -> bytes:
    """The secret of which `shares` are shares by holder, 32 bytes.

    The first `threshold` of them are used. MessageRefused for fewer.
    """
    if len(shares) < threshold:
        raise MessageRefused(f"{len(shares)} shares of a seed: {threshold} are needed")
    used = sorted(shares.items())[:threshold]
    halves = [
        Shamir.combine([(holder, share[part]) for holder, share in used], False)
        for part in (slice(_HALF), slice(_HALF, None))
    ]
    return b"".join(halves)


def seal(key: bytes, shares: Sequence[bytes], about: bytes) -> bytes:
    """A box of shares under a key that is used for nothing else. `about` is bound to it."""
    return ChaCha20Poly1305(key).encrypt(_ONCE, b"".join(shares), about)


def unseal(key: bytes, box: bytes, about: bytes) -> list[bytes]:
    """The shares in a box. MessageRefused for a box of another key, or about something else."""
    try:
        opened = ChaCha20Poly1305(key).decrypt(_ONCE, box, about)
    except InvalidTag:
        raise MessageRefused("a box does not open") from None
    return [opened[at : at + SEED] for at in range(0, len(opened), SEED)]
