"""Reports of PrivUnitG in numbers, and how far a mean of many of them may be off."""

import numpy as np
import torch

from fedveil.privacy.noise.streams import Streams

FAR = 5.5
"""Standard deviations of a sum of many: beyond with probability 4e-8."""


def streams_of(count, seed=1):
    ids, streams = np.arange(count), Streams(seed)
    return streams.keys("normals", 1, ids), streams.keys("choices", 1, ids)


def reports(mechanism, vector, count, length=1.0, seed=1):
    """`count` reports of the same vector, in float64."""
    rows = torch.tensor(vector, dtype=torch.float64).repeat(count, 1)
    mechanism.report_(rows, length, *streams_of(count, seed))
    return rows.numpy()
