"""A client's row holds its own records and nobody else's, also where it is padded."""

import numpy as np
import pytest

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
