"""Noise on the grid has exactly the promised law, and its low bits say nothing.

Statistical tests have a false-alarm rate of 1e-6 each; most use seeded words and repeat themselves.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scipy import stats

from fedveil.errors import BadInput
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise import grid as grid_noise
from fedveil.privacy.noise.grid import (
    Grid,
    delta_of_sampler,
    exponential_tail,
    gaussian_int,
    grid_for,
    laplace_int,
    normal_tail,
)
from fedveil.privacy.noise.secure_random import SecureRandom
from fedveil.privacy.rows import Norm, add_weighted_

ALARM = 1e-6
DRAWS = 1_000_000
SAMPLERS = [gaussian_int, laplace_int]
LAWS = {gaussian_int: stats.norm, laplace_int: stats.laplace}
TAILS = {gaussian_int: normal_tail, laplace_int: exponential_tail}
INNER = {gaussian_int: grid_noise._NORMAL, laplace_int: grid_noise._LAPLACE}
SCALES = [0.3, 3.7, 1000.0, 2.0**24 + 1]


class Seeded(SecureRandom):
    """Words from a seed, all of them with a place below `below`."""

    def __init__(self, seed, below=2**63):
        self.generator = np.random.Generator(np.random.Philox(seed))
        self.below = below

    def words(self, count):
        if count == 2:
            return self.generator.integers(0, 2**64, 2, dtype=np.uint64)
        return self.generator.integers(0, 2 * self.below, count, dtype=np.uint64)


class Played(SecureRandom):
    """The words of a list, in order."""

    def __init__(self, *words):
        self.left = list(words)

    def words(self, count):
        given, self.left = self.left[:count], self.left[count:]
        assert len(given) == count
        return np.array(given, dtype=np.uint64)


def chi_square(draws, scale, law, bins=200):
    """The p-value of draws of round(scale X) against its exact law, in up to `bins` bins."""
    edges = np.unique(np.floor(scale * law.ppf(np.arange(1, bins) / bins))) + 0.5
    share = np.diff(law.cdf(edges / scale), prepend=0.0, append=1.0)
    counts = np.bincount(np.searchsorted(edges, draws), minlength=len(share))
    keep = share * len(draws) > 5
    counts = np.append(counts[keep], counts[~keep].sum())
    share = np.append(share[keep], share[~keep].sum())
    used = share * len(draws) > 1e-3
    assert counts[~used].sum() == 0
    return stats.chisquare(counts[used], len(draws) * share[used] / share[used].sum()).pvalue


def check_law(draws, scale, law):
    """The p-values of everything that is compared with the exact law."""
    n, far = len(draws), math.floor(4.5 * scale)
    numbers = draws.astype(np.float64)
    beyond = int((np.abs(draws) > far).sum())
    if scale < 100:
        cells = np.arange(-40 * math.ceil(scale) - 1, 40 * math.ceil(scale) + 2.0)
        weights = law.cdf((cells + 0.5) / scale) - law.cdf((cells - 0.5) / scale)
        second, fourth = (weights * cells**2).sum(), (weights * cells**4).sum()
    else:
        v, second = law.var() * scale**2, law.var() * scale**2 + 1 / 12
        fourth = float(law().moment(4)) * scale**4 + v / 2 + 1 / 80
    spread = math.sqrt(fourth - second**2)
    return {
        "chi-square": chi_square(draws, scale, law),
        "mean": 2 * stats.norm.sf(abs(numbers.mean()) * math.sqrt(n / second)),
        "variance": 2 * stats.norm.sf(abs((numbers**2).mean() - second) * math.sqrt(n) / spread),
        "beyond 4.5": stats.binomtest(beyond, n, 2 * law.sf((far + 0.5) / scale)).pvalue,
        "sign": stats.binomtest(int((draws > 0).sum()), int((draws != 0).sum())).pvalue,
    }


# --- the law ---


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("scale", SCALES)
def test_draws_have_the_exact_rounded_law(sampler, scale):
    draws = sampler(Seeded(1), scale, DRAWS)
    assert draws.dtype == np.int64
    found = check_law(draws, scale, LAWS[sampler])
    assert min(found.values()) > ALARM / len(found), found


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_draws_of_secret_words_have_the_continuous_law_on_a_fine_grid(sampler):
    draws = sampler(SecureRandom(), 2.0**30, DRAWS) / 2.0**30
    assert stats.kstest(draws, LAWS[sampler].cdf).pvalue > ALARM


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("scale", [5.0, 2.0**20])
def test_far_tail_has_the_exact_law(sampler, scale):
    """Words below 2^48 are draws beyond the 2^-16 tail: 4.3 deviations, 11 Laplace scales."""
    draws = np.abs(sampler(Seeded(2, below=2**47), scale, 3000))
    law, least = LAWS[sampler], 2.0**-17
    edges = np.unique(np.floor(scale * law.isf(least * np.arange(49, 0, -1) / 50))) + 0.5
    edges = edges[law.sf(edges / scale) < 0.99 * least]
    share = np.diff(1 - law.sf(edges / scale) / least, prepend=0.0, append=1.0)
    counts = np.bincount(np.searchsorted(edges, draws), minlength=len(share))
    assert share.min() * 3000 > 5
    assert stats.chisquare(counts, 3000 * share).pvalue > ALARM


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("lag", [1, 2, 1 << 16])
def test_draws_are_independent_of_earlier_ones(sampler, lag):
    draws = sampler(Seeded(3), 1000.0, DRAWS).astype(np.float64)
    for values in (draws, np.abs(draws)):
        correlation = np.corrcoef(values[lag:], values[:-lag])[0, 1]
        assert abs(correlation) * math.sqrt(DRAWS - lag) < stats.norm.isf(ALARM / 4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("scale", [3.7, 2.0**24 + 1])
def test_hundred_million_secret_draws_have_the_exact_rounded_law(sampler, scale):
    """With `-s` the p-values are shown."""
    draws = sampler(SecureRandom(), scale, 100_000_000)
    found = check_law(draws, scale, LAWS[sampler])
    found["finer chi-square"] = chi_square(draws, scale, LAWS[sampler], 20_000)
    print(sampler.__name__, scale, {name: float(f"{p:.3g}") for name, p in found.items()})
    assert min(found.values()) > ALARM / len(found)


# --- why the law is exact ---


@pytest.mark.parametrize("bits", [63, 191, 319, 1000])
@pytest.mark.parametrize("x", [0, Fraction(1, 10**9), Fraction(2, 3), 1, 4, Fraction(39, 2), 30])
def test_tails_are_right_to_the_last_bit(x, bits):
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workprec(4000):
        number = mpmath.mpf(Fraction(x).numerator) / Fraction(x).denominator
        normal = mpmath.erfc(number / mpmath.sqrt(2)) * mpmath.mpf(2) ** bits
        exponential = mpmath.exp(-number) * mpmath.mpf(2) ** bits
        assert abs(normal_tail(Fraction(x), bits) - normal) < 2
        assert abs(exponential_tail(Fraction(x), bits) - exponential) < 2


@pytest.mark.parametrize("tail", [normal_tail, exponential_tail])
def test_tail_of_nothing_is_everything_and_of_everything_nothing(tail):
    assert abs(tail(Fraction(0), 63) - 2**63) < 2
    assert tail(Fraction(10**300), 191) == 0


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_floats_are_as_accurate_as_assumed(sampler):
    """The proof allows 2^-45 where floats decide; what is used keeps to an eighth of it."""
    generator = np.random.default_rng(4)
    branch = 2 * math.exp(-2)  # where scipy's ndtri changes its formula
    p = np.concatenate(
        [
            generator.random(200),
            2.0 ** -(16 * generator.random(200)),
            1 - 2.0 ** -(50 * generator.random(100)),
            branch * (1 + np.linspace(-1e-9, 1e-9, 21)),
            [2.0**-16, 1 - 2.0**-53, 1.0],
        ]
    )
    for probability, size in zip(p.tolist(), INNER[sampler].size(p).tolist(), strict=True):
        wanted, error = Fraction(probability) * 2**160, Fraction(1, 2**48)
        assert TAILS[sampler](Fraction(size) + error, 160) + 2 < wanted
        if size > error:
            assert TAILS[sampler](Fraction(size) - error, 160) - 2 > wanted


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("scale", [1e-3, 0.7, 1234.5, 2.0**24 + 1, 2.0**32])
def test_floats_and_exact_arithmetic_agree(sampler, scale):
    words = Seeded(5).words(300)
    words[0], words[1] = 2**64 - 1, 2**64 - 2
    again = [grid_noise._settled(INNER[sampler], Seeded(6), scale, int(w) >> 1) for w in words]
    sizes = INNER[sampler].size(((words >> np.uint64(1)).astype(float) + 0.5) * 2.0**-63) * scale
    clear = np.abs(sizes - np.rint(sizes)) < 0.5 - 2.0**-44 * max(scale, 1.0)
    assert clear.mean() > 0.99
    draws = np.abs(sampler(Played(*words.tolist(), *[2**63] * 600), scale, 300))
    assert np.array_equal(draws[clear], np.array(again)[clear])


def edge_words(sampler, k, scale, bits):
    """The first `bits` bits of the probability at the upper edge of k."""
    return TAILS[sampler](Fraction(2 * k + 1, 2) / Fraction(scale), bits)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("k", "scale"), [(0, 0.25), (0, 1.0), (41, 17.3), (2**22 + 1, 2.0**24)])
@pytest.mark.parametrize("sign", [0, 1])
def test_draw_on_an_edge_is_settled_by_later_words(sampler, k, scale, sign):
    """Bits that agree with the edge for 63 or 191 places, and then fall to either side."""
    for bits in (191, 319):
        edge = edge_words(sampler, k, scale, bits)
        for offset, expected in ((-100, k + 1), (100, k)):
            p = edge + offset
            first, rest = p >> (bits - 63), p & ((1 << (bits - 63)) - 1)
            later = [rest >> s & (2**64 - 1) for s in range(bits - 127, -1, -64)]
            source = Played(first << 1 | sign, *later)
            assert sampler(source, scale, 1)[0] == expected * (-1) ** sign
            assert not source.left


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_draw_at_the_very_end_is_finite(sampler):
    """63 zero bits, and 128 that are small: the law has no end that the words could show."""
    law = LAWS[sampler]
    draw = int(sampler(Played(0, 0, 2**20), 100.0, 1)[0])
    assert draw == round(100 * law.isf((2**20 + 0.5) * 2.0**-192))
    assert sampler(Played(1, 0, 2**20), 100.0, 1)[0] == -draw


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_draws_of_small_probability_ask_for_more_words(sampler):
    """With few bits left in a word its own rounding would show in the noise."""
    later = [[0, 0], [2**64 - 1, 2**64 - 1]]
    far, near = (
        [sampler(Played(place << 1, *words), 2.0**24, 1)[0] for words in later]
        for place in (2**10, 2**47 - 1)
    )
    assert far[0] > far[1]
    assert near[0] in (near[1], near[1] + 1)
    source = Played(2**47 + 2**20 << 1, 0, 0)
    sampler(source, 1.0, 1)
    assert len(source.left) == 2


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_few_draws_need_exact_arithmetic(sampler, monkeypatch):
    asked = []
    real = grid_noise._settled
    monkeypatch.setattr(grid_noise, "_settled", lambda *a: asked.append(1) or real(*a))
    sampler(Seeded(7), 2.0**30, DRAWS)
    expected = DRAWS * (2.0**-16 + 2 * 2.0**-14)
    assert 0.5 * expected < len(asked) < 1.5 * expected


# --- scales and shapes ---


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), 5, (2, 3, 4), (1 << 16) + 1])
def test_shape_is_what_was_asked_for(sampler, shape):
    assert sampler(SecureRandom(), 10.0, shape).shape == np.empty(shape).shape


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_row_has_its_own_scale(sampler):
    scales = np.array([0.0, 2.0, 1e6])
    rows = sampler(Seeded(8), scales[:, None], (3, 100_000))
    assert not rows[0].any()
    for row, scale in zip(rows[1:], scales[1:], strict=True):
        assert chi_square(row, scale, LAWS[sampler]) > ALARM


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_noise_and_hardly_any(sampler):
    assert not sampler(SecureRandom(), 0.0, 1000).any()
    assert not sampler(Seeded(9, below=2**47), 1e-300, 50).any()


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf, 2.0**32 * 1.01, [1.0, -1.0]])
def test_scale_that_is_no_noise_is_refused(sampler, scale):
    with pytest.raises(ValueError, match="steps"):
        sampler(SecureRandom(), scale, 2)


# --- the grid ---


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
    assert scale / grid.step <= 2.0**30
    assert sensitivity / grid.step <= 2.0**40
    fine = grid.step <= scale * 2.0**-20
    off = grid.step * (size if norm is Norm.L1 else math.sqrt(size))
    fine &= off <= sensitivity * 2.0**-13 * (1 + 1e-12)
    finest = grid.step / 2 < max(scale * 2.0**-30, sensitivity * 2.0**-40)
    assert fine or finest


@pytest.mark.parametrize("multiplier", [0.1, 0.5, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("size", [1, 11, 10_000, 10**7])
def test_usual_settings_cost_less_than_a_thousandth(multiplier, size):
    assert grid_for(0.5, 0.5 * multiplier, size).step * math.sqrt(size) < 0.5e-3


@pytest.mark.parametrize("bad", [(0.0, 1.0, 1), (1.0, 0.0, 1), (1.0, math.nan, 1), (1.0, 1.0, 0)])
def test_no_grid_for_nothing(bad):
    with pytest.raises(BadInput, match="no grid"):
        grid_for(*bad)


# --- what is added to delta ---


def test_delta_of_the_sampler_is_far_below_any_delta_in_use():
    expected = 1e11 * 2**-110 * (1 + math.exp(8))
    assert delta_of_sampler(10**7, 10**4, 8.0) == pytest.approx(expected, abs=0)
    assert delta_of_sampler(10**7, 10**4, 20.0) < 1e-9
    assert delta_of_sampler(0, 10, 1.0) == 0


@pytest.mark.parametrize("epsilon", [100.0, 1e6, math.inf])
def test_delta_of_the_sampler_is_a_probability(epsilon):
    assert delta_of_sampler(10**7, 10**4, epsilon) == 1


# --- low bits ---
#
# Two neighbouring sums, 0 and 1/64 in each of 4096 coordinates: distance 1. With noise of
# deviation 4 nobody may tell them apart with an advantage above 2 Phi(1/8) - 1 = 0.0995.

SIZE, SHIFT, DEVIATION, TRIALS = 4096, 2.0**-6, 4.0, 500


def fine_near_zero(releases, dtype):
    """Whether a release has a coordinate near 0 that is no multiple of the spacing at the shift.

    A float 1/64 + noise near 0 is a difference of two floats of that size, so that it is a
    multiple of their spacing; a float 0 + noise near 0 has finer bits.
    """
    spacing = SHIFT * float(np.finfo(dtype).eps) / 2
    releases = releases.astype(np.float64)
    near = np.abs(releases) < SHIFT / 2
    return (near & (np.rint(releases / spacing) * spacing != releases)).any(axis=1)


def advantage(zero, shifted):
    """How much more often a test says yes to one than to the other, and how far chance goes."""
    chance = stats.norm.isf(ALARM / 2) * math.sqrt(0.5 / TRIALS)
    return abs(zero.mean() - shifted.mean()), chance


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_low_bits_of_float_noise_tell_two_sums_apart(dtype):
    generator = np.random.default_rng(10)

    def release(total):
        noise = generator.standard_normal((TRIALS, SIZE), dtype=dtype) * dtype(DEVIATION)
        return dtype(total) + noise

    found, chance = advantage(*(fine_near_zero(release(t), dtype) for t in (0.0, SHIFT)))
    assert found > 2 * stats.norm.cdf(1 / (2 * DEVIATION)) - 1 + chance
    assert found > 0.9


@pytest.fixture(scope="module")
def grid_releases():
    """Releases of both sums on the grid, in steps."""
    grid = grid_for(1.0, DEVIATION, SIZE)
    scale = DEVIATION / grid.step
    totals = [grid.quantise(torch.full((SIZE,), total)).numpy() for total in (0.0, SHIFT + 1e-9)]
    return grid, [
        t + gaussian_int(Seeded(11 + i), scale, (TRIALS, SIZE)) for i, t in enumerate(totals)
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_same_test_learns_nothing_from_the_grid(grid_releases, dtype):
    grid, releases = grid_releases
    seen = [grid.dequantise(torch.from_numpy(r)).numpy().astype(dtype) for r in releases]
    for release in seen:
        assert np.array_equal(release / grid.step, np.rint(release / grid.step))
    found, chance = advantage(*(fine_near_zero(s, dtype) for s in seen))
    assert found <= chance
    assert found == 0


@pytest.mark.parametrize("modulus", [2, 3, 16, 256])
def test_remainders_on_the_grid_do_not_depend_on_the_sum(grid_releases, modulus):
    _, releases = grid_releases
    counts = [np.bincount((r % modulus).ravel(), minlength=modulus) for r in releases]
    assert stats.chi2_contingency(counts).pvalue > ALARM
    for count in counts:
        assert stats.chisquare(count).pvalue > ALARM


def test_best_test_of_one_release_has_the_advantage_of_the_gaussian_mechanism(grid_releases):
    """The sum of all coordinates tells the most; it must not tell more than it may."""
    grid, releases = grid_releases
    middle = SIZE * SHIFT / 2 / grid.step
    found, chance = advantage(*(r.sum(axis=1) > middle for r in releases))
    assert abs(found - (2 * stats.norm.cdf(1 / (2 * DEVIATION)) - 1)) <= chance
