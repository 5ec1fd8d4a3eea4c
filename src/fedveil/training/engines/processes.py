"""The engine of several processes: the chunks of a cohort on workers.

There is one worker per core of this machine, with one thread each. On Linux they are forked, so
that data, model and plan are there without being sent. What changes from round to round lies in
memory shared with them. Elsewhere they are spawned: each is sent the engine once, the parameters
once a round, and sends its sums back. Sums are read in chunk order, whoever finishes first. A
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
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Never, Protocol, TypeVar

import torch

from fedveil.base import platforms
from fedveil.base.checks import cores
from fedveil.base.errors import FedveilError
from fedveil.base.forks import begin_worker
from fedveil.base.interrupts import hold_signals
from fedveil.base.spawning import can_send, pickle_to_send, script_left_out
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.privacy.release import Ids, Round
from fedveil.training.engines.engine import LARGE_MODEL, keep_memory
from fedveil.training.engines.serial import Branch, Serial
from fedveil.training.evaluate import (
    client_spread,
    combine_metrics,
    evaluation_batches,
    measure_batch,
    measure_clients,
    over_clients,
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
    """Raised when a chunk of clients cannot be computed: its workers died again and again."""


def available_workers(*needed: object) -> int:
    """The number of workers to use here: one for each core.

    1 if workers are spawned and `needed` cannot be pickled.
    """
    return cores() if platforms.start_method() == "fork" or can_send(needed) else 1


class Pool(Protocol):
    """Workers, each with a copy of an engine. Their answers come in the order of the requests."""

    def branches(self, round: Round, chunks: Sequence[Ids]) -> Iterator[Branch]:
        """Yield the chunks' sums in chunk order. Each is valid only until the next is taken.

        A branch may be the sum of several chunks in a row.
        """
        ...

    def measured(
        self, measure: Measure[M], slices: Sequence[slice], params: torch.Tensor
    ) -> Iterator[M]:
        """Yield what `measure` returns at `params` for each slice of the records, in order."""
        ...

    def close(self) -> None:
        """End the workers, or disconnect from them."""
        ...


_Request = tuple[Round, Ids] | tuple[Measure[Any], slice]
"""Clients of a round to sum, or a slice of the records to measure."""


@dataclass
class _Worker:
    """A process and the pipe to it."""

    process: BaseProcess
    connection: Connection
    round_sent: int = 0

    def stop(self) -> None:
        """Kill the process and wait until it has ended."""
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


class Workers:
    """A pool of `count` forked processes of this machine, started at once."""

    def __init__(self, engine: Serial, count: int) -> None:
        engine.make_ready()
        self._engine, job = engine, engine.job
        self._size, self._noisy = job.task.size, job.plan.release.adds_noise
        numbers = job.zero().numbers.numel()
        self._slot_count = count * (1 + min(2, _SPARE_BYTES // (8 * numbers)))
        self._prepare(numbers)
        self._workers: list[_Worker] = []
        for _ in range(count):
            self._workers.append(self._start())

    def branches(self, round: Round, chunks: Sequence[Ids]) -> Iterator[Branch]:
        """Yield the chunks' sums in chunk order. Each is valid until the next is taken."""
        self._share(round.start, round.adaptive_state)
        nothing = torch.zeros(0)  # what is shared already is not in the requests
        round = replace(round, start=nothing, adaptive_state=nothing)
        for slot, answer in self._ordered([(round, ids) for ids in chunks]):
            numbers, rest = self._sum_of(slot, answer)
            total = CohortSum.over(numbers, self._size, self._noisy)
            yield Branch(total.with_rest(rest), lent=True)

    def measured(
        self, measure: Measure[M], slices: Sequence[slice], params: torch.Tensor
    ) -> Iterator[M]:
        """Yield what workers measure on each slice of the records, in order."""
        self._share(params)
        for _, measurements in self._ordered([(measure, part) for part in slices]):
            yield measurements

    def close(self) -> None:
        """Kill all workers. The pool cannot be used afterwards."""
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def _ordered(self, requests: Sequence[_Request]) -> Iterator[tuple[int, Any]]:
        """Yield (slot, answer) of each request in order.

        A slot's numbers are valid until the next pair is taken. Worker w has the slots w, w +
        count, ...: memory that other workers never touch. A request whose worker dies is tried
        again on a new one. Raises WorkerLost when `TRIES` workers have died on it.
        """
        count = len(self._workers)
        waiting = deque((number, 0) for number in range(len(requests)))
        free = [list(range(w, self._slot_count, count)) for w in range(count)]
        idle, busy = set(range(count)), dict[int, tuple[int, int, int]]()
        done: dict[int, tuple[int, Any]] = {}
        for number in range(len(requests)):
            while number not in done:
                for w in [w for w in sorted(idle) if free[w]][: len(waiting)]:
                    request, tries = waiting.popleft()
                    busy[w] = (request, tries, free[w].pop())
                    idle.remove(w)
                    with suppress(OSError):  # it died while idle: reading its answer shows that
                        self._send(self._workers[w], busy[w][2], requests[request])
                connections = {self._workers[w].connection: w for w in busy}
                ready = wait(list(connections))
                for w in [w for connection, w in connections.items() if connection in ready]:
                    request, tries, slot = busy.pop(w)
                    idle.add(w)
                    answer = self._receive(w)
                    if answer is not None:
                        done[request] = (slot, answer)
                        continue
                    free[w].append(slot)
                    if tries + 1 >= TRIES:
                        part = requests[request][1]
                        what = "a piece of the records to measure"
                        if not isinstance(part, slice):
                            what = f"a chunk of {len(part)} clients"
                        raise WorkerLost(
                            f"{tries + 1} workers in a row died on {what}, as they do when memory "
                            "runs out: lower engine.memory, engine.chunk or engine.workers"
                        )
                    self._workers[w].stop()
                    self._workers[w] = self._start()
                    waiting.appendleft((request, tries + 1))
            slot = done[number][0]
            yield done.pop(number)
            free[slot % count].append(slot)

    def _receive(self, w: int) -> Any:
        """Wait for the answer of worker w. None if the worker died.

        Raises the exception that the worker raised.
        """
        try:
            pickled = self._workers[w].connection.recv_bytes()
        except (EOFError, OSError):
            return None
        fine, answer = pickle.loads(pickled)
        if not fine:
            raise answer
        return answer

    def _prepare(self, numbers: int) -> None:
        """Make the memory that workers share, for sums of length `numbers`."""
        job = self._engine.job
        self._params = _shared(self._size, torch.float32)
        self._state = _shared(len(job.plan.first_state(job.task.parameters)), torch.float64)
        self._slots = [_shared(numbers, torch.float64) for _ in range(self._slot_count)]

    def _share(self, params: torch.Tensor, state: torch.Tensor | None = None) -> None:
        """Give all workers the parameters, and the adaptive state, of the next requests."""
        self._params.copy_(params)
        if state is not None:
            self._state.copy_(state)

    def _send(self, worker: _Worker, slot: int, request: _Request) -> None:
        """Send a request to a worker, which may write a sum into `slot`."""
        worker.connection.send((slot, request))

    def _sum_of(self, slot: int, answer: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """(numbers of a chunk's sum, its other fields), from its slot and the worker's answer."""
        return self._slots[slot], answer

    def _start(self) -> _Worker:
        """Start one more process and return it. The caller adds it to the pool."""
        ours, theirs = multiprocessing.Pipe()
        others = [ours, *(w.connection for w in self._workers if not w.connection.closed)]
        process = multiprocessing.get_context("fork").Process(
            target=self._serve, args=(theirs, others, os.getpid()), daemon=True
        )
        with hold_signals():
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _serve(self, connection: Connection, others: Sequence[Connection], parent: int) -> None:
        """Run in a worker process: answer requests until the parent goes away. Does not return.

        Args:
            connection: The worker's end of its pipe.
            others: Connections of the parent, which are closed here.
            parent: The parent's process id.
        """
        begin_worker(parent)
        for other in others:
            other.close()

        def answer(slot: int, request: _Request) -> Any:
            """Write a sum's numbers into `slot` and return its other fields, or measurements."""
            numbers = self._slots[slot]
            return _compute(self._engine, request, numbers, self._params, self._state)

        _answer_all(connection, self._size, connection.recv, answer)


class SpawnedWorkers(Workers):
    """A pool of `count` spawned processes of this machine, which share no memory with this one."""

    def _prepare(self, numbers: int) -> None:
        """Pickle what each worker gets first: the engine, and `numbers`, the length of a sum.

        Raises BadInput if it cannot be pickled.
        """
        engine = self._engine
        sent = Serial(engine.job, engine.mode, engine.chunk), numbers
        self._pickled = pickle_to_send(sent, f"the training of {engine.job.task!r}")
        self._round = 0
        self._content: tuple[Any, ...] = ()

    def _share(self, params: torch.Tensor, state: torch.Tensor | None = None) -> None:
        """Keep parameters and adaptive state for each worker's next request."""
        self._round += 1
        self._content = (params.numpy(), None if state is None else state.numpy())

    def _send(self, worker: _Worker, slot: int, request: _Request) -> None:
        """Send a request to a worker, with the engine and the parameters unless it has them."""
        if worker.round_sent == 0:  # not at its start: workers import side by side
            worker.connection.send_bytes(self._pickled)
        content = None if worker.round_sent == self._round else self._content
        worker.round_sent = self._round
        worker.connection.send_bytes(pickle.dumps((content, request)))

    def _sum_of(self, slot: int, answer: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """(numbers of a chunk's sum, its other fields): both are in the worker's answer."""
        numbers, rest = answer
        return torch.from_numpy(numbers), rest

    def _start(self) -> _Worker:
        """Start one more process and return it. The caller adds it to the pool."""
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_serve_spawned, args=(theirs, os.getpid()), daemon=True
        )
        with hold_signals(), script_left_out():
            process.start()
        theirs.close()
        return _Worker(process, ours)


def local_workers(engine: Serial, count: int) -> Workers:
    """A pool of `count` processes of this machine, forked or spawned as the platform allows."""
    return (Workers if platforms.start_method() == "fork" else SpawnedWorkers)(engine, count)


def _serve_spawned(connection: Connection, parent: int) -> None:
    """Run in a spawned process: receive an engine, and answer requests. Does not return.

    The process exits when the parent goes away. An engine that cannot be unpickled is an error that
    answers the first request.
    """
    begin_worker(parent)
    try:
        pickled = connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)
    try:
        engine, count = pickle.loads(pickled)
        engine.make_ready()
    except Exception as e:
        error = e  # answered to the first request

        def fail(content: Any, request: _Request) -> Any:
            raise error

        _answer_all(connection, 0, lambda: pickle.loads(connection.recv_bytes()), fail)
    del pickled
    given: list[Any] = [None, None]

    def answer(content: Any, request: _Request) -> Any:
        """Keep new parameters, and return (a sum's numbers, its other fields) or measurements."""
        if content is not None:
            given[:] = [part if part is None else torch.tensor(part) for part in content]
        if not isinstance(request[0], Round):
            return _compute(engine, request, torch.zeros(0), *given)
        numbers = torch.zeros(count, dtype=torch.float64)
        rest = _compute(engine, request, numbers, *given)
        return numbers.numpy(), rest

    size = engine.job.task.size
    _answer_all(connection, size, lambda: pickle.loads(connection.recv_bytes()), answer)


def _answer_all(
    connection: Connection,
    size: int,
    receive: Callable[[], Any],
    answer: Callable[[Any, _Request], Any],
) -> Never:
    """Answer requests in a worker until the parent goes away, then exit.

    An answer is a pickle of (True, answer) or (False, exception).

    Args:
        connection: The pipe to the parent.
        size: The number of parameters of the model.
        receive: Returns the two arguments of `answer`.
        answer: Computes the answer.
    """
    keep_memory(size)
    gc.freeze()
    while True:
        try:
            content, request = receive()
        except (EOFError, OSError):
            os._exit(0)
        try:
            pickled = pickle.dumps((True, answer(content, request)))
        except Exception as e:
            e.add_note("in a worker process:\n" + traceback.format_exc())
            pickled = pickle.dumps((False, e))
        try:
            connection.send_bytes(pickled)
        except OSError:
            os._exit(0)
        if size > LARGE_MODEL:
            gc.collect()  # a few forgotten rows would be most of the memory


def _compute(
    engine: Serial,
    request: _Request,
    numbers: torch.Tensor,
    params: torch.Tensor,
    state: torch.Tensor,
) -> Any:
    """Compute a request at the parameters `params` and the adaptive state `state`.

    For a slice, returns the measurements. For clients, overwrites `numbers` with the numbers of
    their sum, and returns its other fields (`CohortSum.rest`).
    """
    job = engine.job
    if not isinstance(request[0], Round):
        measure, part = request
        return measure(job.task, params, job.data, part)
    round, ids = request
    numbers.zero_()
    noisy = job.plan.release.adds_noise
    total = CohortSum.over(numbers, job.task.size, noisy, job.keeps_updates)
    engine.add_chunk_(total, replace(round, start=params, adaptive_state=state), ids)
    return total.rest


def _shared(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor [count] of zeros in memory that later forked processes share."""
    if count == 0:
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype)


@dataclass(frozen=True, eq=False)
class Processes(Serial):
    """The engine of `workers` processes. It computes what `Serial` does, to the last bit.

    Every process computes with one thread, and a draw depends on the client, not on who draws it. A
    cohort of one chunk is computed in this process.

    Attributes:
        workers: The number of processes. On a cluster, 0 means one per core.
        make_pool: Makes the workers from this engine and their number.
    """

    workers: int = 2
    make_pool: Callable[[Serial, int], Pool] = local_workers

    def open(self) -> None:
        """Start the workers now, not when they are first needed. Does nothing if they run."""
        _ = self._pool

    def _branches(self, round: Round, chunks: list[Ids]) -> Iterator[Branch]:
        """Yield the chunks' sums in chunk order, from the workers if there are several chunks."""
        if len(chunks) > 1:
            return self._pool.branches(round, chunks)
        return super()._branches(round, chunks)

    def evaluate(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics over the test split, by name, on the workers if they are running.

        {} without a test split.
        """
        slices = evaluation_batches(self.job.data)
        if len(slices) < 2 or not self._started:
            return super().evaluate(params)
        batches = self._pool.measured(measure_batch, slices, params)
        return combine_metrics(self.job.task, list(batches))

    def evaluate_clients(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics across clients (`client_spread`), on the workers if they are running."""
        slices = record_slices(self.job.data)
        if len(slices) < 2 or not self._started:
            return over_clients(self.job.task, params, self.job.data)
        pieces = self._pool.measured(measure_clients, slices, params)
        return client_spread(self.job.data, pieces)

    def close(self) -> None:
        """End the workers if they are running. They are started again when needed."""
        if self._started:
            self._pool.close()
            del self.__dict__["_pool"]

    @property
    def _started(self) -> bool:
        """Whether the workers have been started."""
        return "_pool" in self.__dict__

    @cached_property
    def _pool(self) -> Pool:
        """The workers, started on first access."""
        return self.make_pool(self, self.workers)
