"""The global model on the central test split, in batches, without autograd."""

import torch

from fedveil.data.federated import FederatedData
from fedveil.models.task import Task


def evaluate(
    task: Task, params: torch.Tensor, data: FederatedData, batch: int = 1000
) -> dict[str, float]:
    """Mean loss and metrics over the test split, summed in float64."""
    totals = dict.fromkeys(("loss", *task.metrics), 0.0)
    with torch.inference_mode():
        for start in range(0, len(data.test_x), batch):
            x = torch.tensor(data.test_x[start : start + batch])
            y = torch.tensor(data.test_y[start : start + batch])
            outputs = task.outputs(params, x)
            for name, value in (("loss", task.loss), *task.metrics.items()):
                totals[name] += float(value(outputs, y).to(torch.float64).sum())
    return {name: total / len(data.test_x) for name, total in totals.items()}
