"""In which order chunk sums are added: a tree that is fixed, wherever its branches are computed.

Eight chunks in a row make a sum, eight of those the next, and so on. Floating-point sums depend on
how they are bracketed; with one tree for all engines, a cohort has the same sum to the last bit in
one process, in several, and on many nodes that add up branches of it themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fedveil.training.reports import CohortSum

FAN_IN = 8


@dataclass(frozen=True, eq=False)
class Branch:
    """A sum and how high in the tree it is: at level k, that of 8^k chunks in a row, or the last.

    The last branches of a level may have fewer. A `lent` sum is valid until the next one comes.
    """

    total: CohortSum
    level: int = 0
    lent: bool = False


class SumTree:
    """Takes branches in chunk order, whole levels of them or chunk by chunk.

    It keeps one sum per level. `zero` makes the sum over nobody.
    """

    def __init__(self, zero: Callable[[], CohortSum]) -> None:
        self._zero = zero
        self._levels: list[tuple[CohortSum | None, int]] = []

    def add_(self, branch: Branch) -> None:
        """Take the next branch in; the first sum of a level is kept, or a copy of one that is lent.

        A level that is full goes up when the next one comes, so that eight chunks need one sum.
        """
        while len(self._levels) <= branch.level:
            self._levels.append((None, 0))
        total, count = self._levels[branch.level]
        if total is not None and count == FAN_IN:
            self.add_(Branch(total, branch.level + 1))
            total, count = None, 0
        if total is None and not branch.lent:
            self._levels[branch.level] = branch.total, 1
            return
        total = total or self._zero()
        total.add_(branch.total)
        self._levels[branch.level] = total, count + 1

    def total(self) -> CohortSum:
        """The sum of all: whatever is left on a level goes up. Nothing can be added afterwards."""
        level, total = 0, None
        while level < len(self._levels):
            total, _ = self._levels[level]
            level += 1
            if total is not None and level < len(self._levels):
                self.add_(Branch(total, level))
        return total or self._zero()
