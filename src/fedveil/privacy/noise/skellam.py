"""Skellam noise: differences of two Poisson variables, drawn exactly.

A draw inverts the distribution function, of which a table has 64 binary digits. Where a word lies
too near to an edge of the table, more digits of both decide. The proof note is
docs/proofs/skellam.md.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedveil.privacy.noise.secure_random import Integers, SecureRandom, Words

LARGEST_VARIANCE = 2.0**32
"""Skellam noise of a larger variance is refused: its table would not fit into the memory."""

_LEAST_MEAN = 2.0**-64
_PIECE = 1 << 18  # draws at a time
_FIRST_BITS, _MORE_BITS = 64, 128
_WIDTH = 2  # the most units that bounds of an edge are apart


def skellam_int(
    source: SecureRandom, variance: float, shape: int | tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """Independent Skellam variables of mean 0 and this variance, int64 of `shape`.

    Guarantee: for uniform words the law is exact: that of X - Y for independent Poisson variables
    X, Y with the mean variance / 2. Sums of n independent draws have the law of one with n times
    the variance.

    | edge | behaviour |
    |---|---|
    | variance 0 | zeros |
    | variance < 0, NaN, above 2^32, or above 0 and below 2^-63 | ValueError |

    >>> skellam_int(SecureRandom(), 0.0, 3).tolist()
    [0, 0, 0]
    """
    first = poisson_int(source, variance / 2, shape)
    first -= poisson_int(source, variance / 2, shape)
    return first


def poisson_int(source: SecureRandom, mean: float, shape: int | tuple[int, ...]) -> Integers:
    """Independent Poisson variables with this mean, int64 of `shape`.

    Guarantee: for uniform words the law is exact. The variable is the least k with U < P(X <= k)
    for a uniform U in (0, 1), of which a word is the first 64 binary digits. Where these do not
    decide, more are drawn.

    | edge | behaviour |
    |---|---|
    | mean 0 | zeros |
    | mean < 0, NaN, above 2^31, or above 0 and below 2^-64 | ValueError |
    | a word within two units of an edge of the table | exact arithmetic decides, with more digits |
    """
    if not (mean == 0 or _LEAST_MEAN <= mean <= LARGEST_VARIANCE / 2):
        raise ValueError(f"a Poisson variable of mean {mean}: 0, or 2^-64 to 2^31 is needed")
    out = np.zeros(shape, dtype=np.int64)
    if mean == 0:
        return out
    table = _words_table(mean)
    flat = out.reshape(-1)
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE]
        words = source.words(len(piece))
        places = np.searchsorted(table.edges, words, side="right")
        piece[:] = places
        piece += table.first - 1
        sure = words - table.edges[places - 1] >= np.uint64(_WIDTH)
        sure &= places < len(table.edges)
        for i in np.flatnonzero(~sure).tolist():
            piece[i] = _draw_exactly(source, mean, int(words[i]))
    return out


@dataclass(frozen=True, eq=False)
class _WordsTable:
    """A Poisson distribution function in 64 binary digits.

    Attributes:
        first: The least value whose probability is not negligible.
        edges: Lower bounds of P(X <= k) 2^64 for k = first - 1, first, ..., ascending. True values
            are less than `_WIDTH` above. The first of them is 0.
    """

    first: int
    edges: Words


@lru_cache(maxsize=4)
def _words_table(mean: float) -> _WordsTable:
    """The table of one mean. Cached, since building it takes up to a second."""
    first, edges = _edges(mean, _FIRST_BITS)
    return _WordsTable(first, np.array(edges, dtype=np.uint64))


def _edges(mean: float, bits: int) -> tuple[int, list[int]]:
    """(first, edges): integers below P(X <= k) 2^bits, for k = first - 1, first, ....

    Guarantee: each is less than two below the true value; those before `first` and after the last
    have less than two units of probability on their side. The first edge is 0.

    Weights relative to the mode's are computed by their ratios, rounded down: a weight that is n
    steps from the mode is less than n units too small, since no ratio is above 1. Values whose
    weight is rounded to 0, n steps away, had less than n units, and those beyond fall at least by
    the factor mean / (mean + 1), or are no more than the mode.
    """
    top, bottom = mean.as_integer_ratio()
    mode = math.floor(mean)
    room = bits + 64
    above, below = [1 << room], list[int]()
    k = mode
    while above[-1]:
        k += 1
        above.append(above[-1] * top // (bottom * k))
    k, weight = mode, 1 << room
    while k and weight:
        weight = weight * (bottom * k) // top
        k -= 1
        below.append(weight)
    weights = [*reversed(below), *above]
    missing = len(weights) ** 2 + len(above) * (mode + 2) + len(below) * (mode + 1)
    total = sum(weights)
    if missing << bits + 1 > total:
        raise AssertionError("the weights of a table are not precise enough")
    edges, so_far = [0], 0
    for weight in weights:
        so_far += weight
        edges.append((so_far << bits) // (total + missing))
    return mode - len(below), edges


def _draw_exactly(source: SecureRandom, mean: float, place: int) -> int:
    """The least k with U < P(X <= k), exactly, for a uniform U in (0, 1).

    `place` is the first 64 binary digits of U, as an integer. Further digits are drawn until they
    decide.
    """
    bits = _FIRST_BITS
    while True:
        high, low = source.words(2).tolist()
        place, bits = place << _MORE_BITS | high << 64 | low, bits + _MORE_BITS
        first, edges = _edges(mean, bits)
        at = bisect_right(edges, place)
        if at < len(edges) and place - edges[at - 1] >= _WIDTH:
            return first - 1 + at
        if at == 1 and first == 0:
            return 0
