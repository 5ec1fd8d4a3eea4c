"""`CohortSum`: what a cohort, or a chunk of one, comes to."""

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class CohortSum:
    """The sum of weighted rows as reported, in float64, and counts; it grows in place.

    `signal` is the same sum before clients added their noise, None where they add none; `watched`
    is what an adaptive clip collects; both are private. `refused` clients sent something that
    cannot be used.
    """

    total: torch.Tensor
    signal: torch.Tensor | None
    watched: torch.Tensor
    weight: float = 0.0
    clients: int = 0
    clipped: int = 0
    refused: tuple[int, ...] = ()

    @classmethod
    def zero(cls, size: int, width: int, *, noisy: bool) -> "CohortSum":
        """Nothing yet: `size` parameters, `width` watched numbers, `noisy` reports."""
        numbers = cls.numbers(size, width, noisy=noisy)
        return cls.over(torch.zeros(numbers, dtype=torch.float64), size, noisy)

    @classmethod
    def numbers(cls, size: int, width: int, *, noisy: bool) -> int:
        """How many float64 numbers a sum holds."""
        return size * (1 + noisy) + width

    @classmethod
    def over(cls, numbers: torch.Tensor, size: int, noisy: bool) -> "CohortSum":
        """A sum that lives in `numbers`, float64, as it finds them."""
        signal = numbers[size : 2 * size] if noisy else None
        return cls(numbers[:size], signal, numbers[size * (1 + noisy) :])

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
