"""Bounds: what limits one client's influence, and therefore knows its sensitivity."""

import math
from dataclasses import dataclass

import torch

from fedveil.errors import BadInput
from fedveil.privacy.claims import Relation

ROUNDING = 1e-6
SMALLEST = 1e-20


@dataclass(frozen=True)
class Bounded:
    """Rows after a bound: `clipped[k]` says whether row k was too long."""

    rows: torch.Tensor
    clipped: torch.Tensor


@dataclass(frozen=True)
class FixedBound:
    """Scale each row down to an L2 norm of at most `value`; shorter rows are left alone.

    Guarantee: the returned rows have L2 norm at most `value` exactly, as real numbers. Norms
    and scaled rows are computed in float64 and rows are scaled to `value * (1 - 1e-6)`, which
    leaves room for rounding them back to float32.

    | edge | behaviour |
    |---|---|
    | value below 1e-20, NaN or infinite | BadInput (float32 has no room for the rounding) |
    | zero row | stays zero |
    | row as long as float32 allows | bounded like any other |
    | row with NaN or infinity | ValueError: `training.server.accept` zeroes and names it first |
    | rows of half precision or integers | ValueError (1e-6 leaves no room for their rounding) |
    | no rows | no rows |

    >>> FixedBound(1.0).apply(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).clipped.tolist()
    [True, False]
    """

    value: float

    def __post_init__(self) -> None:
        if not (self.value >= SMALLEST and math.isfinite(self.value)):
            raise BadInput(
                f"bound.value is {self.value}: a number of at least {SMALLEST} is needed"
            )

    def sensitivity(self, relation: Relation) -> float:
        """How far one client can move the sum of bounded rows, in L2.

        Adding, removing or zeroing a client moves it by one row; replacing a client by another
        moves it by the difference of two.
        """
        match relation:
            case Relation.ADD_REMOVE | Relation.ZERO_OUT:
                return self.value
            case Relation.REPLACE:
                return 2 * self.value

    def apply(self, rows: torch.Tensor) -> Bounded:
        """Bound the rows of [K, P]; the input is left as it is."""
        if rows.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"rows are {rows.dtype}: 1e-6 leaves no room for its rounding")
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        if not bool(torch.isfinite(norms).all()):
            raise ValueError("a row is not finite: reject it before bounding")
        limit = self.value * (1 - ROUNDING)
        clipped = norms > limit
        if not bool(clipped.any()):
            return Bounded(rows, clipped)
        bounded = rows.clone()
        bounded[clipped] = (rows[clipped].double() * (limit / norms[clipped])[:, None]).to(
            rows.dtype
        )
        return Bounded(bounded, clipped)
