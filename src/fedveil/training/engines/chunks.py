"""How a cohort is cut into chunks, and in which order their sums are added.

Both are fixed by the recipe and the data, never by the workers. Eight chunks in a row make a sum,
eight of those the next, and so on. Floating-point sums depend on how they are bracketed. With one
tree for all engines, a cohort has the same sum to the last bit in one process, in several, and on
many nodes that add up branches of it themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedveil.training.reports import CohortSum

Ids = npt.NDArray[np.int64]

FAN_IN = 8


def cut(ids: Ids, sizes: Ids, chunk: int) -> list[Ids]:
    """Chunks of at most `chunk` clients of similar size, the largest first.

    Several chunks are a power of two, equally long, so that 2, 4 or 8 workers have equal shares.
    """
    if len(ids) == 0:
        return []
    count = -(-len(ids) // chunk)
    count = min(len(ids), 1 << (count - 1).bit_length())
    largest_first = ids[np.argsort(-sizes, kind="stable")]
    return [largest_first] if count == 1 else np.array_split(largest_first, count)


@dataclass(frozen=True, eq=False)
class Branch:
    """A sum of chunks in a row.

    Attributes:
        total: The sum.
        level: Its height in the tree: at level k it has 8^k chunks, the last branches fewer.
        lent: The sum is valid only until the next one comes.
    """

    total: CohortSum
    level: int = 0
    lent: bool = False


class SumTree:
    """Adds branches that come in chunk order, whole levels of them or chunk by chunk.

    It keeps one sum per level. `zero` makes the sum over nobody.
    """

    def __init__(self, zero: Callable[[], CohortSum]) -> None:
        self._zero = zero
        self._levels: list[tuple[CohortSum | None, int]] = []

    def add_(self, branch: Branch) -> None:
        """Add the next branch. The first sum of a level is kept, or a copy of one that is lent.

        A full level goes up when the next branch comes, so that eight chunks need one sum.
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
        """The sum of all branches. Nothing can be added afterwards."""
        level, total = 0, None
        while level < len(self._levels):
            total, _ = self._levels[level]
            level += 1
            if total is not None and level < len(self._levels):
                self.add_(Branch(total, level))
        return total or self._zero()
