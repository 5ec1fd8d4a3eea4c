"""One PyTorch data set per client."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from fedveil import FederatedData
from fedveil.base.errors import BadInput


class Squares(Dataset):
    """Pictures that are made when they are asked for."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return torch.full((1, 2, 2), number / 10), number % 2


def test_data_sets_by_name():
    data = FederatedData.from_torch({"ada": Squares(3), "bob": Squares(2)}, test=Squares(4),
                                    classes=2)  # fmt: skip
    assert (data.names.tolist(), data.sizes.tolist()) == (["ada", "bob"], [3, 2])
    assert (data.x.dtype, data.record_shape, data.y.tolist()) == (
        np.float32,
        (1, 2, 2),
        [0, 1, 0, 0, 1],
    )
    np.testing.assert_array_equal(data.x[:, 0, 0, 0], np.float32([0, 0.1, 0.2, 0, 0.1]))
    assert len(data.test_x) == 4


def test_lists_of_data_sets_and_of_pairs():
    words = TensorDataset(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 0]))
    pairs = [(np.array([5, 6]), 1)]
    data = FederatedData.from_torch([words, pairs], test=pairs, classes=2)
    assert (data.names.tolist(), data.x.dtype) == (["0", "1"], np.int64)
    assert data.x.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert data.y.tolist() == [1, 0, 1]


def test_numbers_to_predict_and_what_is_said():
    pairs = [(torch.zeros(2), torch.tensor(0.5)), (torch.ones(2), 1.5)]
    data = FederatedData.from_torch([pairs], test=pairs, classes=0, fitted="means")
    assert (data.y.tolist(), data.fitted) == ([0.5, 1.5], "means")


@pytest.mark.parametrize(
    ("datasets", "test", "message"),
    [
        (5, Squares(1), "datasets is 5: a list or a dict by name"),
        ({}, Squares(1), "no clients"),
        ([5], Squares(1), "client '0' has 5: a data set with a length is needed"),
        (["abc"], Squares(1), "client '0' has 'abc': a data set"),
        ({"ada": Squares(0)}, Squares(1), "client 'ada' has no records: omit it"),
        ([[(1.0, 0), 3]], Squares(1), r"record 1 of client '0' is 3: use \(x, y\)"),
        (
            [[([1.0], 0), ([1.0, 2.0], 0)]],
            Squares(1),
            r"record 1 of client '0' has a record of shape \(2,\)",
        ),
        ([[([[1.0], [1.0, 2.0]], 0)]], Squares(1), "features of client '0' cannot be made"),
        ([Squares(2)], 5, "the test split has 5: a data set with a length"),
        ([Squares(2)], Squares(0), "the test split has no records"),
    ],
)
def test_what_are_no_data_sets_is_refused(datasets, test, message):
    with pytest.raises(BadInput, match=message) as refused:
        FederatedData.from_torch(datasets, test=test, classes=2)
    assert "\n" not in str(refused.value)
