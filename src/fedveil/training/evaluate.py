"""The global model on the central test split, in batches, without autograd."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedveil.base.errors import BadInput
from fedveil.base.inputs import taken
from fedveil.data.federated import FederatedData
from fedveil.models.metrics import Array, Metric, no_value
from fedveil.models.task import Measurements, Task
from fedveil.training.cohort import tensors
from fedveil.training.engines.housekeeping import one_thread

BATCH = 1000
_OUTPUTS = 1 << 24

MOST_KEPT = 1 << 30
"""Bytes of outputs and targets that metrics may keep of a test split."""

_FEW = 32


@dataclass(frozen=True)
class Piece:
    """A number of records, the sum of each mean over them, and what other metrics keep of them."""

    records: int
    sums: dict[str, float]
    kept: dict[str, tuple[Array, ...]]


def evaluate(
    task: Task, params: torch.Tensor, data: FederatedData, batch: int = BATCH
) -> dict[str, float]:
    """Loss and metrics over the test split, means summed in float64; none without one."""
    check_kept(task, data)
    with one_thread():
        pieces = [measure(task, params, data, part) for part in batches_of(data, batch)]
        return joined_metrics(task, pieces)


def batches_of(data: FederatedData, batch: int = BATCH) -> list[slice]:
    """The test split in pieces, smaller ones where a record has many outputs."""
    batch = max(1, min(batch, _OUTPUTS // math.prod(data.target.outputs)))
    return [slice(a, a + batch) for a in range(0, len(data.test_y), batch)]


def measure(task: Task, params: torch.Tensor, data: FederatedData, batch: slice) -> Piece:
    """One batch of the test split."""
    measured = _measured(task, params, data, batch)
    sums = {name: float(each.double().sum()) for name, each in measured.per_example.items()}
    return Piece(len(data.test_y[batch]), sums, measured.statistics)


def joined_metrics(task: Task, pieces: Sequence[Piece]) -> dict[str, float]:
    """The metrics of all records, in the task's order, the pieces in theirs."""
    records = sum(piece.records for piece in pieces)
    found: dict[str, float] = {}
    if not pieces:
        return found
    for name in ("loss", *task.measures):
        if name in pieces[0].sums:
            found[name] = sum(piece.sums[name] for piece in pieces) / records
        else:
            kept = zip(*(piece.kept[name] for piece in pieces), strict=True)
            found[name] = task.value_of(name, [np.concatenate(arrays) for arrays in kept])
    return found


def check_measurable(task: Task, data: FederatedData) -> None:
    """Refuse metrics that tell no models apart on this test split, or keep too much of it."""
    if not len(data.test_y):
        return
    for name, metric in task.measures.items():
        reason = no_value(metric, data.classes, data.test_y)
        if reason:
            raise BadInput(f"metric {name!r} {reason}: leave it out")
    check_kept(task, data)


def check_kept(task: Task, data: FederatedData) -> None:
    """Refuse metrics that would keep more of a test split than memory is meant for.

    How much they keep of a record is found from a few: sums are as long for one as for many.
    """
    few = min(_FEW, len(data.test_y))
    if few < 2 or not any(isinstance(metric, Metric) for metric in task.measures.values()):
        return
    one, many = (_measured(task, task.parameters, data, slice(n)).statistics for n in (1, few))
    for name in one:
        more = sum(a.nbytes for a in many[name]) - sum(a.nbytes for a in one[name])
        whole = more // (few - 1) * len(data.test_y)
        if whole > MOST_KEPT:
            raise BadInput(
                f"metric {name!r} would keep {whole / 2**30:.3g} GiB of the test split's "
                f"{len(data.test_y):,} records, and may keep {MOST_KEPT / 2**30:.3g} GiB: hold "
                "fewer back, or leave it out"
            )


def _measured(task: Task, params: torch.Tensor, data: FederatedData, batch: slice) -> Measurements:
    with torch.inference_mode():
        x, y = tensors(taken(data.test_x, batch)), torch.tensor(data.test_y[batch])
        return task.measure(params, x, y)
