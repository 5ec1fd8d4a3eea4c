"""Metrics are means over all records of the test split, however it is cut into batches."""

import pytest
import torch

from fedveil.data.federated import FederatedData
from fedveil.training.evaluate import evaluate


@pytest.fixture
def tested(data, make_data):
    """The same clients with a test split of many records."""

    def with_test(records):
        other = make_data((records,), seed=4)
        return FederatedData(data.x, data.y, data.offsets, other.x, other.y, data.classes)

    return with_test


@pytest.mark.parametrize(
    ("records", "batch"), [(1, 10), (10, 10), (11, 10), (29, 10), (2001, 1000)]
)
def test_every_record_counts_once(task, tested, records, batch):
    data = tested(records)
    torch.manual_seed(1)
    params = torch.randn(task.size)
    x, y = torch.tensor(data.test_x), torch.tensor(data.test_y)
    found = evaluate(task, params, data, batch)
    assert found["loss"] == pytest.approx(
        float(task.losses(task.named(params), x, y).double().mean())
    )
    right = (task.outputs(task.named(params), x).argmax(dim=1) == y).double().mean()
    assert found["accuracy"] == pytest.approx(float(right))
