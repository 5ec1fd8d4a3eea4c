"""Clips, which limit a client's influence and know their sensitivity, and arithmetic on rows.

Rows [K, P] are measured and added up in float64, a piece at a time.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from fedveil.base.checks import SMALLEST_CLIP
from fedveil.base.errors import BadArgument
from fedveil.privacy.accounting.claims import Relation

BLOCK = 1 << 16
"""Elements in float64 at a time."""


class Norm(StrEnum):
    """How length is measured: L2 goes with Gaussian noise, L1 with Laplace noise."""

    L1 = "l1"
    L2 = "l2"


def row_norms(rows: torch.Tensor, norm: Norm = Norm.L2) -> torch.Tensor:
    """The L1 or L2 length of each row of [K, P], float64 [K], summed in float64 a piece at a time.

    It is finite exactly when every entry of the row is: float64 has room for the sum of the squares
    of anything that float32 can hold.
    """
    if rows.numel() > BLOCK:
        if rows.shape[1] <= BLOCK:
            pieces = torch.split(rows, rows_per_block(rows))
            return torch.cat([row_norms(piece, norm) for piece in pieces])
        norms = torch.empty(len(rows), dtype=torch.float64)
        for k, row in enumerate(rows):
            parts = torch.cat([row_norms(piece[None], norm) for piece in torch.split(row, BLOCK)])
            norms[k] = row_norms(parts[None], norm)[0]
        return norms
    wide = rows.to(torch.float64)
    if norm is Norm.L1:
        return wide.abs().sum(dim=1)
    if len(rows) == 1:
        return torch.dot(wide[0], wide[0]).sqrt()[None]
    return (
        wide.square_().sum(dim=1).sqrt_() if wide is not rows else wide.square().sum(dim=1).sqrt()
    )


def all_finite(norms: torch.Tensor) -> bool:
    """Whether all of the lengths that `row_norms` returned are finite.

    Then every entry of every row is finite as well.

    >>> all_finite(torch.tensor([1.0, 2.0])), all_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    return bool(np.isfinite(norms.numpy()).all())


def add_weighted_(total: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> None:
    """total [P] += weights [K] @ rows [K, P], in place, in float64.

    `total` and `weights` are float64. No copy of all rows is made.
    """
    if rows.shape[1] <= BLOCK:
        step = rows_per_block(rows)
        for a in range(0, len(rows), step):
            total += torch.mv(rows[a : a + step].double().T, weights[a : a + step])
        return
    factors, columns = weights.tolist(), torch.split(rows, BLOCK, dim=1)
    for place, pieces in zip(torch.split(total, BLOCK), columns, strict=True):
        for piece, weight in zip(pieces, factors, strict=True):
            place.add_(piece.double(), alpha=weight)


def rows_per_block(rows: torch.Tensor) -> int:
    """The number of rows of [K, P] with about 65,536 entries together, at least 1."""
    return max(1, BLOCK // max(1, rows.shape[1]))


ROUNDING = 1e-6


@dataclass(frozen=True)
class Clipped:
    """Rows after a clip.

    Attributes:
        rows: The clipped rows [K, P]: the tensor that was given, changed in place.
        norms: Their lengths before the clip, float64 [K].
        clipped: Which of them were too long, bool [K].
    """

    rows: torch.Tensor
    norms: torch.Tensor
    clipped: torch.Tensor


@dataclass(frozen=True)
class Clip:
    """Scale each row down to a norm of at most `value`. Shorter rows are left alone.

    `gradient`, when given, says how the clip is reached: every local gradient is clipped by it
    and the learning rates add up to value / gradient. Without it the update itself is clipped.

    Guarantee: the returned rows have a norm of at most `value` exactly, as real numbers. Norms
    and scaled rows are computed in float64 and rows are scaled to `value * (1 - 1e-6)`, which
    leaves room for rounding them back to float32.

    | edge | behaviour |
    |---|---|
    | value below 1e-20, NaN or infinite | BadInput (float32 has no room for the rounding) |
    | zero row | stays zero |
    | row as long as float32 allows | clipped like any other |
    | row with NaN or infinity | ValueError: `training.reports.accept` zeroes and names it first |
    | rows of half precision or integers | ValueError (1e-6 leaves no room for their rounding) |
    | no rows | no rows |

    >>> Clip(1.0).apply_(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).clipped.tolist()
    [True, False]
    """

    value: float
    norm: Norm = Norm.L2
    gradient: float | None = None

    def __post_init__(self) -> None:
        """Raise BadArgument for a value below 1e-20, NaN or infinite. `gradient` is not checked."""
        if not (self.value >= SMALLEST_CLIP and math.isfinite(self.value)):
            raise BadArgument(
                f"{{value}} is {self.value}: a number of at least {SMALLEST_CLIP} is needed",
                "value",
            )

    @property
    def per_gradient(self) -> "Clip | None":
        """The clip on each local gradient, None if the update itself is clipped."""
        return None if self.gradient is None else Clip(self.gradient, self.norm)

    def sensitivity(self, relation: Relation) -> float:
        """How far one client can move a sum of clipped rows, in this clip's norm.

        Adding, removing or zeroing a client moves it by one row; replacing a client by another
        moves it by the difference of two.
        """
        match relation:
            case Relation.ADD_REMOVE | Relation.ZERO_OUT:
                return self.value
            case Relation.REPLACE:
                return 2 * self.value

    def apply_(self, rows: torch.Tensor, norms: torch.Tensor | None = None) -> Clipped:
        """Clip the rows of [K, P] in place, and return them with their norms.

        Raises ValueError for rows that are not finite, or neither float32 nor float64. `norms` are
        the rows' lengths in this clip's norm, float64 [K], if the caller knows them.
        """
        if rows.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"rows are {rows.dtype}: 1e-6 leaves no room for its rounding")
        norms = row_norms(rows, self.norm) if norms is None else norms
        if not all_finite(norms):
            raise ValueError("a row is not finite: reject it before clipping")
        limit = self.value * (1 - ROUNDING)
        lengths = norms.numpy()
        long = lengths > limit
        clipped = torch.from_numpy(long)
        if not long.any():
            return Clipped(rows, norms, clipped)
        if rows.shape[1] <= BLOCK:
            scales = torch.from_numpy(limit / np.maximum(lengths, limit))[:, None]
            step = rows_per_block(rows)
            for a in range(0, len(rows), step):
                block = rows[a : a + step]
                block.copy_(block.double().mul_(scales[a : a + step]))
            return Clipped(rows, norms, clipped)
        for k in torch.nonzero(clipped)[:, 0].tolist():
            for piece in torch.split(rows[k], BLOCK):
                piece.copy_(piece.double().mul_(limit / norms[k]))
        return Clipped(rows, norms, clipped)
