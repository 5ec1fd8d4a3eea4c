"""`RotatedGrid`: rows rotated and rounded at random, whose sums are small integers.

A rotation by public random signs and Hadamard transforms makes the coordinates of any row about
equally large, so that few bits hold each coordinate of a sum. Rounding is at random, drawn again
until the rounded row is no longer than a bound, which is its sensitivity. The proof note is
docs/proofs/skellam.md.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.checks import SUM_BITS
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated, mix, named_values, words_at
from fedveil.privacy.noise.grid import Grid
from fedveil.privacy.noise.secure_random import SecureRandom
from fedveil.privacy.noise.skellam import LARGEST_VARIANCE, skellam_int

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MOST_BITS = 32
"""Of the words of a rotated sum."""

DEVIATIONS = 6.0
"""The standard deviations of a coordinate of the sum that are within the modulus."""

_FINE = 2.0**-12
_USEFUL, _LEAST_USEFUL, _ROUNDING_SHARE = 16.0, 256.0, 2.0**-8
_LONGEST = 2.0
_MARGIN = 1 + 2.0**-40
_ATTEMPTS = 200
_SPREAD = 4  # of the coordinates, this part may be beyond half of the range
_NUMBERS = 1 << 22
_SIGNS = np.uint64(0x5851F42D4C957F2D)


@dataclass(frozen=True)
class RotatedGrid:
    """Multiples of `spacing` in rotated coordinates, of which sums are known modulo 2^bits.

    Guarantee: docs/proofs/skellam.md. A rounded row is a function of its row and of randomness of
    its own, and the squares of its steps add up to at most `most`, exactly, as integers. So a row
    moves a sum by at most `sensitivity` steps in L2, whatever it was before.

    Attributes:
        spacing: The size of a step, a power of two.
        bits: The number of bits of a word, 16 to 32.
        most: The largest squared L2 length of a rounded row, in steps.
        size: The number of coordinates.

    | edge | behaviour |
    |---|---|
    | bits outside 16 to 32, a spacing that is no power of two, no coordinates | BadInput |
    | rounding has failed to stay within the bound 200 times | rounded towards zero instead |
    | a row that is longer than the bound even so | a row of zeros |
    | a sum that is spread over the whole range, as with a wrong mask | `plausible` is False |
    """

    spacing: float
    bits: int
    most: int
    size: int

    def __post_init__(self) -> None:
        """Raise BadInput for the edges above."""
        Grid(self.spacing)
        SUM_BITS.check("bits", self.bits)
        if self.bits > MOST_BITS:
            raise BadArgument(f"{{bits}} is {self.bits}: a rotated sum has at most 32", "bits")
        if not 1 <= self.most < 1 << 62 or self.size < 1:
            raise BadInput(
                f"rows of {self.size} coordinates and {self.most} squared steps: at least 1 of "
                "each is needed"
            )

    @property
    def identity(self) -> Stated:
        """Identity pairs: grid "rotated", then every field."""
        return (("grid", "rotated"), *named_values(self, "spacing", "bits", "most", "size"))

    @cached_property
    def sensitivity(self) -> float:
        """The L2 length that no rounded row exceeds, in steps."""
        return math.nextafter(math.sqrt(self.most), math.inf)

    @property
    def report_grid(self) -> Grid:
        """The grid of the reports, in rotated coordinates."""
        return Grid(self.spacing)

    @property
    def fine(self) -> Grid:
        """The grid to which rows are cut before they are rotated."""
        return Grid(self.spacing * _FINE)

    def variance(self, multiplier: float) -> float:
        """The variance in squared steps of noise of `multiplier` sensitivities, or hardly more."""
        return (multiplier * self.sensitivity) ** 2 * _MARGIN

    def add_noise_(self, steps: Integers, multiplier: float) -> None:
        """Add secure Skellam noise of `multiplier` sensitivities to steps [P], in place."""
        steps += skellam_int(SecureRandom(), self.variance(multiplier), len(steps))

    def rounded_sum(self, rows: torch.Tensor, round: int) -> Integers:
        """The sum of rows [B, P], float64 in steps of `fine`, each rotated and rounded, int64 [P].

        Guarantee: a row's term is a function of the row, of `round` and of the words of a
        `SecureRandom` call of its own, and has at most `most` squared steps.
        """
        total = np.zeros(self.size, dtype=np.int64)
        for row in self.rotate(rows.numpy(), round) * _FINE:
            total += self._rounded(row)
        return total

    def _rounded(self, row: Floats) -> Integers:
        """A row [P] rounded at random to whole steps, with at most `most` squared steps."""
        low = np.floor(row)
        chances = ((row - low) * 2.0**32).astype(np.uint64)
        whole = low.astype(np.int64)
        for _ in range(_ATTEMPTS):
            words = SecureRandom().words(-(-self.size // 2)).view(np.uint32)[: self.size]
            steps = whole + (words < chances)
            if self._within(steps):
                return steps
        steps = np.trunc(row).astype(np.int64)
        return steps if self._within(steps) else np.zeros_like(steps)

    def _within(self, steps: Integers) -> bool:
        """Whether the squares of steps [P] add up to at most `most`, in integers."""
        largest = int(np.abs(steps).max())
        if largest * largest > self.most:
            return False
        piece = (1 << 62) // max(1, largest * largest)  # whose squares have room in 63 bits
        parts = (steps[a : a + piece] for a in range(0, len(steps), piece))
        return sum(int(np.dot(part, part)) for part in parts) <= self.most

    def rotate(self, rows: Floats, round: int) -> Floats:
        """Rows [B, P] in the rotated coordinates of a round, as a new array.

        Two Hadamard transforms, of the first 2^m coordinates and of the last 2^m, with 2^m the
        largest power of two up to P. Signs are changed before each. Whatever B is, a row's numbers
        are the same to the last bit.
        """
        out = np.array(rows, dtype=np.float64)
        first, second = self._signs(round)
        _transform_(out[:, : self._width], first, back=False)
        _transform_(out[:, -self._width :], second, back=False)
        return out

    def rotate_back(self, rows: Floats, round: int) -> Floats:
        """The rows [B, P] that `rotate` has turned into these, up to rounding, as a new array."""
        out = np.array(rows, dtype=np.float64)
        first, second = self._signs(round)
        _transform_(out[:, -self._width :], second, back=True)
        _transform_(out[:, : self._width], first, back=True)
        return out

    @property
    def _width(self) -> int:
        """The largest power of two up to the number of coordinates."""
        return 1 << (self.size.bit_length() - 1)

    def _signs(self, round: int) -> tuple[Floats, Floats]:
        """The public signs of both transforms of a round, +1 and -1, each [2^m]."""
        return _public_signs(self._width, round)

    def centred(self, steps: Integers) -> Integers:
        """Steps modulo 2^bits, as the numbers from -2^(bits - 1) to below 2^(bits - 1)."""
        half = 1 << (self.bits - 1)
        return ((steps + half) & ((1 << self.bits) - 1)) - half

    def plausible(self, centred: Integers) -> bool:
        """Whether at most a quarter of the coordinates of a sum is beyond half of the range.

        Of a sum that its plan has room for, hardly any is. Of uniform numbers half are.
        """
        beyond = int((np.abs(centred) > 1 << (self.bits - 2)).sum())
        return beyond * _SPREAD <= len(centred)

    def open_(self, total: torch.Tensor, round: int) -> None:
        """Replace a sum of reports in rotated coordinates, float64 [P], by the sum of the rows.

        Only the sum modulo 2^bits is used. Raises BadInput for one that is not `plausible`.
        """
        steps = self.centred(self.report_grid.quantise(total).numpy())
        if not self.plausible(steps):
            raise BadInput(
                f"round {round}: the sum is spread over all of 2^{self.bits} steps: a site did not "
                "follow the protocol, or sum.bits is too few; nothing is handed on"
            )
        values = steps[None].astype(np.float64) * self.spacing
        total.copy_(torch.from_numpy(self.rotate_back(values, round)[0]))

    def room_for(self, coordinate: float) -> bool:
        """Whether coordinates of that standard deviation, in steps, are within the modulus.

        That is, `DEVIATIONS` standard deviations of them.
        """
        return DEVIATIONS * coordinate < 1 << (self.bits - 1)

    def coordinate(self, clip: float, joined: float, multiplier: float) -> float:
        """The standard deviation of a coordinate of a round's sum, in steps, at most about this.

        Args:
            clip: The clip of each row.
            joined: The number of rows in the sum. All may point one way.
            multiplier: The noise of the sum, in sensitivities.
        """
        signal = (joined * clip / self.spacing) ** 2 / self._width
        return math.sqrt(signal + joined / 4 + self.variance(multiplier))


@dataclass(frozen=True)
class Rounding:
    """How the rows of a round are rounded: on a rotated grid, with the signs of that round."""

    rotated: RotatedGrid
    round: int

    @property
    def spacing(self) -> float:
        """The size of a step."""
        return self.rotated.spacing


def finest_grid(
    bits: int, clip: float, size: int, joined: float, multiplier: float, own: float
) -> RotatedGrid:
    """The rotated grid for sums of rows in words of so many bits, whether these are enough or not.

    It is the finest that has room, but no finer than is of use: until the bound on rounded rows is
    0.2 % above the clip and rounding adds 0.4 % to the variance of the noise. A row's bound is at
    most twice the clip: a coarser grid is not tried.

    Args:
        bits: The number of bits of a word.
        clip: The clip of each row, in L2.
        size: The number of coordinates.
        joined: The largest number of rows in a sum, up to chance.
        multiplier: The largest noise of a sum, in sensitivities.
        own: The noise of one site, in sensitivities.
    """
    root = math.sqrt(size)
    useful = max(_USEFUL * root, _LEAST_USEFUL)
    if multiplier > 0:
        useful = max(useful, math.sqrt(joined / 4 / _ROUNDING_SHARE) / multiplier)
    exponent = math.frexp(clip / useful)[1] - 1
    while True:
        grid = RotatedGrid(2.0**exponent, bits, bound(clip / 2.0**exponent, size), size)
        coarser = 2 * grid.spacing
        if grid.room_for(grid.coordinate(clip, joined, multiplier)) and has_table(grid, own):
            return grid
        if bound(clip / coarser, size) > (_LONGEST * clip / coarser) ** 2:
            return grid
        exponent += 1


def has_table(grid: RotatedGrid, own: float) -> bool:
    """Whether noise of `own` sensitivities at a site can be drawn exactly."""
    return grid.variance(own) <= LARGEST_VARIANCE


def bound(length: float, size: int) -> int:
    """The largest squared length that rounding may give a row of `length` steps, a whole number.

    The less of two: (l + sqrt(P))^2, which no rounding exceeds, and l^2 + P / 4 + l + sqrt(P) / 2,
    which it exceeds with a probability of at most 1 - e^-1/2 (Kairouz, Liu and Steinke 2021).
    """
    root = math.sqrt(size)
    return max(1, math.floor(min((length + root) ** 2, length**2 + size / 4 + length + root / 2)))


@lru_cache(maxsize=2)
def _public_signs(width: int, round: int) -> tuple[Floats, Floats]:
    """The signs of both transforms of a round, +1 and -1, each [width]. Cached, and read-only."""
    keys = mix(np.array([2 * round, 2 * round + 1], dtype=np.uint64) ^ _SIGNS)
    words = words_at(keys[:, None], np.arange(width)[None, :])
    signs = 1.0 - 2.0 * (words >> np.uint64(63)).astype(np.float64)
    signs.setflags(write=False)
    first, second = signs
    return first, second


def _transform_(rows: Floats, signs: Floats, *, back: bool) -> None:
    """The orthonormal Hadamard transform of rows [B, 2^m], in place.

    Numbers are multiplied by `signs` before it, or after it on the way `back`.
    """
    count, width = rows.shape
    if not back:
        rows *= signs
    work = rows.copy()
    half = 1
    while half < width:
        pairs = work.reshape(count, width // (2 * half), 2, half)
        both = np.empty_like(pairs)
        np.add(pairs[:, :, 0], pairs[:, :, 1], out=both[:, :, 0])
        np.subtract(pairs[:, :, 0], pairs[:, :, 1], out=both[:, :, 1])
        work, half = both.reshape(count, width), 2 * half
    rows[:] = work
    rows /= math.sqrt(width)
    if back:
        rows *= signs


def rows_at_once(size: int) -> int:
    """How many rows of `size` coordinates are rotated at a time."""
    return max(1, _NUMBERS // size)
