"""Two-point reports: four readings of the same reports, and the one that is charged."""

import math
import re

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Accountant, Relation, Trust, Unit
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Shuffled, TwoPoint
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.releases.two_point import two_point
from fedveil.privacy.sampling import FixedSize, Poisson, RoundRobin

RANGES = Ranges(0.0, 0.075, (20, 4), True, Perturb.WEIGHTS)


def report_plan(sampler=None, population=1000, **changes):
    settings = {"epsilon": 1.0, "rounds": 3, "budget": Budget(math.inf, 1e-5), **changes}
    return two_point(sampler or FixedSize(100, 2), population, RANGES, **settings)


def test_four_readings_of_the_same_reports_stand_side_by_side():
    """24 weights in at most 2 of 3 rounds are 48 reports about one client."""
    plan = report_plan(shuffled=100)
    shuffled, exact, pure, weight = plan.claims(3)
    replaced = Relation.REPLACE
    event = Shuffled(TwoPoint(1.0), 100)
    assert shuffled.epsilon == epsilon(event, 48, 1e-5, replaced)
    assert exact.epsilon == epsilon(TwoPoint(1.0), 48, 1e-5, replaced, Accountant.BINOMIAL)
    assert (pure.epsilon, pure.delta) == (48.0, 0.0)
    assert weight.epsilon == 1.0
    assert shuffled.epsilon < exact.epsilon < pure.epsilon
    assert [c.trust for c in (shuffled, exact, pure)] == [
        Trust.SHUFFLED,
        Trust.LOCAL,
        Trust.LOCAL,
    ]
    assert [c.unit for c in (shuffled, exact, pure)] == [Unit.CLIENT] * 3
    assert (weight.unit, weight.as_published) == (Unit.WEIGHT, True)
    assert "not a guarantee" in str(weight)
    assert any("shuffler" in a for a in shuffled.assumptions)
    assert any("100 honest reports" in a for a in shuffled.assumptions)
    assert plan.release.channel.minimum == 100
    assert [line.reading for line in plan.lines] == [False, True, True]


def test_without_a_shuffler_there_is_no_shuffled_claim():
    plan = report_plan()
    exact, pure, weight = plan.claims(3)
    assert (exact.accountant, pure.accountant) == (Accountant.BINOMIAL, Accountant.PURE)
    assert weight.as_published
    assert {line.trust for line in plan.lines} == {Trust.LOCAL}
    assert [line.reading for line in plan.lines] == [False, True]
    assert plan.release.channel.minimum == 0


def test_clients_are_charged_for_their_own_rounds():
    plan = report_plan(FixedSize(100, 3), shuffled=50)
    counts = np.zeros(1000, dtype=np.int64)
    counts[:300] = 1
    counts[0] = 2
    worst = plan.claims(3, counts)[0]
    event = Shuffled(TwoPoint(1.0), 50)
    assert worst.epsilon == epsilon(event, 2 * 24, 1e-5, Relation.REPLACE)
    assert worst.holds_for == "the client that took part most"


def test_published_epsilon_is_of_one_weight_in_one_round_however_many_there_are():
    assert [report_plan(FixedSize(10, 9), rounds=r).claims(r)[-1].epsilon for r in (1, 9)] == [1, 1]


@pytest.mark.parametrize("sampler", [FixedSize(100, 2), Poisson(0.1), RoundRobin(100)], ids=str)
def test_more_honest_reports_than_clients_are_refused(sampler):
    report_plan(sampler, shuffled=100)
    with pytest.raises(BadInput, match=r"shuffled is 101"):
        report_plan(sampler, shuffled=101)


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan, math.inf])
def test_report_without_an_epsilon_is_refused(eps):
    with pytest.raises(BadInput, match=r"^epsilon is "):
        report_plan(epsilon=eps)


@pytest.mark.parametrize("shuffled", [0, 100])
def test_budget_that_one_round_exceeds_is_refused_with_its_price(shuffled):
    free = report_plan(shuffled=shuffled)
    claim = free.lines[0].claims(1)[0]
    price = claim.epsilon
    with pytest.raises(BadInput, match=re.escape(f"costs {claim.short}")):
        report_plan(shuffled=shuffled, budget=Budget(0.9 * price, 1e-5))
    assert report_plan(shuffled=shuffled, budget=Budget(1.1 * price, 1e-5)).permitted == 1


def test_budget_is_that_of_the_reading_that_is_charged():
    """Behind a shuffler the reading without one may exceed it."""
    free = report_plan(shuffled=100)
    whole = free.claims(3)[0].epsilon
    plan = report_plan(shuffled=100, budget=Budget(1.01 * whole, 1e-5))
    assert plan.permitted == 3
    assert plan.claims(3)[1].epsilon > plan.limit
