"""The engine of several processes: the chunks of a cohort on workers.

Workers of this machine are forked, one per core and with one thread each, so that data, model and
plan are there without being sent. What changes from round to round lies in memory shared with them.
A chunk's sum is written into a shared slot and read in chunk order, whoever finishes first. A
worker that dies is replaced and its chunk is done again: seeded randomness is keyed by client, so
the sum is the same. Secure noise is drawn again, and nobody has seen what the dead worker drew.
"""

import gc
import mmap
import multiprocessing
import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar

import torch

from fedveil.base.checks import cores
from fedveil.base.errors import FedveilError
from fedveil.base.forks import begin_worker, can_fork
from fedveil.base.interrupts import held
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.privacy.release import Ids, Round
from fedveil.training.engines.engine import LARGE_MODEL, keep_memory
from fedveil.training.engines.serial import Branch, Serial
from fedveil.training.evaluate import (
    client_spread,
    combined_metrics,
    evaluation_batches,
    measure_batch,
    measure_clients,
    record_slices,
)
from fedveil.training.reports import CohortSum

TRIES = 3
"""How often a chunk is tried whose workers die."""

_SPARE_BYTES = 1 << 25

M = TypeVar("M")
Measure = Callable[[Task, torch.Tensor, FederatedData, slice], M]
"""(task, parameters, data, slice of the records) -> measurements, such as `measure_batch`."""


class WorkerLost(FedveilError):
    """A chunk of clients could not be computed: its worker died again and again."""


def available_workers() -> int:
    """How many workers this machine takes: its cores, or 1 where processes cannot be forked."""
    return cores() if can_fork() else 1


class Pool(Protocol):
    """Workers with a copy of an engine each. Their answers come in order."""

    def branches(self, round: Round, chunks: Sequence[Ids]) -> Iterator[Branch]:
        """The chunks' sums, in chunk order. Each is valid until the next is taken."""
        ...

    def measured(
        self, measure: Measure[M], slices: Sequence[slice], params: torch.Tensor
    ) -> Iterator[M]:
        """The measurements of each slice, in order."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


@dataclass(frozen=True)
class _Chunk:
    """A request for the sum of some clients."""

    round: Round
    ids: Ids

    def __str__(self) -> str:
        return f"a chunk of {len(self.ids)} clients"


@dataclass(frozen=True)
class _Slice:
    """A request to measure a slice of the records."""

    measure: Measure[Any]
    slice: slice

    def __str__(self) -> str:
        return "a piece of the records to measure"


_Request = _Chunk | _Slice


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


class Workers:
    """A pool of `count` forked processes of this machine."""

    def __init__(self, engine: Serial, count: int) -> None:
        engine.make_ready()
        self._engine, job = engine, engine.job
        self._size, self._noisy = job.task.size, job.plan.release.adds_noise
        self._params = _shared(self._size, torch.float32)
        self._state = _shared(len(job.plan.first_state(job.task.parameters)), torch.float64)
        numbers = CohortSum.numbers(self._size, job.plan.width, noisy=self._noisy)
        each = 1 + min(2, _SPARE_BYTES // (8 * numbers))
        self._slots = [_shared(numbers, torch.float64) for _ in range(count * each)]
        self._workers: list[_Worker] = []
        for _ in range(count):
            self._workers.append(self._fork())

    def branches(self, round: Round, chunks: Sequence[Ids]) -> Iterator[Branch]:
        """The sum of each chunk, in chunk order. Each is valid until the next is taken."""
        self._params.copy_(round.start)
        self._state.copy_(round.adaptive_state)
        nothing = torch.zeros(0)  # what lies in shared memory is not sent
        round = replace(round, start=nothing, adaptive_state=nothing)
        for slot, rest in self._ordered([_Chunk(round, ids) for ids in chunks]):
            total = CohortSum.over(self._slots[slot], self._size, self._noisy)
            yield Branch(total.with_rest(rest), lent=True)

    def measured(
        self, measure: Measure[M], slices: Sequence[slice], params: torch.Tensor
    ) -> Iterator[M]:
        """The measurements of each slice, in order."""
        self._params.copy_(params)
        for _, measurements in self._ordered([_Slice(measure, part) for part in slices]):
            yield measurements

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def _ordered(self, requests: Sequence[_Request]) -> Iterator[tuple[int, Any]]:
        """(slot, answer) of each request in order. A slot is free again when the next is taken.

        Worker w has slots w, w + count, ...: memory that others never touch.
        """
        count = len(self._workers)
        waiting = deque((number, 0) for number in range(len(requests)))
        free = [list(range(w, len(self._slots), count)) for w in range(count)]
        idle, busy = set(range(count)), dict[int, tuple[int, int, int]]()
        done: dict[int, tuple[int, Any]] = {}
        for number in range(len(requests)):
            while number not in done:
                for w in [w for w in sorted(idle) if free[w]][: len(waiting)]:
                    request, tries = waiting.popleft()
                    busy[w] = (request, tries, free[w].pop())
                    idle.remove(w)
                    self._send(w, (busy[w][2], requests[request]))
                connections = {self._workers[w].connection: w for w in busy}
                ready = wait(list(connections))
                for w in [w for connection, w in connections.items() if connection in ready]:
                    request, tries, slot = busy.pop(w)
                    idle.add(w)
                    answer = self._receive(w)
                    if answer is not None:
                        done[request] = (slot, _unpacked(answer))
                        continue
                    free[w].append(slot)
                    if tries + 1 >= TRIES:
                        raise WorkerLost(
                            f"{tries + 1} workers in a row died on {requests[request]}, as they do "
                            "when memory runs out: lower engine.memory, engine.chunk or "
                            "engine.workers"
                        )
                    self._workers[w].stop()
                    self._workers[w] = self._fork()
                    waiting.appendleft((request, tries + 1))
            slot = done[number][0]
            yield done.pop(number)
            free[slot % count].append(slot)

    def _send(self, w: int, message: tuple[int, _Request]) -> None:
        try:
            self._workers[w].connection.send(message)
        except OSError:  # it died while idle: `_receive` will see it and have it replaced
            return

    def _receive(self, w: int) -> bytes | None:
        """The worker's answer, or None if it died."""
        try:
            return self._workers[w].connection.recv_bytes()
        except (EOFError, OSError):
            return None

    def _fork(self) -> _Worker:
        ours, theirs = multiprocessing.Pipe()
        others = [ours, *(w.connection for w in self._workers if not w.connection.closed)]
        process = multiprocessing.get_context("fork").Process(
            target=self._serve, args=(theirs, others, os.getpid()), daemon=True
        )
        with held():
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _serve(self, connection: Connection, others: Sequence[Connection], parent: int) -> None:
        """The life of a worker: requests in, answers out, until the parent goes away."""
        begin_worker(parent)
        for other in others:
            other.close()
        keep_memory(self._size)
        gc.freeze()
        while True:
            try:
                slot, request = connection.recv()
            except EOFError:
                os._exit(0)
            connection.send_bytes(self._answer(slot, request))
            if self._size > LARGE_MODEL:
                gc.collect()  # a few forgotten rows would be most of the memory

    def _answer(self, slot: int, request: _Request) -> bytes:
        """A pickle of (True, answer) or (False, exception). A sum's numbers are in the slot."""
        job = self._engine.job
        try:
            if isinstance(request, _Slice):
                answer = request.measure(job.task, self._params, job.data, request.slice)
                return pickle.dumps((True, answer))
            numbers = self._slots[slot].zero_()
            total = CohortSum.over(numbers, self._size, self._noisy, job.keeps_updates)
            round = replace(request.round, start=self._params, adaptive_state=self._state)
            self._engine.add_chunk_(total, round, request.ids)
            return pickle.dumps((True, total.rest))
        except Exception as e:
            e.add_note("in a worker process:\n" + traceback.format_exc())
            return pickle.dumps((False, e))


def _unpacked(answer: bytes) -> Any:
    fine, content = pickle.loads(answer)
    if not fine:
        raise content
    return content


def _shared(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory that forked processes share."""
    if count == 0:
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype)


@dataclass(frozen=True, eq=False)
class Processes(Serial):
    """As `Serial`, with `workers` processes. Their number and place change nothing at all.

    Every process computes with one thread, and a draw depends on the client, not on who draws it.
    A cohort of one chunk is computed in this process.

    Attributes:
        make_pool: (this engine, number of workers) -> the workers.
    """

    workers: int = 2
    make_pool: Callable[[Serial, int], Pool] = Workers

    def open(self) -> None:
        """Start the workers now and not when they are first needed."""
        _ = self._pool

    def _branches(self, round: Round, chunks: list[Ids]) -> Iterator[Branch]:
        if len(chunks) > 1:
            return self._pool.branches(round, chunks)
        return super()._branches(round, chunks)

    def evaluate(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics over the test split, on the workers once there are any."""
        slices = evaluation_batches(self.job.data)
        if len(slices) < 2 or not self._started:
            return super().evaluate(params)
        batches = self._pool.measured(measure_batch, slices, params)
        return combined_metrics(self.job.task, list(batches))

    def evaluate_clients(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics across clients, on the workers once there are any."""
        slices = record_slices(self.job.data)
        if len(slices) < 2 or not self._started:
            return super().evaluate_clients(params)
        pieces = self._pool.measured(measure_clients, slices, params)
        return client_spread(self.job.data, pieces)

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
