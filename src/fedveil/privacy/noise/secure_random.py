"""Secure randomness: uniform words from the operating system, through AES-256 in counter mode.

Nothing is kept between calls. Every piece of at most 1 MiB is the keystream of a key and a nonce
that come from the operating system for that piece and are dropped with it. There is no seed to
leak, no state to copy into a forked process, and nothing left from which earlier draws follow.
The proof note is docs/proofs/secure.md.
"""

import os
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
        """`count` uniform 64-bit words.

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
        raise TypeError("a SecureRandom is not copied or sent: make one where it is used")
