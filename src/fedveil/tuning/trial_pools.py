"""Pools that run many trainings: forked processes of this machine, or tasks of a Ray cluster.

A job is a cell and the numbers of its trainings. `trial` computes the outcome of each.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property
from typing import Any, Generic, TypeVar

from fedveil.base.forks import begin_worker
from fedveil.base.interrupts import held
from fedveil.training.engines.processes import WorkerLost, available_workers
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.training.engines.ray_tasks import Tasks

C = TypeVar("C")
R = TypeVar("R")


class TrialPool(Generic[C, R]):
    """Workers that train cells. They start, and get all cells, when the first job arrives.

    On this machine they are `workers` forked processes of one thread each. On a cluster they are
    tasks, 0 for one per core: cells and their records are sent to each node once, and a training
    whose worker or node dies is done again from its start.
    """

    def __init__(
        self,
        cells: Sequence[C],
        trial: Callable[[C, Sequence[int]], list[R]],
        workers: int,
        cluster: RayCluster | None = None,
    ) -> None:
        self._shared, self._workers, self._cluster = (list(cells), trial), workers, cluster
        self._places = {id(cell): place for place, cell in enumerate(cells)}

    def __enter__(self) -> "TrialPool[C, R]":
        return self

    def __exit__(self, *_: object) -> None:
        if "_tasks" in self.__dict__:
            self._tasks.close()
        if "_processes" in self.__dict__:
            for process in list((self._processes._processes or {}).values()):
                process.kill()
            self._processes.shutdown(cancel_futures=True)

    def knows(self, jobs: Sequence[tuple[C, Sequence[int]]]) -> bool:
        """Whether all jobs are about cells of this pool."""
        return all(id(cell) in self._places for cell, _ in jobs)

    def outcomes(self, jobs: Sequence[tuple[C, Sequence[int]]]) -> Iterator[tuple[int, list[R]]]:
        """(number of the job, its outcomes) as they finish."""
        calls = [(self._places[id(cell)], tuple(numbers)) for cell, numbers in jobs]
        if self._cluster is not None:
            return self._tasks.completed(_run, calls)
        return self._forked(calls)

    def _forked(
        self, calls: Sequence[tuple[int, tuple[int, ...]]]
    ) -> Iterator[tuple[int, list[R]]]:
        waiting: dict[Future[list[R]], int] = {}
        left = iter(enumerate(calls))
        try:
            while True:
                for number, call in left:
                    with held():  # the first one forks
                        waiting[self._processes.submit(_run_forked, *call)] = number
                    if len(waiting) >= 2 * self._workers:
                        break
                if not waiting:
                    return
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(done), done.result()
        except BrokenProcessPool as e:
            raise WorkerLost(
                "a process that trained was killed, as happens when memory runs out: use fewer "
                "workers"
            ) from e

    @cached_property
    def _processes(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._workers,
            mp_context=multiprocessing.get_context("fork"),
            initializer=_begin,
            initargs=(self._shared, os.getpid()),
        )

    @cached_property
    def _tasks(self) -> Tasks:
        if self._cluster is None:
            raise AssertionError("tasks run on a cluster")
        return Tasks(self._cluster, self._workers, self._shared, "these trainings")


_of_this_process: list[Any] = []
"""The cells and the function of a forked process, set once when it begins."""


def _begin(shared: tuple[Sequence[Any], Any], parent: int) -> None:
    begin_worker(parent)
    _of_this_process[:] = [shared]


def _run_forked(place: int, numbers: Sequence[int]) -> list[Any]:
    return _run(_of_this_process[0], place, numbers)


def _run(shared: tuple[Sequence[Any], Any], place: int, numbers: Sequence[int]) -> list[Any]:
    cells, trial = shared
    outcomes: list[Any] = trial(cells[place], numbers)
    return outcomes


def pool_outcomes(
    jobs: Sequence[tuple[C, Sequence[int]]],
    trial: Callable[[C, Sequence[int]], list[R]],
    workers: int,
    cluster: RayCluster | None,
) -> Iterator[tuple[int, list[R]]]:
    """Run jobs and yield (number of the job, its outcomes) as they finish.

    On the cluster if there is one, on `workers` processes of this machine (0: one per core) if
    that is more than one, and otherwise in this process.
    """
    processes = min(len(jobs), workers or available_workers())
    if not jobs or (cluster is None and processes == 1):
        yield from ((number, trial(*job)) for number, job in enumerate(jobs))
        return
    cells = list({id(cell): cell for cell, _ in jobs}.values())
    with TrialPool(cells, trial, processes if cluster is None else workers, cluster) as pool:
        yield from pool.outcomes(jobs)
