"""`ClientBatch`: clients of a round that are computed together."""

from dataclasses import dataclass, replace

import torch

from fedveil.privacy.channel import Ids, Round
from fedveil.privacy.clip import Clip, Clipped, Norm, all_finite, row_norms
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.trajectories import Gradients


@dataclass(frozen=True, eq=False)
class ClientBatch:
    """Clients of a round that are computed together.

    Attributes:
        round: What the round asks of them; its `ids` are these clients.
        cohort: Their records.
        gradients: How gradients are computed.
        only_sum: Whether nothing but the sum of their updates is used, which may then stay in
            the span of the records.
        everyone: All clients of the round.
    """

    round: Round
    cohort: CohortData
    gradients: Gradients
    only_sum: bool
    everyone: Ids

    @classmethod
    def of(
        cls, round: Round, cohort: CohortData, gradients: Gradients, *, only_sum: bool = False
    ) -> "ClientBatch":
        """The clients of `cohort`, as a part of a round."""
        some = replace(round, ids=cohort.ids)
        return cls(some, cohort, gradients, only_sum, everyone=round.ids)


def clip_rows_(rows: torch.Tensor, clip: Clip | None, norms: torch.Tensor | None = None) -> Clipped:
    """Clip finite rows in place. A client that diverged keeps its row, which the server refuses.

    The norm of such a row is given as zero. `norms` are the rows' lengths, where they are known.
    """
    if norms is None:
        norms = row_norms(rows, Norm.L2 if clip is None else clip.norm)
    if not all_finite(norms):
        norms = torch.where(torch.isfinite(norms), norms, 0.0)
    if clip is None:
        return Clipped(rows, norms, torch.zeros(len(rows), dtype=torch.bool))
    return clip.apply_(rows, norms)
