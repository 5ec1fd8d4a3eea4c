"""`CohortSum`: what a cohort, or a chunk of one, comes to."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]


@dataclass(eq=False)
class CohortSum:
    """The sum of weighted rows as reported, in float64, and counts; it grows in place.

    `signal` is the same sum before clients added their noise, None where they add none; `watched`
    is what an adaptive clip collects; both are private. `refused` clients sent something that
    cannot be used. `cheating` is the number of clients that cheated, `lengths` are the sums of the
    lengths of honest and of cheating reports as they arrived: diagnostics. `kept` are (clients,
    their updates [K, P]) where more than the sum is asked for, None where nobody looks at them.
    `told` is false where clients keep to themselves whom the clip met and what they sent before
    noise; `enough` where so few answered that the round is not to count.
    """

    total: torch.Tensor
    signal: torch.Tensor | None
    watched: torch.Tensor
    weight: float = 0.0
    clients: int = 0
    clipped: int = 0
    refused: tuple[int, ...] = ()
    cheating: int = 0
    lengths: tuple[float, float] = (0.0, 0.0)
    kept: list[tuple[Ids, torch.Tensor]] | None = None
    told: bool = True
    enough: bool = True

    @classmethod
    def zero(cls, size: int, width: int, *, noisy: bool, keep: bool = False) -> "CohortSum":
        """Nothing yet: `size` parameters, `width` watched numbers, `noisy` reports."""
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
        kept: list[tuple[Ids, torch.Tensor]] | None = [] if keep else None
        return cls(numbers[:size], signal, numbers[size * (1 + noisy) :], kept=kept)

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
        self.watched += other.watched
        self.weight += other.weight
        self.clients += other.clients
        self.clipped += other.clipped
        self.refused += other.refused
        self.cheating += other.cheating
        self.lengths = (
            self.lengths[0] + other.lengths[0],
            self.lengths[1] + other.lengths[1],
        )
        if self.kept is not None and other.kept is not None:
            self.kept += other.kept

    @property
    def cheated(self) -> dict[str, float]:
        """How many clients cheated, their share, and how long reports were on average."""
        honest = self.clients - self.cheating
        return {
            "cheating": self.cheating,
            "cheating_share": self.cheating / max(self.clients, 1),
            "honest_length": self.lengths[0] / max(honest, 1),
            "cheating_length": self.lengths[1] / max(self.cheating, 1),
        }

    @property
    def updates(self) -> torch.Tensor:
        """The updates that were kept, [K, P]: of everybody whose report was not refused."""
        if self.kept is None:
            raise AssertionError("nobody asked for the updates one by one")
        rows = [updates for _, updates in self.kept]
        return torch.cat(rows) if rows else self.total.new_zeros(0, len(self.total))


_REST = ("weight", "clients", "clipped", "refused", "cheating", "lengths", "kept")
