"""The engine of one machine: the chunks of a cohort on one worker process per core."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from fedveil.training.engines.engine import Ids
from fedveil.training.engines.serial import Serial
from fedveil.training.engines.workers import Workers
from fedveil.training.evaluate import batches_of, joined_metrics, measure
from fedveil.training.over_clients import measure_clients, pieces_of, spread
from fedveil.training.server import ServerState
from fedveil.training.sums import CohortSum


@dataclass(frozen=True, eq=False)
class Processes(Serial):
    """As `Serial`, with `workers` processes; their number changes nothing at all.

    Every process computes with one thread, and a draw depends on the client, not on who draws it.
    A cohort of one chunk is computed in this process.
    """

    workers: int = 2

    def _sums(self, round: int, chunks: list[Ids], state: ServerState) -> Iterator[CohortSum]:
        if len(chunks) > 1:
            clip = self.job.plan.clip(state.moving, round)
            return self._pool.sums(round, chunks, state.params, state.moving, clip)
        return super()._sums(round, chunks, state)

    def evaluate(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics over the test split, on the workers once there are any."""
        batches = batches_of(self.job.data)
        if len(batches) < 2 or not self._started:
            return super().evaluate(params)
        return joined_metrics(self.job.task, list(self._pool.measures(batches, params)))

    def evaluate_clients(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics across clients, on the workers once there are any."""
        data = self.job.data
        pieces = pieces_of(data)
        if len(pieces) < 2 or not self._started:
            return super().evaluate_clients(params)
        return spread(data, self._pool.client_measures(pieces, params))

    def close(self) -> None:
        """End the workers."""
        if self._started:
            self._pool.close()
            del self.__dict__["_pool"]

    @property
    def _started(self) -> bool:
        return "_pool" in self.__dict__

    @cached_property
    def _pool(self) -> Workers:
        self.make_ready()
        job = self.job
        return Workers(
            self.workers,
            add_chunk_=self.add_chunk_,
            measure=lambda params, batch: measure(job.task, params, job.data, batch),
            measure_clients=lambda params, piece: measure_clients(
                job.task, params, job.data, piece
            ),
            size=job.task.size,
            moving=len(job.plan.start(job.task.parameters)),
            width=job.plan.width,
            noisy=job.plan.release.randomises,
            keep=job.rows,
        )
