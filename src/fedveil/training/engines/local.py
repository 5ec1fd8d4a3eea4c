"""The engine of one machine: a cohort in fixed chunks, on one worker process per core."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedveil.data.federated import FederatedData
from fedveil.errors import BadInput
from fedveil.models.state import Snapshot, difference, snapshot_of
from fedveil.models.task import Task
from fedveil.privacy.plan import PrivacyPlan, Where
from fedveil.privacy.randomness import JointStreams, KeySource, Streams
from fedveil.privacy.rows import add_weighted_
from fedveil.training.client import LocalWork
from fedveil.training.cohort import CohortData
from fedveil.training.engines.chunks import cut
from fedveil.training.engines.process import one_thread
from fedveil.training.engines.workers import Workers
from fedveil.training.evaluate import batches_of, mean_of, measure
from fedveil.training.exchange import client_report, server_sum
from fedveil.training.gradients import Gradients, Mode, gradients_of
from fedveil.training.reports import Rows
from fedveil.training.server import ServerState, Weights
from fedveil.training.sums import CohortSum
from fedveil.training.turn import Turn

Ids = npt.NDArray[np.int64]
Asked = tuple[Ids, ServerState, Streams]
"""A cohort, where it starts, and its streams."""


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
    on the client, not on who draws it. `mixes`: the module lets records of a batch see each other.
    A cohort of one chunk is computed in this process, and so
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
    mixes: bool = False

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

    def run_in_step(self, round: int, asked: Sequence[Asked]) -> list[CohortSum]:
        """The sums over several cohorts of `round`, each with its start and streams, as one block.

        Only for plans whose bound does not move: all of them have the same.
        """
        cohorts = [self._largest_first(ids) for ids, _, _ in asked]
        lengths = [len(ids) for ids in cohorts]
        totals = [self._zero() for _ in asked]
        if not any(lengths):
            return totals
        starts = torch.stack([state.params for _, state, _ in asked])
        starts = starts.repeat_interleave(torch.tensor(lengths), dim=0)
        streams = JointStreams(tuple(streams for _, _, streams in asked), tuple(lengths))
        ends = np.cumsum(lengths).tolist()
        parts = [slice(end - n, end) for n, end in zip(lengths, ends, strict=True)]
        moving = asked[0][1].moving
        turn = self._turn(round, np.concatenate(cohorts), starts, moving, streams, summed=False)
        self._add_block_(list(zip(totals, parts, strict=True)), turn, moving)
        self._check_unchanged()
        return totals

    def _largest_first(self, ids: Ids) -> Ids:
        """A cohort as one chunk."""
        sizes = self.data.offsets[ids + 1] - self.data.offsets[ids]
        return cut(ids, sizes, len(ids))[0] if len(ids) else ids

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

    def make_ready(self) -> None:
        """Compute what every round needs, before a fork: processes then share it."""
        _ = self._gradients, self._work_before

    @cached_property
    def _pool(self) -> Workers:
        self.make_ready()
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
        return gradients_of(self.task, self.mode, self.data, whole=whole, mixes=self.mixes)

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
        _ = self._work_before
        step = 1 if self.mode is Mode.LOOPED else len(ids)
        for a in range(0, len(ids), step):
            here = ids[a : a + step]
            turn = self._turn(round, here, params, moving, self.streams, summed=self._summed)
            self._add_block_([(total, slice(None))], turn, moving)
        self._check_unchanged()

    @cached_property
    def _work_before(self) -> Snapshot:
        return snapshot_of(self.work)

    def _check_unchanged(self) -> None:
        """Refuse a module, a loss or a work that keeps something of a client for the next."""
        self.task.check_unchanged()
        name = difference(self._work_before, snapshot_of(self.work))
        if name is not None:
            raise BadInput(
                f"the work {name!r} changes when clients are computed: what one leaves there would "
                "reach others outside the clip; keep nothing between clients"
            )

    def _turn(
        self,
        round: int,
        ids: Ids,
        start: torch.Tensor,
        moving: torch.Tensor,
        streams: KeySource,
        *,
        summed: bool,
    ) -> Turn:
        cohort, bound = CohortData(self.data, ids), self.plan.bound(moving, round)
        return Turn(round, start, cohort, bound, self._gradients, streams, summed)

    def _add_block_(
        self, parts: Sequence[tuple[CohortSum, slice]], turn: Turn, moving: torch.Tensor
    ) -> None:
        """Compute a block of clients, and add each part of it to its sum."""
        weights = torch.ones(len(turn.cohort), dtype=torch.float64)
        if self.weights is Weights.EXAMPLES:
            weights = turn.cohort.weights

        def keep_signal(rows: Rows) -> None:
            for total, part in parts:
                if total.signal is not None:
                    add_weighted_(total.signal, rows.rows[part], weights[part])

        sent = client_report(self.work, self.plan, turn, moving, keep_signal)
        if self.adversary is not None and isinstance(sent.reports, Rows):
            ids, rows = turn.cohort.ids, sent.reports.rows
            sent = sent.changed(self.adversary(turn.round, ids, rows.clone()), self.task.size)
        server_sum(parts, self.plan, turn, moving, sent, weights)
