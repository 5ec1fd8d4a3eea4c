"""Which clip is in force, how it moves, and what watching gives away.

Statistical tests use fixed seeds and a false-alarm rate of 1e-6 each.
"""

import math
from bisect import bisect_left

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.clip import Clip, Clipped, Norm
from fedveil.privacy.clip_schedules import ClipSchedule, Fixed, Median, PerGradient, Poly, Quantile
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.sampling import Everyone, FixedSize
from tests.asking import asked, next_state

ALARM = 1e-6
BUDGET = Budget(1.0, 1e-5)


def seen(norms, clip):
    """What a clip reports about updates of these norms."""
    norms = torch.as_tensor(norms, dtype=torch.float64)
    return Clipped(norms[:, None], norms, norms > clip)


def watch(schedule, lengths, round=1, ids=None):
    """What clients send for the schedule, as a plan has it."""
    ids = np.arange(len(lengths.norms)) if ids is None else ids
    plan = PrivacyPlan(Everyone(), 100, 10**6, clip_schedule=schedule)
    return plan.client_statistic(lengths, asked(plan, torch.zeros(1), ids, round=round))


def move(schedule, moving, watched, expected, round=1, streams=None):
    """Where the clip goes from a sum that was watched, as a plan has it."""
    clients = int(expected)
    plan = PrivacyPlan(FixedSize(clients), clients, 10**6, clip_schedule=schedule)
    before, model = torch.tensor([moving], dtype=torch.float64), torch.zeros(1)
    return float(next_state(plan, before, watched, model, model, round, streams)[0])


# --- of one's own ---


def test_a_schedule_without_its_clip_cannot_be_made():
    """It is found when it is made, and not by the first round, after its charge."""

    class Half(ClipSchedule):
        def first_value(self):
            return 1.0

    with pytest.raises(TypeError, match=r"abstract method '?clip"):
        Half()


# --- fixed ---


def test_fixed_bound_is_the_same_in_every_round_and_watches_nobody():
    schedule = Fixed(0.5, Norm.L1)
    for round in (1, 7, 10**6):
        assert schedule.clip(schedule.first_value(), round) == Clip(0.5, Norm.L1)
    assert schedule.statistic is None
    assert watch(schedule, seen([1.0, 2.0], 0.5), 1).shape == (2, 0)
    assert move(schedule, 0.5, torch.zeros(0), 10, 1, Streams(1)) == 0.5


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "make",
    [
        Fixed,
        lambda v: Poly(v, 1.0, 10, 1e-3),
        lambda v: Quantile(v, 0.5, noise=1.0),
        lambda v: Median(v, -2, 2, 1, BUDGET),
    ],
    ids=["fixed", "poly", "quantile", "median"],
)
def test_value_that_bounds_nothing_is_refused(make, value):
    with pytest.raises(BadInput, match=r"^value is "):
        make(value)


# --- poly ---


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_poly_follows_its_formula_down_to_the_floor(power):
    schedule = Poly(0.05, power, 40, 0.001)
    for round in range(1, 41):
        wanted = max(0.001, 0.05 * (1 - (round - 1) / 40) ** power)
        assert schedule.clip(schedule.first_value(), round).value == pytest.approx(wanted)
    assert schedule.clip(schedule.first_value(), 1).value == 0.05


@pytest.mark.parametrize("round", [41, 1000])
def test_poly_beyond_its_rounds_is_the_floor(round):
    """The published schedule ends at 0, where std / clip is undefined."""
    assert Poly(0.05, 2.0, 40, 0.001).clip(0.05, round).value == 0.001


def test_poly_of_power_zero_is_a_fixed_bound():
    schedule = Poly(0.05, 0.0, 40, 0.001)
    assert {schedule.clip(0.05, r).value for r in range(1, 41)} == {0.05}


def test_poly_does_not_depend_on_anybody():
    schedule = Poly(1.0, 1.0, 10, 0.1)
    watched = watch(schedule, seen([5.0, 0.1, math.nan], 1.0), 3)
    assert watched.shape == (3, 0)
    assert move(schedule, 1, watched.sum(dim=0), 3.0, 3, Streams(1)) == 1.0


@pytest.mark.parametrize("power", [-0.1, math.nan, math.inf])
def test_poly_refuses_a_power_that_grows(power):
    with pytest.raises(BadInput, match=r"^power is "):
        Poly(1.0, power, 10, 0.1)


@pytest.mark.parametrize("floor", [0.0, -1.0, 1.01, math.nan, 1e-13])
def test_poly_refuses_a_floor_that_is_none(floor):
    with pytest.raises(BadInput, match=r"^floor is "):
        Poly(1.0, 1.0, 10, floor)


# --- per gradient ---


def test_per_gradient_bounds_the_update_by_gradient_times_reach():
    schedule = PerGradient(Poly(3.0, 1.0, 4, 0.1, Norm.L1), lambda round: 0.2 * round)
    for round, gradient in ((1, 3.0), (2, 2.25), (3, 1.5)):
        clip = schedule.clip(schedule.first_value(), round)
        assert clip.value == pytest.approx(gradient * 0.2 * round)
        assert clip.gradient == pytest.approx(gradient)
        assert clip.norm is schedule.norm is Norm.L1
        assert clip.per_gradient == Clip(clip.gradient, Norm.L1)


def test_per_gradient_watches_nobody():
    schedule = PerGradient(Fixed(3.0), lambda round: 1.0)
    assert schedule.statistic is None
    assert watch(schedule, seen([1.0], 3.0), 1).shape == (1, 0)
    assert move(schedule, 3, torch.zeros(0), 1.0, 1, Streams(1)) == 3.0


# --- quantile ---

QUANTILES = {
    "central": {"noise": 5.0},
    "curator": {"noise": 2.0},
    "local": {"flip": 1.0},
}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"target": 0.0}, "target"),
        ({"target": 1.0}, "target"),
        ({"target": math.nan}, "target"),
        ({"lr": 0.0}, "lr"),
        ({"lr": math.inf}, "lr"),
        ({"noise": 0.0}, "noise"),
        ({"noise": -1.0}, "noise"),
        ({"noise": math.nan}, "noise"),
        ({"flip": 0.5}, "noise"),
        ({"noise": 0.0, "flip": -0.5}, "flip"),
        ({"noise": 0.0, "flip": math.nan}, "flip"),
    ],
)
def test_quantile_refuses(changes, name):
    with pytest.raises(BadInput, match=rf"^{name} "):
        Quantile(**{"value": 1.0, "target": 0.5, "noise": 1.0, **changes})


def test_quantile_bits_are_centred_so_that_one_client_moves_the_sum_by_a_half():
    schedule = Quantile(1.0, 0.5, noise=1.0)
    bits = watch(schedule, seen([0.5, 1.0, 1.5], 1.0), 1)
    assert bits.tolist() == [[0.5], [0.5], [-0.5]]


def test_quantile_rule_is_the_published_one():
    """C exp(-lr (b - target)), with b the noisy share of short updates."""
    schedule = Quantile(1.0, 0.3, lr=0.2, noise=1e-300)
    watched = torch.tensor([0.5 * 60 - 0.5 * 40], dtype=torch.float64)
    assert move(schedule, 2, watched, 100.0, 1, Streams(1)) == pytest.approx(
        2 * math.exp(-0.2 * (0.6 - 0.3))
    )


def test_quantile_divides_by_the_public_size():
    """Half as many clients as expected, all short: the share is 3/4, not 1."""
    schedule = Quantile(1.0, 0.5, lr=1.0, noise=1e-300)
    watched = torch.tensor([0.5 * 50], dtype=torch.float64)
    assert move(schedule, 1, watched, 100.0, 1, Streams(1)) == pytest.approx(math.exp(-0.25))


def test_quantile_noise_has_the_promised_law():
    schedule = Quantile(1.0, 0.5, lr=1e-3, noise=3.0)
    zero = torch.zeros(1, dtype=torch.float64)
    moved = [move(schedule, 1, zero, 10.0, r, Streams(5)) for r in range(1, 2001)]
    shares = -np.log(moved) / 1e-3
    assert stats.kstest(10 * shares, stats.norm(0, 3).cdf).pvalue > ALARM


def test_quantile_of_an_empty_cohort_is_pure_noise_and_moves_all_the_same():
    schedule = Quantile(1.0, 0.5, noise=1.0)
    zero = torch.zeros(1, dtype=torch.float64)
    assert len({move(schedule, 1, zero, 10.0, r, Streams(1)) for r in range(1, 9)}) == 8


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_quantile_moves_by_e_cubed_at_most(sign):
    schedule = Quantile(1.0, 0.5, lr=100.0, noise=1e-300)
    watched = torch.tensor([sign * 1e6], dtype=torch.float64)
    assert move(schedule, 1, watched, 1.0, 1, Streams(1)) == pytest.approx(math.exp(-3 * sign))
    for start in (1e-12, 1e12):
        assert 1e-12 <= move(schedule, start, watched, 1, 1, Streams(1)) <= 1e12


@pytest.mark.parametrize("fine", [23, 52])
@pytest.mark.parametrize("flip", [1e-9, 1e-7, 1e-3, 0.1, 1.0, 5.0, 15.0])
def test_realised_chance_of_keeping_the_bit_respects_epsilon(monkeypatch, flip, fine):
    """Counted, not sampled: the odds of the grid of 2^-fine are at most e^epsilon either way."""
    schedule, half = Quantile(1.0, 0.5, flip=flip), 2**fine

    def keeps(draw):
        """Whether a client that draws so many steps of the grid keeps its bit."""
        monkeypatch.setattr(
            "fedveil.privacy.clip_statistic.uniform_", lambda out, _: out.fill_(draw / half)
        )
        return float(watch(schedule, seen([0.5], 1.0))) > 0

    first = bisect_left(range(-half, half), True, key=lambda draw: not keeps(draw))
    assert 0 < first < 2 * half
    odds = math.log(first) - math.log(2 * half - first)
    assert abs(odds) <= flip * (1 + 1e-9)
    assert odds >= 0


@pytest.mark.parametrize("flip", [1e-9, 0.1, 1.0, 5.0])
def test_bit_is_kept_exactly_below_the_threshold(monkeypatch, flip):
    schedule, asked = Quantile(1.0, 0.5, flip=flip), []

    def chosen(out, keys):
        asked.append(keys)
        return out.copy_(torch.from_numpy(np.asarray(draws)[:, None]))

    monkeypatch.setattr("fedveil.privacy.clip_statistic.uniform_", chosen)
    edge = max(0.0, math.tanh(flip / 2) - 2.0**-22)
    last = (math.ceil(edge * 2**23) - 1) * 2.0**-23
    draws = [-1.0, last, last + 2.0**-23, 1 - 2.0**-23]
    reports = watch(schedule, seen([0.5] * 4, 1.0), 1)
    assert (reports > 0).ravel().tolist() == [True, True, False, False]
    assert len(asked) == 1


@pytest.mark.parametrize("flip", [0.5, 2.0])
def test_flipped_bits_are_unbiased_and_as_random_as_promised(flip):
    schedule, count = Quantile(1.0, 0.5, flip=flip), 40_000
    for norm, bit in ((0.5, 0.5), (2.0, -0.5)):
        reports = watch(schedule, seen([norm] * count, 1.0), 1).numpy().ravel()
        kept = int((np.sign(reports) == np.sign(bit)).sum())
        keep = 1 / (1 + math.exp(-flip))
        assert stats.binomtest(kept, count, keep).pvalue > ALARM
        assert np.abs(reports) == pytest.approx(0.5 / (2 * keep - 1))
        error = np.abs(reports).max() / math.sqrt(count) * stats.norm.isf(ALARM / 2)
        assert abs(reports.mean() - bit) < error


def test_flip_of_a_client_does_not_depend_on_the_others():
    schedule = Quantile(1.0, 0.5, flip=1.0)
    whole = watch(schedule, seen([0.5] * 9, 1.0), 1)
    assert torch.equal(watch(schedule, seen([0.5] * 4, 1.0), 1, np.arange(5, 9)), whole[5:])


@pytest.mark.parametrize("version", QUANTILES)
@pytest.mark.parametrize("factor", [0.01, 100.0])
@pytest.mark.parametrize("target", [0.2, 0.5, 0.9])
def test_quantile_finds_the_quantile_of_log_normal_norms(version, factor, target):
    law = stats.lognorm(s=1.0, scale=3.0)
    truth = law.ppf(target)
    schedule = Quantile(factor * truth, target, **QUANTILES[version])
    streams, moving, late = Streams(3), schedule.first_value(), []
    generator = np.random.default_rng(4)
    for round in range(1, 301):
        norms = law.rvs(200, random_state=generator)
        clipped = seen(norms, schedule.clip(moving, round).value)
        watched = watch(schedule, clipped, round).sum(dim=0)
        moving = move(schedule, moving, watched, 200, round, streams)
        if round > 200:
            late.append(moving)
    share = law.cdf(np.exp(np.mean(np.log(late))))
    assert share == pytest.approx(target, abs=0.05)


# --- median ---


def median(**changes):
    settings = {"value": 1.0, "low": -3, "high": 4, "every": 1, "budget": BUDGET}
    return Median(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"low": 4}, "low"),
        ({"low": 5}, "low"),
        ({"low": -61}, "low"),
        ({"high": 61}, "high"),
        ({"every": 0}, "every"),
        ({"cap": 0.1}, "cap"),
        ({"cap": math.nan}, "cap"),
    ],
)
def test_median_refuses(changes, name):
    with pytest.raises(BadInput, match=rf"^{name} "):
        median(**changes)


def test_median_counts_each_client_in_exactly_one_bin():
    """So that replacing a client changes two counts by one: sqrt(2) in L2."""
    schedule = median()
    norms = [0.0, 0.125, 0.1251, 1.0, 1.5, 8.0, 8.1, 1e30, math.inf]
    counts = watch(schedule, seen(norms, 1.0), 1)
    assert counts.shape == (9, 8)
    assert counts.argmax(dim=1).tolist() == [0, 0, 1, 3, 4, 6, 7, 7, 7]
    assert torch.equal(counts.sum(dim=1), torch.ones(9, dtype=torch.float64))
    moved = (counts[:, None, :] - counts[None, :, :]).norm(dim=2)
    assert float(moved.max()) == pytest.approx(math.sqrt(2))


def test_median_counts_a_norm_that_is_no_number_once():
    counts = watch(median(), seen([math.nan], 1.0), 1)
    assert float(counts.sum()) == 1


def test_median_collects_nothing_between_refreshes():
    schedule = median(every=3, noise=1.0)
    due = [bool(watch(schedule, seen([1.0], 1.0), r).any()) for r in range(1, 8)]
    assert due == [True, False, False, True, False, False, True]
    full = torch.ones(8, dtype=torch.float64)
    assert move(schedule, 1.7, full, 8, 2, Streams(1)) == 1.7


def test_median_of_nothing_leaves_the_bound():
    counts = torch.zeros(8, dtype=torch.float64)
    assert move(median(noise=0.0), 1.7, counts, 8, 1, Streams(1)) == 1.7
    assert move(median(noise=1.0), 1.7, counts - 1e9, 8, 1, Streams(1)) == 1.7


def test_median_is_the_upper_edge_of_its_bin():
    schedule = median()
    for norm, edge in ((0.01, 0.125), (0.2, 0.25), (3.0, 4.0), (100.0, 16.0)):
        counts = watch(schedule, seen([norm] * 5, 1.0), 1).sum(dim=0)
        assert move(schedule, 1, counts, 5.0, 1, Streams(1)) == edge


def test_median_noise_is_on_every_count_and_new_in_every_refresh():
    """One huge count, noise as large: the clip moves about; without noise it does not."""
    counts = torch.zeros(8, dtype=torch.float64)
    counts[2] = 10.0
    assert {move(median(), 1, counts, 10.0, r, Streams(1)) for r in range(1, 30)} == {0.5}
    noisy = {move(median(noise=100.0), 1, counts, 10.0, r, Streams(1)) for r in range(1, 30)}
    assert len(noisy) > 3


def followed(schedule, law, rounds=20, clients=500):
    """The clips of a run over norms drawn from `law`."""
    moving, streams, generator, path = (
        schedule.first_value(),
        Streams(3),
        np.random.default_rng(4),
        [],
    )
    for round in range(1, rounds + 1):
        norms = law.rvs(clients, random_state=generator)
        clipped = seen(norms, schedule.clip(moving, round).value)
        watched = watch(schedule, clipped, round).sum(dim=0)
        moving = move(schedule, moving, watched, clients, round, streams)
        path.append(moving)
    return path


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_median_finds_the_bin_of_the_median_of_log_normal_norms(factor):
    schedule = median(value=3.0 * factor, low=-6, high=8, noise=5.0)
    path = followed(schedule, stats.lognorm(s=1.0, scale=3.0))
    assert path[-1] / 2 < 3.0 <= path[-1]
    assert path.count(4.0) >= 18


def test_monotone_median_only_falls():
    law = stats.lognorm(s=1.0, scale=3.0)
    assert set(followed(median(value=0.5, monotone=True, noise=5.0), law)) == {0.5}
    path = followed(median(value=300.0, monotone=True, noise=5.0), law)
    assert path[-1] == 4.0
    assert path == sorted(path, reverse=True)


def test_cap_limits_the_median():
    path = followed(median(value=1.0, cap=2.5, noise=5.0), stats.lognorm(s=1.0, scale=30.0))
    assert set(path) == {2.5}
