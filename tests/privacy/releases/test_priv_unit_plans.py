"""Plans and recipes with PrivUnitG: keys that no two draws share, claims, refusals.

Statistical tests have a false-alarm rate of at most 1e-6 each.
"""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import (
    SEEDED,
    Accountant,
    NoiseSource,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.composition import epsilon as composed
from fedveil.privacy.accounting.events import Gaussian, PureReport, TwoPoint
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import Fixed, Median, PerGradient, Poly, Quantile
from fedveil.privacy.noise.streams import Streams, normal_, uniform_
from fedveil.privacy.release import Release
from fedveil.privacy.releases import priv_unit as module
from fedveil.privacy.releases.priv_unit import PrivUnitG, PrivUnitReports, priv_unit
from fedveil.privacy.sampling import Everyone, FixedSize, RoundRobin
from fedveil.privacy.secure import planned_for, with_secure_noise
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.session import train
from tests.asking import asked
from tests.privacy.releases.priv_unit_reports import FAR, streams_of

FREE = Budget(math.inf, 1e-5)


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
        r"give epsilon or budget\.epsilon",
    ),
    "one report beyond the budget": (
        {"epsilon": 8.0, "budget": Budget(7.0, 1e-5)},
        r"budget\.epsilon is 7 and one report costs epsilon 8 .* lower epsilon",
    ),
    "hardly anything for a report": (
        {"epsilon": None, "budget": Budget(1e-8, 1e-12), "rounds": 4},
        r"budget\.epsilon is 1e-08 over 4 participations, less than 1e-06 for each",
    ),
    "epsilon 0": ({"epsilon": 0.0}, r"epsilon is 0"),
    "clip in L1": ({"schedule": Fixed(1.0, Norm.L1)}, r"norm is l1 .* needs l2"),
    "quantile": ({"schedule": Quantile(1.0, 0.5, noise=5.0)}, "use schedule 'fixed' or 'poly'"),
    "flipped bits": ({"schedule": Quantile(1.0, 0.5, flip=0.1)}, "use schedule 'fixed'"),
    "median": ({"schedule": Median(1.0, -3, 3, 5, Budget(1.0, 1e-5))}, "use schedule 'fixed'"),
    "no clip schedule": ({"schedule": 1.0}, "a ClipSchedule is needed"),
    "cap before the end": ({"sampler": FixedSize(50, 1), "rounds": 3}, "at its cap"),
    "delta for everybody": ({"budget": Budget(8.0, 0.5)}, r"^delta is "),
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
        replace(plan_of(), clip_schedule=None)


def test_secure_noise_keeps_epsilon_and_pays_for_its_draws():
    plan = plan_of(epsilon=1.0, rounds=1, budget=planned_for(Budget(math.inf, 1e-5)))
    secure = with_secure_noise(plan, 5, diagnostics=False)
    (seeded, *_), (claim, pure) = plan.claims(1), secure.claims(1)
    assert (claim.epsilon, claim.delta) == (seeded.epsilon, pytest.approx(1e-5, rel=1e-12))
    assert (pure.epsilon, claim.noise) == (1.0, NoiseSource.SECURE)
    # 5 coordinates and 4 cohort draws at two attempts, with eight words of 2^-113 each
    assert (1 + math.e) * 9 * 2 * 2.0**-110 < pure.delta < 1e-10


@pytest.mark.parametrize("epsilon", [45.0, 1e6])
def test_an_epsilon_that_secure_words_cannot_vouch_for_is_refused(epsilon):
    plan = plan_of(epsilon=epsilon, rounds=1, budget=planned_for(Budget(math.inf, 1e-5)))
    with pytest.raises(BadInput, match=r"^source is 'secure'.*use 'seeded'"):
        with_secure_noise(plan, 5, diagnostics=False)


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
        fv.Training(task, data, plan, fv.work.OneGradient())


def test_noise_length_is_that_of_the_sum_of_zero_updates():
    plan = plan_of(schedule=Fixed(3.0), population=2000, budget=Budget(math.inf, 1e-6))
    ids = np.arange(2000)
    round = asked(plan, torch.zeros(5), ids)
    wanted = plan.release.noise_length(round, 5)
    squares = [
        float(randomised(plan, ids, round, 0.0).double().sum(dim=0).square().sum())
        for round in range(1, 101)
    ]
    spread = np.std(squares) / math.sqrt(len(squares))
    assert abs(np.mean(squares) - wanted**2) < FAR * spread
    assert plan.release.noise_length(replace(round, clip=None), 5) == 0


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
    assert training.plan.clip_schedule.rates_allowed(1) == 1.0


BAD = {
    "noise.epsilon=0.0": "noise.epsilon is 0.0",
    "noise.epsilon=20.0": "budget.epsilon is 16 and one report costs",
    "clip=none": "noise.kind is 'priv-unit' without a",
    "budget=none": "without a .budget.",
    "clip.norm=l1": "set clip.norm = 'l2'",
    "budget.as_published=true": "budget.as_published",
    "shuffle.minimum=3": "shuffle",
    "noise.multiplier=1.0": "unknown key noise.multiplier of kind 'priv-unit'",
    "server.weights=examples": "which the weights would tell",
    "budget.epsilon=inf": "give noise.epsilon or budget.epsilon",
}


@pytest.mark.parametrize("setting", BAD)
def test_recipe_that_cannot_be_is_refused(setting):
    with pytest.raises(BadInput, match=BAD[setting]):
        build(load_recipe("priv-unit", [setting]))
