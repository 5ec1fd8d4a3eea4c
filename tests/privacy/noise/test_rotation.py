"""Rotated grids: rotations, rounded rows and their bound, and sums modulo a power of two.

Statistical tests have a false-alarm rate of 1e-6 each.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.base.errors import BadInput
from fedveil.privacy.noise import rotation
from fedveil.privacy.noise.rotation import RotatedGrid, bound, finest_grid, has_table
from fedveil.privacy.noise.secure_random import SecureRandom

ALARM = 1e-6
SIZES = [1, 2, 3, 64, 65, 100, 127, 1000]


def grid_of(size, length=300.0, bits=16, spacing=2.0**-8):
    return RotatedGrid(spacing, bits, bound(length, size), size)


def rows_of(size, count=5, seed=0):
    return np.random.default_rng(seed).normal(size=(count, size))


@pytest.mark.parametrize("size", SIZES)
def test_rotations_keep_lengths_and_products_and_are_undone(size):
    grid, rows = grid_of(size), rows_of(size)
    turned = grid.rotate(rows, 3)
    assert np.allclose(turned @ turned.T, rows @ rows.T, rtol=1e-12, atol=1e-12)
    assert np.allclose(grid.rotate_back(turned, 3), rows, atol=1e-12)
    if size > 2:
        assert not np.allclose(grid.rotate(rows, 4), turned)


@pytest.mark.parametrize("size", [64, 100, 1000])
def test_a_rotated_row_has_no_large_coordinate(size):
    """Whatever single coordinate a row has: Hoeffding, at most 2 P exp(-x^2 / 2)."""
    grid = grid_of(size)
    unit = np.eye(size)
    width = 1 << (size.bit_length() - 1)
    most = math.sqrt(2 * math.log(2 * size * size / ALARM))
    assert np.abs(grid.rotate(unit, 1)).max() <= most / math.sqrt(width)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    grid, rows = grid_of(100), rows_of(100, 7)
    together = grid.rotate(rows, 2)
    for k in range(7):
        assert np.array_equal(grid.rotate(rows[k : k + 1], 2)[0], together[k])


def test_signs_are_public_and_each_round_has_its_own():
    first = grid_of(1000)._signs(1)
    again = grid_of(1000)._signs(1)
    assert np.array_equal(first[0], again[0])
    for one, other in ((first[0], first[1]), (first[0], grid_of(1000)._signs(2)[0])):
        assert set(np.unique(one)) == {-1.0, 1.0}
        assert abs(float((one * other).sum())) < 5 * math.sqrt(512)
        assert abs(float(one.sum())) < 5 * math.sqrt(512)


def test_rounded_rows_are_within_the_bound_and_right_on_average():
    grid = grid_of(50, length=20.0)
    row = rows_of(50, 1, seed=4)
    row *= 20.0 / np.linalg.norm(row) * (1 - 1e-6)
    turned, drawn = grid.rotate(row, 1)[0], []
    for _ in range(3000):
        steps = grid._rounded(turned)
        assert int((steps * steps).sum()) <= grid.most
        assert (np.abs(steps - turned) < 1).all()
        drawn.append(steps)
    error = np.mean(drawn, axis=0) - turned
    assert np.abs(error).max() < 0.05 + 5 * 0.5 / math.sqrt(3000)  # the condition moves it a little
    spread = np.var(drawn, axis=0).sum()
    share = turned - np.floor(turned)
    together = np.var(np.sum(drawn, axis=1))  # coordinates are rounded by themselves
    assert together == pytest.approx((share * (1 - share)).sum(), rel=0.25)
    assert spread == pytest.approx((share * (1 - share)).sum(), rel=0.15)


def test_rows_that_are_too_long_are_never_rounded_beyond_the_bound():
    """A row within the bound only after rounding towards zero, and one that is not even so."""
    grid = RotatedGrid(1.0, 16, 4, 4)
    assert grid._rounded(np.array([1.999, -1.999, 1.999, 1.999])).tolist() in (
        [1, -1, 1, 1],
        [0, 0, 0, 0],
    )
    assert grid._rounded(np.array([9.0, 0.0, 0.0, 0.0])).tolist() == [0, 0, 0, 0]
    assert grid._rounded(np.array([2.0, 0.0, 0.0, 0.0])).tolist() == [2, 0, 0, 0]
    assert not grid._within(np.array([2, 1, 0, 0]))
    assert not grid._within(np.array([2**40, 2**40, 0, 0]))
    assert not RotatedGrid(1.0, 32, 2**60, 4)._within(np.array([2**59, 0, 0, 0]))
    assert grid._within(np.array([1, -1, 1, 1]))


def test_lengths_are_compared_in_integers():
    """Beyond 2^53, where floats round: one step more is noticed."""
    steps = np.full(1 << 12, 3 << 24, dtype=np.int64)
    exact = int(sum(int(x) ** 2 for x in steps))
    assert exact > 2**62
    steps >>= 2
    exact = int(sum(int(x) ** 2 for x in steps))
    assert 2**53 < exact < 2**62
    assert RotatedGrid(1.0, 32, exact, len(steps))._within(steps)
    assert not RotatedGrid(1.0, 32, exact - 1, len(steps))._within(steps)


@pytest.mark.parametrize("size", [1, 100, 10**6])
@pytest.mark.parametrize("length", [0.1, 10.0, 1e4])
def test_the_bound_is_the_less_of_two(size, length):
    root = math.sqrt(size)
    assert math.sqrt(bound(length, size)) <= max(1.0, length + root)
    second = length**2 + size / 4 + length + root / 2
    assert bound(length, size) <= max(1.0, second)
    assert bound(length, size) >= min((length + root) ** 2, second) - 1
    assert bound(length, size) >= math.floor(length**2)
    grid = RotatedGrid(1.0, 32, bound(length, size), size)
    assert grid.sensitivity**2 >= grid.most
    assert grid.sensitivity == pytest.approx(math.sqrt(grid.most), rel=1e-15)


def test_rounding_is_drawn_again_in_few_rows():
    """With probability 1 - e^-1/2 at most; 5 standard deviations of 400 rows."""
    grid, calls = grid_of(400, length=100.0), []

    class Counting(SecureRandom):
        def words(self, count):
            calls.append(count)
            return super().words(count)

    rows = rows_of(400, 400, seed=1)
    rows *= 100.0 / np.linalg.norm(rows, axis=1)[:, None]
    original, rotation.SecureRandom = rotation.SecureRandom, Counting
    try:
        for row in grid.rotate(rows, 1):
            grid._rounded(row)
    finally:
        rotation.SecureRandom = original
    assert len(calls) < 400 * math.exp(0.5) * 1.3
    assert set(calls) == {200}


def test_every_row_has_words_of_its_own_call(monkeypatch):
    """So that the words of one row have the same law whether another is there or not."""
    grid, calls = grid_of(33, length=1e4), []

    class Counting(SecureRandom):
        def words(self, count):
            calls.append(count)
            return np.full(count, 2**63, dtype=np.uint64)

    monkeypatch.setattr(rotation, "SecureRandom", Counting)
    rows = torch.from_numpy(np.random.default_rng(0).integers(-999, 999, (4, 33))).double()
    all_four = grid.rounded_sum(rows, 1)
    assert calls == [17] * 4
    each = [grid.rounded_sum(rows[k : k + 1], 1) for k in range(4)]
    assert np.array_equal(all_four, sum(each))


@pytest.mark.parametrize("bits", [16, 20, 32])
def test_sums_are_centred_modulo_two_to_the_bits(bits):
    grid, half = grid_of(4, bits=bits), 2 ** (bits - 1)
    steps = np.array([0, half - 1, half, -half, -half - 1, 5 + 3 * 2**bits, 2**52])
    expected = [0, half - 1, -half, -half, half - 1, 5, 2**52 % 2**bits]
    assert grid.centred(steps).tolist() == expected


def test_a_sum_opens_to_the_sum_of_the_rows():
    grid = RotatedGrid(2.0**-10, 16, bound(2000.0, 100), 100)
    rows = rows_of(100, 6, seed=3)
    rows *= 1.9 / np.linalg.norm(rows, axis=1)[:, None]
    steps = grid.rounded_sum(torch.from_numpy(rows * 2.0**22), 5)
    wrapped = steps + 2**16 * np.random.default_rng(0).integers(-9, 9, 100)
    total = torch.from_numpy(wrapped * grid.spacing)
    grid.open_(total, 5)
    assert np.abs(total.numpy() - rows.sum(axis=0)).max() < 0.02
    other = torch.from_numpy(wrapped * grid.spacing)
    grid.open_(other, 6)
    assert np.abs(other.numpy() - rows.sum(axis=0)).max() > 0.1


def test_a_sum_over_the_whole_range_is_noticed():
    """Half of uniform numbers are beyond half of the range: a binomial of 1000."""
    grid, draw = grid_of(1000), np.random.default_rng(0)
    uniform = draw.integers(-(2**15), 2**15, 1000)
    assert stats.binom.cdf(250, 1000, 0.5) < ALARM
    assert not grid.plausible(uniform)
    with pytest.raises(BadInput, match="spread over all of 2\\^16 steps"):
        grid.open_(torch.from_numpy(uniform * grid.spacing), 1)
    assert grid.plausible(np.rint(draw.normal(size=1000) * 2**15 / 6).astype(np.int64))


@pytest.mark.parametrize("bits", [16, 24, 32])
@pytest.mark.parametrize("size", [11, 7850, 10**6])
@pytest.mark.parametrize("multiplier", [0.3, 2.0, 20.0])
def test_the_finest_grid_that_has_room_is_taken(bits, size, multiplier):
    given = bits, 0.7, size, 300.0, multiplier, multiplier / 2
    grid = finest_grid(*given)
    assert math.frexp(grid.spacing)[0] == 0.5
    assert grid.most == bound(0.7 / grid.spacing, size)
    spread = math.sqrt(
        (300 * 0.7 / grid.spacing) ** 2 / 2 ** math.floor(math.log2(size))
        + 75
        + (multiplier * grid.sensitivity) ** 2
    )
    assert grid.coordinate(0.7, 300.0, multiplier) == pytest.approx(spread)
    assert grid.room_for(spread) == (6 * spread < 2 ** (bits - 1))
    if bits == 32:
        assert grid.room_for(spread)
        finer = RotatedGrid(grid.spacing / 2, bits, bound(1.4 / grid.spacing, size), size)
        fine = grid.sensitivity * grid.spacing < 0.7 * 1.003
        assert fine or not has_table(finer, multiplier / 2)
        assert has_table(grid, multiplier / 2)
    assert grid.sensitivity * grid.spacing <= 2 * 0.7 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 15}, "bits"),
        ({"bits": 33}, "bits"),
        ({"bits": 64}, "at most 32"),
        ({"most": 0}, "squared steps"),
        ({"size": 0}, "squared steps"),
        ({"spacing": 0.3}, "power of two"),
    ],
)
def test_grids_that_cannot_be_are_refused(change, message):
    with pytest.raises(BadInput, match=message):
        RotatedGrid(**{"spacing": 0.5, "bits": 16, "most": 9, "size": 3, **change})


def test_noise_has_the_variance_of_the_sensitivity():
    grid = grid_of(200_000, length=50.0)
    steps = np.zeros(200_000, dtype=np.int64)
    grid.add_noise_(steps, 1.5)
    assert grid.variance(1.5) >= (1.5 * grid.sensitivity) ** 2
    assert grid.variance(1.5) == pytest.approx(2.25 * grid.most, rel=1e-9)
    square = float((steps.astype(float) ** 2).sum()) / grid.variance(1.5)
    assert ALARM < stats.chi2.cdf(square, 200_000) < 1 - ALARM
