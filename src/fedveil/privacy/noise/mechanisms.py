"""Mechanisms: noise for rows [K, P], in place, row k from its own key, or secure on a grid.

A mechanism never sees a sensitivity typed by hand: `scales` is what a release computed from a
clip. Rows are drawn in blocks that stay in the cache.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.errors import BadArgument
from fedveil.base.identity import Stated
from fedveil.privacy.clip import Norm
from fedveil.privacy.noise.grid import Grid, gaussian_int, grid_for, laplace_int
from fedveil.privacy.noise.secure_random import SecureRandom
from fedveil.privacy.noise.streams import Keys, SecureKeys, add_normals_, laplace_, uniform_

Scales = npt.NDArray[np.float64]

_BLOCK = 1 << 18
_PIECE = 1 << 15


@dataclass(frozen=True)
class _AdditiveNoise:
    """Noise of scale multiplier x sensitivity on every coordinate.

    The scale is the standard deviation of Gaussian noise, or b of Laplace noise.

    | edge | behaviour |
    |---|---|
    | multiplier < 0, NaN or infinite | BadInput |
    """

    multiplier: float

    norm: ClassVar[Norm]

    def __post_init__(self) -> None:
        """Raise BadArgument unless the multiplier is finite and not negative."""
        if not (self.multiplier >= 0 and math.isfinite(self.multiplier)):
            raise BadArgument(
                f"{{multiplier}} is {self.multiplier}: a number >= 0 is needed", "multiplier"
            )

    def grid(self, scale: float, size: int) -> Grid:
        """The grid of secure noise of this scale on rows of `size` coordinates.

        `scale` is multiplier x sensitivity, from which the sensitivity follows. A multiplier of 0
        raises ZeroDivisionError.
        """
        return grid_for(scale / self.multiplier, scale, size, self.norm)


@dataclass(frozen=True)
class GaussianMechanism(_AdditiveNoise):
    """Add N(0, (multiplier x sensitivity)^2) to every coordinate of rows clipped in L2.

    Guarantee: a row (or a sum of rows) of L2 sensitivity D, released once, is the Gaussian
    mechanism with the event `Gaussian(multiplier)`.

    | edge | behaviour |
    |---|---|
    | multiplier < 0, NaN or infinite | BadInput |
    | multiplier 0 | no noise; the event has multiplier 0 and its epsilon is infinite |
    | zero row | noise all the same |
    """

    norm = Norm.L2
    word = "Gaussian"
    variance = 1.0

    @property
    def identity(self) -> Stated:
        """Identity pairs: mechanism "gaussian", multiplier."""
        return (("mechanism", "gaussian"), ("multiplier", self.multiplier))

    def add_(self, rows: torch.Tensor, scales: Scales, keys: Keys) -> None:
        """rows[k] += scales[k] x standard normals, in place, for rows [K, P].

        scales[k] is multiplier x sensitivity. With secure keys, row k becomes a multiple of its
        grid's spacing, and a scale of 0 raises AssertionError.
        """
        if isinstance(keys, SecureKeys):
            _add_on_grid_(rows, scales, self.grid, gaussian_int)
            return
        step = max(1, _BLOCK // max(1, rows.shape[1]))
        columns = torch.from_numpy(scales).to(rows.dtype)[:, None]
        for start in range(0, len(rows), step):
            block = slice(start, start + step)
            add_normals_(rows[block], columns[block], keys[block])


@dataclass(frozen=True)
class LaplaceMechanism(_AdditiveNoise):
    """Add Laplace noise of scale multiplier x sensitivity to every coordinate, rows clipped in L1.

    Guarantee: a row of L1 sensitivity D, released once, is (1 / multiplier)-DP, pure.

    | edge | behaviour |
    |---|---|
    | multiplier < 0, NaN or infinite | BadInput |
    | a uniform at the very end of its range | finite noise: at most 46 scales |
    """

    norm = Norm.L1
    word = "Laplace"
    variance = 2.0

    @property
    def identity(self) -> Stated:
        """Identity pairs: mechanism "laplace", multiplier."""
        return (("mechanism", "laplace"), ("multiplier", self.multiplier))

    def add_(self, rows: torch.Tensor, scales: Scales, keys: Keys) -> None:
        """rows[k] += scales[k] x standard Laplace noise, in place, for rows [K, P].

        scales[k] is multiplier x sensitivity. With secure keys, row k becomes a multiple of its
        grid's spacing, and a scale of 0 raises AssertionError.
        """
        if isinstance(keys, SecureKeys):
            _add_on_grid_(rows, scales, self.grid, laplace_int)
            return
        for block, scale, block_keys, scratch in _blocks(rows, scales, keys):
            block.addcmul_(laplace_(scratch, block_keys), scale)


@dataclass(frozen=True)
class TwoPointMechanism:
    """Report every weight of [c - r, c + r] as c + r kappa or c - r kappa (Sun et al. 2021).

    kappa = (e^eps + 1) / (e^eps - 1), P(high) = 1/2 + (w - c) / (2 r kappa). Weights outside the
    range are clamped first.

    Guarantee: for any two inputs, clamped or not, the probability of either report differs by a
    factor of at most e^eps, exactly: the uniform draw is a multiple of 2^-23 and inputs are drawn
    2^-22 towards the centre to make up for it. The report is unbiased for the clamped weight, up
    to that 2^-22 r kappa, with variance (r kappa)^2 - (w - c)^2.

    | edge | behaviour |
    |---|---|
    | epsilon below 1e-6, NaN or infinite | BadInput (the draw has a grid of 2^-23) |
    | weight outside the range | clamped |
    | radius 0 | the report is c: constant, nothing is said |
    """

    epsilon: float

    @property
    def identity(self) -> Stated:
        """Identity pairs: mechanism "two-point", epsilon."""
        return (("mechanism", "two-point"), ("epsilon", self.epsilon))

    def __post_init__(self) -> None:
        """Raise BadArgument unless epsilon is finite and at least 1e-6."""
        if not (self.epsilon >= 1e-6 and math.isfinite(self.epsilon)):
            raise BadArgument(
                f"{{epsilon}} is {self.epsilon}: a number >= 1e-6 is needed", "epsilon"
            )

    @property
    def kappa(self) -> float:
        """The distance of a report from the centre, in radii: 2.16 at epsilon 1, 20 at epsilon 0.1.

        >>> round(TwoPointMechanism(1.0).kappa, 3)
        2.164
        """
        return 1 / math.tanh(self.epsilon / 2)

    def report_(
        self, rows: torch.Tensor, centre: torch.Tensor, radius: torch.Tensor, keys: Keys
    ) -> None:
        """Replace rows [K, P] by reports, in place.

        Centre and radius [P] of the ranges are public. Row k is drawn from keys[k].
        """
        reach = radius * self.kappa
        inverse = torch.where(reach > 0, 1 / reach, 0.0)
        most = max(0.0, 1 / self.kappa - 2.0**-22)
        for block, _, block_keys, scratch in _blocks(rows, np.ones(len(rows)), keys):
            draw = uniform_(scratch, block_keys)
            block.sub_(centre).mul_(inverse).clamp_(-most, most).sub_(draw)
            torch.copysign(reach, block, out=block)
            block.add_(centre)


def add_to_sum_(
    mechanism: GaussianMechanism | LaplaceMechanism, total: torch.Tensor, scale: float, keys: Keys
) -> None:
    """total [P], a sum of clients' rows, += noise of that scale, in place.

    `scale` is multiplier x sensitivity, and `keys` has one key: that of the sum.

    Guarantee: with secure noise, a sum of rows that were not cut to the grid is an AssertionError:
    float sums round, and that would move one client's influence.
    """
    if isinstance(keys, SecureKeys) and not mechanism.grid(scale, len(total)).holds(total):
        raise AssertionError("a sum that is not on the grid has no sensitivity to rely on")
    mechanism.add_(total[None, :], np.array([scale]), keys)


def _add_on_grid_(
    rows: torch.Tensor,
    scales: Scales,
    grid_of: Callable[[float, int], Grid],
    draw: Callable[[SecureRandom, float, int], npt.NDArray[np.int64]],
) -> None:
    """Cut rows [K, P] to a grid and add rounded secure noise, in place.

    Args:
        rows: The rows. Each becomes a multiple of its grid's spacing.
        scales: The noise scale of each row [K]. One that is not positive raises AssertionError.
        grid_of: (scale, coordinates) -> the grid.
        draw: (source, scale in steps of the grid, count) -> `count` integers of noise.

    Guarantee: docs/proofs/secure.md. Cutting lengthens no row. A sum of rows must consist of cut
    ones (`Grid.cut_`), which cutting leaves alone. The integers are the release; writing them into
    float32 rows comes after it.
    """
    if not ((scales > 0) & np.isfinite(scales)).all():
        raise AssertionError("a row without noise is not to be released")
    source, size = SecureRandom(), rows.shape[1]
    for scale in np.unique(scales[scales > 0]).tolist():
        grid = grid_of(scale, size)
        alike = np.flatnonzero(scales == scale)
        together = max(1, _PIECE // max(1, size))
        for a in range(0, len(alike), together):
            some = torch.from_numpy(alike[a : a + together])
            block = rows[a : a + together] if len(alike) == len(rows) else rows[some]
            for piece in torch.split(block, _PIECE, dim=1):
                noise = torch.from_numpy(draw(source, scale / grid.spacing, piece.numel()))
                piece.copy_(grid.dequantise(grid.quantise(piece) + noise.view_as(piece)))
            if len(alike) < len(rows):
                rows[some] = block


def _blocks(
    rows: torch.Tensor, scales: Scales, keys: Keys
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Keys, torch.Tensor]]:
    """Yield (rows, scales as a column, keys, scratch) of a few rows of [K, P] at a time.

    Rows are views. The scratch has their shape, and is the same memory each time.
    """
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    scratch = torch.empty(min(step, len(rows)), rows.shape[1], dtype=rows.dtype)
    columns = torch.from_numpy(np.asarray(scales, dtype=np.float64)).to(rows.dtype)[:, None]
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        end = start + len(block)
        yield block, columns[start:end], keys[start:end], scratch[: len(block)]
