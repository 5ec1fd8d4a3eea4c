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
"""Bytes of a sum from which on many of them are added on the nodes."""


def chunks_sum(
    engine: Serial, start: Numbers, everyone: Ids, round: Round, chunks: Sequence[Ids]
) -> SentSum:
    """The sum of a few chunks in a row, a branch of the tree."""
    job, tree = engine.job, SumTree(engine.job.zero)
    round = replace(round, start=torch.tensor(start), ids=everyone)
    for ids in chunks:
        total = job.zero()
        engine.add_chunk_(total, round, ids)
        if len(chunks) > 1:
            tree.add_(Branch(total))
        if job.task.size > LARGE_MODEL:
            gc.collect()  # a few forgotten rows would be most of the memory
    return _sent(total if len(chunks) == 1 else tree.finish())


def _sent(total: CohortSum) -> SentSum:
    return total.whole.numpy(), total.rest


def added(size: int, noisy: bool, keep: bool, *parts: SentSum) -> SentSum:
    """The sums of a few branches in a row, as one."""
    numbers = torch.zeros(len(parts[0][0]), dtype=torch.float64)
    total = CohortSum.over(numbers, size, noisy, keep)
    for part in parts:
        total.add_(received(part, size, noisy))
    return _sent(total)


def received(sent: SentSum, size: int, noisy: bool) -> CohortSum:
    """A sum that was sent, in the memory of the object store: read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch knows no arrays that are only read
        numbers = torch.from_numpy(sent[0])
    return CohortSum.over(numbers, size, noisy).with_rest(sent[1])


def measurements(engine: Serial, params: Numbers, measure: Measure[M], part: slice) -> M:
    """The measurements of a slice of the records."""
    return measure(engine.job.task, torch.tensor(params), engine.job.data, part)


def level_in_tasks(chunks: int, workers: int) -> int:
    """How many levels of the tree one task adds: as many as leave each worker eight tasks.

    A task costs milliseconds, however little it does.

    >>> level_in_tasks(20, 2), level_in_tasks(127, 2), level_in_tasks(128, 2)
    (0, 0, 1)
    """
    level = 0
    while chunks >= FAN_IN ** (level + 1) * _TASKS * workers:
        level += 1
    return level


def level_of(tasks: int, nodes: int, size: int) -> int:
    """How many levels of the tree of tasks' sums nodes add, so that eight or more are left.

    None with one node, or if sums of `size` bytes are so small that they are better sent. The place
    of an addition changes nothing.

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
    """A pool of `Processes` on a cluster. Every worker computes with one thread."""

    def __init__(self, cluster: RayCluster, engine: Serial, workers: int) -> None:
        engine.make_ready()
        job = engine.job
        sent = Serial(job, engine.mode, engine.chunk)
        self._tasks = Tasks(cluster, workers, sent, f"the training of {job.task!r}")
        self._size, self._noisy, self._keep = (
            job.task.size,
            job.plan.release.adds_noise,
            job.keeps_updates,
        )

    def branches(self, round: Round, chunks: Sequence[Ids]) -> Iterator[Branch]:
        """The chunks' sums in order, or those of whole branches if there are many large ones."""
        put = self._tasks.put
        rest = replace(round, ids=np.zeros(0, dtype=np.int64), start=torch.zeros(0))
        common = put(round.start.numpy()), put(round.ids), rest
        inside = level_in_tasks(len(chunks), self._tasks.workers)
        step = FAN_IN**inside
        calls = [(*common, list(chunks[a : a + step])) for a in range(0, len(chunks), step)]
        level = level_of(len(calls), self._tasks.nodes, 8 * self._size * (1 + self._noisy))
        join = partial(self._joined, level)
        for sent in self._tasks.ordered(chunks_sum, calls, FAN_IN**level, join):
            yield Branch(received(sent, self._size, self._noisy), inside + level, lent=True)

    def _joined(self, level: int, refs: list[Any]) -> Any:
        """A reference to the sum of sums in a row: added on nodes, `FAN_IN` at a time per level."""
        for _ in range(level):
            groups = [refs[a : a + FAN_IN] for a in range(0, len(refs), FAN_IN)]
            about = self._size, self._noisy, self._keep
            refs = [self._added.remote(*about, *group) for group in groups]
        return refs[0]

    @cached_property
    def _added(self) -> Any:
        import ray

        return ray.remote(num_cpus=0, max_retries=TRIES - 1)(added)

    def measured(
        self, measure: Measure[M], slices: Sequence[slice], params: torch.Tensor
    ) -> Iterator[M]:
        """The measurements of each slice, in order."""
        there = self._tasks.put(params.numpy())
        return self._tasks.ordered(measurements, [(there, measure, part) for part in slices])

    def close(self) -> None:
        """Leave the cluster."""
        self._tasks.close()
