"""PrivUnitG: pure local DP for whole vectors, exactly, without bias, as noisy as it says.

Statistical tests have a false-alarm rate of at most 1e-6 each.
"""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from scipy.special import log_ndtr

import fedveil as fv
from fedveil.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import SEEDED, Accountant, Relation, Trust, Unit
from fedveil.privacy.accounting.composition import epsilon as composed
from fedveil.privacy.accounting.events import Gaussian, PureReport, TwoPoint
from fedveil.privacy.clip_schedules import Fixed, Median, PerGradient, Poly, Quantile
from fedveil.privacy.noise.streams import Streams, normal_, uniform_
from fedveil.privacy.releases import priv_unit as module
from fedveil.privacy.releases.priv_unit import PrivUnitG, PrivUnitReports, priv_unit
from fedveil.privacy.releases.release import Release
from fedveil.privacy.rows import Norm
from fedveil.privacy.sampling import Everyone, FixedSize, RoundRobin
from fedveil.privacy.secure import secured
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.session import train
from tests.asking import asked

EPSILONS = (0.1, 0.5, 1.0, 4.0, 8.0, 16.0, 50.0)
SIZES = (1, 2, 650, 1_000_000)
FREE = Budget(math.inf, 1e-5)
FAR = 5.5
"""Standard deviations of a sum of many: beyond with probability 4e-8."""


def streams_of(count, seed=1):
    ids, streams = np.arange(count), Streams(seed)
    return streams.keys("normals", 1, ids), streams.keys("choices", 1, ids)


def reports(mechanism, vector, count, length=1.0, seed=1):
    """`count` reports of the same vector, in float64."""
    rows = torch.tensor(vector, dtype=torch.float64).repeat(count, 1)
    mechanism.report_(rows, length, *streams_of(count, seed))
    return rows.numpy()


# --- privacy ---


@pytest.mark.parametrize("dimension", SIZES)
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_densities_on_the_cap_and_beside_it_differ_by_e_to_the_epsilon(epsilon, dimension):
    one = PrivUnitG(epsilon, dimension)
    assert 0.5 < one.p < 1
    assert 0 < one.q < 0.5
    assert math.log(one.q) == pytest.approx(float(log_ndtr(-one.tau)), abs=1e-12)
    cap = math.log(one.p) - float(log_ndtr(-one.tau))
    rest = math.log1p(-one.p) - float(log_ndtr(one.tau))
    assert cap - rest == pytest.approx(epsilon, abs=1e-12)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_split_is_the_best_of_a_fine_grid(epsilon):
    first = np.linspace(0, epsilon, 100_001)[1:-1]
    p, q = 1 / (1 + np.exp(-first)), 1 / (1 + np.exp(epsilon - first))
    grid = stats.norm.pdf(stats.norm.isf(q)) * (p / q - (1 - p) / (1 - q))
    one = PrivUnitG(epsilon, 5)
    assert one.m >= grid.max() * (1 - 1e-12)
    assert one.m == pytest.approx(grid.max(), rel=1e-6)
    assert sum(one.split) == pytest.approx(epsilon, rel=1e-15)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_mean_and_square_of_t_are_the_integrals(epsilon):
    one = PrivUnitG(epsilon, 7)

    def moment(power):
        def value(t):
            share = one.p / one.q if t >= one.tau else (1 - one.p) / (1 - one.q)
            return t**power * stats.norm.pdf(t) * share

        low, high = (integrate.quad(value, a, b)[0] for a, b in ((-40, one.tau), (one.tau, 40)))
        return low + high

    assert moment(0) == pytest.approx(1, rel=1e-7)
    assert one.m == pytest.approx(moment(1), rel=1e-7)
    assert one.square == pytest.approx((7 - 1 + moment(2)) / moment(1) ** 2, rel=1e-7)


@pytest.mark.parametrize("epsilon", [1e-6, 300.0, 1e6])
def test_extreme_epsilons_have_finite_reports(epsilon):
    one = PrivUnitG(epsilon, 3)
    found = reports(one, [0.6, 0.0, 0.8], 1000)
    assert np.isfinite(found).all()
    assert sum(one.split) == pytest.approx(epsilon, rel=1e-12)
    assert 0 < one.m < math.inf


def capped(one, found, direction):
    return int((found @ direction * one.m >= one.tau).sum())


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_caps_are_met_as_often_as_epsilon_allows_and_no_more(epsilon):
    """A report of -v is on the cap of v with probability q (1 - p) / (1 - q)."""
    one, count, v = PrivUnitG(epsilon, 3), 200_000, np.array([0.0, 0.6, 0.8])
    own = capped(one, reports(one, v, count, seed=3), v)
    other = capped(one, reports(one, -v, count, seed=4), v)
    wrong = one.q * (1 - one.p) / (1 - one.q)
    assert stats.binomtest(own, count, one.p).pvalue > 1e-6
    assert stats.binomtest(other, count, wrong).pvalue > 1e-6
    spread = math.sqrt((1 - one.p) / one.p / count + (1 - wrong) / wrong / count)
    assert math.log(own / other) <= epsilon + FAR * spread
    beside = math.log((count - other) / (count - own))
    assert beside <= epsilon + FAR * spread * one.p / (1 - one.p)


@pytest.mark.parametrize("epsilon", [0.5, 4.0, 16.0])
def test_component_along_the_vector_has_the_law_of_t(epsilon):
    one, v = PrivUnitG(epsilon, 4), np.array([0.5, -0.5, 0.5, 0.5])
    found = reports(one, v, 100_000) * one.m

    def cdf(t):
        below = (1 - one.p) / (1 - one.q) * stats.norm.cdf(np.minimum(t, one.tau))
        above = one.p / one.q * (stats.norm.cdf(t) - stats.norm.cdf(one.tau))
        return below + np.where(t > one.tau, above, 0.0)

    assert stats.kstest(found @ v, cdf).pvalue > 1e-6
    across = found @ np.array([0.5, 0.5, 0.5, -0.5])
    assert stats.kstest(across, "norm").pvalue > 1e-6
    mixed = np.corrcoef(across, found @ v)[0, 1]
    assert abs(mixed) < FAR / math.sqrt(len(found))


# --- unbiased, and as noisy as it says ---

VECTORS = {
    "unit": [0.6, 0.0, -0.8],
    "short": [0.2, 0.1, -0.3],
    "shortest": [1e-30, 0.0, 0.0],
    "zero": [0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("length", [1.0, 3.0])
@pytest.mark.parametrize("name", VECTORS)
def test_reports_are_unbiased_and_have_their_variance(name, length):
    one, count = PrivUnitG(2.0, 3), 200_000
    vector = np.array(VECTORS[name]) * length
    found = reports(one, vector, count, length, seed=2)
    spread = found.std(axis=0) / math.sqrt(count)
    assert (np.abs(found.mean(axis=0) - vector) < FAR * spread).all()
    squares = ((found - vector) ** 2).sum(axis=1)
    wanted = length**2 * one.square - float(vector @ vector)
    assert abs(squares.mean() - wanted) < FAR * squares.std() / math.sqrt(count)


@pytest.mark.parametrize("dimension", [1, 5, 300])
def test_variance_of_a_unit_vector_is_the_printed_one(dimension):
    one, count = PrivUnitG(4.0, dimension), 5_000
    v = np.full(dimension, dimension**-0.5)
    squares = ((reports(one, v, count) - v) ** 2).sum(axis=1)
    wanted = dimension / one.m**2 + one.tau / one.m - 1
    assert one.square - 1 == pytest.approx(wanted, rel=1e-12)
    assert abs(squares.mean() - wanted) < FAR * squares.std() / math.sqrt(count)


# --- edges ---


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 9e-7, 1.1e6, math.nan, math.inf])
def test_epsilon_that_cannot_be_is_refused(epsilon):
    with pytest.raises(BadInput, match=r"noise\.epsilon is"):
        PrivUnitG(epsilon, 3)


@pytest.mark.parametrize("dimension", [0, -1, 2.5])
def test_dimension_that_cannot_be_is_refused(dimension):
    with pytest.raises(BadInput, match="parameters is"):
        PrivUnitG(1.0, dimension)


def test_one_dimension_is_t_with_a_sign():
    """The vector -1 is reported as minus what the vector 1 is reported as, from the same draws."""
    one = PrivUnitG(1.0, 1)
    assert np.allclose(reports(one, [-1.0], 1000), -reports(one, [1.0], 1000), atol=1e-12)
    assert capped(one, reports(one, [1.0], 1000), np.ones(1)) > 500


def test_zero_is_a_random_sign_on_the_first_axis():
    one, count = PrivUnitG(16.0, 3), 100_000
    found = reports(one, [0.0, 0.0, 0.0], count)
    first = np.array([1.0, 0.0, 0.0])
    both = capped(one, found, first), capped(one, found, -first)
    each = 0.5 * (one.p + one.q * (1 - one.p) / (1 - one.q))
    assert all(stats.binomtest(n, count, each).pvalue > 1e-6 for n in both)
    assert stats.kstest(found[:, 1] * one.m, "norm").pvalue > 1e-6


def test_a_row_that_rounding_made_too_long_is_as_long_as_the_clip():
    one = PrivUnitG(1.0, 2)
    exact, long = reports(one, [1.0, 0.0], 5000), reports(one, [1.0 + 1e-9, 0.0], 5000)
    assert np.allclose(exact, long, atol=1e-6)


def test_rows_of_another_dimension_are_refused():
    with pytest.raises(AssertionError, match="rows of 2 for reports of 3"):
        reports(PrivUnitG(1.0, 3), [1.0, 0.0], 2)


def test_no_rows_are_no_reports():
    assert reports(PrivUnitG(1.0, 2), [1.0, 0.0], 0).shape == (0, 2)


def test_float32_rows_and_rows_longer_than_a_block_are_reported_the_same():
    one, size = PrivUnitG(8.0, 70_000), 70_000
    rows = torch.zeros(2, size)
    rows[:, -1] = 1.0
    one.report_(rows, 1.0, *streams_of(2))
    noise = normal_(torch.empty(2, size), streams_of(2)[0]) / one.m
    assert torch.allclose(rows[:, :-1], noise[:, :-1], atol=1e-6)
    draws = uniform_(torch.empty(2, 3, dtype=torch.float64), streams_of(2)[1])
    t = one._along(draws[:, 1], draws[:, 2])
    assert torch.allclose(rows[:, -1].double(), t / one.m, atol=1e-5)


# --- keys ---


def plan_of(sampler=None, schedule=None, *, rounds=4, population=100, **changes):
    settings = {"parameters": 5, "epsilon": 2.0, "budget": FREE, **changes}
    schedule = schedule or Fixed(1.0)
    return priv_unit(sampler or Everyone(), population, schedule, rounds=rounds, **settings)


def randomised(plan, ids, round=1, value=0.3, streams=None):
    rows = torch.full((len(ids), 5), value)
    plan.release.randomise_(rows, asked(plan, torch.zeros(5), ids, round=round, streams=streams))
    return rows


def test_no_two_draws_share_a_key(monkeypatch):
    seen = []

    def spying(draw):
        def spy(out, keys):
            seen.extend(map(int, keys))
            return draw(out, keys)

        return spy

    monkeypatch.setattr(module, "normal_", spying(normal_))
    monkeypatch.setattr(module, "uniform_", spying(uniform_))
    plan = plan_of()
    for round in (1, 2, 3):
        randomised(plan, range(50), round)
    randomised(plan, range(50), streams=Streams(2))
    assert len(seen) == 4 * 50 * 2
    assert len(set(seen)) == len(seen)


def test_draws_of_one_client_are_independent_of_each_other():
    """Sign, cap, place and the first normal: no pair of them is correlated."""
    count = 100_000
    draws = uniform_(torch.empty(count, 3, dtype=torch.float64), streams_of(count)[1]).numpy()
    normals = normal_(torch.empty(count, 2), streams_of(count)[0]).numpy()
    table = np.corrcoef(np.hstack([draws, normals]), rowvar=False) - np.eye(5)
    assert np.abs(table).max() < FAR / math.sqrt(count)


def test_reports_do_not_depend_on_the_chunk():
    plan, ids = plan_of(), np.arange(60)
    whole = randomised(plan, ids)
    parts = torch.cat([randomised(plan, piece) for piece in np.split(ids, [1, 20, 47])])
    assert torch.equal(whole, parts)
    assert torch.equal(randomised(plan, ids[::-1].copy()), whole.flip(0))


def test_reports_are_as_long_as_the_clip_of_their_round():
    plan = plan_of(schedule=Poly(2.0, 1.0, 4, 0.1))
    rows = randomised(plan, range(9), 3, value=0.0)
    again = randomised(plan_of(schedule=Fixed(1.0)), range(9), 3, value=0.0)
    assert torch.allclose(rows, again)
    assert randomised(plan, range(9), 1, value=0.0).norm() != rows.norm()


# --- plans ---


def test_claims_are_local_pure_and_about_clients():
    plan = plan_of(rounds=3)
    exact, pure = plan.claims(3)
    assert (exact.accountant, pure.accountant) == (Accountant.BINOMIAL, Accountant.PURE)
    assert (pure.epsilon, pure.delta) == (6.0, 0.0)
    assert exact.epsilon == composed(TwoPoint(2.0), 3, 1e-5, Relation.REPLACE, exact.accountant)
    for claim in (exact, pure):
        assert (claim.unit, claim.trust) == (Unit.CLIENT, Trust.LOCAL)
        assert claim.neighbours is Relation.REPLACE
        assert SEEDED in claim.assumptions
    assert plan.parameters == 5
    assert plan.lines[0].event == PureReport(2.0)


@pytest.mark.parametrize("sampler", [Everyone(), RoundRobin(30), FixedSize(10, 2)], ids=str)
@pytest.mark.parametrize("target", [0.3, 4.0, 40.0])
def test_epsilon_left_out_is_the_largest_that_fits_all_participations(sampler, target):
    plan = plan_of(sampler, rounds=12, epsilon=None, budget=Budget(target, 1e-5))
    turns = {Everyone: 12, RoundRobin: 4, FixedSize: 2}[type(sampler)]
    found = plan.release.mechanism.epsilon
    assert plan.permitted == 12
    assert plan.lines[0].participations(12) == turns
    assert target / turns * (1 - 1e-9) <= found
    one = Accountant.BINOMIAL
    at = composed(PureReport(found), turns, 1e-5, Relation.REPLACE, one)
    more = composed(PureReport(found * (1 + 1e-6)), turns, 1e-5, Relation.REPLACE, one)
    assert at <= target < more


def test_many_participations_cost_less_than_the_sum():
    plan = plan_of(rounds=400, epsilon=None, budget=Budget(4.0, 1e-5))
    assert plan.release.mechanism.epsilon > 3 * 4.0 / 400


def test_budget_stops_by_participations():
    limit = plan_of().lines[0].claims(2)[0].epsilon
    assert plan_of(rounds=9, budget=Budget(limit, 1e-5)).permitted == 2
    assert plan_of(RoundRobin(50), rounds=9, budget=Budget(limit, 1e-5)).permitted == 4


REFUSED = {
    "no budget and no epsilon": (
        {"epsilon": None},
        r"give noise\.epsilon or budget\.epsilon",
    ),
    "one report beyond the budget": (
        {"epsilon": 8.0, "budget": Budget(7.0, 1e-5)},
        r"budget\.epsilon is 7 and one report costs epsilon 8 .* lower noise\.epsilon",
    ),
    "hardly anything for a report": (
        {"epsilon": None, "budget": Budget(1e-8, 1e-12), "rounds": 4},
        r"budget\.epsilon is 1e-08 over 4 participations, less than 1e-06 for each",
    ),
    "epsilon 0": ({"epsilon": 0.0}, r"noise\.epsilon is 0"),
    "clip in L1": ({"schedule": Fixed(1.0, Norm.L1)}, r"clip\.norm is l1 .* needs l2"),
    "quantile": ({"schedule": Quantile(1.0, 0.5, noise=5.0)}, "use clip.kind 'fixed' or 'poly'"),
    "flipped bits": ({"schedule": Quantile(1.0, 0.5, flip=0.1)}, "use clip.kind 'fixed'"),
    "median": ({"schedule": Median(1.0, -3, 3, 5, Budget(1.0, 1e-5))}, "use clip.kind 'fixed'"),
    "no clip schedule": ({"schedule": 1.0}, "a ClipSchedule is needed"),
    "cap before the end": ({"sampler": FixedSize(50, 1), "rounds": 3}, "at its cap"),
    "delta for everybody": ({"budget": Budget(8.0, 0.5)}, r"budget\.delta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plan_that_cannot_be_is_refused_on_one_line(name):
    changes, words = REFUSED[name]
    with pytest.raises(BadInput, match=words) as e:
        plan_of(**changes)
    assert "\n" not in str(e.value)


def test_budget_beyond_every_report_has_the_largest():
    plan = plan_of(rounds=1, epsilon=None, budget=Budget(1e9, 1e-5))
    assert plan.release.mechanism.epsilon == 1e6


def test_clip_per_gradient_is_a_clip_of_the_update():
    plan = plan_of(schedule=PerGradient(Fixed(2.0), lambda round: 0.5))
    same = plan_of(schedule=Fixed(1.0))
    assert torch.equal(randomised(plan, range(9)), randomised(same, range(9)))


def test_a_plan_without_its_clip_is_refused():
    with pytest.raises(BadInput, match="add a clip"):
        replace(plan_of(), schedule=None)


def test_secure_noise_is_refused():
    with pytest.raises(BadInput, match=r"noise\.source is 'secure'.*use 'seeded'"):
        secured(plan_of(epsilon=1.0, rounds=1), 5, diagnostics=False)


def lined(plan, **changes):
    return replace(plan, lines=(replace(plan.lines[0], **changes),))


CHANGED = {
    "a smaller epsilon": lambda p: lined(p, event=PureReport(1.9)),
    "Gaussian": lambda p: lined(p, event=Gaussian(100.0)),
    "two-point": lambda p: lined(p, event=TwoPoint(2.0)),
    "a smaller share": lambda p: lined(p, share=Fraction(1, 2)),
    "a cap": lambda p: lined(p, cap=1),
    "every other round": lambda p: lined(p, every=2),
    "another mechanism": lambda p: replace(p, release=PrivUnitReports(PrivUnitG(2.1, 5))),
    "no noise": lambda p: replace(p, release=Release()),
}


@pytest.mark.parametrize("name", CHANGED)
def test_lines_changed_by_hand_are_refused(name):
    plan_of().check_lines()
    with pytest.raises(BadInput, match="accounts for"):
        CHANGED[name](plan_of()).check_lines()


def test_model_of_another_size_is_refused():
    data = fv.FederatedData.from_clients(
        [(str(k), np.ones((2, 3), np.float32), np.zeros(2, np.int64)) for k in range(4)],
        test=(np.ones((2, 3), np.float32), np.zeros(2, np.int64)),
        classes=2,
    )
    plan = priv_unit(Everyone(), 4, Fixed(1.0), parameters=7, epsilon=1.0, rounds=1, budget=FREE)
    task = fv.Task(torch.nn.Linear(3, 2), fv.cross_entropy)
    with pytest.raises(BadInput, match="accounts for 7 parameters and the model has 8"):
        fv.Training(task, data, plan, fv.OneGradient())


def test_noise_length_is_that_of_the_sum_of_zero_updates():
    plan = plan_of(schedule=Fixed(3.0), population=2000, budget=Budget(math.inf, 1e-6))
    ids, clip = np.arange(2000), plan.clip(plan.start(torch.zeros(5)), 1)
    wanted = plan.release.noise_length(ids, clip, torch.zeros(1), 5)
    squares = [
        float(randomised(plan, ids, round, 0.0).double().sum(dim=0).square().sum())
        for round in range(1, 101)
    ]
    spread = np.std(squares) / math.sqrt(len(squares))
    assert abs(np.mean(squares) - wanted**2) < FAR * spread
    assert plan.release.noise_length(ids, None, torch.zeros(1), 5) == 0


def test_description_has_no_bare_epsilon():
    told = plan_of().describe()
    assert told == (
        "PrivUnitG reports at the clients, each epsilon 2 at delta 0 per client (replace, "
        "local trust)"
    )
    assert plan_of().release.describe(()) == "PrivUnitG reports at the clients"


# --- recipes ---


def trained(*settings):
    training = build(load_recipe("priv-unit", ["engine.workers=1", *settings]))
    *_, last = train(training)
    return training, last


@pytest.mark.slow
def test_recipe_learns_and_is_the_same_in_both_modes():
    """Chance is 0.1; the smallest of five seeds was 0.797."""
    (_, looped), (training, last) = (
        trained(f"engine.mode={mode}", "evaluate.every=20") for mode in ("looped", "vectorised")
    )
    assert last.metrics["accuracy"] > 0.7
    assert looped.metrics["accuracy"] == pytest.approx(last.metrics["accuracy"], abs=0.03)
    assert torch.allclose(looped.state.params, last.state.params, atol=0.05)
    plan = training.plan
    assert (plan.permitted, plan.lines[0].participations(20)) == (20, 2)
    assert 8 < plan.release.mechanism.epsilon < 8.001
    assert 15.9 < plan.claims(20)[0].epsilon <= 16


SHORT = ("rounds=2", "data.clients=20", "sample.size=5", "client.steps=1")


@pytest.mark.parametrize("clip", ["fixed", "poly"])
def test_recipe_takes_an_epsilon_and_both_clips(clip):
    more = ("clip.power=0.5",) if clip == "poly" else ()
    training, last = trained(
        *SHORT, f"clip.kind={clip}", "clip.value=1.0", *more, "noise.epsilon=3.0"
    )
    assert training.plan.release.mechanism == PrivUnitG(3.0, 650)
    assert last.round == 2


def test_recipe_takes_a_clip_per_gradient():
    training, _ = trained(*SHORT, "clip.each=gradient")
    assert training.plan.schedule.rates_allowed(1) == 1.0


BAD = {
    "noise.source=secure": "noise.source is 'secure'",
    "noise.epsilon=0.0": "noise.epsilon is 0.0",
    "noise.epsilon=20.0": "budget.epsilon is 16 and one report costs",
    "clip=none": "noise.kind is 'priv-unit' without a",
    "budget=none": "without a .budget.",
    "clip.norm=l1": "set clip.norm = 'l2'",
    "budget.as_published=true": "budget.as_published",
    "shuffle.minimum=3": "shuffle",
    "noise.multiplier=1.0": "noise.multiplier is no key of kind 'priv-unit'",
    "server.weights=examples": "which the weights would tell",
    "budget.epsilon=inf": "give noise.epsilon or budget.epsilon",
}


@pytest.mark.parametrize("setting", BAD)
def test_recipe_that_cannot_be_is_refused(setting):
    with pytest.raises(BadInput, match=BAD[setting]):
        build(load_recipe("priv-unit", [setting]))
