"""Bounds: what limits one client's influence, and therefore knows its sensitivity."""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch

from fedveil.errors import BadInput
from fedveil.privacy.claims import Relation

ROUNDING = 1e-6
SMALLEST = 1e-20


class Norm(StrEnum):
    """How length is measured: L2 goes with Gaussian noise, L1 with Laplace noise."""

    L1 = "l1"
    L2 = "l2"


@dataclass(frozen=True)
class Bounded:
    """Rows after a bound: their `norms` before it, and which were too long."""

    rows: torch.Tensor
    norms: torch.Tensor
    clipped: torch.Tensor


@dataclass(frozen=True)
class Bound:
    """Scale each row down to a norm of at most `value`; shorter rows are left alone.

    `gradient`, when given, says how the bound is reached: every local gradient is bounded by it
    and the learning rates add up to value / gradient. Without it the update itself is bounded.

    Guarantee: the returned rows have a norm of at most `value` exactly, as real numbers. Norms
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

    >>> Bound(1.0).apply(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).clipped.tolist()
    [True, False]
    """

    value: float
    norm: Norm = Norm.L2
    gradient: float | None = None

    def __post_init__(self) -> None:
        if not (self.value >= SMALLEST and math.isfinite(self.value)):
            raise BadInput(
                f"bound.value is {self.value}: a number of at least {SMALLEST} is needed"
            )

    @property
    def per_gradient(self) -> "Bound | None":
        """The bound on each local gradient, if that is how this bound is reached."""
        return None if self.gradient is None else Bound(self.gradient, self.norm)

    def sensitivity(self, relation: Relation) -> float:
        """How far one client can move a sum of bounded rows, in this bound's norm.

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
        order = 1 if self.norm is Norm.L1 else 2
        norms = torch.linalg.vector_norm(rows, ord=order, dim=1, dtype=torch.float64)
        if not bool(torch.isfinite(norms).all()):
            raise ValueError("a row is not finite: reject it before bounding")
        limit = self.value * (1 - ROUNDING)
        clipped = norms > limit
        if not bool(clipped.any()):
            return Bounded(rows, norms, clipped)
        bounded = rows.clone()
        scale = (limit / norms[clipped])[:, None]
        bounded[clipped] = (rows[clipped].double() * scale).to(rows.dtype)
        return Bounded(bounded, norms, clipped)
