"""Local DP with an adaptive clip whose bits or norms go through a secure sum: nobody is a curator.

Statistical tests have a false-alarm rate of 1e-6 each.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Relation, Trust
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, GaussianWithCurator
from fedveil.privacy.clip_schedules import Fixed, Lengths, Median, Quantile
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.release import Channel, Round
from fedveil.privacy.releases.client_noise import Published, client_noise
from fedveil.privacy.releases.secure_sum import SecureSum
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson, RoundRobin
from fedveil.privacy.secure import planned_for, with_secure_noise

ALARM = 1e-6
FREE = Budget(math.inf, 1e-5)
BITS = Quantile(0.1, 0.5, noise=6.0)
NORMS = Median(0.1, -3, 1, 2, Budget(5.0, 1e-6))
SUM = SecureSum(10, 7, 9)


def plan_of(clip=BITS, summed=SUM, sampler=None, **more):
    given = {"rounds": 6, "budgets": (FREE,), "multiplier": 2.0, "laplace": False, **more}
    cohort = sampler or FixedSize(10, max_participations=4)
    return client_noise(cohort, 20, clip, secure_sum=summed, **given)


@pytest.mark.parametrize(("clip", "most"), [(BITS, 4), (NORMS, 3)], ids=["bits", "norms"])
def test_lines_compose_reports_with_the_sum_and_with_a_client_s_own_share(clip, most):
    plan, curated = plan_of(clip), plan_of(clip, None)
    plan.check_lines()
    first, second = plan.lines
    assert first.event == curated.lines[0].event  # the sum reveals what the curator published
    statistic = plan.statistic
    noise = statistic.noise / statistic.sensitivity(Relation.REPLACE)
    assert first.event == GaussianWithCurator(Gaussian(2.0), Gaussian(noise), most)
    assert (first.trust, second.trust) == (Trust.SECURE_SUM, Trust.LOCAL)
    assert second.event.curator.multiplier == pytest.approx(noise / math.sqrt(7 - 1))
    assert second.event.gaussian == Gaussian(2.0)
    assert second.event.most == most
    assert (first.reading, second.reading) == (False, True)
    assert first.covers == second.covers == f"updates and {statistic.word}"
    assert not any("curator" in text for line in plan.lines for text in line.assumptions)
    claimed = epsilon(first.event, 4, 1e-5, Relation.REPLACE)
    assert first.claims(4)[0].epsilon == pytest.approx(claimed, rel=1e-6)
    assert second.claims(4)[0].epsilon > first.claims(4)[0].epsilon


def with_line(plan, number, **changes):
    lines = list(plan.lines)
    lines[number] = replace(lines[number], **changes)
    return replace(plan, lines=tuple(lines))


CHANGED = {
    "no secure sum": lambda: replace(
        plan_of(), release=replace(plan_of().release, statistic_channel=Channel())
    ),
    "a curator": lambda: with_line(plan_of(), 0, trust=Trust.CURATOR),
    "less noise on bits": lambda: replace(plan_of(), clip_schedule=replace(BITS, noise=3.0)),
    "smaller shares": lambda: replace(
        plan_of(), release=replace(plan_of().release, statistic_channel=SecureSum(10, 8, 9))
    ),
    "the sum's noise on the second line": lambda: with_line(
        plan_of(), 1, event=plan_of().lines[0].event
    ),
    "no second line": lambda: replace(plan_of(), lines=plan_of().lines[:1]),
    "fewer releases": lambda: with_line(
        plan_of(), 1, event=replace(plan_of().lines[1].event, most=3)
    ),
    "no bits": lambda: with_line(plan_of(), 1, event=Gaussian(2.0)),
}


@pytest.mark.parametrize("what", CHANGED)
def test_plans_that_claim_more_than_they_do_are_refused(what):
    with pytest.raises(BadInput, match="accounts for"):
        CHANGED[what]().check_lines()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clip": Fixed(0.1)}, "for the statistic of an adaptive clip"),
        ({"clip": Quantile(0.1, 0.5, flip=1.0)}, "for the statistic of an adaptive clip"),
        ({"sampler": Poisson(0.5)}, "needs cohorts of one size"),
        ({"sampler": FixedSize(11)}, "is of 10 clients and a round asks 11"),
        ({"sampler": Everyone()}, "is of 10 clients and a round asks 20"),
        ({"published": Published()}, "has a curator and no secure sum"),
        (
            {
                "budgets": (Budget(8.0, 1e-5), Budget(50.0, 1e-5)),
                "multiplier": None,
                "clip": replace(BITS, noise=60.0),
                "group_of": np.arange(20) % 2,
            },
            "several and a secure sum adds equal shares",
        ),
    ],
)
def test_what_a_secure_sum_is_not_for_is_refused(wrong, message):
    with pytest.raises(BadInput, match=message):
        plan_of(**wrong)


@pytest.mark.parametrize("sampler", [FixedSize(10), RoundRobin(10)])
def test_cohorts_of_one_size_go_through_it(sampler):
    plan_of(sampler=sampler).check_lines()


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("clip", [BITS, NORMS], ids=["bits", "norms"])
@pytest.mark.parametrize("answering", [7, 10])
def test_every_sum_of_statistics_has_the_noise_that_is_accounted(clip, answering, secure):
    """For the fewest and the most clients that may answer."""
    plan = plan_of(clip, budgets=(planned_for(FREE),))
    if secure:
        plan = with_secure_noise(plan, 50, diagnostics=False)
    state = torch.tensor([0.1], dtype=torch.float64)
    lengths = Lengths(torch.full((10,), 0.2), torch.ones(10))
    exact = plan.clip_schedule.client_statistic(lengths, 1)[:answering].sum(dim=0)
    left = []
    for repetition in range(150):
        streams = Streams(repetition, secure)
        asked = Round(1, np.arange(10), torch.zeros(50), plan.clip(state, 1), state, streams)
        rows = plan.client_statistic(lengths, asked)
        total = plan.read_statistic(rows, secure=secure)[:answering].sum(dim=0)
        published = plan.noisy_statistic(total, asked)
        assert torch.equal(published, total)
        left.append(published - exact)
    noise, accounted = torch.cat(left).numpy(), plan.statistic.noise
    square = float((noise**2).sum()) / accounted**2
    assert stats.chi2.cdf(square, len(noise)) > ALARM
    spread = square * 6 / answering
    assert ALARM < stats.chi2.sf(spread, len(noise)) < 1 - ALARM


def test_nothing_is_sent_in_rounds_without_a_histogram():
    plan = plan_of(NORMS)
    state = torch.tensor([0.1], dtype=torch.float64)
    lengths = Lengths(torch.full((10,), 0.2), torch.ones(10))
    asked = Round(2, np.arange(10), torch.zeros(5), plan.clip(state, 2), state, Streams(0))
    assert not plan.client_statistic(lengths, asked).any()
    assert plan.noisy_statistic(torch.ones(5), asked) is None


def test_what_is_not_finite_counts_as_nothing():
    plan = plan_of()
    rows = torch.tensor([[math.nan], [math.inf], [40.0]], dtype=torch.float64)
    assert plan.read_statistic(rows, secure=False)[:, 0].tolist() == [0.0, 0.0, 40.0]
