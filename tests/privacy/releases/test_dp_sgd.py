"""DP-SGD inside a client: every step of every participation is charged."""

import math

import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Relation, Trust, Unit
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled
from fedveil.privacy.releases.dp_sgd import DpSgdSteps, dp_sgd
from fedveil.privacy.sampling import Everyone, FixedSize, RoundRobin
from tests.privacy.releases.client_noise_plans import BUDGET


def steps_plan(sampler=None, **changes):
    settings = {
        "rate": 0.1,
        "steps": 5,
        "nominal": None,
        "rounds": 4,
        "budget": BUDGET,
        "multiplier": 2.0,
    }
    return dp_sgd(sampler or Everyone(), 100, 0.7, **{**settings, **changes})


@pytest.mark.parametrize(("rounds", "turns"), [(1, 1), (4, 2), (10, 3)])
def test_every_step_of_every_participation_is_counted(rounds, turns):
    plan = steps_plan(RoundRobin(30), rounds=rounds)
    (line,) = plan.lines
    assert (line.per, line.participations(rounds)) == (5, turns)
    event = PoissonSampled(0.1, Gaussian(2.0))
    assert plan.claims(rounds)[0].epsilon == epsilon(event, 5 * turns, 1e-5, Relation.ZERO_OUT)


@pytest.mark.parametrize(
    ("nominal", "relation", "words"),
    [
        (None, Relation.ZERO_OUT, "numbers of records are public"),
        (5, Relation.ADD_REMOVE, "nominal number"),
    ],
)
def test_sizes_are_public_or_nominal(nominal, relation, words):
    plan = steps_plan(nominal=nominal)
    claim = plan.claims(4)[0]
    assert plan.release.relation is claim.neighbours is relation
    assert any(words in a for a in claim.assumptions)
    assert (claim.unit, claim.trust) == (Unit.RECORD, Trust.LOCAL)
    assert isinstance(plan.release, DpSgdSteps)


def test_steps_are_calibrated_to_all_of_them():
    plan = steps_plan(FixedSize(50, 3), rounds=6, rate=1.0, multiplier=None)
    assert plan.lines[0].event == Gaussian(plan.release.multiplier)
    found = epsilon(Gaussian(plan.release.multiplier), 15, 1e-5, Relation.ZERO_OUT)
    assert 0.98 * BUDGET.epsilon < found <= BUDGET.epsilon
    assert plan.permitted == 6


def test_budget_ends_between_participations():
    free = steps_plan(rate=1.0, multiplier=9.0, budget=Budget(math.inf, 1e-5))
    two = free.lines[0].claims(2)[0].epsilon
    assert steps_plan(rate=1.0, multiplier=9.0, budget=Budget(two, 1e-5)).permitted == 2


@pytest.mark.parametrize(
    ("key", "value"), [("rate", 0.0), ("rate", 1.1), ("rate", math.nan), ("steps", 0)]
)
def test_steps_that_cannot_be_are_refused(key, value):
    with pytest.raises(BadInput, match=rf"^{key} is "):
        steps_plan(**{key: value})
