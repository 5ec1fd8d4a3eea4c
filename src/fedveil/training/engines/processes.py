"""The engine of several processes: the chunks of a cohort on workers, here or on a cluster."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from fedveil.privacy.channel import Ids, Round
from fedveil.training.engines.serial import Serial
from fedveil.training.engines.tree import Branch
from fedveil.training.engines.workers import Workers
from fedveil.training.evaluate import (
    BatchMetrics,
    ClientSums,
    client_spread,
    combined_metrics,
    evaluation_batches,
    measure_batch,
    measure_clients,
    record_slices,
)


class Pool(Protocol):
    """Workers that have an engine each, and compute what it would; answers come in order."""

    def branches(self, round: Round, chunks: Sequence[Ids]) -> Iterator[Branch]:
        """The chunks' sums, in chunk order; each is valid until the next is asked for."""
        ...

    def measures(self, batches: Sequence[slice], params: torch.Tensor) -> Iterator[BatchMetrics]:
        """What each batch of the test split comes to, in order."""
        ...

    def client_measures(
        self, pieces: Sequence[slice], params: torch.Tensor
    ) -> Iterator[ClientSums]:
        """What each piece of the clients' records comes to, in order."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


MakePool = Callable[[Serial, int], Pool]
"""(the engine that every worker has, how many workers) -> the workers."""


def forked(engine: Serial, workers: int) -> Workers:
    """Workers on this machine, which share with this process what the engine has."""
    engine.make_ready()
    job = engine.job
    return Workers(
        workers,
        add_chunk_=engine.add_chunk_,
        measure=lambda params, batch: measure_batch(job.task, params, job.data, batch),
        measure_clients=lambda params, piece: measure_clients(job.task, params, job.data, piece),
        size=job.task.size,
        state_size=len(job.plan.first_state(job.task.parameters)),
        width=job.plan.width,
        noisy=job.plan.release.adds_noise,
        keep=job.rows,
    )


@dataclass(frozen=True, eq=False)
class Processes(Serial):
    """As `Serial`, with `workers` processes; where and how many they are changes nothing at all.

    Every process computes with one thread, and a draw depends on the client, not on who draws it.
    A cohort of one chunk is computed in this process.
    """

    workers: int = 2
    make_pool: MakePool = forked

    def open(self) -> None:
        """Start the workers now and not when they are first needed."""
        _ = self._pool

    def _branches(self, round: Round, chunks: list[Ids]) -> Iterator[Branch]:
        if len(chunks) > 1:
            return self._pool.branches(round, chunks)
        return super()._branches(round, chunks)

    def evaluate(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics over the test split, on the workers once there are any."""
        batches = evaluation_batches(self.job.data)
        if len(batches) < 2 or not self._started:
            return super().evaluate(params)
        return combined_metrics(self.job.task, list(self._pool.measures(batches, params)))

    def evaluate_clients(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics across clients, on the workers once there are any."""
        data = self.job.data
        pieces = record_slices(data)
        if len(pieces) < 2 or not self._started:
            return super().evaluate_clients(params)
        return client_spread(data, self._pool.client_measures(pieces, params))

    def close(self) -> None:
        """End the workers."""
        if self._started:
            self._pool.close()
            del self.__dict__["_pool"]

    @property
    def _started(self) -> bool:
        return "_pool" in self.__dict__

    @cached_property
    def _pool(self) -> Pool:
        return self.make_pool(self, self.workers)
