"""A client's row holds its own records and nobody else's, also where it is padded."""

import numpy as np
import pytest
import torch

from fedveil.data.federated import FederatedData
from fedveil.training.cohort import CohortData

SIZES = (7, 1, 4, 10, 3)
COHORTS = [[0, 1, 2, 3, 4], [4], [1, 4], [4, 3, 2, 1, 0], [1], [3, 4], [4, 4]]


@pytest.fixture(params=["in one piece", "strided"])
def data(make_data, request):
    data = make_data(SIZES)
    if request.param == "in one piece":
        return data
    wide = np.repeat(data.x, 2, axis=1)[:, ::2]
    assert not wide.flags.c_contiguous
    return FederatedData(wide, data.y, data.offsets, data.test_x, data.test_y, data.classes)


@pytest.mark.parametrize("ids", COHORTS, ids=str)
def test_rows_are_a_clients_own_records_and_then_its_last_one(data, ids):
    cohort = CohortData(data, np.array(ids))
    longest = max(SIZES[c] for c in ids)
    assert cohort.sizes.tolist() == [SIZES[c] for c in ids]
    assert cohort.weights.tolist() == [SIZES[c] for c in ids]
    for row, client in enumerate(ids):
        own = np.minimum(np.arange(longest), SIZES[client] - 1) + data.offsets[client]
        assert np.array_equal(cohort.x[row].numpy(), data.x[own])
        assert np.array_equal(cohort.y[row].numpy(), data.y[own])


@pytest.mark.parametrize("ids", COHORTS, ids=str)
def test_what_is_written_to_a_row_does_not_reach_the_data(data, ids):
    before, cohort = data.x.copy(), CohortData(data, np.array(ids))
    cohort.x.fill_(-1.0)
    assert np.array_equal(data.x, before)


@pytest.mark.parametrize("client", range(len(SIZES)))
def test_a_clients_records_lie_alone_as_they_lie_among_others(data, client):
    alone = CohortData(data, np.array([client])).x
    assert alone.is_contiguous()
    assert alone.data_ptr() % 64 == 0


def test_padding_of_gathered_records_is_a_client_s_own(data):
    """Also where a client has fewer records than others draw, and where it is the last one."""
    cohort = CohortData(data, np.array([1, 4]))
    few = cohort.gather(torch.tensor([[0, 1, 4], [2, 0, 7]]))
    own = data.x[[7, 7, 7]], data.x[[24, 22, 24]]
    assert np.array_equal(few.x.numpy(), np.stack(own))
    assert np.array_equal(few.y.numpy(), data.y[[[7, 7, 7], [24, 22, 24]]])
