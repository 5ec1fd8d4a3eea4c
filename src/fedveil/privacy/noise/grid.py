"""Noise on an integer grid: the low bits of a release say nothing.

Clipped rows become multiples of a public step, sums are integers, and the noise is a rounded
Gaussian (or Laplace) variable, drawn exactly. A release is then a rounding of the textbook
mechanism, with its sensitivity and its epsilon. The proof note is docs/proofs/secure.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtri

from fedveil.base.errors import BadInput
from fedveil.privacy.clip import BLOCK, Norm
from fedveil.privacy.noise.secure_random import DISTANCE, SecureRandom

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LARGEST_SCALE = 2.0**32
"""Noise of more steps than this is refused: too many draws would need exact arithmetic."""

LARGEST_SUM = 2.0**53
"""Sums of multiples of a step are exact in float64 up to as many steps."""

STEPS_AT_ONCE = 1 << 17
"""Numbers of several rows that are cut to the grid at a time: they stay in the cache."""

_PIECE = 1 << 14  # draws at a time: what they need stays in the cache
_MARGIN = 2.0**-44
_FAR = np.uint64(1 << 47)
_FIRST_BITS, _MORE_BITS = 63, 128
_WORDS_PER_DRAW = 8
_GUARD_BITS = 64


@dataclass(frozen=True)
class Grid:
    """The multiples of `spacing`, a power of two.

    Guarantee: `cut_` never makes a coordinate larger, so a row of norm at most S still has norm at
    most S, in L1 and L2, as a real number; and cut rows add up exactly in float64, in any order,
    while the sum is below 2^53 steps. A sum of cut rows therefore has the sensitivity that
    `Clip.sensitivity` says.

    | edge | behaviour |
    |---|---|
    | spacing not a power of two, or outside 2^-500 .. 2^500 | BadInput |

    >>> Grid(0.25).cut_(torch.tensor([[0.9, -0.9, 0.2]])).tolist()
    [[0.75, -0.75, 0.0]]
    """

    spacing: float

    def __post_init__(self) -> None:
        """Raise BadInput unless the spacing is a power of two from 2^-500 to 2^500."""
        fine = (
            math.isfinite(self.spacing) and self.spacing > 0 and math.frexp(self.spacing)[0] == 0.5
        )
        if not (fine and 2.0**-500 <= self.spacing <= 2.0**500):
            raise BadInput(f"the grid's step is {self.spacing}: a power of two is needed")

    def cut_(self, rows: torch.Tensor) -> torch.Tensor:
        """Round rows towards zero to multiples of the spacing, in place, and return them.

        Their type stays. Scaling by a power of two and cutting off the fraction are exact; what is
        left has no more digits than the row had.

        | edge | behaviour |
        |---|---|
        | a coordinate smaller than the spacing | 0 |
        | NaN or infinity | stays: `training.reports.accept` zeroes and names it first |
        | rows of half precision or integers | ValueError |
        """
        _check_type(rows)
        flat = rows.view(-1) if rows.is_contiguous() else rows
        for piece in torch.split(flat, BLOCK):  # in the cache
            _trunc_(piece.mul_(1 / self.spacing)).mul_(self.spacing)
        return rows

    def holds(self, total: torch.Tensor) -> bool:
        """Whether every coordinate is a multiple of the spacing, of at most 2^53 spacings."""
        return all(self._holds(piece) for piece in torch.split(total.reshape(-1), BLOCK))

    def _holds(self, piece: torch.Tensor) -> bool:
        """Return whether `holds` is true of a piece, which is copied."""
        steps = piece.to(torch.float64) * (1 / self.spacing)
        whole = _trunc_(steps.clone())
        return bool(((steps == whole) & (whole.abs_() <= LARGEST_SUM)).all())

    def quantise(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as numbers of steps, rounded towards zero, int64 of the same shape.

        Only a piece of the rows is held in float64 at a time.

        | edge | behaviour |
        |---|---|
        | a coordinate beyond 2^53 steps | 2^53 steps |
        | NaN or infinity | ValueError |
        | rows of half precision or integers | ValueError |
        """
        _check_type(rows)
        out = torch.empty(rows.shape, dtype=torch.int64)
        for piece, place in zip(
            torch.split(rows.reshape(-1), BLOCK), torch.split(out.view(-1), BLOCK), strict=True
        ):
            if not bool(torch.isfinite(piece).all()):
                raise ValueError("a row is not finite: reject it before quantising")
            steps = _trunc_(piece.double() * (1 / self.spacing))
            place.copy_(steps.clamp_(-LARGEST_SUM, LARGEST_SUM))
        return out

    def dequantise(self, steps: torch.Tensor) -> torch.Tensor:
        """Values of numbers of steps, as a new float64 tensor, exact up to 2^53 steps."""
        return steps.to(torch.float64, copy=True).mul_(self.spacing)


@dataclass(frozen=True)
class Steps:
    """Clipped rows as whole numbers of steps of a grid, added up a block at a time.

    Row b is multiplied by `factors[b]`, which clips it and divides it by the spacing, and rounded
    towards zero.

    Guarantee: sums are exact, in any order. A row of at most `most` steps before rounding is no
    more than 1e-6 of that longer afterwards: factors and products are rounded once each, in
    `dtype`. Numbers are float32 and int32 where these have room for the longest sum of a full
    block, otherwise float64 and int64. This follows from public numbers alone, so that no row is
    rounded differently because of others.

    Attributes:
        factors: The factor of each row, float64 [B], at most `most` over the row's length.
        most: The most steps that a row may have.
        largest_factor: The largest factor that a row may have.
        slots: The public number of rows of a full block, at least B.
    """

    factors: torch.Tensor
    most: float
    largest_factor: float
    slots: int

    def __len__(self) -> int:
        return len(self.factors)

    @property
    def fits(self) -> bool:
        """Whether float32 holds every possible factor, and int32 the sum of a full block."""
        few = self.slots * self.most < _LARGEST_INT32
        return few and self.largest_factor < _LARGEST_FACTOR

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type in which rows are scaled."""
        return torch.float32 if self.fits else torch.float64

    def added(self, scaled: torch.Tensor) -> torch.Tensor:
        """The sum over axis 0 of scaled rows [B, ...], each rounded towards zero, as integers."""
        return _whole(scaled).sum(dim=0, dtype=_INTEGERS[scaled.dtype])

    def cut(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [B, n] in steps, as integers."""
        return _whole(rows * self.factors.to(self.dtype)[:, None])

    def add_(self, total: torch.Tensor, rows: torch.Tensor) -> None:
        """total += the sum of the first B rows [at least B, ...] in steps, in place, float64.

        `total` may be of any shape with as many numbers as a row. Rows behind the first B are not
        looked at.

        >>> steps = Steps(torch.tensor([4.0, 2.0], dtype=torch.float64), 8.0, 4.0, 2)
        >>> total = torch.zeros(2, dtype=torch.float64)
        >>> steps.add_(total, torch.tensor([[1.0, -0.3], [0.7, -0.7], [9.0, 9.0]]))
        >>> total.tolist()
        [5.0, -2.0]
        """
        rows = rows[: len(self)].reshape(len(self), -1)
        factors = self.factors.to(self.dtype)[:, None]
        columns = max(1, STEPS_AT_ONCE // max(1, len(self)))
        pieces = torch.split(rows, columns, dim=1)
        for place, piece in zip(torch.split(total.view(-1), columns), pieces, strict=True):
            place += self.added(piece * factors)


_LARGEST_INT32, _LARGEST_FACTOR = 2.0**31, 2.0**100
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _whole(scaled: torch.Tensor) -> torch.Tensor:
    """Numbers rounded towards zero, as integers with room for them."""
    return scaled.to(_INTEGERS[scaled.dtype])


def grid_for(sensitivity: float, scale: float, coordinates: int, norm: Norm = Norm.L2) -> Grid:
    """The grid for rows of a sensitivity and noise of a scale (standard deviation or Laplace's b).

    Guarantee: any grid is safe; this one costs little. A quantised row is off by at most 2^-13
    of `sensitivity` in `norm`; the step is at most 2^-20 of `scale`.
    Where these would need noise of more than 2^30 steps, or a row of more than 2^40, the grid is
    as fine as that allows. It depends on public numbers only.

    | edge | behaviour |
    |---|---|
    | sensitivity or scale not above 0, or not finite; coordinates < 1 | BadInput |

    >>> grid_for(1.0, 1.0, 10**6).spacing == 2.0**-23
    True
    """
    if not (0 < sensitivity < math.inf and 0 < scale < math.inf and coordinates >= 1):
        raise BadInput(
            f"no grid for sensitivity {sensitivity}, noise {scale} and {coordinates} coordinates: "
            "finite numbers above 0 are needed"
        )
    spread = coordinates if norm is Norm.L1 else math.sqrt(coordinates)
    wanted = min(scale * 2.0**-20, sensitivity * 2.0**-13 / spread)
    finest = max(scale * 2.0**-30, sensitivity * 2.0**-40)
    (_, below), (fraction, above) = math.frexp(wanted), math.frexp(finest)
    return Grid(2.0 ** max(below - 1, above - (fraction == 0.5)))


def delta_of_sampler(coordinates: int, releases: int, epsilon: float) -> float:
    """The addition to delta for words that are not perfectly uniform, at most 1.

    Guarantee: `releases` releases of `coordinates` draws each are (epsilon, delta + this)-DP if
    they would be (epsilon, delta)-DP with the exact law. It is (1 + e^epsilon) times the total
    variation distance, of 2^-110 per draw. Pure DP (delta 0) becomes approximate by it.

    >>> delta_of_sampler(10**7, 10**4, 8.0) < 1e-18
    True
    """
    distance = coordinates * releases * _WORDS_PER_DRAW * DISTANCE
    return min(1.0, distance * (1 + math.exp(min(epsilon, 700.0))))


def gaussian_int(
    source: SecureRandom, scale: npt.ArrayLike, shape: int | tuple[int, ...]
) -> Integers:
    """round(scale x Z) for independent standard normals Z, int64 of `shape`.

    `scale` is in steps of the grid, and may be an array that broadcasts to `shape`.

    Guarantee: for uniform words the law is exact: P(k) = Phi((k + 1/2) / scale) - Phi((k - 1/2) /
    scale) for every integer k. An integer plus such a draw is the rounding of that integer plus
    scale x Z, so adding it to quantised values is a post-processing of the Gaussian mechanism.

    | edge | behaviour |
    |---|---|
    | scale < 0, NaN or above 2^32 | ValueError |
    | scale 0 | zeros |
    | scale far below 1 | nearly always 0, which is what rounding does |
    | a draw on the edge of two integers | more words are drawn until it is clear |

    >>> gaussian_int(SecureRandom(), 1000.0, (2, 3)).shape
    (2, 3)
    """
    return _draw_rounded(source, scale, shape, normal_size, normal_tail)


def laplace_int(
    source: SecureRandom, scale: npt.ArrayLike, shape: int | tuple[int, ...]
) -> Integers:
    """round(scale x X) for independent X of density exp(-|x|) / 2, int64 of `shape`.

    `scale` is in steps of the grid, and may be an array that broadcasts to `shape`.

    Guarantee: as `gaussian_int`, for the Laplace mechanism: P(|k| >= n) = exp(-(n - 1/2) / scale)
    for n >= 1, exactly. The edges are the same.

    >>> laplace_int(SecureRandom(), 0.0, 3).tolist()
    [0, 0, 0]
    """
    return _draw_rounded(source, scale, shape, _laplace_size, exponential_tail)


_Size = Callable[[Floats], Floats]
"""The |Z| of a symmetric law that is exceeded with probability p, in floats."""

_Tail = Callable[[Fraction, int], int]
"""(x, bits) -> P(|Z| > x) x 2^bits, less than two units off."""


def normal_size(p: Floats) -> Floats:
    """The x with P(|Z| > x) = p, for a standard normal Z and each p, in floats."""
    sizes: Floats = np.asarray(ndtri(p * 0.5))
    np.negative(sizes, out=sizes)
    return sizes


def _laplace_size(p: Floats) -> Floats:
    """The x with P(|X| > x) = p, for a standard Laplace X and each p, in floats."""
    return -np.log(p)


def _draw_rounded(
    source: SecureRandom,
    scale: npt.ArrayLike,
    shape: int | tuple[int, ...],
    size: _Size,
    tail: _Tail,
) -> Integers:
    """Draw round(scale x Z) for a symmetric law, int64 of `shape`, a piece at a time.

    `size` and `tail` are the law of |Z|. Raises ValueError for a scale below 0, above 2^32 or NaN.

    The lowest bit of a word is the sign, the others are the first 63 bits of p, uniform on (0, 1).
    Floats err by less than `_MARGIN` in |Z| for p above 2^-16; where that could change the integer,
    and for smaller p, exact arithmetic decides.
    """
    scales = np.asarray(scale, dtype=np.float64)
    if not bool(((scales >= 0) & (scales <= LARGEST_SCALE)).all()):
        raise ValueError(f"noise of {scale!r} steps: at least 0 and at most 2^32 are possible")
    out = np.empty(shape, dtype=np.int64)
    flat = out.reshape(-1)
    each = scales if scales.ndim == 0 else np.broadcast_to(scales, out.shape).reshape(-1)
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE]
        steps = each if each.ndim == 0 else each[start : start + _PIECE]
        words = source.words(len(piece))
        place = words >> np.uint64(1)
        middle = place.astype(np.float64)
        middle += 0.5
        middle *= 2.0**-63
        sizes = size(middle)
        sizes *= steps
        whole = np.rint(sizes)
        np.copyto(piece, whole, casting="unsafe")
        sizes -= whole
        unsure = np.abs(sizes, out=sizes) > 0.5 - _MARGIN * np.maximum(steps, 1.0)
        unsure |= place < _FAR
        unsure &= steps > 0
        for i in np.flatnonzero(unsure).tolist():
            scale = float(steps if steps.ndim == 0 else steps[i])
            piece[i] = _draw_exactly(source, scale, int(place[i]), size, tail)
        words &= np.uint64(1)
        minus = -words.view(np.int64)  # -1 where the sign is negative, and else 0
        piece ^= minus
        piece -= minus
    return out


def _draw_exactly(source: SecureRandom, scale: float, place: int, size: _Size, tail: _Tail) -> int:
    """round(scale x |Z|), exactly, where |Z| is exceeded with probability p, uniform on (0, 1).

    `place` is the first 63 binary digits of p, as an integer. Further digits are drawn from
    `source` until they decide. `size` and `tail` are the law of |Z|.
    """
    bits = _FIRST_BITS
    while True:
        high, low = source.words(2).tolist()
        place, bits = place << _MORE_BITS | high << 64 | low, bits + _MORE_BITS
        middle = np.array((2 * place + 1) / (1 << bits + 1))
        guess = int(np.rint(size(middle) * scale))
        cell = _cell(tail, Fraction(scale), place, bits, guess)
        if cell is not None:
            return cell


def _cell(tail: _Tail, scale: Fraction, place: int, bits: int, guess: int) -> int | None:
    """The integer k nearest to scale x |Z|, None if that is not clear yet.

    Args:
        tail: The law of |Z|.
        scale: The scale, in steps.
        place: The first `bits` binary digits of p, the probability with which |Z| is exceeded.
        bits: How many digits are known.
        guess: Where to look first.
    """

    def beyond(k: int) -> bool | None:
        """Whether |Z| is beyond the upper edge of k: whether p is below that edge's tail."""
        edge = tail(Fraction(2 * k + 1, 2) / scale, bits)
        if place + 1 <= edge - 2:
            return True
        return False if place >= edge + 2 else None

    k = guess
    while above := beyond(k):
        k += 1
    while above is False and k > 0:
        above = beyond(k - 1)
        if above:
            return k
        k -= 1
    return None if above is None else k


def _trunc_(values: torch.Tensor) -> torch.Tensor:
    """Values rounded towards zero, in place. NumPy does so ten times as fast as torch."""
    np.trunc(values.numpy(), out=values.numpy())
    return values


def _check_type(rows: torch.Tensor) -> None:
    """Raise ValueError for rows that are neither float32 nor float64."""
    if rows.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"rows are {rows.dtype}: float32 or float64 is needed")


# --- tails to any number of bits, in integers ---


def normal_tail(x: Fraction, bits: int) -> int:
    """P(|Z| > x) x 2^bits, as an integer, for a standard normal Z and x >= 0.

    Guarantee: less than two units off, for bits up to 1000.

    | edge | behaviour |
    |---|---|
    | x 0 | 2^bits |
    | a tail far below 2^-bits | 0 |

    >>> normal_tail(Fraction(196, 100), 63) / 2**63
    0.049995790296440...
    """
    power = x * x / 2
    if power > bits:
        return 0
    room = bits + _GUARD_BITS
    inside = _series(power, room, 2) * _root(room) * x.numerator // (x.denominator << room)
    return ((1 << room) - inside) >> _GUARD_BITS


def exponential_tail(x: Fraction, bits: int) -> int:
    """P(X > x) x 2^bits = exp(-x) x 2^bits, as an integer, for x >= 0.

    Guarantee and edges: as `normal_tail`.

    >>> exponential_tail(Fraction(1), 63) / 2**63 == math.exp(-1)
    True
    """
    if x > bits:
        return 0
    return _series(x, bits + _GUARD_BITS, 0) >> _GUARD_BITS


def _series(power: Fraction, room: int, step: int) -> int:
    """The sum over n of (-power)^n / (n! (step n + 1)), times 2^room: two units off per term.

    Terms grow before they shrink, but cutting one off at a unit moves the sum by at most a unit.
    """
    top, bottom = power.numerator, power.denominator
    term = total = 1 << room
    n = 0
    while term:
        n += 1
        term = term * top // (bottom * n)
        total += (-term if n % 2 else term) // (step * n + 1)
    return total


@lru_cache(maxsize=32)
def _root(room: int) -> int:
    """sqrt(2 / pi) x 2^room, as an integer. Cached."""
    pi = 4 * (4 * _arccot(5, room) - _arccot(239, room))
    return math.isqrt((2 << 3 * room) // pi)


def _arccot(n: int, room: int) -> int:
    """arccot(n) x 2^room, as an integer, for n > 1."""
    power = total = (1 << room) // n
    k = 1
    while power:
        power //= -n * n
        k += 2
        total += power // k
    return total
