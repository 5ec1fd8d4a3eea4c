"""What clients send, and the one acceptance that every report passes, in whatever form it comes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fedveil.privacy.clip import ROUNDING, Clip
from fedveil.privacy.rows import Norm, add_weighted_, all_finite, row_norms
from fedveil.training.gradients.trajectories import LocalTrajectory


class Reports(Protocol):
    """The reports of K clients, as rows of parameters or in another form that stands for them."""

    def norms(self, norm: Norm) -> torch.Tensor:
        """The length of each, float64 [K]; not finite where a report is not."""
        ...

    def zero_(self, which: torch.Tensor) -> None:
        """Make those marked in `which` [K] zero."""
        ...

    def clip_(self, clip: Clip, norms: torch.Tensor) -> torch.Tensor:
        """Scale those that are too long down to the clip; which they were, bool [K]."""
        ...

    def add_to_(self, total: torch.Tensor, weights: torch.Tensor) -> None:
        """total += weights @ rows, in float64 throughout."""
        ...


@dataclass(frozen=True, eq=False)
class Rows:
    """Reports as they are sent: rows [K, P] of float32."""

    rows: torch.Tensor

    @classmethod
    def of(cls, reports: torch.Tensor | Sequence[torch.Tensor], size: int) -> "Rows":
        """What arrived; one that is not a vector of `size` numbers becomes a row of NaN.

        A matrix of reports is changed in place: from here on it is the server's.
        """
        if isinstance(reports, torch.Tensor):
            if reports.shape[1:] == (size,) and reports.is_floating_point():
                return cls(reports.to(torch.float32))
            reports = list(reports)
        rows = torch.full((len(reports), size), math.nan)
        for row, report in zip(rows, reports, strict=True):
            if report.shape == (size,) and report.dtype.is_floating_point:
                row.copy_(report)
        return cls(rows)

    def norms(self, norm: Norm) -> torch.Tensor:
        return row_norms(self.rows, norm)

    def zero_(self, which: torch.Tensor) -> None:
        self.rows[which] = 0.0

    def clip_(self, clip: Clip, norms: torch.Tensor) -> torch.Tensor:
        return clip.apply_(self.rows, norms).clipped

    def add_to_(self, total: torch.Tensor, weights: torch.Tensor) -> None:
        add_weighted_(total, self.rows, weights)


@dataclass(eq=False)
class Spanned:
    """Updates that nobody looks at one by one: coordinates [K, width] in the span of a trajectory.

    `clipped` tells whom a clip met on the way. A report is its coordinates times its scale;
    `lengths` are those of the coordinates' rows, taken from above.
    """

    trajectory: LocalTrajectory
    moved: torch.Tensor
    clipped: torch.Tensor

    def __post_init__(self) -> None:
        self.lengths = self.trajectory.norms(self.moved, Norm.L2)
        self.scales = torch.ones_like(self.lengths)

    def norms(self, norm: Norm) -> torch.Tensor:
        if norm is not Norm.L2:
            raise AssertionError("in the span of records lengths are known in L2 only")
        return self.lengths * self.scales

    def zero_(self, which: torch.Tensor) -> None:
        self.moved[which], self.lengths[which], self.scales[which] = 0.0, 0.0, 0.0

    def clip_(self, clip: Clip, norms: torch.Tensor) -> torch.Tensor:
        limit = clip.value * (1 - ROUNDING)
        self.scales *= (limit / norms).clamp_max(1.0)
        return norms > limit

    def add_to_(self, total: torch.Tensor, weights: torch.Tensor) -> None:
        self.trajectory.add_weighted_(total, self.moved, weights * self.scales)


@dataclass(frozen=True)
class Accepted:
    """Which reports were scaled down, and which were refused and count as zero: bool [K] each.

    `lengths` are those of the reports as they arrived, float64 [K]; zero where one was refused.
    """

    clipped: torch.Tensor
    refused: torch.Tensor
    lengths: torch.Tensor


def accept(reports: Reports, clip: Clip | None) -> Accepted:
    """Make of whatever was sent reports that are finite and clipped, in place.

    Guarantee: whatever a client sends, its row has a norm of at most the clip, so that it moves
    the sum by at most the clip's sensitivity. Clients are not trusted to have clipped, nor is the
    code in which they train.

    | edge | behaviour |
    |---|---|
    | NaN or infinity in a report | the row is zero, refused[k] is true |
    | report of another length or shape (`Rows.of`) | the row is zero, refused[k] is true |
    | report 1000 times too long | scaled to the clip, clipped[k] is true |
    | no clip | only refusals apply |
    | no reports | no rows |
    """
    norms = reports.norms(Norm.L2 if clip is None else clip.norm)
    refused = torch.zeros(norms.shape, dtype=torch.bool)
    if not all_finite(norms):
        refused = ~torch.isfinite(norms)
        reports.zero_(refused)
        norms = torch.where(refused, 0.0, norms)
    if clip is None:
        return Accepted(torch.zeros_like(refused), refused, norms)
    return Accepted(reports.clip_(clip, norms), refused, norms)
