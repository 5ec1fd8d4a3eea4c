"""Rows cut to the grid add up exactly and keep their sensitivity, and the grid is fine enough."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.clip import Clip, Norm, add_weighted_
from fedveil.privacy.noise.grid import Grid, grid_for

numbers = st.one_of(st.floats(-4, 4, width=32), st.floats(-(2.0**99), 2.0**99, width=32))
matrices = arrays(
    np.float32, array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12), elements=numbers
)
steps = st.integers(-40, 3).map(lambda e: 2.0**e)


def distance(first, second, norm, step):
    """The exact distance of two integer vectors in steps: its square in L2."""
    moved = [Fraction(a - b) * Fraction(step) for a, b in zip(first, second, strict=True)]
    return sum(map(abs, moved)) if norm is Norm.L1 else sum(m * m for m in moved)


def at_most(norm, limit):
    return Fraction(limit) if norm is Norm.L1 else Fraction(limit) ** 2


@given(matrices, steps, st.sampled_from(Norm), st.sampled_from([0.01, 1 / 3, 1.0, 40.0]))
@settings(max_examples=200, deadline=None)
def test_float_sums_of_cut_rows_keep_the_sensitivity_of_the_bound(rows, step, norm, value):
    clip, grid = Clip(value, norm), Grid(step)
    cut = grid.cut_(clip.apply_(torch.from_numpy(rows.copy())).rows).double()
    total = cut.sum(dim=0)
    assert grid.holds(total)
    without, replaced = cut[1:].sum(dim=0), torch.cat([cut[1:], cut[-1:]]).sum(dim=0)
    sums = [grid.quantise(s).tolist() for s in (total, without, replaced)]
    one, two = clip.sensitivity(Relation.ADD_REMOVE), clip.sensitivity(Relation.REPLACE)
    assert distance(sums[0], sums[1], norm, step) <= at_most(norm, one)
    assert distance(sums[0], sums[2], norm, step) <= at_most(norm, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cut_rows_add_up_exactly_in_any_order(dtype):
    """Plain rows do not: their sums depend on the order, and so on who is there."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(3000, 50, generator=generator, dtype=dtype)
    orders = [torch.randperm(len(rows), generator=generator) for _ in range(20)]
    grid = grid_for(1.0, 1.0, 50)

    def sums(rows):
        found = []
        for order in orders:
            total = torch.zeros(50, dtype=torch.float64)
            add_weighted_(total, rows[order], torch.ones(len(rows), dtype=torch.float64))
            found.append(total)
        return found

    plain = sums(rows)
    assert dtype is torch.float32 or any(not torch.equal(plain[0], s) for s in plain)
    assert not grid.holds(plain[0])
    cut = sums(grid.cut_(rows.clone()))
    assert all(torch.equal(cut[0], s) for s in cut)
    assert grid.holds(cut[0])


@pytest.mark.parametrize("off", [0.5, 2.0**-40, 2.0**54])
def test_what_is_off_the_grid_is_seen(off):
    total = torch.zeros(300, dtype=torch.float64)
    assert Grid(1.0).holds(total)
    total[123] = off
    assert not Grid(1.0).holds(total)


@given(matrices, steps)
@settings(max_examples=100, deadline=None)
def test_quantised_coordinates_never_grow_and_lose_less_than_a_step(rows, step):
    there = Grid(step).quantise(torch.from_numpy(rows.copy()))
    cut = Grid(step).cut_(torch.from_numpy(rows.copy()))
    for x, k, c in zip(
        rows.ravel().tolist(), there.flatten().tolist(), cut.flatten().tolist(), strict=True
    ):
        exact = Fraction(x) / Fraction(step)
        if abs(exact) < 2**53:
            assert k == math.trunc(exact)
            assert Fraction(c) == k * Fraction(step)
        else:
            assert k == math.copysign(2**53, x)


def test_quantise_accepts_rows_of_any_layout_and_keeps_them():
    rows = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.trunc(rows * 1024).long()
    kept = rows.clone()
    assert torch.equal(Grid(2.0**-10).quantise(rows.T), expected.T)
    assert torch.equal(Grid(2.0**-10).quantise(rows[:, 2]), expected[:, 2])
    assert torch.equal(rows, kept)
    assert Grid(1.0).quantise(torch.zeros(0, 4)).shape == (0, 4)
    wide = torch.full((3, 200_000), 1.5)
    assert bool((Grid(0.5).quantise(wide) == 3).all())


def test_coordinates_beyond_the_limits_stay_within_them():
    huge = torch.tensor([1e308, -1e308, 5e-324], dtype=torch.float64)
    assert Grid(2.0**-500).quantise(huge).tolist() == [2**53, -(2**53), 0]
    assert Grid(2.0**500).quantise(huge[2:]).tolist() == [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_coordinate_that_is_not_finite_is_an_error(bad):
    rows = torch.zeros(2, 200_000)
    rows[1, 150_000] = bad
    with pytest.raises(ValueError, match="not finite"):
        Grid(1.0).quantise(rows)
    assert not Grid(1.0).holds(rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_rows_of_other_types_are_refused(dtype):
    for method in (Grid(1.0).quantise, Grid(1.0).cut_):
        with pytest.raises(ValueError, match="float32 or float64"):
            method(torch.ones(2, 2).to(dtype))


@pytest.mark.parametrize("step", [0.0, -0.5, 0.3, 3.0, math.nan, math.inf, 2.0**-501, 2.0**501])
def test_step_that_is_no_power_of_two_is_refused(step):
    with pytest.raises(BadInput, match="step"):
        Grid(step)


def test_multiples_of_the_step_go_there_and_back():
    grid = Grid(2.0**-12)
    steps = torch.tensor([[0, 1, -1, 2**40, -(2**40), 12345]])
    assert torch.equal(grid.quantise(grid.dequantise(steps)), steps)
    assert grid.dequantise(torch.tensor([2**53 - 1])).tolist() == [(2**53 - 1) * 2.0**-12]


@given(
    st.floats(1e-12, 1e12),
    st.floats(1e-12, 1e12),
    st.integers(1, 10**9),
    st.sampled_from(Norm),
)
@settings(max_examples=300, deadline=None)
def test_chosen_grid_is_fine_enough_or_as_fine_as_possible(sensitivity, scale, size, norm):
    grid = grid_for(sensitivity, scale, size, norm)
    assert scale / grid.spacing <= 2.0**30
    assert sensitivity / grid.spacing <= 2.0**40
    fine = grid.spacing <= scale * 2.0**-20
    off = grid.spacing * (size if norm is Norm.L1 else math.sqrt(size))
    fine &= off <= sensitivity * 2.0**-13 * (1 + 1e-12)
    finest = grid.spacing / 2 < max(scale * 2.0**-30, sensitivity * 2.0**-40)
    assert fine or finest


@pytest.mark.parametrize("multiplier", [0.1, 0.5, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("size", [1, 11, 10_000, 10**7])
def test_usual_settings_cost_less_than_a_thousandth(multiplier, size):
    assert grid_for(0.5, 0.5 * multiplier, size).spacing * math.sqrt(size) < 0.5e-3


@pytest.mark.parametrize("bad", [(0.0, 1.0, 1), (1.0, 0.0, 1), (1.0, math.nan, 1), (1.0, 1.0, 0)])
def test_no_grid_for_nothing(bad):
    with pytest.raises(BadInput, match="no grid"):
        grid_for(*bad)


@pytest.mark.parametrize("place", [0, 65_535, 65_536, 199_999])
def test_one_number_off_the_grid_is_found_wherever_it_is(place):
    total = torch.zeros(200_000, dtype=torch.float64)
    assert Grid(0.25).holds(total)
    total[place] = 0.125
    assert not Grid(0.25).holds(total)
