"""Conversion between a model as Flower carries it and the one vector that is clipped and noised."""

import math

import numpy as np
import torch
from flwr.app import Array, ArrayRecord

from fedveil.base.errors import BadInput


def flat(record: ArrayRecord) -> torch.Tensor:
    """All arrays concatenated, float32 [P]. Raises `BadInput` if one has no real numbers."""
    parts = []
    for name, array in record.items():
        values = array.numpy()
        if values.dtype.kind != "f":
            raise BadInput(
                f"the model's array {name!r} is {values.dtype}: only real numbers can be "
                "protected; leave counters and other buffers out of what is sent"
            )
        parts.append(torch.tensor(values.astype(np.float32).reshape(-1)))
    return torch.cat(parts) if parts else torch.zeros(0)


def shaped(vector: torch.Tensor, like: ArrayRecord) -> ArrayRecord:
    """The vector as arrays with the names, shapes and types of `like`."""
    arrays, begin = dict[str, Array](), 0
    for name, array in like.items():
        size = math.prod(array.shape)
        part = vector[begin : begin + size].numpy().reshape(array.shape)
        arrays[name] = Array(part.astype(array.dtype))
        begin += size
    return ArrayRecord(arrays)


def moved(record: ArrayRecord, start: ArrayRecord) -> torch.Tensor:
    """The difference of a model from where it started, float32 [P], or empty for another model.

    Acceptance refuses a vector of another length by the client's name.
    """
    forms = [[(name, array.shape) for name, array in each.items()] for each in (record, start)]
    if forms[0] != forms[1]:
        return torch.zeros(0)
    try:
        return flat(record) - flat(start)
    except Exception:  # whatever a reader of files that somebody else wrote may raise
        return torch.zeros(0)
