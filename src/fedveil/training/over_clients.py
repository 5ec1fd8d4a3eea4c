"""How a model does across clients, on their own records: for simulations.

It is computed from private data in the clear. So it is a diagnostic and no release: it is only
there where somebody asked for it and noise is seeded.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.inputs import taken
from fedveil.data.federated import FederatedData
from fedveil.models.metrics import OVER_CLIENTS
from fedveil.models.task import Task
from fedveil.training.cohort import tensors
from fedveil.training.engines.housekeeping import one_thread
from fedveil.training.evaluate import BATCH

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClientSums:
    """Sums over the records of a piece, by client from `first` on, of each mean over examples."""

    first: int
    sums: dict[str, Numbers]


def over_clients(task: Task, params: torch.Tensor, data: FederatedData) -> dict[str, float]:
    """Loss and metrics across clients, in this process."""
    with one_thread():
        return spread(data, (measure_clients(task, params, data, p) for p in pieces_of(data)))


def pieces_of(data: FederatedData, batch: int = BATCH) -> list[slice]:
    """The clients' records in pieces, whoever they belong to."""
    return [slice(a, min(a + batch, data.records)) for a in range(0, data.records, batch)]


def measure_clients(
    task: Task, params: torch.Tensor, data: FederatedData, piece: slice
) -> ClientSums:
    """The sums of one piece, for all clients that have records in it at once."""
    with torch.inference_mode():
        x, y = tensors(taken(data.x, piece)), torch.tensor(data.y[piece])
        each = task.measure(params, x, y).per_example
    first, last = np.searchsorted(data.offsets, [piece.start, piece.stop - 1], side="right") - 1
    begins = np.maximum(data.offsets[first : last + 1] - piece.start, 0)
    sums = {name: np.add.reduceat(v.double().numpy(), begins) for name, v in each.items()}
    return ClientSums(int(first), sums)


def spread(data: FederatedData, pieces: Iterable[ClientSums]) -> dict[str, float]:
    """Over all clients, each counting once: the mean, and that of the lowest and highest tenth.

    Metrics that are no means over examples have no value for a client with few.
    """
    totals: dict[str, Numbers] = {}
    for piece in pieces:
        for name, sums in piece.sums.items():
            total = totals.setdefault(name, np.zeros(data.clients))
            total[piece.first : piece.first + len(sums)] += sums
    found = {}
    tenth = math.ceil(data.clients / 10)
    for name, total in totals.items():
        means = np.sort(total / data.sizes)
        for what, values in (
            ("mean", means),
            ("lowest_decile", means[:tenth]),
            ("highest_decile", means[-tenth:]),
        ):
            found[f"{OVER_CLIENTS}{name}/{what}"] = float(values.mean())
    return found
