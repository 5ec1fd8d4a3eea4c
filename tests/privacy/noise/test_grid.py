"""Noise on the grid has exactly the promised law, at every scale and to the last bit.

Statistical tests have a false-alarm rate of 1e-6 each; most use seeded words and repeat themselves.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from fedveil.privacy.noise import grid as grid_noise
from fedveil.privacy.noise.grid import (
    delta_of_sampler,
    exponential_tail,
    gaussian_int,
    laplace_int,
    normal_tail,
)
from fedveil.privacy.noise.secure_random import SecureRandom
from tests.privacy.noise.seeded_words import ALARM, Seeded

DRAWS = 1_000_000
SAMPLERS = [gaussian_int, laplace_int]
LAWS = {gaussian_int: stats.norm, laplace_int: stats.laplace}
TAILS = {gaussian_int: normal_tail, laplace_int: exponential_tail}
INNER = {
    gaussian_int: (grid_noise.normal_size, normal_tail),
    laplace_int: (grid_noise._laplace_size, exponential_tail),
}
SCALES = [0.3, 3.7, 1000.0, 2.0**24 + 1]


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
    for probability, size in zip(p.tolist(), INNER[sampler][0](p).tolist(), strict=True):
        wanted, error = Fraction(probability) * 2**160, Fraction(1, 2**48)
        assert TAILS[sampler](Fraction(size) + error, 160) + 2 < wanted
        if size > error:
            assert TAILS[sampler](Fraction(size) - error, 160) - 2 > wanted


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("scale", [1e-3, 0.7, 1234.5, 2.0**24 + 1, 2.0**32])
def test_floats_and_exact_arithmetic_agree(sampler, scale):
    words = Seeded(5).words(300)
    words[0], words[1] = 2**64 - 1, 2**64 - 2
    again = [
        grid_noise._draw_exactly(Seeded(6), scale, int(w) >> 1, *INNER[sampler]) for w in words
    ]
    sizes = INNER[sampler][0](((words >> np.uint64(1)).astype(float) + 0.5) * 2.0**-63) * scale
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
    real = grid_noise._draw_exactly
    monkeypatch.setattr(grid_noise, "_draw_exactly", lambda *a: asked.append(1) or real(*a))
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


# --- what is added to delta ---


def test_delta_of_the_sampler_is_far_below_any_delta_in_use():
    expected = 1e11 * 2**-110 * (1 + math.exp(8))
    assert delta_of_sampler(10**7, 10**4, 8.0) == pytest.approx(expected, abs=0)
    assert delta_of_sampler(10**7, 10**4, 20.0) < 1e-9
    assert delta_of_sampler(0, 10, 1.0) == 0


@pytest.mark.parametrize("epsilon", [100.0, 1e6, math.inf])
def test_delta_of_the_sampler_is_a_probability(epsilon):
    assert delta_of_sampler(10**7, 10**4, epsilon) == 1
