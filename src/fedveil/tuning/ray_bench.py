"""Trainings on a Ray cluster: each is one task, from its start to its end."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

from fedveil.training.engines.on_ray.cluster import RayCluster
from fedveil.training.engines.on_ray.pool import Tasks
from fedveil.training.engines.workers import available
from fedveil.tuning.bench import Bench

C = TypeVar("C")
R = TypeVar("R")


class RayBench(Generic[C, R]):
    """As `Bench`, on the workers of a cluster: cells and their records reach each node once.

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

    def __enter__(self) -> "RayBench[C, R]":
        return self

    def __exit__(self, *_: object) -> None:
        if "_tasks" in self.__dict__:
            self._tasks.close()

    def knows(self, jobs: Sequence[tuple[C, Sequence[int]]]) -> bool:
        """Whether all jobs are about its cells."""
        return all(id(cell) in self._places for cell, _ in jobs)

    def outcomes(self, jobs: Sequence[tuple[C, Sequence[int]]]) -> Iterator[tuple[int, list[R]]]:
        """(number of the job, its outcomes) as they finish."""
        calls = [(self._places[id(cell)], tuple(numbers)) for cell, numbers in jobs]
        return self._tasks.completed(_run, calls)

    @cached_property
    def _tasks(self) -> Tasks:
        known = (self._cells, self._trial)
        return Tasks(self._cluster, self._workers, known, "these trainings")


def bench_outcomes(
    jobs: Sequence[tuple[C, Sequence[int]]],
    trial: Callable[[C, Sequence[int]], list[R]],
    workers: int,
    cluster: RayCluster | None,
) -> Iterator[tuple[int, list[R]]]:
    """(number of the job, its outcomes): of one cell, wherever there is room for it.

    On the cluster if there is one, on processes of this machine if these are several, or here;
    `workers` 0 is one per core.
    """
    cells, processes = [cell for cell, _ in jobs[:1]], min(len(jobs), workers or available())
    if cluster is not None and jobs:
        with RayBench(cells, trial, workers, cluster) as ray_bench:
            yield from ray_bench.outcomes(jobs)
    elif processes > 1:
        with Bench(cells, trial, processes) as bench:
            yield from bench.outcomes(jobs)
    else:
        yield from ((number, trial(*job)) for number, job in enumerate(jobs))


def _run(known: tuple[Sequence[Any], Any], place: int, numbers: Sequence[int]) -> list[Any]:
    cells, trial = known
    found: list[Any] = trial(cells[place], numbers)
    return found
