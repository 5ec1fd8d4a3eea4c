"""Trials: one training of one cell, many of them over all cores."""

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from fedveil.data.federated import FederatedData
from fedveil.data.records import Records
from fedveil.errors import BadInput
from fedveil.planning.grid import Cell
from fedveil.privacy.claims import PrivacyClaim
from fedveil.privacy.plan import PrivacyPlan, Where
from fedveil.privacy.randomness import Streams
from fedveil.runs.build import build, divided, records_of
from fedveil.runs.recipe import Recipe
from fedveil.training.client import LocalWork
from fedveil.training.engines.process import die_with_parent
from fedveil.training.engines.workers import WorkerLost, available
from fedveil.training.gradients import Mode
from fedveil.training.in_step import fitting_together, train_in_step
from fedveil.training.loop import RoundResult
from fedveil.training.training import Training, train

_NEVER = 1 << 60
_KEPT = 2
_MOST_WORKERS = 1024


Track = list[tuple[int, dict[str, float]]]
"""The rounds of a training and what was measured then, often nothing."""


@dataclass(frozen=True)
class Outcome:
    """Where one training ended: the test metrics, and those along the way as (round, metrics).

    A metric that is not finite is NaN: the training diverged.
    """

    rounds: int
    metrics: dict[str, float]
    curve: tuple[tuple[int, dict[str, float]], ...] = ()


@dataclass(frozen=True, eq=False)
class Prepared:
    """A cell that was built once: its plan and execution mode serve every repetition.

    `noise` is the standard deviation of the noise on one coordinate of the first round's mean
    update, 0 without noise and NaN where it is part of training. `together` is how many repetitions
    are one computation.
    """

    cell: Cell
    plan: PrivacyPlan
    mode: Mode
    work: LocalWork
    noise: float
    together: int = 1

    def blocks(self, first: int, last: int) -> list[tuple[int, ...]]:
        """Repetitions first .. last - 1, those together that are one computation."""
        return [
            tuple(range(r, min(r + self.together, last))) for r in range(first, last, self.together)
        ]

    @property
    def told_noise(self) -> str:
        """The noise for people."""
        return "in training" if math.isnan(self.noise) else f"{self.noise:.3g}"

    @property
    def claim(self) -> PrivacyClaim | None:
        """What the cell's rounds guarantee, if anything."""
        return self.claims[0] if self.claims else None

    @cached_property
    def claims(self) -> list[PrivacyClaim]:
        """The claims that have to be told: the tightest for each thing that is released.

        The strict reading comes after one as published.
        """
        every = self.plan.claims(self.plan.permitted)
        told = list(every[:1])
        for claim in every[1:]:
            if not claim.as_published and all(
                claim.covers != other.covers or other.as_published for other in told
            ):
                told.append(claim)
        return told


@dataclass
class Laboratory:
    """Prepares cells and runs their trials; keeps the records it has read.

    `curves`: the model is measured as often as the recipe says, not only at the end.
    """

    root: Path | None = None
    curves: bool = False
    workers: int = 0
    _modes: dict[str, Mode] = field(default_factory=dict)
    _records: dict[str, Records | FederatedData] = field(default_factory=dict)
    _divided: dict[str, FederatedData] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.workers <= _MOST_WORKERS:
            raise BadInput(
                f"--workers is {self.workers}: a number from 1 to {_MOST_WORKERS} is needed, or 0 "
                "for one per core"
            )

    def prepare(self, cell: Cell, mode: Mode | None = None) -> Prepared:
        """Build a cell and refuse what cannot run, before anything does.

        `mode` fixes the execution mode; otherwise it is the recipe's, or measured once for cells
        that share data, model and batches.
        """
        recipe = cell.recipe
        try:
            if getattr(recipe.noise, "source", "seeded") == "secure":
                raise BadInput(
                    "noise.source is 'secure', and trials are repeated and compared: use 'seeded' "
                    "here and 'secure' for the run that is published"
                )
            training = build(recipe, data=self.data(recipe))
            noise = _noise(training.plan, training)
            found = mode or training.mode or self._measured(recipe, training)
        except BadInput as e:
            raise BadInput(f"cell {cell.name}: {e}" if cell.choice else str(e)) from e
        together = 1
        if recipe.data.seed is not None and not _dealt(recipe):  # the same clients in all of them
            together = fitting_together(replace(training, mode=found, workers=1))
        return Prepared(cell, training.plan, found, training.work, noise, together)

    def trial(self, prepared: Prepared, repetitions: Sequence[int]) -> list[Outcome]:
        """Train the cell with the seed of each repetition: cells share their random numbers."""
        trainings = [self._training(prepared, repetition) for repetition in repetitions]
        tracks: list[Track] = [[] for _ in trainings]
        for results in _results(trainings):
            for number, result in results:
                tracks[number].append((result.round, _finite(result.metrics)))
        return [self._outcome(track) for track in tracks]

    def trials(
        self, jobs: Sequence[tuple[Prepared, Sequence[int]]]
    ) -> Iterator[tuple[int, list[Outcome]]]:
        """(number of the job, its outcomes) as they finish, over all cores; in order on one."""
        count = min(len(jobs), self.workers or available())
        if count <= 1:
            for number, job in enumerate(jobs):
                yield number, self.trial(*job)
            return
        yield from _spread(jobs, self.trial, count)

    def _training(self, prepared: Prepared, repetition: int) -> Training:
        recipe = seeded(prepared.cell.recipe, repetition)
        engine = recipe.engine.model_copy(update={"workers": 1, "mode": str(prepared.mode)})
        every = recipe.evaluate.every if self.curves else _NEVER
        evaluate = recipe.evaluate.model_copy(update={"every": every})
        recipe = recipe.model_copy(update={"engine": engine, "evaluate": evaluate})
        plan = None if _dealt(recipe) else prepared.plan
        return build(recipe, data=self.data(recipe), plan=plan)

    def _outcome(self, track: Track) -> Outcome:
        curve = [(round, metrics) for round, metrics in track if metrics]
        if not curve:
            raise BadInput("the budget permits no round: raise budget.epsilon")
        return Outcome(track[-1][0], curve[-1][1], tuple(curve) if self.curves else ())

    def data(self, recipe: Recipe) -> FederatedData:
        """The recipe's clients; those of the last two repetitions are kept."""
        section = recipe.data.model_dump_json()
        key = f"{recipe.seed if recipe.data.seed is None else ''} {section}"
        if key not in self._divided:
            name, options = recipe.data.name, (recipe.data.grades, recipe.data.min_records)
            source = f"{name} {options} {recipe.data.path}"
            if source not in self._records:
                self._records = {source: records_of(recipe.data, self.root)}
            while len(self._divided) >= _KEPT:
                self._divided.pop(next(iter(self._divided)))
            self._divided[key] = divided(self._records[source], recipe.data, recipe.seed)
        return self._divided[key]

    def _measured(self, recipe: Recipe, training: Training) -> Mode:
        batch = getattr(recipe.local, "batch", None)
        key = f"{recipe.data!r} {recipe.model!r} {recipe.local.kind} {batch}"
        if key not in self._modes:
            self._modes[key] = min(training.timings, key=training.timings.__getitem__)
        return self._modes[key]


def seeded(recipe: Recipe, repetition: int) -> Recipe:
    """The recipe of one repetition, counted from 0."""
    return recipe.model_copy(update={"seed": recipe.seed + repetition})


def _results(trainings: Sequence[Training]) -> Iterator[list[tuple[int, RoundResult]]]:
    """(number of the training, result), a round at a time."""
    if len(trainings) > 1:
        yield from train_in_step(trainings)
    else:
        yield from ([(0, result)] for result in train(trainings[0]))


def _dealt(recipe: Recipe) -> bool:
    """Whether a repetition deals out budgets of its own: then its plan is its own as well."""
    return recipe.budget is not None and recipe.budget.epsilons is not None


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: v if math.isfinite(v) else math.nan for name, v in metrics.items()}


def _noise(plan: PrivacyPlan, training: Training) -> float:
    """The noise on a coordinate of the first round's mean update: its standard deviation."""
    if plan.where is Where.TRAINING:
        return math.nan
    state = training.start()
    turns = np.zeros(plan.population, dtype=np.int64) if plan.counted else None
    ids = plan.sampler.cohort(plan.population, 1, Streams(training.seed), turns)
    size = training.task.size
    with np.errstate(over="ignore"):
        length = float(plan.noise_length(ids, state.moving, 1, size))
    if not math.isfinite(length):
        raise BadInput("the noise that the budget asks for is infinite: raise budget.epsilon")
    return length / math.sqrt(size) / plan.divisor(max(1, len(ids)))


def _spread(
    jobs: Sequence[tuple[Prepared, Sequence[int]]],
    trial: Callable[[Prepared, Sequence[int]], list[Outcome]],
    count: int,
) -> Iterator[tuple[int, list[Outcome]]]:
    """Run the jobs on `count` forked processes, each with one thread."""

    def run(number: int) -> list[Outcome]:
        return trial(*jobs[number])

    pool = ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_begin,
        initargs=(run, os.getpid()),
    )
    waiting: dict[Future[list[Outcome]], int] = {}
    left = iter(range(len(jobs)))
    try:
        while True:
            for number in left:
                waiting[pool.submit(_run, number)] = number
                if len(waiting) >= 2 * count:
                    break
            if not waiting:
                return
            for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(done), done.result()
    except BrokenProcessPool as e:
        raise WorkerLost(
            "a process that trained was killed, as happens when memory runs out: use fewer workers"
        ) from e
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(cancel_futures=True)


class _Here:
    """What a forked process runs: set once, when it begins."""

    run: Callable[[int], list[Outcome]]


def _begin(run: Callable[[int], list[Outcome]], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    torch.set_num_threads(1)
    _Here.run = run


def _run(number: int) -> list[Outcome]:
    return _Here.run(number)
