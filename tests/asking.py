"""What a round asks of clients, made by hand."""

import numpy as np
import torch

from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.release import Round
from fedveil.training.reports import ClientBatch


def asked(plan, start, ids, adaptive_state=None, round=1, streams=None):
    """Clients `ids` in `round` of the plan, from the model `start`."""
    state = plan.first_state(start) if adaptive_state is None else adaptive_state
    ids, streams = np.asarray(ids), streams or Streams(1)
    return Round(round, ids, start, plan.clip(state, round), state, streams)


def batch_of(number, start, cohort, clip, gradients, streams, only_sum=False, state=None):
    """Clients that are computed together."""
    state = torch.zeros(0, dtype=torch.float64) if state is None else state
    round = Round(number, cohort.ids, start, clip, state, streams)
    return ClientBatch.from_round(round, cohort, gradients, only_sum=only_sum)


def noised(plan, total, clip, number, streams):
    """A copy of `total` with the server's noise in round `number`."""
    state = torch.zeros(0, dtype=torch.float64)
    round = Round(number, np.arange(1), torch.zeros(len(total)), clip, state, streams)
    total = total.clone()
    plan.release.noise_(total, round)
    return total


def next_state(plan, state, statistic, before, after, number=1, streams=None):
    """The adaptive state after round `number`, which moved the model from `before` to `after`."""
    ids, streams = np.arange(1), streams or Streams(1)
    round = Round(number, ids, before, plan.clip(state, number), state, streams)
    return plan.next_state(round, statistic, after)


def moved_ranges(ranges, state, before, after):
    """The ranges after a round that moved the model from `before` to `after`."""
    return ranges.next_state(state, None, 1.0, before, after, 1)
