"""The one acceptance: whatever is sent, in whatever form, ends finite and within the clip."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.privacy.clip import Clip, Norm
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.reports import DualUpdates, Rows, accept

CLIP = Clip(2.0)


def taken(reports, size, clip):
    rows = Rows.from_reports(reports, size)
    return SimpleNamespace(rows=rows.rows, **vars(accept(rows, clip)))


def test_good_reports_pass_unchanged():
    reports = torch.tensor([[1.0, 0.5], [0.0, 0.0]])
    accepted = taken(reports, 2, CLIP)
    assert torch.equal(accepted.rows, reports)
    assert not accepted.clipped.any()
    assert not accepted.refused.any()


def test_a_report_a_thousand_times_too_long_is_scaled_to_the_bound():
    accepted = taken(torch.tensor([[1200.0, 1600.0]]), 2, CLIP)
    assert accepted.clipped.tolist() == [True]
    assert float(accepted.rows.double().norm()) <= CLIP.value
    assert torch.allclose(accepted.rows, torch.tensor([[1.2, 1.6]]), rtol=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, CLIP])
def test_reports_that_are_not_finite_count_as_zero(poison, clip):
    accepted = taken(torch.tensor([[1.0, poison], [1.0, 1.0]]), 2, clip)
    assert accepted.refused.tolist() == [True, False]
    assert accepted.rows.tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    "odd",
    [
        torch.ones(3),
        torch.ones(1),
        torch.ones(0),
        torch.ones(1, 2),
        torch.ones(()),
        torch.ones(2, dtype=torch.int64),
        torch.full((2,), 1e300, dtype=torch.float64),
    ],
    ids=["long", "short", "empty", "matrix", "scalar", "integers", "beyond-float32"],
)
def test_reports_of_the_wrong_shape_count_as_zero(odd):
    accepted = taken([torch.ones(2), odd], 2, CLIP)
    assert accepted.refused.tolist() == [False, True]
    assert accepted.rows.tolist() == [[1, 1], [0, 0]]


def test_a_matrix_of_the_wrong_width_is_refused_row_by_row():
    accepted = taken(torch.ones(2, 3), 2, CLIP)
    assert accepted.refused.tolist() == [True, True]
    assert accepted.rows.tolist() == [[0, 0], [0, 0]]


@pytest.fixture
def spanned(make_data):
    """Coordinates of clients in the span of few wide records, and the rows they stand for."""
    data = make_data((3, 2, 4), shape=(20,))
    task = Task(nn.Linear(20, 3), cross_entropy)
    cohort = CohortData(data, np.arange(3))
    walk = gradients_of(task, Mode.VECTORISED, data).trajectory(
        task.parameters, cohort, spanned=True
    )
    assert walk.spanned

    def made(*lengths):
        moved = torch.ones(3, walk.width)
        moved *= (torch.tensor(lengths) / walk.norms(moved, Norm.L2).float())[:, None]
        return DualUpdates(walk, moved, torch.zeros(3, dtype=torch.bool)), walk.update_rows(
            moved.clone()
        )

    return made


def summed(reports, weights, size=63):
    total = torch.zeros(size, dtype=torch.float64)
    reports.add_to_(total, torch.tensor(weights, dtype=torch.float64))
    return total


def test_updates_in_the_span_are_scaled_to_the_bound(spanned):
    """Whoever wrote the work, and whether or not it clipped on the way."""
    reports, rows = spanned(1000.0, 1.0, 2.5)
    accepted = accept(reports, CLIP)
    assert accepted.clipped.tolist() == [True, False, True]
    assert not accepted.refused.any()
    for k, length in enumerate((2.0, 1.0, 2.0)):
        total = summed(reports, [float(k == j) for j in range(3)])
        assert float(total.norm()) <= CLIP.value
        expected = rows[k].double() * (length / rows[k].double().norm())
        assert torch.allclose(total, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clip", [None, CLIP])
def test_updates_in_the_span_that_are_not_finite_count_as_zero(spanned, clip):
    reports, _ = spanned(1.0, 1.0, 1.0)
    reports.moved[1, 0] = math.inf
    reports = DualUpdates(reports.trajectory, reports.moved, reports.clipped)
    assert accept(reports, clip).refused.tolist() == [False, True, False]
    assert not summed(reports, [0.0, 1.0, 0.0]).any()
    assert torch.isfinite(summed(reports, [1.0, 1.0, 1.0])).all()
    assert reports.norms(Norm.L2)[1] == 0


def test_no_reports():
    assert taken(torch.empty(0, 2), 2, CLIP).rows.shape == (0, 2)
    assert taken([], 2, CLIP).rows.shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_reports_of_another_precision_are_taken_as_float32(dtype):
    accepted = taken(torch.tensor([[30.0, 40.0]], dtype=dtype), 2, CLIP)
    assert accepted.rows.dtype is torch.float32
    assert float(accepted.rows.double().norm()) <= CLIP.value
    assert accepted.clipped.tolist() == [True]
