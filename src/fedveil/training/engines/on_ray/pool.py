"""Workers on a Ray cluster: chunks are tasks, many of them a task together.

Model, plan and records are put into the object store once and reach each node once; the round's
parameters are put once a round. Ray does a task again whose worker or node has died, and so a chunk
whose sum was lost with a node: seeded randomness is keyed by client, so the sum is the same; secure
noise is drawn again, and nobody has seen what was drawn before.
"""

import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedveil.privacy.channel import Round
from fedveil.training.engines.on_ray import node
from fedveil.training.engines.on_ray.cluster import RayCluster, cluster_cores
from fedveil.training.engines.on_ray.parcel import packed
from fedveil.training.engines.serial import Serial
from fedveil.training.engines.tree import FAN_IN, Branch
from fedveil.training.engines.workers import TRIES, WorkerLost
from fedveil.training.evaluate import BatchMetrics, ClientSums

Ids = npt.NDArray[np.int64]

_AHEAD = 2
"""Tasks per worker that are handed out, so that none waits for the next."""

_UNUSED = 4
"""Chunk sums per worker that are computed and not taken yet: what they take of the store."""

_TASKS = 8
"""Tasks per worker and round that chunks may be put together to."""

_ENDED = "the Ray cluster has ended, or its head is gone: start it again, then resume"

_LARGE = 1 << 20
"""Bytes of a sum from which on many of them are added on the nodes and not here."""


class Tasks:
    """Tasks about one thing on a cluster: it is sent once, and calls of functions of it after that.

    `workers` 0 is one per core of the cluster.
    """

    def __init__(self, cluster: RayCluster, workers: int, thing: object, what: str) -> None:
        parcel, self._mapped = packed(thing, what=what)
        with ExitStack() as opened:
            self.workers = opened.enter_context(cluster.joined(workers))
            import ray

            self._ray: Any = ray
            self._name, self._parcel = uuid.uuid4().hex, [self._ray.put(parcel)]
            self._arrays: dict[int, Any] = {}
            self._use = self._ray.remote(num_cpus=1, max_retries=TRIES - 1)(node.use)
            few = self.workers < cluster_cores()  # then nobody but us keeps to their number
            self._limit = self.workers * (1 if few else _AHEAD)
            self._opened = opened.pop_all()

    @property
    def nodes(self) -> int:
        """How many nodes the cluster has."""
        return sum(bool(each["Alive"]) for each in self._ray.nodes())

    def close(self) -> None:
        """Let go of what was sent, and of the cluster."""
        self._parcel, self._arrays = [], {}
        self._opened.close()

    def put(self, value: object) -> Any:
        """A reference to a value that several calls are given."""
        return self._ray.put(value)

    def ordered(
        self, function: Any, calls: Sequence[tuple[Any, ...]], join: "Join | None" = None
    ) -> Iterator[Any]:
        """What the calls return, in order; joined in blocks of so many if `join` says how.

        Files that a node turns out not to see are sent, and what is left is asked for again.
        """
        block, taken = 1 if join is None else join.block, 0
        while taken < len(calls):
            try:
                for answer in self._answers(function, calls[taken:], block, join):
                    taken += block
                    yield answer
            except node.FilesMissing:
                if self._arrays:
                    raise AssertionError("an array that was sent is missing") from None
                self._arrays = {k: self.put(np.asarray(a)) for k, a in enumerate(self._mapped)}

    def completed(self, function: Any, calls: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """(number of the call, what it returned) as they finish."""
        left, running = deque(enumerate(calls)), dict[Any, tuple[int, tuple[Any, ...]]]()
        try:
            while left or running:
                while left and len(running) < self._limit:
                    number, given = left.popleft()
                    running[self._call(function, given)] = number, given
                (done,) = self._ready(list(running))
                number, given = running.pop(done)
                try:
                    yield number, self._got(done)
                except node.FilesMissing:
                    self._arrays = {k: self.put(np.asarray(a)) for k, a in enumerate(self._mapped)}
                    left.appendleft((number, given))
        finally:
            self._cancel(running)

    def _answers(
        self, function: Any, calls: Sequence[tuple[Any, ...]], block: int, join: "Join | None"
    ) -> Iterator[Any]:
        left, begun = deque(range(0, len(calls), block)), deque[tuple[Any, int]]()
        running: list[Any] = []
        most = max(_UNUSED * self.workers, 2 * block)
        try:
            while left or begun:
                unused = sum(count for _, count in begun)
                while left and (not begun or (len(running) < self._limit and unused < most)):
                    some = calls[left[0] : left.popleft() + block]
                    refs = [self._call(function, given) for given in some]
                    running += refs
                    begun.append((refs[0] if join is None else join.joined(refs), len(some)))
                    unused += len(some)
                first = begun[0][0]
                waited = list(dict.fromkeys([first, *running]))
                ready = self._ready(waited)
                running = [ref for ref in running if ref not in ready]
                if first in ready:
                    answer = self._got(first)
                    begun.popleft()
                    del first, waited, ready
                    yield answer
        finally:
            self._cancel(running)

    def _call(self, function: Any, given: tuple[Any, ...]) -> Any:
        return self._use.remote(function, self._name, self._parcel, self._arrays, *given)

    def _ready(self, refs: list[Any]) -> list[Any]:
        """Those of which one is there, or has failed."""
        try:
            return list(self._ray.wait(refs, num_returns=1, fetch_local=False)[0])
        except SystemExit as e:  # that is how Ray ends those who are connected to it
            raise WorkerLost(_ENDED) from e

    def _got(self, ref: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except SystemExit as e:
            raise WorkerLost(_ENDED) from e
        except errors.RayTaskError as e:
            cause: BaseException = e
            while isinstance(cause, errors.RayTaskError) and cause.cause is not None:
                cause = cause.cause
            if not isinstance(cause, node.FilesMissing):
                cause.add_note(f"on a Ray worker:\n{e}")
            raise cause from None
        except errors.RayError as e:
            raise WorkerLost(
                f"{TRIES} workers in a row died on the same work ({type(e).__name__}), as they do "
                "when memory runs out: lower engine.memory or engine.chunk, or see to the nodes"
            ) from e

    def _cancel(self, refs: Iterable[Any]) -> None:
        for ref in refs:
            with suppress(Exception):
                self._ray.cancel(ref)


class Join:
    """Adds sums on the nodes, `FAN_IN` at a time, up to `level` levels of the tree."""

    def __init__(self, level: int, size: int, noisy: bool, keep: bool) -> None:
        import ray

        self._added = ray.remote(num_cpus=0, max_retries=TRIES - 1)(node.added)
        self.level, self.block = level, FAN_IN**level
        self._about = size, noisy, keep

    def joined(self, refs: Sequence[Any]) -> Any:
        """A reference to the sum of sums in a row, which need not be there yet."""
        for _ in range(self.level):
            groups = [refs[a : a + FAN_IN] for a in range(0, len(refs), FAN_IN)]
            refs = [self._added.remote(*self._about, *group) for group in groups]
        return refs[0]


def level_in_tasks(chunks: int, workers: int) -> int:
    """How many levels of the tree one task adds: as many as leave each worker eight tasks.

    A task costs milliseconds, whatever there is to do in it.

    >>> level_in_tasks(20, 2), level_in_tasks(127, 2), level_in_tasks(128, 2)
    (0, 0, 1)
    """
    level = 0
    while chunks >= FAN_IN ** (level + 1) * _TASKS * workers:
        level += 1
    return level


def level_of(tasks: int, nodes: int, size: int) -> int:
    """How many levels of the tree nodes add of what tasks return: so that eight are left, or more.

    None where there is one node, or where sums of `size` bytes are so small that they are
    better sent than added: where sums are added changes nothing.

    >>> level_of(7, 4, 1 << 24), level_of(64, 4, 1 << 24), level_of(512, 4, 1 << 24)
    (0, 1, 2)
    """
    if nodes < 2 or size < _LARGE:
        return 0
    level = 0
    while tasks >= FAN_IN ** (level + 2):
        level += 1
    return level


class RayPool:
    """A pool of `Processes` on a cluster; every worker computes with one thread."""

    def __init__(self, cluster: RayCluster, engine: Serial, workers: int) -> None:
        engine.make_ready()
        job = engine.job
        sent = Serial(job, engine.mode, engine.chunk)
        self._tasks = Tasks(cluster, workers, sent, f"the training of {job.task!r}")
        self._size, self._noisy, self._keep = job.task.size, job.plan.release.adds_noise, job.rows

    def branches(self, round: Round, chunks: Sequence[Ids]) -> Iterator[Branch]:
        """The chunks' sums in order, of many large ones whole branches."""
        put = self._tasks.put
        rest = replace(round, ids=np.zeros(0, dtype=np.int64), start=torch.zeros(0))
        common = put(round.start.numpy()), put(round.ids), rest
        inside = level_in_tasks(len(chunks), self._tasks.workers)
        step = FAN_IN**inside
        calls = [(*common, list(chunks[a : a + step])) for a in range(0, len(chunks), step)]
        level = level_of(len(calls), self._tasks.nodes, 8 * self._size * (1 + self._noisy))
        join = Join(level, self._size, self._noisy, self._keep) if level else None
        for sent in self._tasks.ordered(node.chunks_sum, calls, join):
            yield Branch(node.received(sent, self._size, self._noisy), inside + level, lent=True)

    def measures(self, batches: Sequence[slice], params: torch.Tensor) -> Iterator[BatchMetrics]:
        """What each batch of the test split comes to, in order."""
        there = self._tasks.put(params.numpy())
        return self._tasks.ordered(node.batch_measure, [(there, batch) for batch in batches])

    def client_measures(
        self, pieces: Sequence[slice], params: torch.Tensor
    ) -> Iterator[ClientSums]:
        """What each piece of the clients' records comes to, in order."""
        there = self._tasks.put(params.numpy())
        return self._tasks.ordered(node.clients_measure, [(there, piece) for piece in pieces])

    def close(self) -> None:
        """Leave the cluster."""
        self._tasks.close()
