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
from fedveil.privacy.clipping import Bounded
from fedveil.privacy.plan import PrivacyPlan, Where
from fedveil.privacy.randomness import Streams
from fedveil.training.client import LocalWork
from fedveil.training.cohort import gather
from fedveil.training.gradients import Gradients, Mode, gradients_of
from fedveil.training.server import ServerState, Weights, accept

MEMORY = 512 * 2**20


class Adversary(Protocol):
    """Clients that report something other than their work: returns one report per client."""

    def __call__(
        self, round: int, ids: npt.NDArray[np.int64], reports: torch.Tensor
    ) -> torch.Tensor | Sequence[torch.Tensor]: ...


@dataclass(frozen=True)
class CohortSum:
    """What a cohort comes to: the sum of weighted rows as reported, in float64, and counts.

    `signal` is the same sum before clients added their noise, `watched` what an adaptive bound
    collects; both are private. `refused` clients sent something that cannot be used.
    """

    total: torch.Tensor
    signal: torch.Tensor
    watched: torch.Tensor
    weight: float
    clients: int
    clipped: int
    refused: tuple[int, ...]

    def __add__(self, other: "CohortSum") -> "CohortSum":
        return CohortSum(
            self.total + other.total,
            self.signal + other.signal,
            self.watched + other.watched,
            self.weight + other.weight,
            self.clients + other.clients,
            self.clipped + other.clipped,
            self.refused + other.refused,
        )


@dataclass(frozen=True, eq=False)
class LocalEngine:
    """Runs `train, bound, randomise, sum` for a cohort; chunk sums are added in chunk order.

    `mode` and `chunk`, the clients computed together, change rounding and nothing else.
    """

    task: Task
    data: FederatedData
    work: LocalWork
    plan: PrivacyPlan
    streams: Streams
    weights: Weights
    mode: Mode
    chunk: int
    adversary: Adversary | None = None

    @cached_property
    def _gradients(self) -> Gradients:
        return gradients_of(self.task, self.mode)

    def run(self, round: int, ids: npt.NDArray[np.int64], state: ServerState) -> CohortSum:
        """The sum over the cohort `ids` of `round`, starting from `state`."""
        zero = torch.zeros(self.task.size, dtype=torch.float64)
        width = 0 if self.plan.rule is None else self.plan.rule.width
        total = CohortSum(zero, zero, torch.zeros(width, dtype=torch.float64), 0.0, 0, 0, ())
        for start in range(0, len(ids), self.chunk):
            total = total + self._run_chunk(round, ids[start : start + self.chunk], state)
        return total

    def _run_chunk(self, round: int, ids: npt.NDArray[np.int64], state: ServerState) -> CohortSum:
        plan, streams = self.plan, self.streams
        cohort = gather(self.data, ids)
        bound = plan.bound(state.moving, round)
        done = self.work.updates(self._gradients, state.params, cohort, bound, round, streams)
        rows, diverged = done.rows, np.zeros(len(ids), dtype=bool)
        if plan.where is Where.CLIENT:
            rows, diverged = _without_diverged(rows)
        by_examples = self.weights is Weights.EXAMPLES
        weights = cohort.weights if by_examples else torch.ones(len(ids), dtype=torch.float64)
        signal = torch.mv(rows.double().T, weights) if plan.where is Where.CLIENT else None
        plan.randomise_(rows, state.params, ids, state.moving, round, streams)
        reports: torch.Tensor | Sequence[torch.Tensor] = rows
        if self.adversary is not None:
            reports = self.adversary(round, ids, rows)
        again = bound if plan.where in (Where.SERVER, Where.NOWHERE) else None
        accepted = accept(reports, self.task.size, again)
        refused = accepted.refused | plan.unreadable(accepted.rows, state.moving)
        weights = torch.where(refused, 0.0, weights)
        total = plan.summed(accepted.rows, weights, state.params, state.moving)
        return CohortSum(
            total=total,
            signal=total if signal is None else signal,
            watched=self._watch(done, round, ids),
            weight=float(weights.sum()),
            clients=len(ids),
            clipped=int((done.clipped | accepted.clipped).sum()),
            refused=tuple(int(c) for c in ids[refused.numpy() | diverged]),
        )

    def _watch(self, done: Bounded, round: int, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        if self.plan.rule is None or self.plan.rule.width == 0:
            return torch.zeros(0, dtype=torch.float64)
        keys = self.streams.keys("client-bits", round, ids)
        return self.plan.rule.watch(done, round, keys).sum(dim=0)


def _without_diverged(rows: torch.Tensor) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
    """A client that diverged sends a randomised zero: that it diverged is private as well."""
    diverged = ~torch.isfinite(rows).all(dim=1)
    if not bool(diverged.any()):
        return rows, diverged.numpy()
    return torch.where(diverged[:, None], 0.0, rows), diverged.numpy()


def fitting_chunk(task: Task, data: FederatedData) -> int:
    """How many clients fit into 512 MiB: their padded records and eight rows of parameters."""
    records = int(data.sizes.max()) * math.prod(data.record_shape)
    return max(1, min(4096, MEMORY // (4 * (8 * task.size + 2 * records))))
