"""`Round`, what a round asks of its clients, and `Channel`, what carries their reports back."""

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from fedveil.privacy.clip import Clip, add_weighted_
from fedveil.privacy.noise.streams import JointStreams, Streams

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Round:
    """What a round asks of its clients: sampled, charged, and with its clip fixed.

    Attributes:
        number: The round, from 1.
        ids: The clients that take part, or those of them that are computed together.
        start: The model that they start from, float32 [P]; [K, P] where clients of several
            trainings are computed in step.
        clip: The clip on their updates or gradients, None without one.
        adaptive_state: The value of an adaptive clip, or the ranges of reports, float64.
        streams: The source of their random numbers.
        attempt: How often the round was charged before.
        began: The time at which it began, by `time.perf_counter`.
    """

    number: int
    ids: Ids
    start: torch.Tensor
    clip: Clip | None
    adaptive_state: torch.Tensor
    streams: Streams | JointStreams
    attempt: int = 0
    began: float = field(default_factory=time.perf_counter)

    @property
    def own_streams(self) -> Streams:
        """The streams of the round's training."""
        if isinstance(self.streams, JointStreams):
            raise AssertionError("clients of several trainings have no streams in common")
        return self.streams

    @property
    def server_streams(self) -> Streams:
        """The server's own random numbers: a round that is charged again draws new ones."""
        return self.own_streams.for_attempt(self.attempt)


class Channel:
    """Carries clients' reports to the server and adds them up. The plain one changes nothing.

    Attributes:
        minimum: The least number of reports of which a sum is handed on.
        hides_reports: Why the server sees no single report; empty if it sees them all.
    """

    hides_reports = ""
    minimum = 0

    def add_(
        self, total: torch.Tensor, reports: torch.Tensor, weights: torch.Tensor, round: Round
    ) -> None:
        """Add the weighted sum of the updates behind reports [K, P] to `total`, float64 [P]."""
        add_weighted_(total, reports, weights)

    def updates(self, reports: torch.Tensor, round: Round) -> torch.Tensor:
        """The updates behind reports [K, P]."""
        return reports

    def encode_(self, updates: torch.Tensor, round: Round) -> None:
        """Turn updates [K, P] in place into the nearest reports that this channel can carry."""
