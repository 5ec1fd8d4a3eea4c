"""A model as Flower carries it, and as the one vector that clips and noise are for."""

import math

import numpy as np
import torch
from flwr.app import Array, ArrayRecord

from fedveil.errors import BadInput


def flat(record: ArrayRecord) -> torch.Tensor:
    """All arrays behind each other, float32 [P]; BadInput if some are no real numbers."""
    parts = []
    for name, array in record.items():
        found = array.numpy()
        if found.dtype.kind != "f":
            raise BadInput(
                f"the model's array {name!r} is {found.dtype}: only real numbers can be protected; "
                "leave counters and other buffers out of what is sent"
            )
        parts.append(torch.tensor(found.astype(np.float32).reshape(-1)))
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
    """How far a model is from where it started, float32 [P]; no numbers if it is another model.

    A vector of another length is what acceptance refuses by name.
    """
    forms = [[(name, array.shape) for name, array in each.items()] for each in (record, start)]
    if forms[0] != forms[1]:
        return torch.zeros(0)
    try:
        return flat(record) - flat(start)
    except Exception:  # whatever a reader of files that somebody else wrote may raise
        return torch.zeros(0)
