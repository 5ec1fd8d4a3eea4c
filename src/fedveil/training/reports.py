"""Clients that are computed together, their reports, the one acceptance of each, and the sum."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fedveil.privacy.clip import ROUNDING, Clip, Clipped, Norm, add_weighted_, all_finite, row_norms
from fedveil.privacy.release import Ids, Round
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.trajectories import Gradients, LocalTrajectory


class Reports(Protocol):
    """The reports of K clients, as rows of parameters or in another form that stands for them."""

    def norms(self, norm: Norm) -> torch.Tensor:
        """The norm of each report, float64 [K], not finite where the report is not."""
        ...

    def zero_(self, which: torch.Tensor) -> None:
        """Make those marked in `which` [K] zero."""
        ...

    def clip_(self, clip: Clip, norms: torch.Tensor) -> torch.Tensor:
        """Scale reports that are too long down to the clip. Returns which ones, bool [K]."""
        ...

    def add_to_(self, total: torch.Tensor, weights: torch.Tensor) -> None:
        """total += weights @ rows, in float64 throughout."""
        ...


@dataclass(frozen=True, eq=False)
class Rows:
    """Reports as they are sent: rows [K, P] of float32."""

    rows: torch.Tensor

    @classmethod
    def from_reports(cls, reports: torch.Tensor | Sequence[torch.Tensor], size: int) -> "Rows":
        """Rows of reports as they arrived. One that is not a vector of `size` numbers becomes NaN.

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
class DualUpdates:
    """Updates that nobody looks at one by one, as coordinates in the span of the records.

    An update is its coordinates times its scale. `lengths` are upper bounds of the updates' norms.

    Attributes:
        trajectory: The local training, which knows the span.
        moved: The coordinates, [K, width].
        clipped: Which clients a clip met during training, [K].
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
    """What a block of K clients sends.

    Attributes:
        reports: The reports themselves.
        statistic: The statistic of an adaptive clip, [K, width].
        clipped: Which clients were clipped, as they know it: a diagnostic.
        diverged: Which clients' training diverged, as they know it: a diagnostic.
    """

    reports: Reports
    statistic: torch.Tensor
    clipped: torch.Tensor
    diverged: torch.Tensor


@dataclass(eq=False)
class CohortSum:
    """The sum of the reports of a cohort, or of a chunk of one, with counts. It grows in place.

    Attributes:
        total: The weighted sum of reports, float64 [P].
        signal: The same sum before clients added their noise, None where they add none: private.
        statistic: The sum of the statistics of an adaptive clip: private.
        weight: The sum of the weights.
        clients: The number of clients.
        clipped_clients: The number of clients that were clipped.
        refused: The clients that sent something that cannot be used.
        notes: What the participants recorded of themselves, summed by name.
        updates_by_client: (clients, their updates [K, P]), None where only the sum is needed.
        clipping_known: Whether clients reported if they were clipped, and the sum before noise.
        enough: False if too few sites answered; the model then stays.
    """

    total: torch.Tensor
    signal: torch.Tensor | None
    statistic: torch.Tensor
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
        """Nothing yet: `size` parameters, `width` numbers of a statistic, `noisy` reports."""
        numbers = cls.numbers(size, width, noisy=noisy)
        return cls.over(torch.zeros(numbers, dtype=torch.float64), size, noisy, keep)

    @classmethod
    def numbers(cls, size: int, width: int, *, noisy: bool) -> int:
        """How many float64 numbers a sum holds."""
        return size * (1 + noisy) + width

    @classmethod
    def over(cls, numbers: torch.Tensor, size: int, noisy: bool, keep: bool = False) -> "CohortSum":
        """A sum that lives in `numbers`, float64, as it finds them."""
        signal = numbers[size : 2 * size] if noisy else None
        rows: list[tuple[Ids, torch.Tensor]] | None = [] if keep else None
        rest = numbers[size * (1 + noisy) :]
        return cls(numbers[:size], signal, rest, updates_by_client=rows)

    @property
    def whole(self) -> torch.Tensor:
        """All of the numbers it lives in, from which `over` makes it again."""
        whole = self.total._base
        if whole is None:
            raise AssertionError("a sum is a view of its numbers")
        return whole

    @property
    def rest(self) -> tuple[Any, ...]:
        """All that does not live in the numbers, for `with_rest`."""
        return tuple(getattr(self, name) for name in _REST)

    def with_rest(self, rest: tuple[Any, ...]) -> "CohortSum":
        """The same numbers with what another process counted beside them."""
        return replace(self, **dict(zip(_REST, rest, strict=True)))

    @property
    def strength(self) -> float:
        """The length of the sum without clients' noise: a diagnostic."""
        return float((self.total if self.signal is None else self.signal).norm())

    def add_(self, other: "CohortSum") -> None:
        """Take the other sum in."""
        self.total += other.total
        if self.signal is not None and other.signal is not None:
            self.signal += other.signal
        self.statistic += other.statistic
        self.weight += other.weight
        self.clients += other.clients
        self.clipped_clients += other.clipped_clients
        self.refused += other.refused
        self.note(other.notes)
        if self.updates_by_client is not None and other.updates_by_client is not None:
            self.updates_by_client += other.updates_by_client

    def note(self, notes: Mapping[str, float]) -> None:
        """Add numbers to `notes` by name."""
        for name, number in notes.items():
            self.notes[name] = self.notes.get(name, 0.0) + number

    @property
    def updates(self) -> torch.Tensor:
        """The updates of all clients whose report was not refused, [K, P]."""
        if self.updates_by_client is None:
            raise AssertionError("nobody asked for the updates one by one")
        rows = [updates for _, updates in self.updates_by_client]
        return torch.cat(rows) if rows else self.total.new_zeros(0, len(self.total))


_REST = ("weight", "clients", "clipped_clients", "refused", "notes", "updates_by_client")


@dataclass(frozen=True, eq=False)
class ClientBatch:
    """Clients of a round that are computed together.

    Attributes:
        round: What the round asks of them; its `ids` are these clients.
        cohort: Their records.
        gradients: How gradients are computed.
        only_sum: Whether nothing but the sum of their updates is used, which may then stay in
            the span of the records.
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
        """The clients of `cohort`, as a part of a round."""
        some = replace(round, ids=cohort.ids)
        return cls(some, cohort, gradients, only_sum, everyone=round.ids)


def clip_rows_(rows: torch.Tensor, clip: Clip | None, norms: torch.Tensor | None = None) -> Clipped:
    """Clip finite rows in place. A client that diverged keeps its row, which the server refuses.

    The norm of such a row is given as zero. `norms` are the rows' lengths, where they are known.
    """
    if norms is None:
        norms = row_norms(rows, Norm.L2 if clip is None else clip.norm)
    if not all_finite(norms):
        norms = torch.where(torch.isfinite(norms), norms, 0.0)
    if clip is None:
        return Clipped(rows, norms, torch.zeros(len(rows), dtype=torch.bool))
    return clip.apply_(rows, norms)
