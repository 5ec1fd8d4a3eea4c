"""Trials: one training of one cell, many of them over worker processes or on a Ray cluster."""

import math
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from fedveil.base import platforms
from fedveil.base.checks import check_workers
from fedveil.base.errors import BadInput
from fedveil.base.forks import begin_worker
from fedveil.base.interrupts import hold_signals
from fedveil.base.spawning import pickle_to_send, script_left_out
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
from fedveil.training.in_step import repetitions_per_chunk, train_in_step
from fedveil.training.round import RoundResult
from fedveil.training.session import Training, train
from fedveil.training.work import ClientWork
from fedveil.tuning.recipe_grid import Cell

C = TypeVar("C")
R = TypeVar("R")


class TrialPool(Generic[C, R]):
    """Workers that train cells. They start, and get all cells, when the first job arrives.

    Leaving its context kills them.

    Args:
        cells: All cells that jobs may name. A job must name one of these very objects.
        trial: Trains a cell once for each repetition and returns the outcomes.
        workers: Processes of one thread each. With one, jobs run in this process. On a
            cluster tasks, 0 for one per core.
        cluster: The Ray cluster to use. A training is repeated if its worker or node dies.
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
        self._tasks: Tasks | None = None
        self._processes: ProcessPoolExecutor | None = None

    def __enter__(self) -> "TrialPool[C, R]":
        return self

    def __exit__(self, *_: object) -> None:
        if self._tasks is not None:
            self._tasks.close()
        if self._processes is not None:
            for process in list((self._processes._processes or {}).values()):
                process.kill()
            self._processes.shutdown(cancel_futures=True)

    def outcomes(self, jobs: Sequence[tuple[C, Sequence[int]]]) -> Iterator[tuple[int, list[R]]]:
        """Run jobs (cell, repetitions) and yield (index of the job, its outcomes) as they finish.

        Raise WorkerLost if a process was killed, and KeyError for a cell that the pool does not
        have.
        """
        calls = [(self._places[id(cell)], tuple(numbers)) for cell, numbers in jobs]
        if not jobs or (self._cluster is None and self._workers == 1):
            yield from ((number, _run(self._shared, *call)) for number, call in enumerate(calls))
            return
        if self._cluster is not None:
            if self._tasks is None:
                self._tasks = Tasks(self._cluster, self._workers, self._shared, "these trainings")
            yield from self._tasks.completed(_run, calls)
            return
        if self._processes is None:
            self._processes = self._start()
        waiting: dict[Future[list[R]], int] = {}
        left = iter(enumerate(calls))
        try:
            while True:
                for number, call in left:
                    with hold_signals(), script_left_out():  # this may start processes
                        waiting[self._processes.submit(_run_in_worker, *call)] = number
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

    def _start(self) -> ProcessPoolExecutor:
        """Make the pool of processes. Spawned ones are sent a pickle of the cells."""
        shared: tuple[Sequence[C], Any] | bytes = self._shared
        if platforms.start_method() == "spawn":
            shared = pickle_to_send(shared, "the trainings")
        return ProcessPoolExecutor(
            self._workers,
            mp_context=multiprocessing.get_context(platforms.start_method()),
            initializer=_begin_process,
            initargs=(shared, os.getpid()),
        )


_of_this_process: list[Any] = []
"""The cells and the function of a worker, set once when it begins. In a spawned one, their pickle
until its first job."""


def _begin_process(shared: tuple[Sequence[Any], Any] | bytes, parent: int) -> None:
    """Prepare a worker that ends with `parent`, and keep `shared` in it."""
    begin_worker(parent)
    _of_this_process[:] = [shared]


def _run_in_worker(place: int, numbers: Sequence[int]) -> list[Any]:
    """Run a job in a worker, on the cells that it keeps."""
    if isinstance(_of_this_process[0], bytes):
        _of_this_process[:] = [pickle.loads(_of_this_process[0])]
    return _run(_of_this_process[0], place, numbers)


def _run(shared: tuple[Sequence[Any], Any], place: int, numbers: Sequence[int]) -> list[Any]:
    """Train the cell at `place` once for each repetition in `numbers`, and return the outcomes.

    `shared` is (cells, function that trains a cell).
    """
    cells, trial = shared
    outcomes: list[Any] = trial(cells[place], numbers)
    return outcomes


def pool_outcomes(
    jobs: Sequence[tuple[C, Sequence[int]]],
    trial: Callable[[C, Sequence[int]], list[R]],
    workers: int,
    cluster: RayCluster | None,
) -> Iterator[tuple[int, list[R]]]:
    """Run jobs (cell, repetitions) and yield (index of the job, its outcomes) as they finish.

    Workers start when iteration begins, and end with it. Raise WorkerLost if a process was killed.

    Args:
        jobs: The jobs.
        trial: Trains a cell once for each repetition and returns the outcomes.
        workers: Processes on this machine, 0 for one per core. With one, jobs run in this process.
        cluster: The Ray cluster to use instead.
    """
    cells = list({id(cell): cell for cell, _ in jobs}.values())
    if cluster is None:
        workers = min(len(jobs), workers or available_workers(cells, trial))
    with TrialPool(cells, trial, workers, cluster) as pool:
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
        test_curve: (round, test metrics) along the way. Empty unless curves are kept.
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
        """Return repetitions first .. last - 1 in blocks of at most `together` repetitions."""
        return [
            tuple(range(r, min(r + self.together, last))) for r in range(first, last, self.together)
        ]

    @property
    def noise_text(self) -> str:
        """Return `noise_std` with three digits, or "in training" if it is NaN."""
        return "in training" if math.isnan(self.noise_std) else f"{self.noise_std:.3g}"

    @property
    def headline_claim(self) -> PrivacyClaim | None:
        """Return the headline claim after all rounds that the plan permits.

        None without a claim.
        """
        return counting(self.shown_claims)

    @cached_property
    def shown_claims(self) -> list[PrivacyClaim]:
        """Return the plan's first claim, then the first strict one for each release and trust.

        A strict claim comes after one as published, and one without a shuffler after that with it.
        [] if the plan claims nothing.
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


CellPool = TrialPool[PreparedCell, TrialOutcome]


@dataclass
class Laboratory:
    """Prepares cells and runs their trials, with the records cached.

    Attributes:
        root: Where data sets are stored.
        with_curves: Whether the model is measured as often as the recipe says, not only at the end.
        workers: Processes that train, 0 for one per core, whatever the recipe says of its engine.
        cluster: The Ray cluster that trains instead of this machine.
    """

    root: Path | None = None
    with_curves: bool = False
    workers: int = 0
    cluster: RayCluster | None = None
    _records: dict[str, Records | FederatedData] = field(default_factory=dict)
    _divided: dict[str, FederatedData] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_workers("--workers", self.workers)

    def __getstate__(self) -> dict[str, Any]:
        """For a worker, which trains what it is given by itself."""
        return {**vars(self), "workers": 1, "cluster": None}

    def prepare(self, cell: Cell, mode: Mode | None = None) -> PreparedCell:
        """Build a cell without training it, and return it with its plan, mode and noise.

        Modes are timed only if `mode` is None and the recipe's engine.mode is "fastest". Raise
        BadInput if the cell cannot run, has secure noise or a price on its metrics, or its data
        have no test split.

        Args:
            cell: The cell.
            mode: The execution mode. None: the recipe's, or without one that of `mode_of`.
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
                    "metrics in the clear: omit it here"
                )
            training = build(on_this_machine(recipe), data=self.federated_data(recipe))
            training.data.check_tested("comparing trials")
            noise = _first_noise_std(training)
            found = mode or training.chosen
        except BadInput as e:
            raise BadInput(f"cell {cell.name}: {e}" if cell.choice else str(e)) from e
        together = 1
        # the same clients in all of them
        if recipe.data.seed is not None and not _has_client_budgets(recipe):
            training = replace(training, mode=found, fastest=False, workers=1)
            engine = training.engine
            if isinstance(engine, Serial):
                engine.make_ready()
            together = repetitions_per_chunk(training)
        return PreparedCell(cell, training.plan, found, training.work, noise, together)

    def trial(self, prepared: PreparedCell, repetitions: Sequence[int]) -> list[TrialOutcome]:
        """Train the cell once for each repetition (counted from 0), and return the outcomes.

        The same repetition of two cells has the same clients and the same first model. Noise,
        cohorts and batches are different in every training: if two shared their noise, it would
        cancel in the difference of their models, and no sum of epsilons would cover both. Raise
        BadInput if the budget permits no round.
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
            TrialOutcome(last, curve[-1][1], tuple(curve) if self.with_curves else ())
            for last, curve in zip(last_rounds, curves, strict=True)
        ]

    def trials(
        self, jobs: Sequence[tuple[PreparedCell, Sequence[int]]]
    ) -> Iterator[tuple[int, list[TrialOutcome]]]:
        """Run jobs (cell, repetitions) and yield (index of the job, outcomes) as they finish.

        Jobs run on the laboratory's workers. Raise WorkerLost if a process was killed.
        """
        return pool_outcomes(jobs, self.trial, self.workers, self.cluster)

    def pool(self, cells: Sequence[PreparedCell]) -> CellPool:
        """Return a pool of workers for many calls on these cells. Leaving its context ends it."""
        workers = self.workers
        if self.cluster is None:
            workers = workers or available_workers(cells, self.trial)
        return TrialPool(cells, self.trial, workers, self.cluster)

    def _training(self, prepared: PreparedCell, repetition: int) -> Training:
        """Return the training of one repetition of a cell, on one worker.

        Its seed is the recipe's plus the repetition. It is evaluated only at the end, unless curves
        are kept.
        """
        recipe = recipe_of_repetition(prepared.cell.recipe, repetition)
        alone = {"workers": 1, "mode": str(prepared.mode)}
        engine = on_this_machine(recipe).engine.model_copy(update=alone)
        every = recipe.evaluate.every if self.with_curves else _NEVER
        changes = {"every": every, "clients": None, "clients_every": None}
        evaluate = recipe.evaluate.model_copy(update=changes)
        recipe = recipe.model_copy(update={"engine": engine, "evaluate": evaluate})
        plan = None if _has_client_budgets(recipe) else prepared.plan
        return build(recipe, data=self.federated_data(recipe), plan=plan)

    def federated_data(self, recipe: Recipe) -> FederatedData:
        """Load the recipe's records, divide them among clients, and return them.

        The last two divisions are cached.
        """
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


def recipe_of_repetition(recipe: Recipe, repetition: int) -> Recipe:
    """Return the recipe with `repetition` (from 0) added to its seed."""
    return recipe.model_copy(update={"seed": recipe.seed + repetition})


def _has_client_budgets(recipe: Recipe) -> bool:
    """Return whether clients have budgets of their own. Each repetition then needs its own plan."""
    return recipe.budget is not None and recipe.budget.epsilons is not None


def _first_noise_std(training: Training) -> float:
    """Return the standard deviation of noise on a coordinate of the first round's mean update.

    NaN if noise is part of local training. Raise BadInput if it is infinite.
    """
    plan = training.plan
    if plan.noisy_steps is not None:
        return math.nan
    state = training.start()
    turns = np.zeros(plan.population, dtype=np.int64) if plan.release.local else None
    ids = plan.sampler.cohort(plan.population, 1, training.streams, turns)
    size = training.task.size
    with np.errstate(over="ignore"):
        length = plan.release.noise_length(training.round(1, ids, state), size)
    if not math.isfinite(length):
        raise BadInput("the noise that the budget asks for is infinite: raise budget.epsilon")
    return length / math.sqrt(size) / plan.release.divisor(max(1, len(ids)), plan.expected_cohort)
