"""Updates in the span of a client's records: their lengths, rows, sums and bounds."""

import math

import numpy as np
import pytest
import torch

from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.privacy.clip import Clip, Norm, row_norms
from fedveil.training.cohort import Batches, CohortData
from fedveil.training.gradients.linear_chains import DualTrajectory
from fedveil.training.gradients.modes import Vectorised
from fedveil.training.gradients.trajectories import VmappedTrajectory
from fedveil.training.reports import DualUpdates, accept
from fedveil.training.work import ClientSgd
from tests.asking import batch_of
from tests.training.gradients.chains import (
    ROUND,
    STREAMS,
    WIDE,
    assert_close,
    away,
    chain,
    some,
    whole,
)


@pytest.mark.parametrize("hidden", [(), (5,)])
@pytest.mark.parametrize("bias", [True, False])
def test_lengths_in_the_span_are_those_of_the_rows(make_walks, hidden, bias):
    walk, _ = make_walks(chain(hidden=hidden, bias=bias), spanned=True)
    for moved in (
        away(walk),
        walk.mean_update(None, whole(walk)),
        walk.mean_update(None, some(walk)),
    ):
        lengths = walk.norms(moved, Norm.L2)
        assert lengths.dtype == torch.float64
        assert lengths.tolist() == pytest.approx(
            row_norms(walk.update_rows(moved)).tolist(), rel=1e-5
        )


def test_lengths_in_the_span_are_not_finite_where_a_row_is_not(make_walks):
    walk, _ = make_walks(chain(), spanned=True)
    moved = away(walk)
    moved[1, 0], moved[2, -1], moved[3, 3] = math.nan, math.inf, -math.inf
    finite = torch.isfinite(walk.norms(moved, Norm.L2))
    assert finite.tolist() == [True, False, False, False, True]
    assert finite.tolist() == torch.isfinite(row_norms(walk.update_rows(moved))).tolist()


def test_the_span_knows_one_length_only(make_walks):
    walk, _ = make_walks(chain(), spanned=True)
    with pytest.raises(AssertionError, match="in L2 only"):
        walk.norms(away(walk), Norm.L1)


def test_rows_of_the_span_are_linear(make_walks):
    walk, _ = make_walks(chain(), spanned=True)
    a, b = away(walk), walk.mean_update(None, whole(walk))
    assert_close(walk.update_rows(a - 3 * b), walk.update_rows(a) - 3 * walk.update_rows(b))


def test_rows_of_parameters_are_themselves(make_walks):
    walk, _ = make_walks(chain())
    moved = away(walk)
    assert torch.equal(walk.update_rows(moved), moved)
    for norm in Norm:
        assert torch.equal(walk.norms(moved, norm), row_norms(moved, norm))


@pytest.mark.parametrize("hidden", [(), (5,)])
@pytest.mark.parametrize("bias", [True, False])
def test_weighted_sums_are_those_of_the_rows(make_walks, hidden, bias, spanned):
    walk, _ = make_walks(chain(hidden=hidden, bias=bias), spanned=spanned)
    moved, weights = away(walk), torch.tensor([0.5, 0.0, 2.0, 1e-9, 1.0], dtype=torch.float64)
    total = torch.ones(walk._task.size, dtype=torch.float64)
    walk.add_weighted_(total, moved, weights)
    assert walk.spanned is spanned
    assert_close(total - 1, weights @ walk.update_rows(moved).double(), 1e-6)


@pytest.mark.parametrize("apart", [1.0, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_updates_left_in_the_span_are_bounded(make_walks, apart, size):
    """Records of a client that are almost the same, and coordinates that cancel each other."""
    walk, _ = make_walks(chain(), spanned=True)
    x = walk._cohort.x
    x.copy_(size * (x[:, :1] + apart * x))
    walk = Vectorised(walk._task, walk._cohort.data).trajectory(
        walk._start, walk._cohort, spanned=True
    )
    moved, clip = away(walk, 100.0), Clip(0.01)
    moved[:, walk._span :] = 0
    coordinates = walk._coordinates(moved)
    coordinates -= coordinates.mean(dim=1, keepdim=True)
    done = DualUpdates(walk, moved, torch.zeros(len(moved), dtype=torch.bool))
    lengths = done.lengths.clone()
    accepted = accept(done, clip)
    for k in range(len(moved)):
        total = torch.zeros(walk._task.size, dtype=torch.float64)
        walk.add_weighted_(
            total, moved, torch.eye(len(moved), dtype=torch.float64)[k] * done.scales
        )
        assert float(total.norm()) <= clip.value
        assert bool(accepted.clipped[k]) == (float(lengths[k]) > clip.value * (1 - 1e-6))


def test_a_client_that_diverged_in_the_span_is_left_out(make_walks):
    walk, _ = make_walks(chain(), spanned=True)
    moved = away(walk)
    kept = moved[[0, 2, 4]].clone()
    moved[1, 0], moved[3, -1] = math.inf, math.nan
    done = DualUpdates(walk, moved, torch.zeros(len(moved), dtype=torch.bool))
    accepted = accept(done, Clip(0.1))
    assert accepted.refused.tolist() == [False, True, False, True, False]
    assert not done.moved[[1, 3]].any()
    assert not done.scales[[1, 3]].any()
    assert torch.equal(done.moved[[0, 2, 4]], kept)


class Ordinary(Vectorised):
    def trajectory(self, start, cohort, *, spanned):
        return super().trajectory(start, cohort, spanned=False)


class General(Vectorised):
    def trajectory(self, start, cohort, *, spanned):
        return VmappedTrajectory(self._task, start, cohort)


@pytest.mark.parametrize("hidden", [(), (5,)])
@pytest.mark.parametrize(
    "batches", [Batches(0, epochs=3), Batches(3, epochs=2), Batches(4, steps=5)], ids=str
)
@pytest.mark.parametrize(
    ("momentum", "clip"),
    [
        (0.0, None),
        (0.9, None),
        (0.0, Clip(0.3)),
        (0.9, Clip(0.3)),
        (0.0, Clip(0.5, gradient=0.6)),
        (0.0, Clip(1e3, gradient=0.6)),
    ],
)
def test_local_sgd_ends_where_it_ends_in_any_form(make_data, batches, momentum, clip, hidden):
    data = make_data(shape=(WIDE,))
    cohort = CohortData(data, np.arange(data.clients))
    torch.manual_seed(7)
    task = Task(chain(hidden=hidden), cross_entropy)
    start = 0.2 * torch.randn(task.size)
    work = ClientSgd(batches, lr=0.2, momentum=momentum)
    dual, ordinary, general = (
        work.updates(batch_of(ROUND, start, cohort, clip, way(task, data), STREAMS))
        for way in (Vectorised, Ordinary, General)
    )
    assert type(Vectorised(task, data).trajectory(start, cohort, spanned=True)) is DualTrajectory
    for other in (ordinary, general):
        assert_close(dual.rows, other.rows)
        assert torch.equal(dual.clipped, other.clipped)
        assert dual.norms.tolist() == pytest.approx(other.norms.tolist(), rel=1e-5)
    if clip is not None:
        assert bool(dual.clipped.any())
        assert float(dual.rows.double().norm(dim=1).max()) <= clip.value


def test_a_clients_row_depends_on_its_own_records_only(make_walks, spanned):
    walk, _ = make_walks(chain(), spanned=spanned)
    before = walk.update_rows(walk.mean_update(None, whole(walk)))
    walk._cohort.x[0] += 1.0
    again = Vectorised(walk._task, walk._cohort.data).trajectory(
        walk._start, walk._cohort, spanned=spanned
    )
    after = again.update_rows(again.mean_update(None, whole(again)))
    assert not torch.allclose(before[0], after[0])
    assert torch.allclose(before[1:], after[1:], rtol=1e-5, atol=1e-7)
