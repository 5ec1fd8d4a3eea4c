"""Institutions' noisy sums: what each line claims, and plans that claim more than they do."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Relation, Trust, Unit
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.release import Channel
from fedveil.privacy.releases.secure_sum import SecureSum
from fedveil.privacy.releases.sites import PART, WHOLE, sites
from fedveil.privacy.secure import planned_for, with_secure_noise

BUDGET = Budget(1.0, 1e-5)
SECURE = {"secure": True, "parameters": 10**6}


def plan_of(share=PART, population=9, **more):
    given = {"records": 900, "rate": 0.05, "rounds": 20, "budget": BUDGET, **more}
    return sites(population, 1.0, share=share, **given)


@pytest.mark.parametrize("share", [WHOLE, PART])
def test_each_line_is_the_event_that_its_observer_sees(share):
    plan = plan_of(share)
    own, together = plan.release.noisy.multiplier, plan.release.together
    assert together == pytest.approx(3 * own)
    first, second = plan.lines
    seen = {line.trust: line.event for line in plan.lines}
    assert seen[Trust.SITE] == PoissonSampled(0.05, Gaussian(own))
    other = Trust.SECURE_SUM if share == PART else Trust.CENTRAL
    assert seen[other].event.multiplier == pytest.approx(together)
    assert first.trust is (Trust.SECURE_SUM if share == PART else Trust.SITE)
    assert second.reading
    for line in plan.lines:
        assert (line.unit, line.relation) == (Unit.RECORD, Relation.ZERO_OUT)
        assert (line.per, line.share) == (1, 1)
    plan.check_lines()
    claimed = plan.claims(20)[0].epsilon
    assert claimed <= BUDGET.epsilon
    assert claimed == pytest.approx(epsilon(first.event, 20, 1e-5, Relation.ZERO_OUT), rel=1e-6)
    assert plan.permitted == 20


def test_shares_need_the_square_root_of_the_sites_less_noise():
    part, whole = plan_of(PART), plan_of(WHOLE)
    assert part.release.together == pytest.approx(whole.release.noisy.multiplier, rel=1e-6)


def test_a_part_is_handed_on_by_all_sites_or_not_at_all():
    assert plan_of(PART).release.channel == SecureSum(9, 9, 9)
    assert plan_of(PART).release.channel.minimum == 9
    assert plan_of(PART).release.requires.only_sum
    assert type(plan_of(WHOLE).release.channel) is Channel


def line(plan, number=0, **changes):
    lines = list(plan.lines)
    lines[number] = replace(lines[number], **changes)
    return replace(plan, lines=tuple(lines))


CHANGED = {
    "half the noise": lambda: replace(
        plan_of(), release=replace(plan_of().release, multiplier=plan_of().release.multiplier / 2)
    ),
    "fewer sites add noise": lambda: replace(
        plan_of(), release=replace(plan_of().release, site_count=4)
    ),
    "another rate": lambda: line(
        plan_of(), event=PoissonSampled(0.01, plan_of().lines[0].event.event)
    ),
    "a client": lambda: line(plan_of(), unit=Unit.CLIENT),
    "replacement": lambda: line(plan_of(), relation=Relation.REPLACE),
    "a secure sum of sums in the clear": lambda: line(plan_of(WHOLE), trust=Trust.SECURE_SUM),
    "a trusted server's noise": lambda: line(plan_of(), trust=Trust.CENTRAL),
    "the sum's noise against the server": lambda: line(
        plan_of(), 1, event=plan_of().lines[0].event
    ),
    "two steps in one": lambda: line(plan_of(), per=2),
}


@pytest.mark.parametrize("name", CHANGED)
def test_plans_that_claim_more_than_they_do_are_refused(name):
    with pytest.raises(BadInput, match="the plan's line about"):
        CHANGED[name]().check_lines()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": "half"}, "use 'whole' or 'part'"),
        ({"population": 1}, "a sum of one hides nothing"),
        ({"rate": 0.0}, "rate"),
        ({"multiplier": 0.0}, "positive number"),
        ({"budget": Budget(1e-4, 1e-5), "multiplier": 0.01}, "contradict each other"),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(BadInput, match=message):
        plan_of(**given)


def test_secure_shares_count_every_sites_draws():
    secure = with_secure_noise(plan_of(budget=planned_for(BUDGET)), 10**6, diagnostics=False)
    by_trust = {line.trust: line for line in secure.lines}
    ratio = by_trust[Trust.SITE].vouched - by_trust[Trust.SECURE_SUM].vouched
    assert ratio > 0
    assert by_trust[Trust.SECURE_SUM].slip > 0
    tiny = plan_of(budget=planned_for(Budget(math.inf, 1e-5)), multiplier=1e-9)
    with pytest.raises(BadInput, match="steps of the grid"):
        tiny.release.check(
            SimpleNamespace(**SECURE, clip_schedule=tiny.clip_schedule, norm=tiny.norm)
        )
    plan_of().release.check(
        SimpleNamespace(**SECURE, clip_schedule=tiny.clip_schedule, norm=tiny.norm)
    )


def test_the_multiplier_that_was_given_is_the_one_that_is_stored():
    """A run that resumes is built from it, to the last bit."""
    for population in (3, 4, 7):
        plan = plan_of(population=population, multiplier=1.734, budget=Budget(math.inf, 1e-5))
        assert plan.release.settings(plan.clip_schedule) == {"multiplier": 1.734}
        assert plan.lines[0].event.event.multiplier == 1.734


def test_sums_that_would_not_be_exact_are_refused():
    plan = plan_of(records=10**15, multiplier=3.0, budget=Budget(math.inf, 1e-5))
    with pytest.raises(BadInput, match="too long for the grid"):
        plan.release.check(
            SimpleNamespace(**SECURE, clip_schedule=plan.clip_schedule, norm=plan.norm)
        )


def test_a_secure_sum_needs_the_line_about_all_other_sites():
    """Without it nothing would compare the noise of one site with what is claimed."""
    plan = sites(
        5,
        1.0,
        records=100,
        rate=0.5,
        share="part",
        rounds=3,
        budget=Budget(math.inf, 1e-5),
        multiplier=4.0,
        threshold=4,
        honest=4,
    )
    alone = replace(plan, lines=plan.lines[:1])
    with pytest.raises(BadInput, match="the line about a server with all other sites is missing"):
        alone.check_lines()


def secure_sites(population, records):
    given = {"records": records, "multiplier": 2.0, "budget": Budget(8.0, 1e-12)}
    return with_secure_noise(plan_of(WHOLE, population, **given), 10, diagnostics=False)


def test_more_sites_than_a_sum_has_room_for_are_refused():
    secure_sites(10**6, 10**6).check_lines()
    with pytest.raises(BadInput, match="at each of 1000001 sites"):
        secure_sites(10**6 + 1, 10**6 + 1)


def test_more_records_than_an_exact_sum_has_room_for_are_refused():
    """A row has at most twice as many steps as the clip, and a sum of all rows at most 2^53."""
    most = int(2**53 * GaussianMechanism(2.0).grid(2.0, 10).spacing / 2)
    secure_sites(3, most).check_lines()
    with pytest.raises(BadInput, match="their sum is too long for the grid"):
        secure_sites(3, most + 1)
