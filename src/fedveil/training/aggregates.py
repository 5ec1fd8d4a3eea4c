"""Robust aggregates: what a server takes instead of the mean, from the updates one by one.

They limit what a few malicious clients can do, and promise nothing about privacy: with noise at the
server they are refused, because one client can move a median or a choice of rows by more than the
clip. Where every report is private by itself they are post-processing, like anything else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from fedveil.base.checks import ANY_COUNT, COUNT, TRIM
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import stated

_COLUMNS = 1 << 22


class Aggregate(Protocol):
    """A rule that combines the updates of a round into the one that the server steps along."""

    def check(self, cohort: float) -> None:
        """Raise BadInput if cohorts of this expected size are too small for the rule."""
        ...

    def combine(self, updates: torch.Tensor) -> torch.Tensor:
        """Combine finite updates [K, P], K at least 1, into one, float64 [P].

        Must not change `updates`.
        """
        ...


@dataclass(frozen=True)
class CoordinateMedian:
    """The median of every coordinate by itself (Yin et al. 2018).

    With an even number of updates, the median is the mean of the two middle values.
    """

    identity = stated("aggregate", "median")

    def check(self, cohort: float) -> None:
        """Accept a cohort of any size, and never raise."""

    def combine(self, updates: torch.Tensor) -> torch.Tensor:
        """The median of each column of updates [K, P], float64 [P]."""
        middle = (len(updates) - 1) // 2, len(updates) // 2
        return _by_column(updates, lambda block: block.sort(dim=0).values[list(middle)].mean(dim=0))


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of every coordinate without its largest and smallest values (Yin et al. 2018).

    `trim` is the share of updates left out at either end. Of K updates, int(trim K) are left out at
    the top and as many at the bottom.
    """

    trim: float = 0.1

    identity = stated("aggregate", "trimmed-mean", "trim")

    def __post_init__(self) -> None:
        """Raise BadInput unless `trim` is in [0, 0.5)."""
        TRIM.check("trim", self.trim)

    def check(self, cohort: float) -> None:
        """Accept a cohort of any size, and never raise."""

    def combine(self, updates: torch.Tensor) -> torch.Tensor:
        """The trimmed mean of each column of updates [K, P], float64 [P]."""
        out = int(self.trim * len(updates))
        return _by_column(
            updates, lambda block: block.sort(dim=0).values[out : len(block) - out].mean(dim=0)
        )


@dataclass(frozen=True)
class Krum:
    """The mean of the updates that are nearest to their neighbours (Blanchard et al. 2017).

    The score of an update is the sum of its squared distances to the K - `malicious` - 2 updates
    nearest to it. The mean is taken over the `chosen` updates with the lowest scores: 1 is Krum,
    more is multi-Krum, None is K - `malicious` updates. A round of fewer than `malicious` + 3
    updates has no scores and does not move the model.
    """

    malicious: int
    chosen: int | None = 1

    identity = stated("aggregate", "krum", "malicious", "chosen")

    def __post_init__(self) -> None:
        """Raise BadInput unless both are whole, `malicious` >= 0, and `chosen` >= 1 or None."""
        ANY_COUNT.check("malicious", self.malicious)
        if self.chosen is not None:
            COUNT.check("chosen", self.chosen)

    def check(self, cohort: float) -> None:
        """Raise BadArgument for cohorts of fewer than 2 * malicious + 3 clients.

        Below that size, Krum's bound on malicious updates does not hold.
        """
        least = 2 * self.malicious + 3
        if cohort < least:
            raise BadArgument(
                f"{{malicious}} is {self.malicious} and a round has {cohort:g} clients: Krum needs "
                f"at least {least}; ask more clients, or expect fewer malicious ones",
                "malicious",
            )

    def combine(self, updates: torch.Tensor) -> torch.Tensor:
        """The mean of the updates with the lowest scores, float64 [P].

        All zeros if there are fewer than `malicious` + 3 updates.
        """
        near = len(updates) - self.malicious - 2
        if near < 1:
            return updates.new_zeros(updates.shape[1], dtype=torch.float64)
        products = _products(updates)
        squares = products.diagonal()
        distances = (squares[:, None] + squares[None, :] - 2 * products).clamp_min_(0)
        distances.fill_diagonal_(torch.inf)
        scores = distances.sort(dim=1).values[:, :near].sum(dim=1)
        chosen = len(updates) - self.malicious if self.chosen is None else self.chosen
        best = torch.argsort(scores, stable=True)[:chosen]
        return updates[best].double().mean(dim=0)


@dataclass(frozen=True)
class Flame:
    """The mean of the largest cluster of updates, each clipped to the median length.

    Clustering and clipping are those of FLAME (Nguyen et al. 2022), without its noise, for which
    nothing is claimed here. The cluster has more than half of the round's updates, by HDBSCAN on
    cosine distances. If there is no such cluster, all updates count.
    """

    identity = stated("aggregate", "flame")

    def check(self, cohort: float) -> None:
        """Raise BadInput for cohorts of fewer than 3 clients, which have no clusters."""
        if cohort < 3:
            raise BadInput(f"a round has {cohort:g} clients: clusters need at least 3")

    def combine(self, updates: torch.Tensor) -> torch.Tensor:
        """The mean of the cluster's updates, each scaled down to the median length, float64 [P].

        The median length is that of all updates, including those outside the cluster, and of an
        even number of updates the lower of the two middle ones.
        """
        norms = updates.double().norm(dim=1)
        kept = _largest_cluster(updates, norms)
        scale = (norms.median() / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
        scale = torch.where(kept, scale, 0.0) / kept.sum()
        return _by_column(updates, lambda block: scale @ block)


def _largest_cluster(updates: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Mask of the updates in the cluster of more than half of all updates, bool [K].

    All True if there is no such cluster, and with fewer than 3 updates. `norms` are the updates'
    lengths, float64 [K].
    """
    from sklearn.cluster import HDBSCAN  # half a second, for this aggregate only

    everyone = torch.ones(len(updates), dtype=torch.bool)
    if len(updates) < 3:
        return everyone
    lengths = norms.clamp_min(torch.finfo(torch.float64).tiny)
    cosines = _products(updates) / (lengths[:, None] * lengths[None, :])
    distances = (1 - cosines).clamp_(0, 2).fill_diagonal_(0)
    clustering = HDBSCAN(
        min_cluster_size=len(updates) // 2 + 1,
        min_samples=1,
        metric="precomputed",
        allow_single_cluster=True,
        copy=True,
    )
    labels = clustering.fit_predict(np.ascontiguousarray(distances.numpy()))
    found = torch.from_numpy(labels >= 0)
    return found if bool(found.any()) else everyone


def _products(updates: torch.Tensor) -> torch.Tensor:
    """The inner products of all pairs of updates, float64 [K, K]."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for block in _blocks(updates):
        wide = block.double()
        total += wide @ wide.T
    return total


def _blocks(updates: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split updates [K, P] into views of a few columns, to keep their float64 copies small."""
    return torch.split(updates, max(1, _COLUMNS // max(1, len(updates))), dim=1)


def _by_column(
    updates: torch.Tensor, combine: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Apply `combine`, float64 [K, p] to [p], to blocks of columns, and join the results to [P]."""
    return torch.cat([combine(block.double()) for block in _blocks(updates)])
