"""Processes that train: one per core, forked once what they train is built."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property
from typing import Any, Generic, TypeVar

from fedveil.forks import begin_worker
from fedveil.interrupts import held
from fedveil.training.engines.workers import WorkerLost

C = TypeVar("C")
R = TypeVar("R")


class Bench(Generic[C, R]):
    """`count` processes, each with one thread, that know some cells; forked when first needed.

    A job is a cell and the numbers of its trainings; `trial` returns what each of them came to.
    """

    def __init__(
        self, cells: Sequence[C], trial: Callable[[C, Sequence[int]], list[R]], count: int
    ) -> None:
        self._cells, self._trial, self._count = list(cells), trial, count
        self._places = {id(cell): place for place, cell in enumerate(self._cells)}

    def __enter__(self) -> "Bench[C, R]":
        return self

    def __exit__(self, *_: object) -> None:
        if "_pool" in self.__dict__:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
            self._pool.shutdown(cancel_futures=True)

    def knows(self, jobs: Sequence[tuple[C, Sequence[int]]]) -> bool:
        """Whether all jobs are about its cells."""
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


class _Here:
    """What a forked process knows: set once, when it begins."""

    cells: Sequence[Any]
    trial: Callable[[Any, Sequence[int]], list[Any]]


def _begin(
    cells: Sequence[Any], trial: Callable[[Any, Sequence[int]], list[Any]], parent: int
) -> None:
    begin_worker(parent)
    _Here.cells, _Here.trial = cells, trial


def _run(place: int, repetitions: Sequence[int]) -> list[Any]:
    return _Here.trial(_Here.cells[place], repetitions)
