"""What a round asks of clients, made by hand."""

from dataclasses import dataclass

import numpy as np
import torch

from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.streams import Streams


@dataclass(frozen=True)
class Asked:
    """All that a release may know when reports are made and read."""

    round: int
    ids: np.ndarray
    start: torch.Tensor
    clip: Clip | None
    moving: torch.Tensor
    streams: Streams


def asked(plan, start, ids, moving=None, round=1, streams=None):
    """Clients `ids` in `round` of the plan, from the model `start`."""
    moving = plan.start(start) if moving is None else moving
    ids, streams = np.asarray(ids), streams or Streams(1)
    return Asked(round, ids, start, plan.clip(moving, round), moving, streams)
