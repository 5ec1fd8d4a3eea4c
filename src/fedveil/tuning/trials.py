"""Trials: one training of one cell, many of them over all cores."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.base.checks import check_workers
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.data.partition import Records
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs.build import build
from fedveil.runs.recipe import Recipe
from fedveil.runs.recipe_file import on_this_machine
from fedveil.training.engines.processes import available_workers
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.training.engines.serial import Serial
from fedveil.training.gradients.modes import Mode
from fedveil.training.in_step import fitting_together, train_in_step
from fedveil.training.round import RoundResult
from fedveil.training.session import Training, train
from fedveil.training.work import ClientWork
from fedveil.tuning.recipe_grid import Cell
from fedveil.tuning.trial_pools import TrialPool, pool_outcomes

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
        if recipe.data.seed is not None and not _own_budgets(
            recipe
        ):  # the same clients in all of them
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
