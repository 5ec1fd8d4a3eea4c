"""`Turn`: what a cohort is asked to do in one round."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from fedveil.privacy.clip import Clip, Clipped
from fedveil.privacy.noise.streams import KeySource
from fedveil.privacy.round import Round
from fedveil.privacy.rows import Norm, all_finite, row_norms
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.trajectories import Gradients


@dataclass(frozen=True, eq=False)
class Turn:
    """The round's model, the clients whose turn it is, and how they compute.

    `start` is one model [P], or [K, P] where clients of several trainings are computed in step.

    Local work turns it into one update per client, as rows [K, P]; or, if `summed` says that their
    weighted sum is all that will be asked for, into updates left in the span of the records.
    `everyone` is the whole cohort of the round, which clients that cheat together know.
    """

    number: int
    start: torch.Tensor
    cohort: CohortData
    clip: Clip | None
    gradients: Gradients
    streams: KeySource
    summed: bool = False
    moving: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    everyone: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @classmethod
    def of(
        cls, round: Round, cohort: CohortData, gradients: Gradients, *, summed: bool = False
    ) -> "Turn":
        """The turn of some clients of a round."""
        return cls(
            number=round.number,
            start=round.start,
            cohort=cohort,
            clip=round.clip,
            gradients=gradients,
            streams=round.streams,
            summed=summed,
            moving=round.moving,
            everyone=round.ids,
        )

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Whose turn it is."""
        return self.cohort.ids


def clip_rows_(rows: torch.Tensor, clip: Clip | None, norms: torch.Tensor | None = None) -> Clipped:
    """Clip finite rows in place; a client that diverged keeps its row, which the server refuses.

    The norm of such a row is given as zero. `norms` are the rows' lengths, where they are known.
    """
    if norms is None:
        norms = row_norms(rows, Norm.L2 if clip is None else clip.norm)
    if not all_finite(norms):
        norms = torch.where(torch.isfinite(norms), norms, 0.0)
    if clip is None:
        return Clipped(rows, norms, torch.zeros(len(rows), dtype=torch.bool))
    return clip.apply_(rows, norms)
