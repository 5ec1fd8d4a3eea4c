"""What an item of a paper runs on: sweeps in a directory, resumed after an interruption."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from fedveil.papers.paper_page import Page
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import budgeted
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.tuning.recipe_grid import Axis
from fedveil.tuning.repetitions import Mean, mean_of
from fedveil.tuning.sweep import Sweep
from fedveil.tuning.trials import Laboratory


class ExperimentScale(StrEnum):
    """Minutes on two cores, or the paper's sizes as far as the data at hand allow."""

    QUICK = "quick"
    PAPER = "paper"


OnTrial = Callable[[str, int, int, str], None]
"""(sweep, trials done, trials in all, the cell just finished)."""


@dataclass
class Experiment:
    """Where results are kept, how large they are to be, and how often they are repeated.

    `repeat` None is as often as an item says for its scale.
    """

    out: Path
    scale: ExperimentScale = ExperimentScale.QUICK
    repeat: int | None = None
    root: Path | None = None
    workers: int = 0
    on_trial: OnTrial = lambda sweep, done, total, name: None
    cluster: RayCluster | None = None
    _laboratories: dict[bool, Laboratory] = field(default_factory=dict, repr=False)

    def choose(self, quick: int, paper: int) -> int:
        """A number that depends on the scale."""
        return quick if self.scale is ExperimentScale.QUICK else paper

    def repetitions(self, quick: int, paper: int) -> int:
        """How often to repeat: what was asked for, or what the scale allows."""
        return self.repeat or self.choose(quick, paper)

    def sweep(
        self,
        name: str,
        recipe: str,
        settings: Sequence[str],
        axes: Sequence[Axis],
        repeat: int,
        *,
        curves: bool = False,
    ) -> Sweep:
        """Run a grid of `recipe` with `settings`, in a directory of its own, and return it."""
        folder = self.out / f"{name}-{self.scale}-{repeat}"
        sweep = Sweep.in_folder(folder, recipe, settings, axes, repeat, self._laboratory(curves))
        sweep.run(lambda done, total, cell: self.on_trial(name, done, total, cell))
        return sweep

    def _laboratory(self, curves: bool) -> Laboratory:
        """One for all sweeps, so that records are read and modes are measured once."""
        if curves not in self._laboratories:
            self._laboratories[curves] = Laboratory(
                self.root, curves=curves, workers=self.workers, cluster=self.cluster
            )
        return self._laboratories[curves]


Item = Callable[[Experiment], Page]


def mean_lines(sweep: Sweep, length: int, metric: str) -> list[list[Mean]]:
    """The cells' means, `length` of them to a line."""
    means = [sweep.cell_mean(c, metric) for c in range(len(sweep.cells))]
    return [means[i : i + length] for i in range(0, len(means), length)]


def learning_curve(sweep: Sweep, cell: int, metric: str) -> tuple[list[int], list[Mean]]:
    """The rounds in which a cell was measured, and the means then."""
    curves = [outcome.test_curve for outcome in sweep.outcomes(cell)]
    rounds = [round for round, _ in curves[0]]
    return rounds, [mean_of([c[i][1][metric] for c in curves]) for i in range(len(rounds))]


def named(epsilon: str) -> str:
    """How a line is named after its epsilon.

    >>> named("3"), named("inf")
    ('epsilon 3', 'no noise')
    """
    return "no noise" if epsilon == "inf" else f"epsilon {epsilon}"


def strict_claim(sweep: Sweep, cell: int) -> str:
    """What a cell's reports are worth strictly."""
    plan = sweep.prepared[cell].plan
    readings = [claim for claim in plan.claims(plan.permitted) if not claim.as_published]
    if not readings:
        return "nothing claimed"
    return readings[0].short


def claim_of(sweep: Sweep) -> PrivacyClaim:
    """The claim of the first cell that makes one: what belongs to the epsilons of its budgets."""
    found = (budgeted(prepared.shown_claims) for prepared in sweep.prepared)
    return next(claim for claim in found if claim is not None)


def meaning(*claims: PrivacyClaim) -> str:
    """What a page's epsilons mean where no other words stand beside them."""
    return "Every epsilon here, unless it says otherwise: " + "; ".join(
        f"epsilon {words}" for words in dict.fromkeys(claim.full_terms for claim in claims)
    )
