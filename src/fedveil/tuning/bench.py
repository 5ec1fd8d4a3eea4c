"""Processes that train cells: one per core, forked once the cells are built."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property

import torch

from fedveil.training.engines.housekeeping import die_with_parent
from fedveil.training.engines.workers import WorkerLost
from fedveil.tuning.cells import Outcome, Prepared

Trial = Callable[[Prepared, Sequence[int]], list[Outcome]]
Job = tuple[Prepared, Sequence[int]]


class Bench:
    """`count` processes, each with one thread, that know some cells; forked when first needed."""

    def __init__(self, cells: Sequence[Prepared], trial: Trial, count: int) -> None:
        self._cells, self._trial, self._count = list(cells), trial, count
        self._places = {id(cell): place for place, cell in enumerate(self._cells)}

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        if "_pool" in self.__dict__:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
            self._pool.shutdown(cancel_futures=True)

    def knows(self, jobs: Sequence[Job]) -> bool:
        """Whether all jobs are about its cells."""
        return all(id(prepared) in self._places for prepared, _ in jobs)

    def outcomes(self, jobs: Sequence[Job]) -> Iterator[tuple[int, list[Outcome]]]:
        """(number of the job, its outcomes) as they finish."""
        waiting: dict[Future[list[Outcome]], int] = {}
        left = iter(range(len(jobs)))
        try:
            while True:
                for number in left:
                    prepared, repetitions = jobs[number]
                    place = self._places[id(prepared)]
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

    cells: Sequence[Prepared]
    trial: Trial


def _begin(cells: Sequence[Prepared], trial: Trial, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    torch.set_num_threads(1)
    _Here.cells, _Here.trial = cells, trial


def _run(place: int, repetitions: Sequence[int]) -> list[Outcome]:
    return _Here.trial(_Here.cells[place], repetitions)
