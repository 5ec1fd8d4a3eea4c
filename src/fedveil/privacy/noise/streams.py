"""Keyed streams: every draw is a pure function of (seed, purpose, round, client, index).

Nothing here keeps state between calls, so a draw does not depend on the chunk, the worker, the
engine or the order in which clients are processed, and a round can be replayed on its own.
These streams make a simulation repeatable. They are not secure: whoever knows the seed knows
the noise, and a claim made from them says so (`NoiseSource.SEEDED`). Secure
streams draw everything that protects somebody from the operating system, and repeat nothing.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtr, ndtri

from fedveil.base.checks import cores
from fedveil.base.identity import GOLDEN, mix, words_at
from fedveil.privacy.noise.secure_random import SecureRandom


class SecureKeys:
    """Stands for `count` keys where randomness is the operating system's, and is never repeated.

    Nothing can be drawn twice from it. `bits` and `uniform_` accept it. Noise is added by a
    mechanism only, which puts it on a grid.
    """

    def __init__(self, count: int) -> None:
        """Stand for `count` keys."""
        self._count = count

    def __len__(self) -> int:
        """The number of keys."""
        return self._count

    def __getitem__(self, rows: Any) -> "SecureKeys":
        """As many secure keys as NumPy would select by `rows`: a slice, a mask or numbers."""
        return SecureKeys(len(np.empty(self._count, dtype=np.int8)[rows]))


SeededKeys = npt.NDArray[np.uint64]
Keys = SeededKeys | SecureKeys

_SMALL = 256  # below this many coordinates a row, one vectorised draw beats a generator per row
_WIDE = 1 << 16  # above this many, normals are added a piece at a time
_LONG = 1 << 20  # above this many, a float64 row is drawn in blocks, on all cores
_LONG_BLOCK = 1 << 18
_BLOCKS = np.uint64(0xA0761D6478BD642F)
_FAR_NORMAL = 4.8
_FAR_LAPLACE = 12 * math.log(2)
_TAILS = np.uint64(0xD1B54A32D192ED03)
_AT_ONCE = 16
_STATE_WORDS = 624
_STATE_START = 24
_STATE_STOP = _STATE_START + 8 * _STATE_WORDS


@dataclass(frozen=True)
class Streams:
    """The streams of one seed.

    >>> a, b = Streams(1), Streams(1)
    >>> int(a.generator("cohort", 3).integers(1000)) == int(b.generator("cohort", 3).integers(1000))
    True
    """

    seed: int
    secure: bool = False

    @property
    def secure_random(self) -> SecureRandom | None:
        """A source of secure random numbers, None for seeded streams."""
        return SecureRandom() if self.secure else None

    def for_attempt(self, attempt: int) -> "Streams":
        """The streams of an attempt at a round, from 0. Those of attempts 1, 2, ... share no draws.

        Attempt 0, and secure streams, have these streams themselves.
        """
        if attempt == 0 or self.secure:
            return self
        return Streams(self.derive_key("attempt", attempt))

    def derive_key(self, purpose: str, *parts: int) -> int:
        """A key of 128 bits, as an integer: a hash of (seed, purpose, parts)."""
        text = "\x1f".join([str(self.seed), purpose, *map(str, parts)])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")

    def generator(self, purpose: str, *parts: int) -> np.random.Generator:
        """A NumPy generator seeded by (seed, purpose, parts), for draws that are not per client.

        It is seeded also where `secure`.
        """
        return np.random.Generator(np.random.Philox(key=self.derive_key(purpose, *parts)))

    def keys(self, purpose: str, round: int, clients: npt.ArrayLike, *parts: int) -> Keys:
        """One 64-bit key per client, for the row functions below.

        Keys follow from (seed, purpose, round, client, parts). Secure streams return `SecureKeys`
        for as many clients.
        """
        if self.secure:
            return SecureKeys(len(np.asarray(clients)))
        base = self.derive_key(purpose, round, *parts)
        low, high = np.uint64(base & (2**64 - 1)), np.uint64(base >> 64)
        ids = np.asarray(clients, dtype=np.uint64)
        return mix(mix(ids * GOLDEN + low) ^ high)


@dataclass(frozen=True)
class JointStreams:
    """The streams of several seeds side by side.

    Attributes:
        each: The streams of each seed.
        clients_per_seed: How many clients have each seed: the first `clients_per_seed[0]` have the
            first.
    """

    each: tuple[Streams, ...]
    clients_per_seed: tuple[int, ...]

    secure = False

    def keys(self, purpose: str, round: int, clients: npt.ArrayLike, *parts: int) -> Keys:
        """One 64-bit key per client, from the streams of its own seed, as `clients` are ordered."""
        keys = []
        pieces = np.split(np.asarray(clients), np.cumsum(self.clients_per_seed)[:-1])
        for streams, piece in zip(self.each, pieces, strict=True):
            keys.append(streams.keys(purpose, round, piece, *parts))
        return np.concatenate([each for each in keys if not isinstance(each, SecureKeys)])


KeySource = Streams | JointStreams
"""What gives each client of a cohort its key."""


def bits(keys: Keys, count: int) -> npt.NDArray[np.uint64]:
    """Uniform 64-bit words [K, count]: row k is the SplitMix64 sequence that starts at keys[k].

    With `SecureKeys`, words of the operating system's randomness.
    """
    if isinstance(keys, SecureKeys):
        return SecureRandom().words(len(keys) * count).reshape(len(keys), count)
    return words_at(keys[:, None], np.arange(count)[None, :])


def bits_at(keys: Keys, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The words of `bits` at `places` [K, B]: row k of the result has words of keys[k].

    With `SecureKeys`, new words at each call.
    """
    if isinstance(keys, SecureKeys):
        return SecureRandom().words(places.size).reshape(places.shape)
    return words_at(keys[:, None], places)


def normal_(out: torch.Tensor, keys: Keys) -> torch.Tensor:
    """Fill the rows of `out` [K, P] with standard normals, row k from keys[k], and return it.

    Raises AssertionError for `SecureKeys`, and for another number of keys than rows.

    A float32 draw by itself ends at 5.77 standard deviations, beyond which an unnoised value would
    show itself outright. Values beyond 4.8 are therefore drawn again from the exact tail, with 53
    bits, which reaches 9.9. Long float64 rows have an exact tail as they are drawn.
    """
    keys = _require_seeded(out, keys)
    if out.shape[1] > _WIDE:
        out.zero_()
        return add_normals_(out, torch.ones(len(out), 1, dtype=out.dtype), keys)
    if out.shape[1] > _SMALL:
        for row, generator in zip(out, _generators(keys), strict=True):
            row.normal_(generator=generator)
    else:
        pairs = -(-out.shape[1] // 2)
        uniforms = (bits(keys, 2 * pairs) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        first, second = np.hsplit(uniforms, 2)
        radius, angle = np.sqrt(-2 * np.log1p(-first)), 2 * np.pi * second
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        out.copy_(torch.from_numpy(both[:, : out.shape[1]]))
    _redraw_normal_tails(out, keys, 0)
    return out


def add_normals_(rows: torch.Tensor, scales: torch.Tensor, keys: Keys) -> torch.Tensor:
    """Add scales [K, 1] x the standard normals of `normal_` to rows [K, P] in place. Returns them.

    Raises what `normal_` raises. Wide rows get normals a piece at a time: a row of normals that is
    written out and read again takes as long as drawing it.
    """
    keys = _require_seeded(rows, keys)
    if rows.shape[1] <= _WIDE:
        return rows.addcmul_(normal_(torch.empty_like(rows), keys), scales)
    if rows.shape[1] > _LONG and rows.dtype is torch.float64:
        for row, scale, key in zip(rows, scales, keys, strict=True):
            _add_long_(row, scale, key)
        return rows
    # A generator draws sixteen values at a time, the last sixteen once more if they are no multiple
    # of that. Pieces that end accordingly get the same numbers as the whole row.
    starts = list(range(0, rows.shape[1] - _AT_ONCE, _WIDE)) or [0]
    for row, scale, key, generator in zip(rows, scales, keys, _generators(keys), strict=True):
        for start, end in pairwise([*starts, len(row)]):
            piece = row[start:end]
            normals = torch.empty_like(piece).normal_(generator=generator)
            _redraw_normal_tails(normals[None, :], key[None], start)
            piece.addcmul_(normals, scale)
    return rows


def _redraw_normal_tails(out: torch.Tensor, keys: SeededKeys, start: int) -> None:
    """Draw the normals of rows [K, P] that are beyond +-4.8 again, in place.

    The first column of `out` is column `start` of the rows that the keys are for.
    """
    if not out.numel():
        return
    least, most = torch.aminmax(out, dim=1)
    rows = torch.nonzero((most > _FAR_NORMAL) | (least < -_FAR_NORMAL))[:, 0]
    if not len(rows):
        return
    few = out if len(rows) == len(out) else out[rows]
    far = (few > _FAR_NORMAL) | (few < -_FAR_NORMAL)
    _redraw_tails(few, far, keys[rows.numpy()], lambda u: -ndtri(u * ndtr(-_FAR_NORMAL)), start)
    if few is not out:
        out[rows] = few


def laplace_(out: torch.Tensor, keys: Keys) -> torch.Tensor:
    """Fill the rows of `out` [K, P] with Laplace noise of scale 1, row k from keys[k]. Returns it.

    Raises AssertionError for `SecureKeys`, and for another number of keys than rows.

    Values beyond 12 ln 2 are drawn again from the exact tail, which reaches 45 scales: the draw of
    24 bits would end at 17 and be coarse before that.
    """
    keys = _require_seeded(out, keys)
    uniform_(out, keys)
    minus_size = out.abs().neg_().log1p_()
    torch.copysign(minus_size, out, out=out)
    _redraw_tails(out, minus_size < -_FAR_LAPLACE, keys, lambda u: _FAR_LAPLACE - np.log(u))
    return out


def uniform_(out: torch.Tensor, keys: Keys) -> torch.Tensor:
    """Fill the rows of `out` [K, P] with uniforms on [-1, 1), row k from keys[k], and return it.

    With `SecureKeys` the rows come from the operating system and never repeat. Values are multiples
    of 2^-23 in float32 and of 2^-52 in float64. Raises AssertionError for another number of keys
    than rows.
    """
    if len(out) != len(keys):
        raise AssertionError(f"{len(out)} rows for {len(keys)} keys")
    if out.shape[1] > _SMALL and not isinstance(keys, SecureKeys):
        for row, generator in zip(out, _generators(keys), strict=True):
            row.uniform_(-1, 1, generator=generator)
        return out
    fine = 24 if out.dtype is torch.float32 else 53
    words = bits(keys, out.shape[1]) >> np.uint64(64 - fine)
    return out.copy_(torch.from_numpy(words.astype(np.float64) * 2.0 ** (1 - fine) - 1))


def _redraw_tails(
    out: torch.Tensor,
    far: torch.Tensor,
    keys: SeededKeys,
    tail: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
    start: int = 0,
) -> None:
    """Give the values of `out` marked `far` new sizes tail(u), u uniform on (0, 1), in place.

    Their signs stay. The first column of `out` is column `start` of the rows that the keys are for.
    """
    rows, columns = np.divmod(np.flatnonzero(far.numpy()), max(1, far.shape[1]))
    if len(rows):
        places = (columns + start).astype(np.uint64)
        with np.errstate(over="ignore"):
            words = mix(mix(keys[rows] ^ _TAILS) + places * GOLDEN)
        uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        drawn = out.numpy()  # a few places: NumPy finds them ten times faster than torch
        drawn[rows, columns] = np.copysign(tail(uniform), drawn[rows, columns])


def _require_seeded(out: torch.Tensor, keys: Keys) -> SeededKeys:
    """`keys`, if they are seeded and there is one for each row of `out`.

    Raises AssertionError otherwise: the low bits of secure noise in floats would tell what it
    hides, and one key's noise may not be spread over several rows.
    """
    if len(out) != len(keys):
        raise AssertionError(f"{len(out)} rows for {len(keys)} keys")
    if isinstance(keys, SecureKeys):
        raise AssertionError("secure noise is added by a mechanism, on a grid")
    return keys


def _generators(keys: SeededKeys) -> Iterator[torch.Generator]:
    """Yield torch's generator once per key, its whole state of 624 words set from the key.

    It is one object each time: draw from it before the next is asked for. Seeding it in the
    ordinary way would keep only 32 bits of the key, and among a hundred thousand rows some would
    carry the same noise.
    """
    generator = torch.Generator()
    state = generator.manual_seed(0).get_state().numpy()
    for words in bits(keys, _STATE_WORDS) >> np.uint64(32):
        state[_STATE_START:_STATE_STOP] = words.view(np.uint8)
        generator.set_state(torch.from_numpy(state))
        yield generator


def _add_long_(row: torch.Tensor, scale: torch.Tensor, key: np.uint64) -> None:
    """row [P] of float64 += scale x standard normals by NumPy's ziggurat, exact in its tail.

    Each block has a generator of its own, from 128 bits that follow from the row's key and the
    block's number, so that the number of threads changes nothing.
    """
    blocks = torch.split(row, _LONG_BLOCK)
    seeds = bits(mix(np.array([key ^ _BLOCKS])), 2 * len(blocks)).reshape(-1, 2).tolist()

    def add(block: torch.Tensor, seed: list[int]) -> None:
        generator = np.random.Generator(np.random.SFC64(seed))
        block.addcmul_(torch.from_numpy(generator.standard_normal(len(block))), scale)

    with ThreadPoolExecutor(cores()) as threads:
        list(threads.map(add, blocks, seeds))
