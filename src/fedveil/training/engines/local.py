"""The engine of one machine: a cohort in fixed chunks, on one worker process per core."""

from collections.abc import Iterator, Sequence
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
from fedveil.privacy.rows import add_weighted_
from fedveil.training.client import LocalWork
from fedveil.training.cohort import CohortData
from fedveil.training.engines.chunks import cut
from fedveil.training.engines.process import one_thread
from fedveil.training.engines.workers import Workers
from fedveil.training.evaluate import batches_of, mean_of, measure
from fedveil.training.gradients import Gradients, Mode, gradients_of
from fedveil.training.server import ServerState, Weights, accept
from fedveil.training.sums import CohortSum
from fedveil.training.turn import Spanned, Turn


class Adversary(Protocol):
    """Clients that report something other than their work: returns one report per client."""

    def __call__(
        self, round: int, ids: npt.NDArray[np.int64], reports: torch.Tensor
    ) -> torch.Tensor | Sequence[torch.Tensor]: ...


@dataclass(frozen=True, eq=False)
class LocalEngine:
    """Runs `train, bound, randomise, sum` for a cohort; chunk sums are added in chunk order.

    `mode` and `chunk`, the clients summed together, change rounding and nothing else; the number
    of workers changes nothing at all: every process computes with one thread, and a draw depends
    on the client, not on who draws it. A cohort of one chunk is computed in this process, and so
    is everything when an adversary, who may remember what it saw, takes part.
    """

    task: Task
    data: FederatedData
    work: LocalWork
    plan: PrivacyPlan
    streams: Streams
    weights: Weights
    mode: Mode
    chunk: int
    workers: int = 1
    adversary: Adversary | None = None

    def run(self, round: int, ids: npt.NDArray[np.int64], state: ServerState) -> CohortSum:
        """The sum over the cohort `ids` of `round`, starting from `state`."""
        total = self._zero()
        chunks = cut(ids, self.data.offsets[ids + 1] - self.data.offsets[ids], self.chunk)
        for done in self._sums(round, chunks, state):
            total.add_(done)
        total.refused = tuple(sorted(total.refused))
        return total

    def _sums(
        self, round: int, chunks: list[npt.NDArray[np.int64]], state: ServerState
    ) -> Iterator[CohortSum]:
        """The sum of each chunk, in chunk order."""
        if len(chunks) > 1 and self._divided:
            yield from self._pool.sums(round, chunks, state.params, state.moving)
            return
        with one_thread():
            for chunk in chunks:
                total = self._zero()
                self._add_chunk_(total, round, chunk, state.params, state.moving)
                yield total

    def evaluate(self, params: torch.Tensor) -> dict[str, float]:
        """Mean loss and metrics over the test split."""
        batches = batches_of(self.data)
        if len(batches) < 2 or not self._divided or not self._started:
            with one_thread():
                return mean_of([measure(self.task, params, self.data, b) for b in batches])
        return mean_of(list(self._pool.measures(batches, params)))

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        if self._started:
            self._pool.close()
            del self.__dict__["_pool"]

    @property
    def _divided(self) -> bool:
        return self.workers > 1 and self.adversary is None

    @property
    def _started(self) -> bool:
        return "_pool" in self.__dict__

    @cached_property
    def _pool(self) -> Workers:
        _ = self._gradients  # made before the fork: workers share what it holds
        return Workers(
            self.workers,
            add_chunk_=self._add_chunk_,
            measure=lambda params, batch: measure(self.task, params, self.data, batch),
            size=self.task.size,
            moving=len(self.plan.start(self.task.parameters)),
            width=self._width,
            noisy=self._noisy,
        )

    @cached_property
    def _gradients(self) -> Gradients:
        whole = self.work.whole(int(self.data.sizes.max()))
        return gradients_of(self.task, self.mode, self.data, whole=whole)

    @property
    def _noisy(self) -> bool:
        return self.plan.where is Where.CLIENT

    @property
    def _summed(self) -> bool:
        """Whether nobody sees a client's own row: not the server, which only sums, no adversary."""
        return self.plan.where in (Where.SERVER, Where.NOWHERE) and self.adversary is None

    @property
    def _width(self) -> int:
        return 0 if self.plan.rule is None else self.plan.rule.width

    def _zero(self) -> CohortSum:
        return CohortSum.zero(self.task.size, self._width, noisy=self._noisy)

    def _add_chunk_(
        self,
        total: CohortSum,
        round: int,
        ids: npt.NDArray[np.int64],
        params: torch.Tensor,
        moving: torch.Tensor,
    ) -> None:
        """Add the chunk `ids`: at once when vectorised, client by client when looped."""
        step = 1 if self.mode is Mode.LOOPED else len(ids)
        for a in range(0, len(ids), step):
            self._add_block_(total, round, ids[a : a + step], params, moving)

    def _add_block_(
        self,
        total: CohortSum,
        round: int,
        ids: npt.NDArray[np.int64],
        params: torch.Tensor,
        moving: torch.Tensor,
    ) -> None:
        plan, streams = self.plan, self.streams
        cohort, bound = CohortData(self.data, ids), plan.bound(moving, round)
        done = self.work.updates(
            Turn(round, params, cohort, bound, self._gradients, streams, self._summed)
        )
        by_examples = self.weights is Weights.EXAMPLES
        weights = cohort.weights if by_examples else torch.ones(len(ids), dtype=torch.float64)
        if isinstance(done, Spanned):
            self._add_spanned_(total, round, ids, done, weights)
            return
        rows, diverged = done.rows, np.zeros(len(ids), dtype=bool)
        if total.signal is not None:
            diverged = _zero_diverged_(done)
            add_weighted_(total.signal, rows, weights)
        plan.randomise_(rows, params, ids, moving, round, streams)
        reports: torch.Tensor | Sequence[torch.Tensor] = rows
        if self.adversary is not None:
            reports = self.adversary(round, ids, rows.clone())
        again = bound if plan.where in (Where.SERVER, Where.NOWHERE) else None
        accepted = accept(reports, self.task.size, again)
        plan.align_(accepted.rows, bound)
        refused = accepted.refused | plan.unreadable(accepted.rows, moving)
        weights = torch.where(refused, 0.0, weights)
        plan.add_sum_(total.total, accepted.rows, weights, params, moving)
        total.watched += self._watch(done, round, ids)
        total.weight += float(weights.sum())
        total.clients += len(ids)
        total.clipped += int((done.clipped | accepted.clipped).sum())
        total.refused += tuple(int(c) for c in ids[refused.numpy() | diverged])

    def _add_spanned_(
        self,
        total: CohortSum,
        round: int,
        ids: npt.NDArray[np.int64],
        done: Spanned,
        weights: torch.Tensor,
    ) -> None:
        """Add updates whose rows nobody looks at: the server has nothing to bound again."""
        refused = ~torch.isfinite(done.norms)
        weights = torch.where(refused, 0.0, weights)
        done.walk.add_weighted_(total.total, done.moved, weights * done.scales)
        total.watched += self._watch(done, round, ids)
        total.weight += float(weights.sum())
        total.clients += len(ids)
        total.clipped += int(done.clipped.sum())
        total.refused += tuple(int(c) for c in ids[refused.numpy()])

    def _watch(
        self, done: Bounded | Spanned, round: int, ids: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        if self.plan.rule is None or self.plan.rule.width == 0:
            return torch.zeros(0, dtype=torch.float64)
        keys = self.streams.keys("client-bits", round, ids)
        return self.plan.rule.watch(done, round, keys).sum(dim=0)


def _zero_diverged_(done: Bounded) -> npt.NDArray[np.bool_]:
    """A client that diverged sends a randomised zero: that it diverged is private as well."""
    diverged = np.zeros(len(done.rows), dtype=bool)
    for k in torch.nonzero(done.norms == 0)[:, 0].tolist():
        if not bool(torch.isfinite(done.rows[k]).all()):
            done.rows[k] = 0.0
            diverged[k] = True
    return diverged
