"""Arithmetic on rows [K, P] in float64 that never holds more than a piece of them in float64."""

from enum import StrEnum

import numpy as np
import torch

BLOCK = 1 << 16
"""Elements in float64 at a time."""


class Norm(StrEnum):
    """How length is measured: L2 goes with Gaussian noise, L1 with Laplace noise."""

    L1 = "l1"
    L2 = "l2"


def row_norms(rows: torch.Tensor, norm: Norm = Norm.L2) -> torch.Tensor:
    """The length of each row of [K, P], summed in float64 a piece at a time: float64 [K].

    It is finite exactly when every entry of the row is: float64 has room for the sum of the
    squares of anything that float32 can hold.
    """
    if rows.numel() <= BLOCK:
        return _lengths(rows, norm)
    if rows.shape[1] <= BLOCK:
        return torch.cat([_lengths(piece, norm) for piece in torch.split(rows, at_a_time(rows))])
    norms = torch.empty(len(rows), dtype=torch.float64)
    for k, row in enumerate(rows):
        parts = torch.cat([_lengths(piece[None], norm) for piece in torch.split(row, BLOCK)])
        norms[k] = _lengths(parts[None], norm)[0]
    return norms


def all_finite(norms: torch.Tensor) -> bool:
    """Whether every length is finite, and so every entry of every row.

    >>> all_finite(torch.tensor([1.0, 2.0])), all_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    return bool(np.isfinite(norms.numpy()).all())


def add_weighted_(total: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> None:
    """total += weights @ rows, in float64 throughout, without a copy of all rows."""
    if rows.shape[1] <= BLOCK:
        step = at_a_time(rows)
        for a in range(0, len(rows), step):
            total += torch.mv(rows[a : a + step].double().T, weights[a : a + step])
        return
    for row, weight in zip(rows, weights.tolist(), strict=True):
        for place, piece in zip(torch.split(total, BLOCK), torch.split(row, BLOCK), strict=True):
            place.add_(piece.double(), alpha=weight)


def at_a_time(rows: torch.Tensor) -> int:
    """How many rows make up a block."""
    return max(1, BLOCK // max(1, rows.shape[1]))


def _lengths(rows: torch.Tensor, norm: Norm) -> torch.Tensor:
    wide = rows.to(torch.float64)
    if norm is Norm.L1:
        return wide.abs().sum(dim=1)
    if len(rows) == 1:
        return torch.dot(wide[0], wide[0]).sqrt()[None]
    return (
        wide.square_().sum(dim=1).sqrt_() if wide is not rows else wide.square().sum(dim=1).sqrt()
    )
