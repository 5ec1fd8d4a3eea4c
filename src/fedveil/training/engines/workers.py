"""Worker processes: one per core, one thread each, fed with chunks.

They are forked, so that data, model and plan are there without being sent; what changes from
round to round lies in memory shared with them. A chunk's sum is written into a shared slot and
read in chunk order, whoever finishes first. A worker that dies is replaced and its chunk is done
again: seeded randomness is keyed by client, so the sum is the same; secure noise is drawn again,
and nobody has seen what the dead worker drew.
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
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.checks import cores
from fedveil.base.errors import FedveilError
from fedveil.base.forks import begin_worker, can_fork
from fedveil.base.interrupts import held
from fedveil.privacy.channel import Round
from fedveil.training.engines.housekeeping import LARGE_MODEL, keep_memory
from fedveil.training.engines.tree import Branch
from fedveil.training.evaluate import BatchMetrics, ClientSums
from fedveil.training.reports import CohortSum

TRIES = 3
"""How often a chunk is tried whose workers die."""

_SPARE_BYTES = 1 << 25

Ids = npt.NDArray[np.int64]
AddChunk = Callable[[CohortSum, Round, Ids], None]
Measure = Callable[[torch.Tensor, slice], BatchMetrics]
MeasureClients = Callable[[torch.Tensor, slice], ClientSums]


class WorkerLost(FedveilError):
    """A chunk of clients could not be computed: its worker died again and again."""


@dataclass(frozen=True)
class _Chunk:
    """Clients whose sum is wanted."""

    round: Round
    ids: Ids

    def __str__(self) -> str:
        return f"a chunk of {len(self.ids)} clients"


@dataclass(frozen=True)
class _Batch:
    """A batch of the test split to measure."""

    batch: slice

    def __str__(self) -> str:
        return "a batch of the test split"


@dataclass(frozen=True)
class _Records:
    """A piece of the clients' records to measure."""

    piece: slice

    def __str__(self) -> str:
        return "a piece of the clients' records"


_Job = _Chunk | _Batch | _Records


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection


def available() -> int:
    """How many workers this machine takes: its cores, or 1 where processes cannot be forked."""
    return cores() if can_fork() else 1


class Workers:
    """A pool of forked processes that compute chunk sums and measure records."""

    def __init__(
        self,
        count: int,
        *,
        add_chunk_: AddChunk,
        measure: Measure,
        measure_clients: MeasureClients,
        size: int,
        state_size: int,
        width: int,
        noisy: bool,
        keep: bool = False,
    ) -> None:
        self._add_chunk_, self._measure = add_chunk_, measure
        self._measure_clients = measure_clients
        self._size, self._noisy, self._keep = size, noisy, keep
        self._params = _shared(size, torch.float32)
        self._state = _shared(state_size, torch.float64)
        numbers = CohortSum.numbers(size, width, noisy=noisy)
        each = 1 + min(2, _SPARE_BYTES // (8 * numbers))
        self._slots = [_shared(numbers, torch.float64) for _ in range(count * each)]
        self._workers: list[_Worker] = []
        for _ in range(count):
            self._workers.append(self._fork())

    def branches(self, round: Round, chunks: Sequence[Ids]) -> Iterator[Branch]:
        """The sum of each chunk, in chunk order; each is valid until the next is asked for."""
        self._params.copy_(round.start)
        self._state.copy_(round.adaptive_state)
        nothing = torch.zeros(0)  # what lies in shared memory is not sent
        jobs = [
            _Chunk(replace(round, start=nothing, adaptive_state=nothing), ids) for ids in chunks
        ]
        for slot, rest in self._ordered(jobs):
            total = CohortSum.over(self._slots[slot], self._size, self._noisy)
            yield Branch(total.with_rest(rest), lent=True)

    def measures(self, batches: Sequence[slice], params: torch.Tensor) -> Iterator[BatchMetrics]:
        """What each batch of the test split comes to, in order."""
        self._params.copy_(params)
        for _, measured in self._ordered([_Batch(batch) for batch in batches]):
            yield measured

    def client_measures(
        self, pieces: Sequence[slice], params: torch.Tensor
    ) -> Iterator[ClientSums]:
        """What each piece of the clients' records comes to, in order."""
        self._params.copy_(params)
        for _, measured in self._ordered([_Records(piece) for piece in pieces]):
            yield measured

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
        self._workers = []

    def _ordered(self, jobs: Sequence[_Job]) -> Iterator[tuple[int, Any]]:
        """(slot, answer) of each job in order; a slot is free again when the next is asked for.

        Worker w has slots w, w + count, ...: memory that others never touch.
        """
        count = len(self._workers)
        waiting = deque((number, 0) for number in range(len(jobs)))
        free = [list(range(w, len(self._slots), count)) for w in range(count)]
        idle, busy = set(range(count)), dict[int, tuple[int, int, int]]()
        done: dict[int, tuple[int, Any]] = {}
        for number in range(len(jobs)):
            while number not in done:
                for at in [w for w in sorted(idle) if free[w]][: len(waiting)]:
                    job, tries = waiting.popleft()
                    busy[at] = (job, tries, free[at].pop())
                    idle.remove(at)
                    self._send(at, (busy[at][2], jobs[job]))
                for at in self._ready(busy):
                    job, tries, slot = busy.pop(at)
                    idle.add(at)
                    answer = self._receive(at)
                    if answer is not None:
                        done[job] = (slot, _opened(answer))
                        continue
                    free[at].append(slot)
                    _check_tries(tries + 1, jobs[job])
                    self._replace(at)
                    waiting.appendleft((job, tries + 1))
            slot = done[number][0]
            yield done.pop(number)
            free[slot % count].append(slot)

    def _ready(self, busy: dict[int, Any]) -> list[int]:
        at = {self._workers[w].connection: w for w in busy}
        return [at[c] for c in wait(list(at)) if isinstance(c, Connection)]

    def _send(self, at: int, message: tuple[int, _Job]) -> None:
        try:
            self._workers[at].connection.send(message)
        except OSError:  # it died while idle; `_receive` will see it and have it replaced
            return

    def _receive(self, at: int) -> bytes | None:
        """The worker's answer, or None if it died."""
        try:
            return self._workers[at].connection.recv_bytes()
        except (EOFError, OSError):
            return None

    def _replace(self, at: int) -> None:
        dead = self._workers[at]
        dead.connection.close()
        dead.process.kill()
        dead.process.join()
        dead.process.close()
        self._workers[at] = self._fork()

    def _fork(self) -> _Worker:
        ours, theirs = multiprocessing.Pipe()
        others = [ours, *(w.connection for w in self._workers if not w.connection.closed)]
        parent = os.getpid()
        process = multiprocessing.get_context("fork").Process(
            target=self._serve, args=(theirs, others, parent), daemon=True
        )
        with held():
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _serve(self, connection: Connection, others: Sequence[Connection], parent: int) -> None:
        """The life of a worker: jobs in, answers out, until the parent goes away."""
        begin_worker(parent)
        for other in others:
            other.close()
        keep_memory(self._size)
        gc.freeze()
        while True:
            try:
                slot, job = connection.recv()
            except EOFError:
                os._exit(0)
            connection.send_bytes(self._answer(slot, job))
            if self._size > LARGE_MODEL:
                gc.collect()  # a few forgotten rows would be most of the memory

    def _answer(self, slot: int, job: _Job) -> bytes:
        try:
            if isinstance(job, _Batch):
                return pickle.dumps((True, self._measure(self._params, job.batch)))
            if isinstance(job, _Records):
                return pickle.dumps((True, self._measure_clients(self._params, job.piece)))
            numbers = self._slots[slot].zero_()
            total = CohortSum.over(numbers, self._size, self._noisy, self._keep)
            round = replace(job.round, start=self._params, adaptive_state=self._state)
            self._add_chunk_(total, round, job.ids)
            return pickle.dumps((True, total.rest))
        except Exception as e:
            e.add_note("in a worker process:\n" + traceback.format_exc())
            return pickle.dumps((False, e))


def _opened(answer: bytes) -> Any:
    fine, content = pickle.loads(answer)
    if not fine:
        raise content
    return content


def _check_tries(tries: int, job: _Job) -> None:
    if tries >= TRIES:
        raise WorkerLost(
            f"{tries} workers in a row died on {job}, as they do when memory runs out: lower "
            "engine.memory, engine.chunk or engine.workers"
        )


def _shared(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory that forked processes share."""
    if count == 0:
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype)
