"""What an item of a paper runs on: sweeps in a directory, resumed after an interruption."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from fedveil.papers.page import Page
from fedveil.training.engines.on_ray.cluster import RayCluster
from fedveil.tuning.axes import Axis
from fedveil.tuning.sweep import Sweep
from fedveil.tuning.trials import Laboratory


class Scale(StrEnum):
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
    scale: Scale = Scale.QUICK
    repeat: int | None = None
    root: Path | None = None
    workers: int = 0
    on_trial: OnTrial = lambda sweep, done, total, name: None
    cluster: RayCluster | None = None
    _laboratories: dict[bool, Laboratory] = field(default_factory=dict, repr=False)

    def choose(self, quick: int, paper: int) -> int:
        """A number that depends on the scale."""
        return quick if self.scale is Scale.QUICK else paper

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
        sweep = Sweep.open(folder, recipe, settings, axes, repeat, self._laboratory(curves))
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
