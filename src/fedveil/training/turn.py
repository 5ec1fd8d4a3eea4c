"""`Turn`: what a cohort is asked to do in one round."""

import math
from dataclasses import dataclass

import torch

from fedveil.privacy.clipping import ROUNDING, Bound, Bounded
from fedveil.privacy.randomness import KeySource
from fedveil.privacy.rows import Norm, row_norms
from fedveil.training.cohort import CohortData
from fedveil.training.gradients import Gradients, Walk


@dataclass(frozen=True, eq=False)
class Turn:
    """The round's model, the clients whose turn it is, and how they compute.

    `start` is one model [P], or [K, P] where clients of several trainings are computed in step.

    Local work turns it into one update per client, as rows [K, P]; or, if `summed` says that their
    weighted sum is all that will be asked for, into updates left in the span of the records.
    """

    round: int
    start: torch.Tensor
    cohort: CohortData
    bound: Bound | None
    gradients: Gradients
    streams: KeySource
    summed: bool = False


@dataclass(frozen=True, eq=False)
class Spanned:
    """Updates in the coordinates of their walk, [K, width], and what each must be scaled by.

    `norms` are their lengths, not finite for a client that diverged, whose coordinates and scale
    are zero; `clipped` tells whom a bound has met.
    """

    walk: Walk
    moved: torch.Tensor
    scales: torch.Tensor
    norms: torch.Tensor
    clipped: torch.Tensor


def bounded_(rows: torch.Tensor, bound: Bound | None, norms: torch.Tensor | None = None) -> Bounded:
    """Bound finite rows in place; a client that diverged keeps its row, which the server refuses.

    The norm of such a row is given as zero. `norms` are the rows' lengths, where they are known.
    """
    if norms is None:
        norms = row_norms(rows, Norm.L2 if bound is None else bound.norm)
    finite = torch.isfinite(norms)
    if not bool(finite.all()):
        norms = torch.where(finite, norms, 0.0)
    if bound is None:
        return Bounded(rows, norms, torch.zeros(len(rows), dtype=torch.bool))
    return bound.apply_(rows, norms)


def spanned_(walk: Walk, moved: torch.Tensor, bound: Bound | None) -> Spanned:
    """Bound updates by scales on their coordinates; those of a client that diverged become zero.

    Guarantee: as `Bound`'s, for the rows behind the coordinates: their lengths are taken from
    above, and scales stay in float64 until the sum.
    """
    norms = walk.norms(moved, Norm.L2)
    finite = torch.isfinite(norms)
    if not bool(finite.all()):
        moved[~finite] = 0.0
    limit = math.inf if bound is None else bound.value * (1 - ROUNDING)
    scales = torch.where(finite, (limit / norms).clamp_max(1.0), 0.0)
    return Spanned(walk, moved, scales, norms, finite & (norms > limit))
