"""No row leaves a clip longer than it may be, as a real number."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fedveil.base.checks import SMALLEST_CLIP
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.clip import ROUNDING, Clip, Norm, row_norms

LARGEST = float(np.finfo(np.float32).max)
SUBNORMAL = float(np.finfo(np.float32).smallest_subnormal)


def square(row):
    """The exact squared length of a row."""
    return sum(Fraction(x) ** 2 for x in row.tolist())


def assert_bounded(rows, value, norm=Norm.L2):
    for row in rows:
        if norm is Norm.L1:
            assert sum(abs(Fraction(x)) for x in row.tolist()) <= Fraction(value)
        else:
            assert square(row) <= Fraction(value) ** 2


def matrices(dtype, largest):
    width = 32 if dtype is np.float32 else 64
    numbers = st.one_of(
        st.floats(-largest, largest, width=width),
        st.floats(-4, 4, width=width),
        st.sampled_from([0.0, SUBNORMAL, -SUBNORMAL, 1e-38, largest, -largest]).map(dtype),
    )
    return arrays(dtype, array_shapes(min_dims=2, max_dims=2, max_side=12), elements=numbers)


values = st.one_of(
    st.floats(SMALLEST_CLIP, 1e38), st.sampled_from([SMALLEST_CLIP, 0.1, 1.0, 1 / 3, 5.0, 1e37])
)


norms = st.sampled_from(Norm)


@given(matrices(np.float32, LARGEST), values, norms)
@settings(max_examples=100, deadline=None)
def test_float32_rows_are_bounded_exactly(rows, value, norm):
    assert_bounded(Clip(value, norm).apply_(torch.from_numpy(rows)).rows, value, norm)


@given(matrices(np.float64, 1e150), values, norms)
@settings(max_examples=100, deadline=None)
def test_float64_rows_are_bounded_exactly(rows, value, norm):
    assert_bounded(Clip(value, norm).apply_(torch.from_numpy(rows)).rows, value, norm)


@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [SMALLEST_CLIP, 1e-3, 1.0, 1 / 3, 1e10])
def test_rows_at_the_edge_of_the_bound_are_bounded_exactly(value, dtype, norm):
    """Lengths within a few roundings of the clip, where a careless comparison fails."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(100, 37, generator=generator, dtype=torch.float64)
    near = value * (1 + 1e-7 * torch.linspace(-20, 20, 100, dtype=torch.float64))
    lengths = rows.norm(p=1 if norm is Norm.L1 else 2, dim=1)
    rows = (rows * (near / lengths)[:, None]).to(dtype)
    assert_bounded(Clip(value, norm).apply_(rows).rows, value, norm)


@pytest.mark.parametrize("norm", Norm)
def test_wide_rows_are_bounded_exactly(norm):
    """Many coordinates: rounding errors of the sum add up."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(2, 20_000, generator=generator) * torch.tensor([[1.0], [1e30]])
    assert_bounded(Clip(0.7, norm).apply_(rows).rows, 0.7, norm)


@pytest.mark.parametrize("scale", [1.001, 1e3, 1e38])
def test_long_row_keeps_its_direction_and_reaches_the_bound(scale):
    row = torch.tensor([[0.6, -0.8, 0.0]]) * scale
    result = Clip(1.0).apply_(row)
    assert result.clipped.tolist() == [True]
    assert torch.allclose(result.rows, torch.tensor([[0.6, -0.8, 0.0]]), atol=1e-5)
    assert float(result.rows.double().norm()) > 1 - 2 * ROUNDING


def test_row_as_long_as_float32_allows_is_bounded():
    row = torch.full((1, 1000), LARGEST)
    result = Clip(2.0).apply_(row)
    assert float(result.rows.double().norm()) == pytest.approx(2.0, rel=1e-5)
    assert_bounded(result.rows, 2.0)


@given(matrices(np.float32, 1.0))
@settings(deadline=None)
def test_short_rows_are_left_alone(rows):
    rows = torch.from_numpy(rows)
    limit = 1.01 * max(math.sqrt(square(row)) for row in rows) + 1
    result = Clip(limit).apply_(rows.clone())
    assert torch.equal(result.rows, rows)
    assert not result.clipped.any()


def test_long_row_does_not_change_its_neighbours():
    rows = torch.tensor([[3.0, 4.0], [0.1, 0.2], [0.0, 0.0]])
    result = Clip(1.0).apply_(rows.clone())
    assert result.clipped.tolist() == [True, False, False]
    assert torch.equal(result.rows[1:], rows[1:])


def test_rows_of_many_blocks_are_scaled_by_their_own_length():
    """Blocks of 65,536 numbers are scaled at a time; rows of each kind are in every one of them."""
    rows = torch.ones(500, 1000)
    rows[::2] *= 1e-6
    expected = rows.clone()
    result = Clip(1.0).apply_(rows)
    assert result.clipped.tolist() == [False, True] * 250
    assert torch.equal(rows[::2], expected[::2])
    assert torch.allclose(rows[1::2], expected[1::2] / math.sqrt(1000), rtol=1e-5)


def test_rows_are_bounded_in_place():
    rows = torch.tensor([[3.0, 4.0]])
    assert Clip(1.0).apply_(rows).rows is rows
    assert_bounded(rows, 1.0)


@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("shape", [(7, 3), (3, 5000), (1, 300_000), (2, 600_000)])
def test_norms_of_wide_and_narrow_rows_are_those_of_float64(norm, shape):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    order = 1 if norm is Norm.L1 else 2
    expected = torch.linalg.vector_norm(rows.double(), ord=order, dim=1)
    assert torch.allclose(row_norms(rows, norm), expected, rtol=1e-12)
    rows[0, -1] = math.inf
    assert torch.isfinite(row_norms(rows, norm)).tolist() == [False] + [True] * (len(rows) - 1)


@pytest.mark.slow
def test_wide_rows_are_bounded_like_narrow_ones():
    rows = torch.randn(3, 70_000, generator=torch.Generator().manual_seed(3))
    rows[1] *= 1e-6
    expected = rows.clone()
    result = Clip(1.0).apply_(rows)
    assert result.clipped.tolist() == [True, False, True]
    assert_bounded(rows, 1.0)
    assert torch.equal(rows[1], expected[1])
    assert torch.allclose(rows[0], expected[0] / expected[0].norm(), rtol=1e-5)


def test_known_norms_are_believed():
    rows = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    result = Clip(1.0).apply_(rows, torch.tensor([0.0, 10.0], dtype=torch.float64))
    assert result.clipped.tolist() == [False, True]
    assert torch.allclose(rows, torch.tensor([[3.0, 4.0], [0.3, 0.4]]), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_type_of_rows_is_kept(dtype):
    assert Clip(1.0).apply_(torch.ones(2, 5, dtype=dtype)).rows.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_rows_that_round_by_more_than_the_room_are_refused(dtype):
    """1e-6 of room is less than half precision rounds by."""
    with pytest.raises(ValueError, match="no room"):
        Clip(1.0).apply_(torch.ones(5, 6).to(dtype))


def test_zero_row_stays_zero():
    result = Clip(SMALLEST_CLIP).apply_(torch.zeros(2, 3))
    assert result.rows.tolist() == [[0.0] * 3] * 2
    assert not result.clipped.any()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_no_rows_and_no_columns_pass(shape):
    result = Clip(1.0).apply_(torch.zeros(shape))
    assert result.rows.shape == shape
    assert result.clipped.shape == (shape[0],)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_row_that_is_not_finite_is_an_error(bad):
    rows = torch.zeros(3, 4)
    rows[1, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        Clip(1.0).apply_(rows)


@pytest.mark.parametrize("value", [0.0, -1.0, SMALLEST_CLIP / 2, math.nan, math.inf])
def test_value_that_bounds_nothing_is_refused(value):
    with pytest.raises(BadInput, match=r"^value is "):
        Clip(value)


def test_one_client_moves_the_sum_by_one_row_and_a_replacement_by_two():
    clip = Clip(0.25)
    assert clip.sensitivity(Relation.ADD_REMOVE) == 0.25
    assert clip.sensitivity(Relation.ZERO_OUT) == 0.25
    assert clip.sensitivity(Relation.REPLACE) == 0.5


@given(matrices(np.float32, LARGEST), values)
@settings(max_examples=50, deadline=None)
def test_sensitivity_covers_every_pair_of_rows(rows, value):
    clip = Clip(value)
    clipped = clip.apply_(torch.from_numpy(rows)).rows.double()
    first, second = clipped[0], clipped[-1]
    moved = sum(
        (Fraction(a) - Fraction(b)) ** 2
        for a, b in zip(first.tolist(), second.tolist(), strict=True)
    )
    assert moved <= Fraction(clip.sensitivity(Relation.REPLACE)) ** 2


@given(matrices(np.float32, LARGEST), values)
@settings(max_examples=50, deadline=None)
def test_l1_sensitivity_covers_every_pair_of_rows(rows, value):
    clip = Clip(value, Norm.L1)
    clipped = clip.apply_(torch.from_numpy(rows)).rows.double()
    moved = sum(
        abs(Fraction(a) - Fraction(b))
        for a, b in zip(clipped[0].tolist(), clipped[-1].tolist(), strict=True)
    )
    assert moved <= Fraction(clip.sensitivity(Relation.REPLACE))


@pytest.mark.parametrize(("norm", "length"), [(Norm.L2, 5.0), (Norm.L1, 7.0)])
def test_norms_are_those_before_the_bound(norm, length):
    result = Clip(1.0, norm).apply_(torch.tensor([[3.0, -4.0], [0.0, 0.5]]))
    assert result.norms.tolist() == [length, 0.5]
    assert result.norms.dtype is torch.float64
    assert result.clipped.tolist() == [True, False]


def test_l1_bound_reaches_its_value_and_keeps_the_direction():
    result = Clip(1.0, Norm.L1).apply_(torch.tensor([[3.0, -1.0]]))
    assert torch.allclose(result.rows, torch.tensor([[0.75, -0.25]]), atol=1e-5)


def test_bound_per_gradient_has_the_same_norm():
    assert Clip(1.0).per_gradient is None
    assert Clip(6.0, Norm.L1, 2.0).per_gradient == Clip(2.0, Norm.L1)
    assert Clip(6.0, Norm.L1, 2.0).sensitivity(Relation.REPLACE) == 12.0
