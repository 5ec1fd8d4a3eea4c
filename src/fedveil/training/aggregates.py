"""Robust aggregates: what a server takes instead of the mean, from the updates one by one.

They limit what a few malicious clients can do, and promise nothing about privacy: with noise at the
server they are refused, because one client can move a median or a choice of rows by more than the
clip. Where every report is private by itself they are post-processing, like anything else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from fedveil.base.checks import ANY_COUNT, COUNT, TRIM
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated

_COLUMNS = 1 << 22


class Aggregate(Protocol):
    """From the updates of a round to the one that the server steps along."""

    def check(self, cohort: float) -> None:
        """Refuse cohorts of this expected size."""
        ...

    def combine(self, updates: torch.Tensor) -> torch.Tensor:
        """From finite updates [K, P], K at least 1, to one of them or between them, float64 [P]."""
        ...


@dataclass(frozen=True)
class CoordinateMedian:
    """The median of every coordinate by itself (Yin et al. 2018)."""

    @property
    def identity(self) -> Stated:
        return (("aggregate", "median"),)

    def check(self, cohort: float) -> None:
        """Any cohort has a median."""

    def combine(self, updates: torch.Tensor) -> torch.Tensor:
        middle = (len(updates) - 1) // 2, len(updates) // 2
        return _by_column(updates, lambda block: block.sort(dim=0).values[list(middle)].mean(dim=0))


@dataclass(frozen=True)
class TrimmedMean:
    """The mean of every coordinate without its largest and smallest values (Yin et al. 2018).

    `trim` is the share that is left out at either end, rounded down.
    """

    trim: float = 0.1

    @property
    def identity(self) -> Stated:
        return (("aggregate", "trimmed-mean"), ("trim", self.trim))

    def __post_init__(self) -> None:
        TRIM.check("trim", self.trim)

    def check(self, cohort: float) -> None:
        """Any cohort can be trimmed by less than half."""

    def combine(self, updates: torch.Tensor) -> torch.Tensor:
        out = int(self.trim * len(updates))
        return _by_column(
            updates, lambda block: block.sort(dim=0).values[out : len(block) - out].mean(dim=0)
        )


@dataclass(frozen=True)
class Krum:
    """The update that is nearest to its neighbours (Blanchard et al. 2017).

    Each has a score: the sum of its squared distances to the K - `malicious` - 2 updates nearest to
    it. The mean is taken of the `chosen` updates with the least scores: one is Krum, more are
    multi-Krum, None is all but `malicious`. A round too small for a score does not move the model.
    """

    malicious: int
    chosen: int | None = 1

    @property
    def identity(self) -> Stated:
        return (("aggregate", "krum"), ("malicious", self.malicious), ("chosen", self.chosen))

    def __post_init__(self) -> None:
        ANY_COUNT.check("malicious", self.malicious)
        if self.chosen is not None:
            COUNT.check("chosen", self.chosen)

    def check(self, cohort: float) -> None:
        least = 2 * self.malicious + 3
        if cohort < least:
            raise BadArgument(
                f"{{malicious}} is {self.malicious} and a round has {cohort:g} clients: Krum needs "
                f"at least {least}; ask more clients, or expect fewer malicious ones",
                "malicious",
            )

    def combine(self, updates: torch.Tensor) -> torch.Tensor:
        near = len(updates) - self.malicious - 2
        if near < 1:
            return updates.new_zeros(updates.shape[1], dtype=torch.float64)
        squares = _squared_distances(updates).fill_diagonal_(torch.inf)
        scores = squares.sort(dim=1).values[:, :near].sum(dim=1)
        chosen = len(updates) - self.malicious if self.chosen is None else self.chosen
        best = torch.argsort(scores, stable=True)[:chosen]
        return updates[best].double().mean(dim=0)


@dataclass(frozen=True)
class Flame:
    """The mean of the largest cluster by direction, clipped to the median length.

    Clustering and clipping of FLAME (Nguyen et al. 2022), without its noise, which has no claim: a
    cluster has more than half of the round's updates, by HDBSCAN on cosine distances. Where there
    is none, all updates count.
    """

    @property
    def identity(self) -> Stated:
        return (("aggregate", "flame"),)

    def check(self, cohort: float) -> None:
        if cohort < 3:
            raise BadInput(f"a round has {cohort:g} clients: clusters need at least 3")

    def combine(self, updates: torch.Tensor) -> torch.Tensor:
        norms = updates.double().norm(dim=1)
        kept = _largest_cluster(updates, norms)
        scale = (norms.median() / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
        scale = torch.where(kept, scale, 0.0) / kept.sum()
        return _by_column(updates, lambda block: scale @ block)


def _largest_cluster(updates: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Which updates are in the cluster of more than half of them, all if there is none."""
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


def _squared_distances(updates: torch.Tensor) -> torch.Tensor:
    products = _products(updates)
    squares = products.diagonal()
    return (squares[:, None] + squares[None, :] - 2 * products).clamp_min_(0)


def _products(updates: torch.Tensor) -> torch.Tensor:
    """All inner products, float64 [K, K]."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for block in _blocks(updates):
        wide = block.double()
        total += wide @ wide.T
    return total


def _blocks(updates: torch.Tensor) -> Iterator[torch.Tensor]:
    """The updates by columns, so that what is computed of them stays small."""
    yield from torch.split(updates, max(1, _COLUMNS // max(1, len(updates))), dim=1)


def _by_column(updates: torch.Tensor, of: "Columns") -> torch.Tensor:
    return torch.cat([of(block.double()) for block in _blocks(updates)])


class Columns(Protocol):
    """From columns [K, p] to one value each, [p]."""

    def __call__(self, block: torch.Tensor) -> torch.Tensor: ...
