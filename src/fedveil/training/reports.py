"""Clients that are computed together, their reports, the one acceptance of each, and the sum."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedveil.privacy.clip import ROUNDING, Clip, Clipped, Norm, all_finite, row_norms
from fedveil.privacy.release import Ids, Round
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.trajectories import Gradients, LocalTrajectory


@dataclass(frozen=True, eq=False)
class Rows:
    """Reports of K clients as they are sent: `rows` [K, P], float64 if the release is wide."""

    rows: torch.Tensor

    @classmethod
    def from_reports(
        cls, reports: torch.Tensor | Sequence[torch.Tensor], size: int, *, wide: bool = False
    ) -> "Rows":
        """Rows of `reports` as they arrived, float64 if `wide` and float32 otherwise.

        A report that is not a vector of `size` floats becomes NaN. A matrix [K, size] of that type
        is not copied, so that `accept` later changes the caller's matrix.
        """
        dtype = torch.float64 if wide else torch.float32
        if isinstance(reports, torch.Tensor):
            if reports.shape[1:] == (size,) and reports.is_floating_point():
                return cls(reports.to(dtype))
            reports = list(reports)
        rows = torch.full((len(reports), size), math.nan, dtype=dtype)
        for row, report in zip(rows, reports, strict=True):
            if report.shape == (size,) and report.dtype.is_floating_point:
                row.copy_(report)
        return cls(rows)

    def norms(self, norm: Norm) -> torch.Tensor:
        """The norm of each report, float64 [K]. It is not finite where the report is not."""
        return row_norms(self.rows, norm)

    def zero_(self, which: torch.Tensor) -> None:
        """Set the reports marked in the mask `which`, bool [K], to zero, in place."""
        self.rows[which] = 0.0

    def clip_(self, clip: Clip, norms: torch.Tensor) -> torch.Tensor:
        """Scale too long reports down to the clip, in place, and return their mask, bool [K].

        `norms` are the reports' finite norms, [K].
        """
        return clip.apply_(self.rows, norms).clipped


@dataclass(eq=False)
class DualUpdates:
    """Updates of which only the sum is used, as coordinates in the span of the clients' records.

    It has the methods of `Rows`. An update is its coordinates times its scale.

    Attributes:
        trajectory: The local training, which knows the span.
        moved: The coordinates, [K, width].
        clipped: Mask of the clients that a clip met during training, bool [K].
        lengths: Upper bounds of the updates' L2 norms before scaling, float64 [K].
        scales: The updates' scales, float64 [K], all 1 at first.
    """

    trajectory: LocalTrajectory
    moved: torch.Tensor
    clipped: torch.Tensor

    def __post_init__(self) -> None:
        self.lengths = self.trajectory.norms(self.moved, Norm.L2)
        self.scales = torch.ones_like(self.lengths)

    def norms(self, norm: Norm) -> torch.Tensor:
        """Upper bounds of the scaled updates' norms, float64 [K]. AssertionError unless L2."""
        if norm is not Norm.L2:
            raise AssertionError("in the span of records lengths are known in L2 only")
        return self.lengths * self.scales

    def zero_(self, which: torch.Tensor) -> None:
        """Set the updates marked in the mask `which`, bool [K], to zero, in place."""
        self.moved[which], self.lengths[which], self.scales[which] = 0.0, 0.0, 0.0

    def clip_(self, clip: Clip, norms: torch.Tensor) -> torch.Tensor:
        """Scale too long updates down to the clip, in place, and return their mask, bool [K].

        `norms` are the result of `norms`.
        """
        limit = clip.value * (1 - ROUNDING)
        self.scales *= (limit / norms).clamp_max(1.0)
        return norms > limit

    def add_to_(self, total: torch.Tensor, weights: torch.Tensor) -> None:
        """Add the scaled updates times `weights` [K] to `total` (float64 [P]), in place."""
        self.trajectory.add_weighted_(total, self.moved, weights * self.scales)


Reports = Rows | DualUpdates
"""The reports of K clients."""


@dataclass(frozen=True)
class Accepted:
    """The outcome of `accept` for K reports.

    Attributes:
        clipped: Mask of reports that were scaled down to the clip, bool [K].
        refused: Mask of reports that were refused and are now zero, bool [K].
        lengths: Norms of the reports as they arrived, float64 [K], zero for refused ones.
    """

    clipped: torch.Tensor
    refused: torch.Tensor
    lengths: torch.Tensor


def accept(reports: Reports, clip: Clip | None) -> Accepted:
    """Make reports finite and clipped, in place, whatever was sent. Never raises.

    Guarantee: whatever a client sends, its row has a norm of at most the clip, so that it moves the
    sum by at most the clip's sensitivity. Clients are not trusted to have clipped, nor is the code
    in which they train.

    | edge | behaviour |
    |---|---|
    | NaN or infinity in a report | the row is zero, refused[k] is true |
    | report of another shape (`Rows.from_reports`) | the row is zero, refused[k] is true |
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


@dataclass(frozen=True, eq=False)
class ClientReports:
    """The reports of a block of K clients, and what else they send.

    Attributes:
        reports: The reports themselves.
        statistic_values: The statistic of an adaptive clip, [K, width], width 0 if there is none.
        clipped: Mask of clients that were clipped, by their own account: a diagnostic.
        diverged: Mask of clients whose training diverged, by their own account: a diagnostic.
    """

    reports: Reports
    statistic_values: torch.Tensor
    clipped: torch.Tensor
    diverged: torch.Tensor


@dataclass(eq=False)
class CohortSum:
    """The sum of the reports of a cohort, or of a chunk of one, with counts. It grows in place.

    Attributes:
        total: The weighted sum of reports, float64 [P].
        signal: The same sum before clients added their noise, None where they add none: private.
        statistic_values: The sum of the statistics of an adaptive clip: private.
        weight: The sum of the weights.
        clients: The number of clients.
        clipped_clients: The number of clients that were clipped.
        refused: The clients that sent something that cannot be used.
        notes: What the participants recorded of themselves, summed by name.
        updates_by_client: (clients, their updates [K, P]), None where only the sum is needed. If
            they are masked, the statistic of an adaptive clip follows each update.
        clipping_known: False if clients report neither whether they were clipped nor what they
            sent before noise.
        enough: False if too few sites answered; the model then stays.
    """

    total: torch.Tensor
    signal: torch.Tensor | None
    statistic_values: torch.Tensor
    weight: float = 0.0
    clients: int = 0
    clipped_clients: int = 0
    refused: tuple[int, ...] = ()
    notes: dict[str, float] = field(default_factory=dict)
    updates_by_client: list[tuple[Ids, torch.Tensor]] | None = None
    clipping_known: bool = True
    enough: bool = True

    @classmethod
    def zero(cls, size: int, width: int, *, noisy: bool, keep: bool = False) -> "CohortSum":
        """A new sum over no clients, with all numbers zero.

        Args:
            size: Number of parameters.
            width: Length of the statistic of an adaptive clip, 0 without one.
            noisy: Whether clients add noise, so that the sum without it is kept as well.
            keep: Whether every client's update is kept.
        """
        numbers = torch.zeros(size * (1 + noisy) + width, dtype=torch.float64)
        return cls.over(numbers, size, noisy, keep)

    @classmethod
    def over(cls, numbers: torch.Tensor, size: int, noisy: bool, keep: bool = False) -> "CohortSum":
        """A sum whose tensors are views of `numbers`, which holds their values already.

        `numbers` is float64: the total [size], the signal [size] if `noisy`, and then the
        statistic. The counts are zero. `keep` as in `zero`.
        """
        signal = numbers[size : 2 * size] if noisy else None
        rows: list[tuple[Ids, torch.Tensor]] | None = [] if keep else None
        rest = numbers[size * (1 + noisy) :]
        return cls(numbers[:size], signal, rest, updates_by_client=rows)

    @property
    def numbers(self) -> torch.Tensor:
        """The one tensor that holds total, signal and statistic: the `numbers` of `over`.

        AssertionError unless the sum was made by `zero` or `over`.
        """
        numbers = self.total._base
        assert numbers is not None, "a sum is a view of its numbers"
        return numbers

    @property
    def rest(self) -> tuple[Any, ...]:
        """The values of the fields to send beside `numbers`, for `with_rest`.

        They are weight, clients, clipped_clients, refused, notes and updates_by_client, in this
        order.
        """
        return tuple(getattr(self, name) for name in _REST)

    def with_rest(self, rest: tuple[Any, ...]) -> "CohortSum":
        """A copy with this sum's tensors and the fields `rest` of another process's sum."""
        return replace(self, **dict(zip(_REST, rest, strict=True)))

    def add_(self, other: "CohortSum") -> None:
        """Add `other`, its counts, refused clients, notes and kept updates to this sum, in place.

        `clipping_known` and `enough` stay as they are.
        """
        self.total += other.total
        if self.signal is not None and other.signal is not None:
            self.signal += other.signal
        self.statistic_values += other.statistic_values
        self.weight += other.weight
        self.clients += other.clients
        self.clipped_clients += other.clipped_clients
        self.refused += other.refused
        if other.notes:
            self.note(other.notes)
        if self.updates_by_client is not None and other.updates_by_client is not None:
            self.updates_by_client += other.updates_by_client

    def note(self, notes: Mapping[str, float]) -> None:
        """Add each number to the one of the same name in `notes`, in place."""
        for name, number in notes.items():
            self.notes[name] = self.notes.get(name, 0.0) + number

    @property
    def updates(self) -> torch.Tensor:
        """The updates of all clients whose report was not refused, [K, P], in the order of the sum.

        AssertionError unless the sum keeps them (`keep`).
        """
        assert self.updates_by_client is not None, "nobody asked for the updates one by one"
        rows = [updates for _, updates in self.updates_by_client]
        if not rows:
            return self.total.new_zeros(0, len(self.total))
        return torch.cat(rows)[:, : len(self.total)]


_REST = ("weight", "clients", "clipped_clients", "refused", "notes", "updates_by_client")


@dataclass(frozen=True, eq=False)
class ClientBatch:
    """Clients of a round that are computed together.

    Attributes:
        round: What the round asks of them. Its `ids` are these clients only.
        cohort: Their records.
        gradients: How gradients are computed.
        only_sum: Whether only the sum of their updates is used. Updates may then stay coordinates
            in the span of the records (`DualUpdates`).
        everyone: All clients of the round.
    """

    round: Round
    cohort: CohortData
    gradients: Gradients
    only_sum: bool
    everyone: Ids

    @classmethod
    def from_round(
        cls, round: Round, cohort: CohortData, gradients: Gradients, *, only_sum: bool = False
    ) -> "ClientBatch":
        """The clients of `cohort` as a part of `round`, which holds all clients of the round."""
        some = replace(round, ids=cohort.ids)
        return cls(some, cohort, gradients, only_sum, everyone=round.ids)


def clip_rows_(rows: torch.Tensor, clip: Clip | None, norms: torch.Tensor | None = None) -> Clipped:
    """Clip the finite rows [K, P] in place. Others stay, for the server to refuse.

    `norms` are the rows' norms, [K], computed if None. In the result, a row that is not finite has
    norm 0, and without a clip no row is marked as clipped.
    """
    if norms is None:
        norms = row_norms(rows, Norm.L2 if clip is None else clip.norm)
    if not all_finite(norms):
        norms = torch.where(torch.isfinite(norms), norms, 0.0)
    if clip is None:
        return Clipped(rows, norms, torch.zeros(len(rows), dtype=torch.bool))
    return clip.apply_(rows, norms)
