"""Trials: one training of one cell, many of them over forked processes or on a Ray cluster."""

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from fedveil.base.checks import check_workers
from fedveil.base.errors import BadInput
from fedveil.base.forks import begin_worker
from fedveil.base.interrupts import held
from fedveil.data.federated import FederatedData
from fedveil.data.partition import Records
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs.build import build
from fedveil.runs.recipe import Recipe, on_this_machine
from fedveil.training.engines.processes import WorkerLost, available_workers
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.training.engines.ray_tasks import Tasks
from fedveil.training.engines.serial import Serial
from fedveil.training.gradients.modes import Mode
from fedveil.training.in_step import fitting_together, train_in_step
from fedveil.training.round import RoundResult
from fedveil.training.session import Training, train
from fedveil.training.work import ClientWork
from fedveil.tuning.recipe_grid import Cell

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
        assert self._cluster is not None, "tasks run on a cluster"
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


_NEVER = 1 << 60
_DIVISIONS = 2
"""Divisions of the records among clients that are cached."""


@dataclass(frozen=True)
class TrialOutcome:
    """The result of one training. A metric is NaN if the training diverged.

    Attributes:
        rounds_done: The rounds that ran.
        test_metrics: Test metrics at the end.
        test_curve: (round, test metrics) along the way.
    """

    rounds_done: int
    test_metrics: dict[str, float]
    test_curve: tuple[tuple[int, dict[str, float]], ...] = ()


@dataclass(frozen=True, eq=False)
class PreparedCell:
    """A cell that was built once. Its plan and mode serve every repetition.

    Attributes:
        cell: The recipe and its choices.
        plan: The privacy plan.
        mode: The execution mode.
        work: What clients do.
        noise_std: Standard deviation of the noise on one coordinate of the first round's mean
            update, 0 without noise, NaN if noise is part of local training.
        together: The number of repetitions that are one computation.
    """

    cell: Cell
    plan: PrivacyPlan
    mode: Mode
    work: ClientWork
    noise_std: float
    together: int = 1

    def blocks(self, first: int, last: int) -> list[tuple[int, ...]]:
        """Repetitions first .. last - 1 in blocks that are one computation each."""
        return [
            tuple(range(r, min(r + self.together, last))) for r in range(first, last, self.together)
        ]

    @property
    def noise_text(self) -> str:
        """`noise_std` for people."""
        return "in training" if math.isnan(self.noise_std) else f"{self.noise_std:.3g}"

    @property
    def headline_claim(self) -> PrivacyClaim | None:
        """The headline claim of the cell's rounds, if any."""
        return counting(self.shown_claims)

    @cached_property
    def shown_claims(self) -> list[PrivacyClaim]:
        """The claims to show: the tightest for each kind of release and trust.

        The strict reading comes after one as published, the one without a shuffler after its own.
        """
        every = self.plan.claims(self.plan.permitted)
        shown = list(every[:1])
        for claim in every[1:]:
            if not claim.as_published and all(
                (claim.covers, claim.trust) != (other.covers, other.trust) or other.as_published
                for other in shown
            ):
                shown.append(claim)
        return shown


@dataclass
class Laboratory:
    """Prepares cells and runs their trials, with the records cached.

    Attributes:
        root: Where data sets are stored.
        curves: Whether the model is measured as often as the recipe says, not only at the end.
        workers: Processes that train, 0 for one per core, whatever the recipe says of its engine.
        cluster: The Ray cluster that trains instead of this machine.
    """

    root: Path | None = None
    curves: bool = False
    workers: int = 0
    cluster: RayCluster | None = None
    _records: dict[str, Records | FederatedData] = field(default_factory=dict)
    _divided: dict[str, FederatedData] = field(default_factory=dict)
    _pool: TrialPool[PreparedCell, TrialOutcome] | None = None

    def __post_init__(self) -> None:
        check_workers("--workers", self.workers)

    def __getstate__(self) -> dict[str, Any]:
        """For a worker, which trains what it is given by itself."""
        return {**vars(self), "workers": 1, "cluster": None, "_pool": None}

    def prepare(self, cell: Cell, mode: Mode | None = None) -> PreparedCell:
        """Build a cell and refuse what cannot run, before anything does.

        `mode` fixes the execution mode; otherwise it is the recipe's, or follows from its rule.
        """
        recipe = cell.recipe
        try:
            if getattr(recipe.noise, "source", "seeded") == "secure":
                raise BadInput(
                    "noise.source is 'secure', and trials are repeated and compared: use 'seeded' "
                    "here and 'secure' for the run that is published"
                )
            if recipe.evaluate.epsilon is not None:
                raise BadInput(
                    "evaluate.epsilon pays for the metrics of one run, and trials are compared by "
                    "metrics in the clear: leave it out here"
                )
            training = build(on_this_machine(recipe), data=self.federated_data(recipe))
            training.data.check_tested("comparing trials")
            noise = _noise(training.plan, training)
            found = mode or training.chosen
        except BadInput as e:
            raise BadInput(f"cell {cell.name}: {e}" if cell.choice else str(e)) from e
        together = 1
        # the same clients in all of them
        if recipe.data.seed is not None and not _own_budgets(recipe):
            training = replace(training, mode=found, fastest=False, workers=1)
            engine = training.engine
            if isinstance(engine, Serial):
                engine.make_ready()
            together = fitting_together(training)
        return PreparedCell(cell, training.plan, found, training.work, noise, together)

    def trial(self, prepared: PreparedCell, repetitions: Sequence[int]) -> list[TrialOutcome]:
        """Train the cell once for each repetition.

        The same repetition of two cells has the same clients and the same first model. Noise,
        cohorts and batches are a training's own (`Training.streams`): where two share their noise,
        it cancels in the difference of what they release, and no sum of epsilons covers both.
        """
        trainings = [self._training(prepared, repetition) for repetition in repetitions]
        last_rounds, curves = [0 for _ in trainings], [list[Any]() for _ in trainings]
        rounds: Iterable[Sequence[tuple[int, RoundResult]]] = (
            train_in_step(trainings)
            if len(trainings) > 1
            else ([(0, result)] for result in train(trainings[0]))
        )
        for results in rounds:
            for number, result in results:
                last_rounds[number] = result.round
                if result.metrics:
                    # a training that diverged has NaN, not infinity, in all tables
                    finite = {
                        k: v if math.isfinite(v) else math.nan for k, v in result.metrics.items()
                    }
                    curves[number].append((result.round, finite))
        if not all(curves):
            raise BadInput("the budget permits no round: raise budget.epsilon")
        return [
            TrialOutcome(last, curve[-1][1], tuple(curve) if self.curves else ())
            for last, curve in zip(last_rounds, curves, strict=True)
        ]

    def trials(
        self, jobs: Sequence[tuple[PreparedCell, Sequence[int]]]
    ) -> Iterator[tuple[int, list[TrialOutcome]]]:
        """Yield (number of the job, its outcomes) as they finish, over all cores."""
        if self._pool is not None and len(jobs) > 1 and self._pool.knows(jobs):
            return self._pool.outcomes(jobs)
        return pool_outcomes(jobs, self.trial, self.workers, self.cluster)

    @contextmanager
    def pooled(self, cells: Sequence[PreparedCell]) -> Iterator[None]:
        """Keep the processes from one call of `trials` on these cells to the next."""
        count = self.workers or available_workers()
        if self.cluster is None and count == 1:
            yield
            return
        workers = count if self.cluster is None else self.workers
        with TrialPool(cells, self.trial, workers, self.cluster) as self._pool:
            try:
                yield
            finally:
                self._pool = None

    def _training(self, prepared: PreparedCell, repetition: int) -> Training:
        recipe = seeded(prepared.cell.recipe, repetition)
        alone = {"workers": 1, "mode": str(prepared.mode)}
        engine = on_this_machine(recipe).engine.model_copy(update=alone)
        every = recipe.evaluate.every if self.curves else _NEVER
        changes = {"every": every, "clients": None, "clients_every": None}
        evaluate = recipe.evaluate.model_copy(update=changes)
        recipe = recipe.model_copy(update={"engine": engine, "evaluate": evaluate})
        plan = None if _own_budgets(recipe) else prepared.plan
        return build(recipe, data=self.federated_data(recipe), plan=plan)

    def federated_data(self, recipe: Recipe) -> FederatedData:
        """The recipe's clients, cached for the last two repetitions."""
        section = recipe.data.model_dump_json()
        key = f"{recipe.seed if recipe.data.seed is None else ''} {section}"
        if key not in self._divided:
            source = recipe.data.source
            if source not in self._records:
                self._records = {source: recipe.data.load(self.root)}
            while len(self._divided) >= _DIVISIONS:
                self._divided.pop(next(iter(self._divided)))
            self._divided[key] = recipe.data.divide(self._records[source], recipe.seed)
        return self._divided[key]


def seeded(recipe: Recipe, repetition: int) -> Recipe:
    """The recipe of one repetition, counted from 0: its seed divides records and starts models."""
    return recipe.model_copy(update={"seed": recipe.seed + repetition})


def _own_budgets(recipe: Recipe) -> bool:
    """Whether each repetition deals out budgets of its own, and so has a plan of its own."""
    return recipe.budget is not None and recipe.budget.epsilons is not None


def _noise(plan: PrivacyPlan, training: Training) -> float:
    """The noise on a coordinate of the first round's mean update: its standard deviation."""
    if plan.steps is not None:
        return math.nan
    state = training.start()
    turns = np.zeros(plan.population, dtype=np.int64) if plan.release.local else None
    ids = plan.sampler.cohort(plan.population, 1, training.streams, turns)
    size = training.task.size
    with np.errstate(over="ignore"):
        length = plan.release.noise_length(training.round(1, ids, state), size)
    if not math.isfinite(length):
        raise BadInput("the noise that the budget asks for is infinite: raise budget.epsilon")
    return length / math.sqrt(size) / plan.release.divisor(max(1, len(ids)), plan.expected)
