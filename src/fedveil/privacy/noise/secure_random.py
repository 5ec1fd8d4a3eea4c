"""Secure randomness: uniform words from the operating system, and cohorts drawn from them.

Words come through AES-256 in counter mode. Nothing is kept between calls. Every piece of at most
1 MiB is the keystream of a key and a nonce that come from the operating system for that piece and
are dropped with it. There is no seed to leak, no state to copy into a forked process, and nothing
left from which earlier draws follow.

Poisson cohorts are drawn by the gaps between their clients: exact, at the cost of the cohort.
Between two clients that join lie as many that do not as a coin fails before it succeeds, so one
geometric draw replaces the coins of a whole gap. Floats decide a draw where they certainly can,
integers where they cannot, as with the noise. The proof note is docs/proofs/secure.md.
"""

import math
import os
from fractions import Fraction
from typing import Never

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedveil.base.errors import BadInput

Words = npt.NDArray[np.uint64]

DISTANCE = 2.0**-113
"""Each word adds at most this much to the distance of all words from uniform ones.

A keystream never repeats a block of 128 bits, as truly random blocks might. n blocks of one key
are n^2 / 2^129 away from uniform for it; n is at most 2^16 here, and a word starts at most one.
"""

_PIECE = 1 << 20
_KEY, _NONCE = 32, 16
_ZEROS = bytes(_PIECE)


class SecureRandom:
    """A source of secure random numbers. It takes no seed and has no state.

    Guarantee: if the operating system's entropy is uniform and AES-256 cannot be told from a
    random permutation, then all words ever drawn, by all instances, threads and processes, are
    independent and uniform up to a total variation distance of DISTANCE per word. Everything
    else here is an exact function of the words: no probability is rounded.

    | edge | behaviour |
    |---|---|
    | a process forks | parent and child each draw from the operating system again |
    | several threads | no shared state, nothing to lock |
    | pickle, copy | TypeError: make a `SecureRandom` where it is needed |
    | the operating system has no entropy | its error is passed on, nothing is drawn |
    """

    def words(self, count: int) -> Words:
        """`count` uniform 64-bit words, uint64 [count].

        | edge | behaviour |
        |---|---|
        | count 0 | no words, no key |
        | count < 0 | ValueError |

        >>> SecureRandom().words(3).shape
        (3,)
        """
        if count < 0:
            raise ValueError(f"{count} words: none or more are needed")
        room = np.empty(count + _NONCE // 8, dtype=np.uint64)  # update_into wants a block to spare
        view = room.data.cast("B")
        for start in range(0, 8 * count, _PIECE):
            size = min(_PIECE, 8 * count - start)
            fresh = os.urandom(_KEY + _NONCE)
            mode = modes.CTR(fresh[_KEY:])
            keystream = Cipher(algorithms.AES256(fresh[:_KEY]), mode).encryptor()
            if keystream.update_into(memoryview(_ZEROS)[:size], view[start:]) != size:
                raise AssertionError("a keystream ended early")
        return room[:count]

    def subset(self, population: int, size: int) -> npt.NDArray[np.int64]:
        """A uniformly random subset of `size` out of 0 .. population - 1, in ascending order.

        The first `size` different ones of a sequence of independent uniform numbers; if that is
        more than half, those that are left. Words that would favour small numbers are skipped.

        | edge | behaviour |
        |---|---|
        | size 0, size = population | nobody, everybody |
        | size < 0, size > population | BadInput |

        >>> SecureRandom().subset(3, 3).tolist()
        [0, 1, 2]
        """
        if not 0 <= size <= population:
            raise BadInput(f"{size} of {population} cannot be chosen")
        if 2 * size > population:
            left_out = self.subset(population, population - size)
            return np.delete(np.arange(population, dtype=np.int64), left_out)
        chosen = np.empty(0, dtype=np.uint64)
        while len(chosen) < size:
            words = self.words(size - len(chosen))  # never more than are missing
            fair = words[words <= np.uint64(2**64 - 1 - 2**64 % population)]
            ordered = np.sort(np.concatenate([chosen, fair % np.uint64(population)]))
            new = np.ones(len(ordered), dtype=np.bool_)
            new[1:] = ordered[1:] != ordered[:-1]
            chosen = ordered[new]
        return chosen.astype(np.int64)

    def __reduce_ex__(self, protocol: object) -> Never:
        """Raise TypeError: a SecureRandom is not copied or pickled."""
        raise TypeError("a SecureRandom is not copied or sent: make one where it is used")


Integers = npt.NDArray[np.int64]

_MARGIN = 2.0**-44
_SLOPE_MARGIN = 2.0**-45
_FAR = np.uint64(1 << 48)
_FIRST_BITS, _MORE_BITS = 64, 128
_GUARD_BITS = 64


def poisson_subset(source: SecureRandom, rate: float, population: int) -> Integers:
    """Those of 0 .. population - 1 that join, each with probability `rate`, in ascending order.

    Guarantee: for uniform words everybody joins independently and with exactly the probability
    that the float `rate` is, so that the rate that is accounted and the one that is drawn are the
    same number. At most `population` gaps are drawn.

    | edge | behaviour |
    |---|---|
    | rate outside [0, 1], NaN | BadInput |
    | rate 0, rate 1 | nobody, everybody |
    | population 0 | nobody |
    | rate so small that 1 - rate is 1 in floats | right all the same |

    >>> poisson_subset(SecureRandom(), 1.0, 3).tolist()
    [0, 1, 2]
    """
    if not 0 <= rate <= 1:
        raise BadInput(f"the rate is {rate}: a probability is needed")
    if rate == 1:
        return np.arange(population, dtype=np.int64)
    cohort, last = [np.empty(0, dtype=np.int64)], -1
    while rate and (left := population - 1 - last) > 0:
        expected = rate * left
        count = min(left, math.ceil(expected + 4 * math.sqrt(expected)) + 16)
        ids = last + np.cumsum(geometric_int(source, rate, left, count) + 1)
        cohort.append(ids[ids < population])
        last = int(ids[-1])
    return np.concatenate(cohort)


def geometric_int(source: SecureRandom, rate: float, most: int, count: int) -> Integers:
    """`count` independent draws of min(G, most), where P(G >= k) = (1 - rate)^k.

    Guarantee: for uniform words the law is exact. G is the largest k with U < (1 - rate)^k for a
    uniform U in (0, 1), of which a word is the first 64 binary digits. Floats err by less than
    their margins for U above 2^-16; where that could change the integer, and for smaller U, exact
    arithmetic decides.

    | edge | behaviour |
    |---|---|
    | rate outside (0, 1), NaN | ValueError |
    | most 0 | zeros |
    | U on the edge of two integers | more words are drawn until it is clear |

    >>> geometric_int(SecureRandom(), 0.5, 0, 3).tolist()
    [0, 0, 0]
    """
    if not 0 < rate < 1:
        raise ValueError(f"gaps at the rate {rate}: it must be above 0 and below 1")
    words = source.words(count)
    slope = -math.log1p(-rate)
    with np.errstate(over="ignore", invalid="ignore"):
        sizes = -np.log((words.astype(np.float64) + 0.5) * 2.0**-64) / slope
        error = _MARGIN / slope + _SLOPE_MARGIN * sizes
        whole = np.floor(sizes)
        inside = (sizes - whole > error) & (whole + 1 - sizes > error)
        beyond = sizes - error >= most
    out = np.minimum(whole, most).astype(np.int64)
    for i in np.flatnonzero(~(inside | beyond) | (words < _FAR)).tolist():
        out[i] = _draw_exactly(source, 1 - Fraction(rate), most, int(words[i]))
    return out


def _draw_exactly(source: SecureRandom, stays: Fraction, most: int, place: int) -> int:
    """The largest k <= most with U < stays^k, exactly, for a uniform U in (0, 1).

    Args:
        source: The source of further binary digits of U, drawn until they decide.
        stays: The base, in (0, 1).
        most: The largest result.
        place: The first 64 binary digits of U, as an integer.

    The search keeps U < stays^low, and U >= stays^high unless high is beyond `most`.
    """
    bits, low, high = _FIRST_BITS, 0, most + 1
    while high - low > 1:
        k = (low + high) // 2
        room = bits + k.bit_length() + _GUARD_BITS
        least, largest = power(stays, k, room)
        if place + 1 << room - bits <= least:
            low = k
        elif place << room - bits >= largest:
            high = k
        else:  # U may lie on either side: draw more of its bits
            first, second = source.words(2).tolist()
            place, bits = place << _MORE_BITS | first << 64 | second, bits + _MORE_BITS
    return low


def power(base: Fraction, k: int, bits: int) -> tuple[int, int]:
    """(low, high): integers between which base^k x 2^bits lies, for a base in [0, 1] and k >= 0.

    Guarantee: rounded down and up in every product, so they are bounds; with 0 < k < 2^n they are
    less than 2^(n + 2) apart.

    >>> power(Fraction(1, 2), 3, 4)
    (2, 2)
    """
    one = 1 << bits
    low = high = one
    square_low = base.numerator * one // base.denominator
    square_high = -(-base.numerator * one // base.denominator)
    while k:
        if k & 1:
            low, high = low * square_low >> bits, -(-high * square_high >> bits)
        square_low, square_high = square_low**2 >> bits, -(-(square_high**2) >> bits)
        k >>= 1
    return low, high
