"""SplitMix64: words as a pure function of a key and a place, for all keys at once."""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(z: Words) -> Words:
    """The finaliser of SplitMix64: a bijection in which every input bit reaches every output."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def words_at(keys: Words, places: npt.NDArray[np.integer]) -> Words:
    """Word number `places` of the sequence of each key. The two are broadcast.

    >>> words_at(np.array([7, 8], dtype=np.uint64)[:, None], np.arange(3)).shape
    (2, 3)
    """
    with np.errstate(over="ignore"):
        return mix(keys + (places.astype(np.uint64) + np.uint64(1)) * GOLDEN)
