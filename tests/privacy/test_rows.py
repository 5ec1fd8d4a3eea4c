"""Sums over rows are those of float64, row by row and weight by weight, however wide rows are."""

import pytest
import torch

from fedveil.privacy.clip import BLOCK, Norm, add_weighted_, all_finite, row_norms

SHAPES = [
    (1, 7),
    (5, 1),
    (5, BLOCK // 4),
    (5, BLOCK // 4 - 1),
    (3, BLOCK),
    (3, BLOCK + 1),
    (2, 2 * BLOCK + 5),
    (BLOCK // 100 + 7, 300),
]


def rows_of(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_row_has_its_own_weight(shape):
    rows, total = rows_of(shape), torch.ones(shape[1], dtype=torch.float64)
    weights = torch.linspace(-1.0, 2.0, shape[0], dtype=torch.float64)
    add_weighted_(total, rows, weights)
    expected = 1 + (weights[:, None] * rows.double()).sum(dim=0)
    assert torch.allclose(total, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_of_zero_leaves_a_row_out(shape):
    rows, total = rows_of(shape), torch.zeros(shape[1], dtype=torch.float64)
    add_weighted_(total, rows, torch.zeros(shape[0], dtype=torch.float64))
    assert not total.any()


@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_as_long_alone_as_among_others(shape, norm):
    rows = rows_of(shape)
    alone = torch.cat([row_norms(rows[k : k + 1], norm) for k in range(min(4, len(rows)))])
    assert torch.allclose(alone, row_norms(rows, norm)[:4], rtol=1e-12)


@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lengths_are_those_of_float64(shape, norm):
    rows = rows_of(shape) * torch.logspace(-30, 30, shape[1])
    expected = torch.linalg.vector_norm(rows.double(), ord=1 if norm is Norm.L1 else 2, dim=1)
    assert torch.allclose(row_norms(rows, norm), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_length_is_finite_exactly_where_the_row_is(shape, norm, bad):
    rows = torch.full(shape, torch.finfo(torch.float32).max)
    assert all_finite(row_norms(rows, norm))
    rows[-1, -1] = bad
    found = row_norms(rows, norm)
    assert not all_finite(found)
    assert torch.isfinite(found).tolist() == [True] * (shape[0] - 1) + [False]
