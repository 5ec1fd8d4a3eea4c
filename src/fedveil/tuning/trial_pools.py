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
from fedveil.training.engines.on_ray.cluster import RayCluster
from fedveil.training.engines.on_ray.pool import Tasks
from fedveil.training.engines.workers import WorkerLost, available

C = TypeVar("C")
R = TypeVar("R")


class ProcessTrialPool(Generic[C, R]):
    """`count` processes of one thread each, forked with their cells when the first job arrives."""

    def __init__(
        self, cells: Sequence[C], trial: Callable[[C, Sequence[int]], list[R]], count: int
    ) -> None:
        self._cells, self._trial, self._count = list(cells), trial, count
        self._places = {id(cell): place for place, cell in enumerate(self._cells)}

    def __enter__(self) -> "ProcessTrialPool[C, R]":
        return self

    def __exit__(self, *_: object) -> None:
        if "_pool" in self.__dict__:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
            self._pool.shutdown(cancel_futures=True)

    def knows(self, jobs: Sequence[tuple[C, Sequence[int]]]) -> bool:
        """Whether all jobs are about cells of this pool."""
        return all(id(cell) in self._places for cell, _ in jobs)

    def outcomes(self, jobs: Sequence[tuple[C, Sequence[int]]]) -> Iterator[tuple[int, list[R]]]:
        """(number of the job, its outcomes) as they finish."""
        waiting: dict[Future[list[R]], int] = {}
        left = iter(range(len(jobs)))
        try:
            while True:
                for number in left:
                    cell, repetitions = jobs[number]
                    place = self._places[id(cell)]
                    with held():  # the first one forks
                        waiting[self._pool.submit(_run, place, tuple(repetitions))] = number
                    if len(waiting) >= 2 * self._count:
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
    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._count,
            mp_context=multiprocessing.get_context("fork"),
            initializer=_begin,
            initargs=(self._cells, self._trial, os.getpid()),
        )


class _WorkerState:
    """The cells and the function of a forked process, set once when it begins."""

    cells: Sequence[Any]
    trial: Callable[[Any, Sequence[int]], list[Any]]


def _begin(
    cells: Sequence[Any], trial: Callable[[Any, Sequence[int]], list[Any]], parent: int
) -> None:
    begin_worker(parent)
    _WorkerState.cells, _WorkerState.trial = cells, trial


def _run(place: int, repetitions: Sequence[int]) -> list[Any]:
    return _WorkerState.trial(_WorkerState.cells[place], repetitions)


class RayTrialPool(Generic[C, R]):
    """A pool of Ray tasks. Cells and their records are sent to each node once.

    A training whose worker or node dies is done again from its start.
    """

    def __init__(
        self,
        cells: Sequence[C],
        trial: Callable[[C, Sequence[int]], list[R]],
        workers: int,
        cluster: RayCluster,
    ) -> None:
        self._cells, self._trial = list(cells), trial
        self._workers, self._cluster = workers, cluster
        self._places = {id(cell): place for place, cell in enumerate(self._cells)}

    def __enter__(self) -> "RayTrialPool[C, R]":
        return self

    def __exit__(self, *_: object) -> None:
        if "_tasks" in self.__dict__:
            self._tasks.close()

    def knows(self, jobs: Sequence[tuple[C, Sequence[int]]]) -> bool:
        """Whether all jobs are about cells of this pool."""
        return all(id(cell) in self._places for cell, _ in jobs)

    def outcomes(self, jobs: Sequence[tuple[C, Sequence[int]]]) -> Iterator[tuple[int, list[R]]]:
        """(number of the job, its outcomes) as they finish."""
        calls = [(self._places[id(cell)], tuple(numbers)) for cell, numbers in jobs]
        return self._tasks.completed(_run_on_ray, calls)

    @cached_property
    def _tasks(self) -> Tasks:
        known = (self._cells, self._trial)
        return Tasks(self._cluster, self._workers, known, "these trainings")


def pool_outcomes(
    jobs: Sequence[tuple[C, Sequence[int]]],
    trial: Callable[[C, Sequence[int]], list[R]],
    workers: int,
    cluster: RayCluster | None,
) -> Iterator[tuple[int, list[R]]]:
    """Run jobs of one cell and yield (number of the job, its outcomes) as they finish.

    On the cluster if there is one, on `workers` processes of this machine (0: one per core) if
    that is more than one, and otherwise in this process.
    """
    cells, processes = [cell for cell, _ in jobs[:1]], min(len(jobs), workers or available())
    if cluster is not None and jobs:
        with RayTrialPool(cells, trial, workers, cluster) as pool:
            yield from pool.outcomes(jobs)
    elif processes > 1:
        with ProcessTrialPool(cells, trial, processes) as pool:
            yield from pool.outcomes(jobs)
    else:
        yield from ((number, trial(*job)) for number, job in enumerate(jobs))


def _run_on_ray(known: tuple[Sequence[Any], Any], place: int, numbers: Sequence[int]) -> list[Any]:
    cells, trial = known
    found: list[Any] = trial(cells[place], numbers)
    return found
