"""Workers on a Ray cluster: chunks are tasks, several of them a task together.

Model, plan and records are put into the object store once and reach each node once. The round's
parameters are put once a round. Ray repeats a task whose worker or node has died, and so a chunk
whose sum was lost with a node: seeded randomness is keyed by client, so the sum is the same. Secure
noise is drawn again, and nobody has seen the first draw.
"""

import gc
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedveil.privacy.release import Ids, Round
from fedveil.training.engines.engine import LARGE_MODEL
from fedveil.training.engines.processes import TRIES, M, Measure
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.training.engines.ray_tasks import Tasks
from fedveil.training.engines.serial import FAN_IN, Branch, Serial, SumTree
from fedveil.training.reports import CohortSum

Numbers = npt.NDArray[Any]
SentSum = tuple[Numbers, tuple[Any, ...]]
"""A sum as it travels: its numbers, and the rest."""

_TASKS = 8
"""Fewest tasks per worker and round that chunks are grouped into."""

_LARGE = 1 << 20
"""The size of a sum in bytes above which nodes add up their sums before they send them."""


def sum_chunks(
    engine: Serial, start: Numbers, everyone: Ids, round: Round, chunks: Sequence[Ids]
) -> SentSum:
    """Run on a node: the sum of `chunks`, a few chunks in a row.

    Args:
        engine: The engine that computes a chunk.
        start: The round's parameters.
        everyone: All clients of the round.
        round: The round, sent without its parameters and clients.
        chunks: The clients of each chunk.
    """
    job, tree = engine.job, SumTree(engine.job.zero)
    round = replace(round, start=torch.tensor(start), ids=everyone)
    for ids in chunks:
        total = job.zero()
        engine.add_chunk_(total, round, ids)
        if len(chunks) > 1:
            tree.add_(Branch(total))
        if job.task.size > LARGE_MODEL:
            gc.collect()  # a few forgotten rows would be most of the memory
    return _to_sent(total if len(chunks) == 1 else tree.finish())


def _to_sent(total: CohortSum) -> SentSum:
    """A sum as the pair (its numbers as an array, its other fields)."""
    return total.numbers.numpy(), total.rest


def add_branches(size: int, noisy: bool, keep: bool, *parts: SentSum) -> SentSum:
    """Run on a node: the sum of `parts`, which are sums of branches in a row.

    Args:
        size: Number of parameters.
        noisy: Whether clients add noise (`CohortSum.zero`).
        keep: Whether every client's update is kept.
        parts: The sums, at least one.
    """
    numbers = torch.zeros(len(parts[0][0]), dtype=torch.float64)
    total = CohortSum.over(numbers, size, noisy, keep)
    for part in parts:
        total.add_(sum_from(part, size, noisy))
    return _to_sent(total)


def sum_from(sent: SentSum, size: int, noisy: bool) -> CohortSum:
    """The sum that was sent as `sent`.

    Its tensors must only be read: they are the store's memory. `size` and `noisy` as in
    `CohortSum.zero`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch knows no arrays that are only read
        numbers = torch.from_numpy(sent[0])
    return CohortSum.over(numbers, size, noisy).with_rest(sent[1])


def measurements(engine: Serial, params: Numbers, measure: Measure[M], part: slice) -> M:
    """Run on a node: what `measure` returns for the slice `part` and the parameters `params`."""
    return measure(engine.job.task, torch.tensor(params), engine.job.data, part)


def levels_per_task(chunks: int, workers: int) -> int:
    """The levels of the sum tree that one task adds up: a task gets 8^levels chunks.

    The most that leave each worker eight tasks. A task costs milliseconds, however little it does.

    >>> levels_per_task(20, 2), levels_per_task(127, 2), levels_per_task(128, 2)
    (0, 0, 1)
    """
    level = 0
    while chunks >= FAN_IN ** (level + 1) * _TASKS * workers:
        level += 1
    return level


def levels_on_nodes(tasks: int, nodes: int, size: int) -> int:
    """The levels of the tree of tasks' sums that nodes add: as many as leave eight sums or more.

    0 with one node, or if a sum of `size` bytes is so small that it is better sent. Where sums are
    added changes nothing in the result.

    >>> [levels_on_nodes(tasks, 4, 1 << 24) for tasks in (7, 64, 512)]
    [0, 1, 2]
    """
    if nodes < 2 or size < _LARGE:
        return 0
    level = 0
    while tasks >= FAN_IN ** (level + 2):
        level += 1
    return level


class RayPool:
    """A pool of workers on a Ray cluster, connected until `close`.

    Each computes with one thread.
    """

    def __init__(self, cluster: RayCluster, engine: Serial, workers: int) -> None:
        engine.make_ready()
        job = engine.job
        sent = Serial(job, engine.mode, engine.chunk)
        self._tasks = Tasks(cluster, workers, sent, f"the training of {job.task!r}")
        self._size, self._keep = job.task.size, job.keeps_updates
        self._noisy = job.plan.release.adds_noise

    def branches(self, round: Round, chunks: Sequence[Ids]) -> Iterator[Branch]:
        """Yield the chunks' sums in chunk order. Each is valid only until the next is taken.

        With many chunks, a branch is the sum of several chunks in a row, as its `level` says.
        Raises WorkerLost if workers die again and again, and what a worker raised.
        """
        put = self._tasks.put
        rest = replace(round, ids=np.zeros(0, dtype=np.int64), start=torch.zeros(0))
        common = put(round.start.numpy()), put(round.ids), rest
        inside = levels_per_task(len(chunks), self._tasks.workers)
        step = FAN_IN**inside
        calls = [(*common, list(chunks[a : a + step])) for a in range(0, len(chunks), step)]
        level = levels_on_nodes(len(calls), self._tasks.nodes, 8 * self._size * (1 + self._noisy))
        join = partial(self._join, level)
        for sent in self._tasks.ordered(sum_chunks, calls, FAN_IN**level, join):
            yield Branch(sum_from(sent, self._size, self._noisy), inside + level, lent=True)

    def _join(self, level: int, refs: list[Any]) -> Any:
        """A reference to the sum of `refs`, added on nodes in `level` levels, `FAN_IN` at a time.

        With level 0, `refs` has one reference, which is returned.
        """
        for _ in range(level):
            groups = [refs[a : a + FAN_IN] for a in range(0, len(refs), FAN_IN)]
            about = self._size, self._noisy, self._keep
            refs = [self._add_task.remote(*about, *group) for group in groups]
        return refs[0]

    @cached_property
    def _add_task(self) -> Any:
        """The Ray task that runs `add_branches`."""
        import ray

        return ray.remote(num_cpus=0, max_retries=TRIES - 1)(add_branches)

    def measured(
        self, measure: Measure[M], slices: Sequence[slice], params: torch.Tensor
    ) -> Iterator[M]:
        """Yield what `measure` returns at `params` for each slice of the records, in order."""
        there = self._tasks.put(params.numpy())
        return self._tasks.ordered(measurements, [(there, measure, part) for part in slices])

    def close(self) -> None:
        """Release what was sent, and disconnect from the cluster."""
        self._tasks.close()
