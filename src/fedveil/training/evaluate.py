"""The global model on the central test split, in batches, without autograd."""

from collections.abc import Sequence

import torch

from fedveil.data.federated import FederatedData
from fedveil.inputs import taken
from fedveil.models.task import Task
from fedveil.training.cohort import tensors
from fedveil.training.engines.housekeeping import one_thread

Measured = tuple[int, dict[str, float]]
"""A number of records, and the sum of each metric over them."""

BATCH = 1000


def evaluate(
    task: Task, params: torch.Tensor, data: FederatedData, batch: int = BATCH
) -> dict[str, float]:
    """Mean loss and metrics over the test split, summed in float64."""
    with one_thread():
        return mean_metrics([measure(task, params, data, part) for part in batches_of(data, batch)])


def batches_of(data: FederatedData, batch: int = BATCH) -> list[slice]:
    """The test split in pieces."""
    return [slice(a, a + batch) for a in range(0, len(data.test_y), batch)]


def measure(task: Task, params: torch.Tensor, data: FederatedData, batch: slice) -> Measured:
    """The sums over one batch of the test split."""
    with torch.inference_mode():
        x, y = tensors(taken(data.test_x, batch)), torch.tensor(data.test_y[batch])
        measured = task.measured(params, x, y)
        sums = {name: float(each.double().sum()) for name, each in measured.items()}
    return len(y), sums


def mean_metrics(parts: Sequence[Measured]) -> dict[str, float]:
    """Means over all records, added in the order of the batches."""
    records = sum(count for count, _ in parts)
    return {name: sum(sums[name] for _, sums in parts) / records for name in parts[0][1]}
