"""The engine that runs a cohort in this process, in fixed chunks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.privacy.clipping import FixedBound
from fedveil.privacy.randomness import Streams
from fedveil.training.client import LocalWork
from fedveil.training.cohort import gather
from fedveil.training.gradients import GradientFn, Mode, gradient_fn
from fedveil.training.server import Weights, accept

MEMORY = 512 * 2**20


class Adversary(Protocol):
    """Clients that report something other than their work: returns one report per client."""

    def __call__(
        self, round: int, ids: npt.NDArray[np.int64], reports: torch.Tensor
    ) -> torch.Tensor | Sequence[torch.Tensor]: ...


@dataclass(frozen=True)
class CohortSum:
    """What a cohort comes to: the sum of weighted, bounded rows in float64, and counts."""

    total: torch.Tensor
    weight: float
    clients: int
    clipped: int
    refused: tuple[int, ...]

    def __add__(self, other: "CohortSum") -> "CohortSum":
        return CohortSum(
            self.total + other.total,
            self.weight + other.weight,
            self.clients + other.clients,
            self.clipped + other.clipped,
            self.refused + other.refused,
        )


@dataclass(frozen=True, eq=False)
class LocalEngine:
    """Runs `train, bound, sum` for a cohort; chunk sums are added in chunk order.

    `mode` and `chunk`, the clients computed together, change rounding and nothing else.
    """

    task: Task
    data: FederatedData
    work: LocalWork
    streams: Streams
    bound: FixedBound | None
    weights: Weights
    mode: Mode
    chunk: int
    adversary: Adversary | None = None

    @cached_property
    def _gradients(self) -> GradientFn:
        return gradient_fn(self.task, self.mode)

    def run(self, round: int, ids: npt.NDArray[np.int64], params: torch.Tensor) -> CohortSum:
        """The sum over the cohort `ids` of `round`, starting from `params` [P]."""
        total = CohortSum(torch.zeros(self.task.size, dtype=torch.float64), 0.0, 0, 0, ())
        for start in range(0, len(ids), self.chunk):
            total = total + self._run_chunk(round, ids[start : start + self.chunk], params)
        return total

    def _run_chunk(self, round: int, ids: npt.NDArray[np.int64], params: torch.Tensor) -> CohortSum:
        cohort = gather(self.data, ids)
        done = self.work.updates(self._gradients, params, cohort, self.bound, round, self.streams)
        reports: torch.Tensor | Sequence[torch.Tensor] = done.rows
        if self.adversary is not None:
            reports = self.adversary(round, ids, done.rows)
        accepted = accept(reports, self.task.size, self.bound)
        by_examples = self.weights is Weights.EXAMPLES
        weights = cohort.weights if by_examples else torch.ones(len(ids), dtype=torch.float64)
        weights = torch.where(accepted.refused, 0.0, weights)
        return CohortSum(
            total=torch.mv(accepted.rows.to(torch.float64).T, weights),
            weight=float(weights.sum()),
            clients=len(ids),
            clipped=int((done.clipped | accepted.clipped).sum()),
            refused=tuple(int(c) for c in ids[accepted.refused.numpy()]),
        )


def fitting_chunk(task: Task, data: FederatedData) -> int:
    """How many clients fit into 512 MiB: their padded records and eight rows of parameters."""
    records = int(data.sizes.max()) * math.prod(data.record_shape)
    return max(1, min(4096, MEMORY // (4 * (8 * task.size + 2 * records))))
