"""Normal vectors whose component along a direction has a law of its own, rounded, drawn exactly.

A report of PrivUnitG is such a vector. It is a function of uniform numbers, whose binary digits are
drawn when they are needed. Floats decide how a coordinate is rounded where they certainly can,
integers where they cannot. The proof note is docs/proofs/priv-unit.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fedveil.privacy.noise.grid import Floats, Integers, normal_size, normal_tail
from fedveil.privacy.noise.secure_random import SecureRandom, Words

LARGEST_DIRECTION = 1 << 40
"""The largest coordinate of a direction."""

LEAST_TAIL = Fraction(1, 1 << 128)
"""The least probability of the tails that a component is drawn from."""

LARGEST_SCALE = 1 << 20
"""The largest scale: with a larger one, too many coordinates would need exact arithmetic."""

_MARGIN = 2.0**-44
_FAR = np.uint64(1 << 47)
_FIRST_BITS, _MORE_BITS, _SPARE_BITS = 64, 128, 128
_FINE_BITS = 96
_TOGETHER = 64


def directed_int(
    source: SecureRandom, scale: int, direction: Integers, low: Fraction, high: Fraction
) -> Integers:
    """round(scale x g) for a random vector g in R^P, int64 [P], where `direction` is int64 [P].

    g = z + (t - <z, u>) u for u = direction / |direction|, z standard normal in R^P, and t standard
    normal given that P(N(0, 1) > t) is between `low` and `high`.

    Guarantee: for uniform words the law is exact. u has length 1 as a vector of real numbers, the
    sides of t have exactly these probabilities, and rounding is a post-processing of g.

    | edge | behaviour |
    |---|---|
    | a direction of zeros, or with a coordinate beyond 2^40 | ValueError |
    | not 0 <= low < high <= 1, or high < 2^-128, or low > 1 - 2^-128 | ValueError |
    | a scale that is no power of two from 1 to 2^20 | ValueError |
    | a coordinate on the edge of two integers | more words are drawn until it is clear |
    | P = 1 | round(scale x t), with the sign of the direction |

    >>> half = Fraction(1, 2)
    >>> bool(directed_int(SecureRandom(), 1024, np.array([3]), Fraction(0), half)[0] >= 0)
    True
    """
    longest = int(np.abs(direction).max(initial=0))
    if not 0 < longest <= LARGEST_DIRECTION:
        raise ValueError(f"the largest coordinate of a direction is {longest}: not in 1 .. 2^40")
    if not (0 <= low < high <= 1 and min(high, 1 - low) >= LEAST_TAIL):
        raise ValueError(f"no component has a tail probability from {low} to {high}")
    if not (1 <= scale <= LARGEST_SCALE and scale & (scale - 1) == 0):
        raise ValueError(f"the scale is {scale}: a power of two from 1 to 2^20 is needed")
    along = _Normal(int(source.words(1)[0]), low, high)
    words = source.words(len(direction))
    near, known = _near(source, words)
    values, errors = _in_floats(near, direction.astype(np.float64), along.near(source))
    values *= scale
    whole = np.rint(values)
    out = whole.astype(np.int64)
    unsure = np.flatnonzero(np.abs(values - whole) > 0.5 - scale * errors)
    if len(unsure):
        normals = [known.get(i) or _Normal(word) for i, word in enumerate(words.tolist())]
        for i, n in _in_integers(source, scale, direction.tolist(), normals, along, unsure):
            out[i] = n
    return out


def _near(source: SecureRandom, words: Words) -> tuple[Floats, dict[int, "_Normal"]]:
    """Floats of the standard normals that begin with `words`, each less than 2^-44 off.

    Also returns those in the far tails, which had to draw more words, by their place.
    """
    negative = words >> np.uint64(63) == 1
    place = np.where(negative, ~words, words)
    near = normal_size((place.astype(np.float64) + 0.5) * 2.0**-63)
    near[negative] *= -1
    known = {i: _Normal(int(words[i])) for i in np.flatnonzero(place < _FAR).tolist()}
    for i, normal in known.items():
        near[i] = normal.near(source)
    return near, known


def _in_floats(near: Floats, direction: Floats, t: float) -> tuple[Floats, Floats]:
    """Floats of the coordinates of g, and bounds on their errors, float64 [P] each.

    `near` is z and `t` the component, as floats that are less than 2^-44 off.
    """
    products = near * direction
    square = _sum(direction * direction)
    length = math.sqrt(square)
    factor = (t * length - _sum(products)) / square
    error = _MARGIN * (_sum(np.abs(direction)) + length)
    error += 2.0**-44 * (_sum(np.abs(products)) + abs(t) * length)
    error = 2 * error / square + 2.0**-44 * abs(factor)
    moved = direction * factor
    errors = 2 * _MARGIN + np.abs(direction) * error + 2.0**-51 * (np.abs(near) + np.abs(moved))
    return near + moved, errors


def _sum(numbers: Floats) -> float:
    """The sum of floats [P], less than 2^-46 of the sum of their sizes off."""
    whole = len(numbers) - len(numbers) % _TOGETHER
    sums = numbers[:whole].reshape(-1, _TOGETHER).sum(axis=1)
    return math.fsum([*sums.tolist(), *numbers[whole:].tolist()])


def _in_integers(
    source: SecureRandom,
    scale: int,
    direction: list[int],
    normals: list["_Normal"],
    along: "_Normal",
    wanted: Integers,
) -> Iterator[tuple[int, int]]:
    """Yield (i, round(scale x g[i])), exactly, for every i of `wanted`, in no order.

    `normals` are z, and `along` is t. All of them draw more words until every i is clear.
    """
    square, left, bits = sum(a * a for a in direction), wanted.tolist(), _FINE_BITS
    while left:
        for number in (along, *normals):
            number.extend(source)
        between = [number.between(source, bits) for number in normals]
        products = [
            sorted((a * low, a * high)) for a, (low, high) in zip(direction, between, strict=True)
        ]
        dot_low, dot_high = (sum(ends) for ends in zip(*products, strict=True))
        t_low, t_high = along.between(source, bits)
        length = math.isqrt(square << 2 * bits)
        low = min(t_low * length, t_low * (length + 1)) - (dot_high << bits)
        high = max(t_high * length, t_high * (length + 1)) - (dot_low << bits)
        unclear, half = [], 1 << 2 * bits - 1
        for i in left:
            ends = sorted((direction[i] * low, direction[i] * high))
            least = (between[i][0] << bits) + ends[0] // square
            most = (between[i][1] << bits) - (-ends[1] // square)
            n = least * scale + half >> 2 * bits
            if n == most * scale + half >> 2 * bits:
                yield i, n
            else:
                unclear.append(i)
        left, bits = unclear, bits + _FINE_BITS


@dataclass
class _Normal:
    """A normal number x with P(N(0, 1) > x) = low + (high - low) U, for U uniform on (0, 1).

    Attributes:
        place: The binary digits of U that are known, as an integer.
        low, high: The bounds of the probability.
        bits: How many digits are known.
    """

    place: int
    low: Fraction = Fraction(0)
    high: Fraction = Fraction(1)
    bits: int = _FIRST_BITS

    def extend(self, source: SecureRandom) -> None:
        """Draw 128 more digits."""
        first, second = source.words(2).tolist()
        self.place = self.place << _MORE_BITS | first << 64 | second
        self.bits += _MORE_BITS

    def near(self, source: SecureRandom) -> float:
        """A float that is less than 2^-46 + 2^-52 |x| off."""
        while True:
            self.extend(source)
            low, high = self.between(source, 64)
            if high - low < 1 << 16:
                return (low + high) / 2**65

    def between(self, source: SecureRandom, bits: int) -> tuple[int, int]:
        """(low, high): integers between which x 2^bits lies.

        More digits are drawn until the sign, and 64 digits of the probability beyond |x|, are
        known.
        """
        while True:
            units = self.bits + _SPARE_BITS
            first, last = (
                (self.low + (self.high - self.low) * Fraction(place, 1 << self.bits)) * 2**units
                for place in (self.place, self.place + 1)
            )
            least, most = 2 * math.floor(first), 2 * math.ceil(last)
            negative = least >= 1 << units
            if negative:
                least, most = (2 << units) - most, (2 << units) - least
            if most <= 1 << units and least >= 1 << 64:
                low, high = _size_between(least, most, units, bits)
                return (-high, -low) if negative else (low, high)
            self.extend(source)


def _size_between(least: int, most: int, units: int, bits: int) -> tuple[int, int]:
    """(low, high): integers between which x 2^bits lies, for every x >= 0 with
    least <= P(|N(0, 1)| > x) 2^units <= most.

    Newton's method with slopes in floats finds the middle, 40 bits a step. It is only used if the
    tails at both ends are certainly beyond the bounds.
    """
    middle, whole = least + most >> 1, 1 << units
    guess = float(normal_size(np.array(max(middle / whole, 1e-300))))
    centre = Fraction(guess)
    for _ in range(-(-bits // 40) - 1):
        slope = math.sqrt(2 / math.pi) * math.exp(-(float(centre) ** 2) / 2)
        centre += Fraction((normal_tail(centre, units) - middle) / whole / slope)
        centre = max(Fraction(0), Fraction(math.floor(centre * 2**bits), 1 << bits))
    at, room = math.floor(centre * 2**bits), 2
    while True:
        low, high = max(0, at - room), at + room
        if (low == 0 or normal_tail(Fraction(low, 1 << bits), units) - 2 >= most) and normal_tail(
            Fraction(high, 1 << bits), units
        ) + 2 <= least:
            return low, high
        room *= 4
