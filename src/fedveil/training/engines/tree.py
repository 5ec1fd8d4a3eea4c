"""In which order chunk sums are added: a tree that is fixed, wherever its branches are computed.

Eight chunks in a row make a sum, eight of those the next, and so on. Floating-point sums depend on
how they are bracketed; with one tree for all engines, a cohort has the same sum to the last bit in
one process, in several, and on many nodes that add up branches of it themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fedveil.training.sums import CohortSum

FAN_IN = 8


@dataclass(frozen=True, eq=False)
class Branch:
    """A sum and how high in the tree it is: at level k, that of 8^k chunks in a row, or the last.

    The last branches of a level may have fewer.
    """

    total: CohortSum
    level: int = 0


class SumTree:
    """Takes branches in chunk order, whole levels of them or chunk by chunk.

    It keeps one sum per level. `zero` makes the sum over nobody.
    """

    def __init__(self, zero: Callable[[], CohortSum]) -> None:
        self._zero = zero
        self._levels: list[tuple[CohortSum, int]] = []

    def add_(self, branch: Branch) -> None:
        """Take the next branch in; its sum is copied, not kept.

        A level that is full goes up when the next one comes, so that eight chunks need one sum.
        """
        while len(self._levels) <= branch.level:
            self._levels.append((self._zero(), 0))
        total, count = self._levels[branch.level]
        if count == FAN_IN:
            self.add_(Branch(total, branch.level + 1))
            total, count = self._zero(), 0
        total.add_(branch.total)
        self._levels[branch.level] = total, count + 1

    def total(self) -> CohortSum:
        """The sum of all: whatever is left on a level goes up. Nothing can be added afterwards."""
        if not self._levels:
            return self._zero()
        level = 0
        while level + 1 < len(self._levels):
            total, count = self._levels[level]
            if count:
                self.add_(Branch(total, level + 1))
            level += 1
        return self._levels[level][0]
