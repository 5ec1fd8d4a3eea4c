"""Noise has the promised law, row by row, and reports keep their promise to the last bit.

Statistical tests use fixed seeds and a false-alarm rate of 1e-6 each. Rows of at most 256
coordinates are drawn in another way than longer ones, so both are tested.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Accountant, Relation
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, Laplace
from fedveil.privacy.clip import Norm
from fedveil.privacy.noise.mechanisms import GaussianMechanism, LaplaceMechanism, TwoPointMechanism
from fedveil.privacy.noise.streams import Streams

ALARM = 1e-6
SHAPES = [(4000, 9), (120, 300)]
ADDITIVE = [GaussianMechanism, LaplaceMechanism]
LAWS = {GaussianMechanism: stats.norm, LaplaceMechanism: stats.laplace}


def keys(count, round=1):
    return Streams(1).keys("noise", round, np.arange(count))


def noised(rows, mechanism=GaussianMechanism, scale=1.0, round=1):
    out = rows.clone()
    mechanism(2.0).add_(out, np.full(len(rows), scale), keys(len(rows), round))
    return out


def zeros(rows, width, dtype=torch.float64):
    return torch.zeros(rows, width, dtype=dtype)


# --- additive noise ---


@pytest.mark.parametrize("mechanism", ADDITIVE)
@pytest.mark.parametrize("multiplier", [-1e-9, -1.0, math.nan, math.inf])
def test_multiplier_that_is_no_noise_is_refused(mechanism, multiplier):
    with pytest.raises(BadInput, match=r"^multiplier is "):
        mechanism(multiplier)


@pytest.mark.parametrize("mechanism", ADDITIVE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_added_has_the_promised_law(mechanism, shape, dtype):
    draws = noised(zeros(*shape, dtype), mechanism, 0.7).double().numpy().ravel() / 0.7
    n, law = draws.size, LAWS[mechanism]()
    assert stats.kstest(draws, law.cdf).pvalue > ALARM
    z = stats.norm.isf(ALARM / 2)
    assert abs(draws.mean()) < z * law.std() / math.sqrt(n)
    fourth = float(law.moment(4))
    assert abs((draws**2).mean() - law.var()) < z * math.sqrt((fourth - law.var() ** 2) / n)


@pytest.mark.parametrize("mechanism", ADDITIVE)
@pytest.mark.parametrize("width", [9, 300])
def test_each_row_has_its_own_scale(mechanism, width):
    scales = np.array([0.0, 1.0, 10.0])
    rows = zeros(3, width)
    mechanism(1.0).add_(rows, scales, keys(3))
    alike = noised(zeros(3, width), mechanism)
    assert torch.allclose(rows, alike * torch.from_numpy(scales)[:, None])


@pytest.mark.parametrize("mechanism", ADDITIVE)
@pytest.mark.parametrize("width", [9, 300])
def test_noise_goes_on_top_and_does_not_depend_on_the_row(mechanism, width):
    row = torch.linspace(-1e3, 1e3, width, dtype=torch.float64).repeat(3, 1)
    assert torch.allclose(noised(row, mechanism) - row, noised(zeros(3, width), mechanism))


@pytest.mark.parametrize("mechanism", ADDITIVE)
@pytest.mark.parametrize("width", [9, 300, 50_000])
def test_row_depends_neither_on_order_nor_on_blocks(mechanism, width):
    rows, scales = torch.randn(7, width), np.arange(1.0, 8.0)
    whole, single, order = rows.clone(), rows.clone(), [3, 0, 6, 1, 5, 2, 4]
    mechanism(1.0).add_(whole, scales, keys(7))
    for k in range(7):
        mechanism(1.0).add_(single[k : k + 1], scales[k : k + 1], keys(7)[k : k + 1])
    shuffled = rows[order]
    mechanism(1.0).add_(shuffled, scales[order], keys(7)[order])
    assert torch.equal(single, whole)
    assert torch.equal(shuffled, whole[order])


@pytest.mark.parametrize("mechanism", ADDITIVE)
def test_zero_rows_and_sums_of_no_rows_are_noised_all_the_same(mechanism):
    assert int((noised(zeros(0, 30).sum(dim=0)[None], mechanism) == 0).sum()) == 0
    assert noised(zeros(0, 30), mechanism).shape == (0, 30)


@pytest.mark.parametrize("mechanism", ADDITIVE)
def test_noise_is_new_in_every_round_and_row(mechanism):
    first, second = (noised(zeros(2, 20), mechanism, round=r) for r in (1, 2))
    assert len(torch.unique(torch.cat([first, second]), dim=0)) == 4


@pytest.mark.parametrize("mechanism", ADDITIVE)
def test_type_of_rows_is_kept(mechanism):
    for dtype in (torch.float32, torch.float64):
        assert noised(zeros(2, 300, dtype), mechanism).dtype is dtype


def test_multiplier_zero_adds_nothing_and_is_worth_nothing():
    rows = zeros(2, 5)
    GaussianMechanism(0.0).add_(rows, np.zeros(2), keys(2))
    assert torch.equal(rows, zeros(2, 5))
    assert epsilon(Gaussian(0.0), 1, 1e-5, Relation.ADD_REMOVE) == math.inf
    assert epsilon(Laplace(0.0), 1, 0.0, Relation.REPLACE, Accountant.PURE) == math.inf


def test_each_noise_has_the_norm_of_its_sensitivity():
    assert (GaussianMechanism.norm, LaplaceMechanism.norm) == (Norm.L2, Norm.L1)


@pytest.mark.parametrize("size", [9, 64, 1000])
def test_noise_on_a_sum_has_the_tails_of_float64(size):
    """float32 normals end at 5.77 standard deviations.

    An update of length S along one coordinate then shows itself outright with probability
    Phi(1 / multiplier - 5.77), 8e-5 at multiplier 0.5: more than a delta of 1e-5 allows.
    """
    draws = noised(zeros(1, size))
    assert int((draws.float().double() != draws).sum()) > size / 2


FAR = {
    GaussianMechanism: (4.8, 5.0, 5.77),
    LaplaceMechanism: (12 * math.log(2), 1 - 2.0**-20, 16.7),
}


@pytest.mark.parametrize("mechanism", ADDITIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [-1, 1])
def test_tail_of_a_long_row_goes_beyond_the_end_of_float32(monkeypatch, mechanism, dtype, sign):
    """Noise that ends early tells inputs at +C and -C apart for certain.

    At epsilon 30 and delta 1e-4 a Gaussian report has a multiplier of 0.202: inputs are 5 standard
    deviations apart, and float32 noise, which ends at 5.77, would give one report in five away.
    float32 Laplace noise ends at 17 scales, so that a "pure" epsilon of 10 has a delta of 1e-3.
    Here every draw is a far one: what becomes of it must follow the tail of the law.
    """
    start, drawn, end = FAR[mechanism]
    for draw in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, draw, lambda row, *_, **__: row.fill_(sign * drawn))
    far = sign * noised(zeros(100, 1000, dtype), mechanism).double().numpy().ravel()
    law = LAWS[mechanism]()
    assert far.min() >= start * (1 - 1e-6)
    share = np.clip(law.sf(far) / law.sf(start), 0, 1)
    assert stats.kstest(share, "uniform").pvalue > ALARM
    beyond = int((far > end).sum())
    assert beyond > 0
    assert stats.binomtest(beyond, far.size, law.sf(end) / law.sf(start)).pvalue > ALARM


@pytest.mark.parametrize("mechanism", ADDITIVE)
def test_draws_of_long_rows_are_far_out_as_often_as_they_should_be(mechanism):
    start = FAR[mechanism][0]
    far = int((noised(zeros(100, 20_000, torch.float32), mechanism).abs() > start).sum())
    assert stats.binomtest(far, 2_000_000, 2 * LAWS[mechanism].sf(start)).pvalue > ALARM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("draw", [-1.0, -1 + 2.0**-52, -1 + 2.0**-23, 0.0, 0.5, 1 - 2.0**-23])
def test_laplace_is_finite_at_the_ends_of_its_uniform(monkeypatch, draw, dtype):
    monkeypatch.setattr("fedveil.privacy.noise.streams.uniform_", lambda out, keys: out.fill_(draw))
    (value,) = noised(zeros(1, 1, dtype), LaplaceMechanism).ravel().tolist()
    assert math.isfinite(value)
    assert abs(value) < 46
    assert value * draw >= 0
    if abs(draw) == 0.5:
        assert abs(value) == pytest.approx(math.log(2))


# --- two-point ---


def reports(weights, centre=0.25, radius=0.5, eps=1.0, rows=1, round=1):
    """Reports of `rows` clients that all hold `weights`."""
    held = torch.as_tensor(weights, dtype=torch.float32).repeat(rows, 1)
    width = held.shape[1]
    c, r = torch.full((width,), centre), torch.full((width,), radius)
    TwoPointMechanism(eps).report_(held, c, r, keys(rows, round))
    return held


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan, math.inf, 1e-7])
def test_report_needs_an_epsilon(eps):
    """One of 1e-7 is finer than the grid of the draw can keep."""
    with pytest.raises(BadInput, match=r"^epsilon is "):
        TwoPointMechanism(eps)


@pytest.mark.parametrize(
    ("eps", "kappa"),
    [(0.1, 20.017), (0.3, 6.717), (1, 2.164), (4, 1.0373), (5, 1.0136), (10, 1.0001)],
)
def test_reference_table_of_kappas(eps, kappa):
    assert TwoPointMechanism(eps).kappa == pytest.approx(kappa, rel=1e-4)


@pytest.mark.parametrize("width", [7, 300])
def test_report_is_one_of_two_values(width):
    found = reports(torch.linspace(-3, 3, width), rows=50)
    reach = 0.5 * TwoPointMechanism(1.0).kappa
    assert torch.unique(found).tolist() == pytest.approx([0.25 - reach, 0.25 + reach])


def chance_of_high(monkeypatch, weight, eps, centre=0.0, radius=1.0):
    """The realised probability of a high report, by trying draws around the threshold.

    The draw is a multiple of 2^-23 on [-1, 1) and high is a decreasing function of it: bisect for
    the largest draw that still reports high.
    """

    def high(step):
        monkeypatch.setattr(
            "fedveil.privacy.noise.mechanisms.uniform_",
            lambda out, keys: out.fill_(step * 2.0**-23),
        )
        return float(reports([weight], centre, radius, eps)[0, 0]) > centre

    low, end = -(2**23) - 1, 2**23
    while end - low > 1:
        middle = (low + end) // 2
        low, end = (middle, end) if high(middle) else (low, middle)
    return low + 2**23 + 1, 2**24


@pytest.mark.parametrize("eps", [1e-6, 1e-3, 0.1, 1.0, 4.0, 10.0])
@pytest.mark.parametrize(("centre", "radius"), [(0.0, 1.0), (0.3, 0.075), (-7.0, 1e-6)])
def test_odds_never_exceed_epsilon_for_any_two_inputs(monkeypatch, eps, centre, radius):
    """Exact: draws are counted on their grid, at the ends, between them and beyond them."""
    inputs = [-1e30, -1.0, -0.99, 0.0, 1e-7, 0.5, 1.0, 1.0 + 1e-6, 3.0, 1e30, math.inf]
    found = [chance_of_high(monkeypatch, centre + x * radius, eps, centre, radius) for x in inputs]
    high = [a for a, _ in found]
    low = [total - a for a, total in found]
    for side in (high, low):
        assert min(side) > 0
        assert math.log(max(side)) - math.log(min(side)) <= eps * (1 + 1e-9)


def test_clamp_is_what_keeps_the_promise(monkeypatch):
    """Beyond the range the chance is that of its end, where the formula would go on."""
    end, _ = chance_of_high(monkeypatch, 1.0, 1.0)
    beyond, _ = chance_of_high(monkeypatch, 2.0, 1.0)
    inside, total = chance_of_high(monkeypatch, 0.5, 1.0)
    assert beyond == end > inside
    kappa = TwoPointMechanism(1.0).kappa
    assert inside / total == pytest.approx(0.5 + 0.5 / (2 * kappa), abs=1e-6)
    assert end / total == pytest.approx(math.e / (1 + math.e), abs=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weight", [-5.0, -0.25, 0.25, 0.4, 0.75, 2.0])
def test_reports_have_the_promised_mean_variance_and_odds(shape, weight):
    rows, width = shape
    found = reports([weight] * width, rows=rows).double().numpy().ravel()
    clamped = min(max(weight, -0.25), 0.75)
    reach = 0.5 * TwoPointMechanism(1.0).kappa
    variance = reach**2 - (clamped - 0.25) ** 2
    z = stats.norm.isf(ALARM / 2)
    assert abs(found.mean() - clamped) < z * math.sqrt(variance / found.size)
    high = int((found > 0.25).sum())
    chance = 0.5 + (clamped - 0.25) / (2 * reach)
    assert stats.binomtest(high, found.size, chance).pvalue > ALARM
    spread = z * 2 * abs(clamped - 0.25) * math.sqrt(variance / found.size) + 40 / found.size
    assert abs(found.var() - variance) < spread


@pytest.mark.parametrize("width", [9, 300, 50_000])
def test_reports_depend_neither_on_order_nor_on_blocks(width):
    held = torch.randn(7, width, generator=torch.Generator().manual_seed(1))
    c, r = torch.zeros(width), torch.ones(width)
    mechanism, order = TwoPointMechanism(1.0), [3, 0, 6, 1, 5, 2, 4]
    whole, single, shuffled = held.clone(), held.clone(), held[order]
    mechanism.report_(whole, c, r, keys(7))
    for k in range(7):
        mechanism.report_(single[k : k + 1], c, r, keys(7)[k : k + 1])
    mechanism.report_(shuffled, c, r, keys(7)[order])
    assert torch.equal(single, whole)
    assert torch.equal(shuffled, whole[order])
    assert len(torch.unique(whole, dim=0)) == 7


def test_reports_of_neighbouring_weights_are_independent():
    signs = np.sign(reports([0.25] * 8, rows=20_000).numpy() - 0.25)
    correlation = np.corrcoef(signs.T)[np.triu_indices(8, 1)]
    assert np.abs(correlation).max() < stats.norm.isf(ALARM / 2 / 28) / math.sqrt(20_000)


def test_radius_of_zero_says_nothing():
    found = reports([-9.0, 0.3, 7.0, 1e30], radius=0.0, rows=5)
    assert torch.equal(found, torch.full((5, 4), 0.25))


def test_layers_have_their_own_ranges():
    held = torch.zeros(400, 2)
    centre, radius = torch.tensor([0.0, 5.0]), torch.tensor([1.0, 0.1])
    TwoPointMechanism(1.0).report_(held, centre, radius, keys(400))
    kappa = TwoPointMechanism(1.0).kappa
    assert torch.unique(held[:, 0]).tolist() == pytest.approx([-kappa, kappa])
    assert torch.unique(held[:, 1]).tolist() == pytest.approx([5 - 0.1 * kappa, 5 + 0.1 * kappa])
