"""`Round`: what a round asks of its clients, wherever they are computed."""

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.streams import Streams

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Round:
    """What a round asks of its clients: sampled, charged, and with its clip fixed.

    Attributes:
        number: Which round it is, from 1.
        ids: The clients that take part.
        start: The model that they start from, float32 [P].
        clip: The clip on their updates or gradients, None without one.
        moving: What an adaptive clip or range has come to, float64.
        streams: Where their random numbers come from.
        attempt: How often the round was charged before.
        began: When it began, by `time.perf_counter`.
    """

    number: int
    ids: Ids
    start: torch.Tensor
    clip: Clip | None
    moving: torch.Tensor
    streams: Streams
    attempt: int = 0
    began: float = field(default_factory=time.perf_counter)
