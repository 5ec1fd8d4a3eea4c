"""Adaptive clips beside noise at the clients: the server learns from both, and both are charged."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Relation, Trust
from fedveil.privacy.accounting.closed_forms import gaussian_epsilon
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import (
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    TwoPoint,
)
from fedveil.privacy.clip_schedules import Median, Quantile
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.releases.client_noise import Published
from fedveil.privacy.sampling import FixedSize, RoundRobin
from tests.privacy.releases.client_noise_plans import BUDGET, plan_of


def through_curator(plan, releases, noise, count):
    """The epsilon of all that a client's reports and the curator's noisy sums tell together."""
    squared = releases / plan.release.multiplier**2 + count / noise**2
    return gaussian_epsilon(math.sqrt(squared), BUDGET.delta)


def test_line_against_the_server_composes_updates_and_the_curators_bits():
    """Replacing a client moves the sum of centred bits by 1: noise over sensitivity is sigma_b."""
    plan = plan_of(RoundRobin(100), Quantile(1.0, 0.5, noise=5.0), rounds=35)
    (line,) = plan.lines
    assert line.event == GaussianWithCurator(Gaussian(plan.release.multiplier), Gaussian(5.0), 4)
    assert (line.covers, line.trust, line.relation) == (
        "updates and bits",
        Trust.CURATOR,
        Relation.REPLACE,
    )
    assert any("curator" in a for a in line.assumptions)
    claim = plan.claims(35)[0]
    assert claim.epsilon == pytest.approx(through_curator(plan, 4, 5.0, 4), rel=1e-12)
    assert 0.99 * BUDGET.epsilon < claim.epsilon <= BUDGET.epsilon
    assert plan.release.multiplier > plan_of(RoundRobin(100), rounds=35).release.multiplier


def test_bits_of_capped_clients_are_capped():
    plan = plan_of(FixedSize(50, 4), Quantile(1.0, 0.5, noise=5.0), rounds=60)
    assert plan.lines[0].participations(60) == 4
    assert plan.lines[0].event.most == 4


@pytest.mark.parametrize(
    ("schedule", "word"),
    [
        (Quantile(1.0, 0.5, noise=0.5), r"^noise 0\.5 "),
        (Median(1.0, -3, 3, 5, Budget(20.0, 1e-5)), r"^clip_epsilon 20 "),
    ],
    ids=["q", "m"],
)
def test_curator_that_alone_uses_up_the_budget_is_refused(schedule, word):
    with pytest.raises(BadInput, match=f"{word}.*budget\\.epsilon 3") as e:
        plan_of(schedule=schedule)
    assert "\n" not in str(e.value)
    with pytest.raises(BadInput, match=word):
        plan_of(schedule=schedule, multiplier=50.0, rounds=1)


def test_curator_that_barely_leaves_something_is_refused_by_name():
    """Whatever is left asks for more noise than there is."""

    def left(noise):
        return BUDGET.epsilon * (1 - 1e-12) - epsilon(Gaussian(noise), 10, 1e-5, Relation.REPLACE)

    noise = brentq(left, 1.0, 100.0, xtol=1e-13)
    assert epsilon(Gaussian(noise), 10, 1e-5, Relation.REPLACE) < BUDGET.epsilon
    with pytest.raises(BadInput, match=r"^noise [0-9]"):
        plan_of(schedule=Quantile(1.0, 0.5, noise=noise))


def test_budget_stops_by_what_the_server_learns_from_both():
    schedule, open_ended = Quantile(1.0, 0.5, noise=4.0), Budget(math.inf, 1e-5)
    told = plan_of(schedule=schedule, multiplier=4.0, rounds=20, budgets=(open_ended,))
    limit = told.lines[0].claims(9)[0].epsilon
    plan = plan_of(schedule=schedule, multiplier=4.0, rounds=20, budgets=(Budget(limit, 1e-5),))
    assert plan.permitted == 9
    assert plan_of(multiplier=4.0, rounds=20, budgets=(Budget(limit, 1e-5),)).permitted > 9


def test_every_group_composes_its_own_reports_with_the_curator():
    budgets = (Budget(2.0, 1e-5), Budget(8.0, 1e-5))
    plan = plan_of(
        schedule=Quantile(1.0, 0.5, noise=9.0), budgets=budgets, group_of=np.arange(1000) % 2
    )
    assert [line.covers for line in plan.lines] == [
        "updates and bits of 500 clients, group 2",
        "updates and bits of 500 clients, group 1",
    ]
    for line, m in zip(plan.lines, plan.release.multipliers[[1, 0]], strict=True):
        assert line.event == GaussianWithCurator(Gaussian(m), Gaussian(9.0), 10)
        assert line.trust is Trust.CURATOR
        assert 0.99 * line.budget.epsilon < line.claims(10)[0].epsilon <= line.budget.epsilon


def test_strict_reading_beside_a_published_label_composes_too():
    plan = plan_of(schedule=median(), rounds=100, published=Published())
    label, strict = plan.lines
    assert (label.covers, label.event) == ("updates", Gaussian(plan.release.multiplier))
    assert label.as_published
    curator = Gaussian(plan.clip_schedule.noise / math.sqrt(2))
    assert strict.event == GaussianWithCurator(Gaussian(plan.release.multiplier / 2), curator, 10)
    assert (strict.covers, strict.trust) == ("updates and norms", Trust.CURATOR)
    assert strict.reading


def test_flipped_bits_are_part_of_the_report():
    plan = plan_of(schedule=Quantile(1.0, 0.5, flip=0.05))
    (line,) = plan.lines
    assert line.event == GaussianWithBit(Gaussian(plan.release.multiplier), TwoPoint(0.05))
    assert plan.release.multiplier > plan_of().release.multiplier
    assert line.trust is Trust.LOCAL
    assert plan.claims(10)[0].epsilon <= BUDGET.epsilon


def test_flipped_bits_that_use_up_the_budget_are_refused():
    with pytest.raises(BadInput, match=r"flip 0\.3 over 10 participations"):
        plan_of(schedule=Quantile(1.0, 0.5, flip=0.3))


def median(**changes):
    settings = {"value": 1.0, "low": -4, "high": 4, "every": 10, "budget": Budget(0.8, 1e-8)}
    return Median(**{**settings, **changes})


def test_line_against_the_server_composes_updates_and_the_curators_histograms():
    """Replacing a client changes two counts by one, in at most ten histograms."""
    plan = plan_of(schedule=median(), rounds=100)
    (line,) = plan.lines
    noise = plan.clip_schedule.noise / math.sqrt(2)
    assert line.event == GaussianWithCurator(Gaussian(plan.release.multiplier), Gaussian(noise), 10)
    assert (line.covers, line.trust) == ("updates and norms", Trust.CURATOR)
    histograms = gaussian_epsilon(math.sqrt(10) / noise, 1e-8)
    assert 0.98 * 0.8 < histograms <= 0.8
    claim = plan.claims(100)[0]
    assert claim.epsilon == pytest.approx(through_curator(plan, 100, noise, 10), rel=1e-12)
    assert 0.99 * BUDGET.epsilon < claim.epsilon <= BUDGET.epsilon
    assert plan.permitted == 100


@pytest.mark.parametrize(
    ("size", "population", "every"), [(1, 10, 10), (10, 100, 5), (3, 10, 4), (7, 20, 20)]
)
def test_histograms_that_keep_step_with_the_turns_are_all_counted(size, population, every):
    """Round robin in step with the refreshes puts one client into every histogram."""
    sampler, rounds = RoundRobin(size), 100
    plan = plan_of(sampler, median(every=every), rounds=rounds, population=population)
    concerned = np.zeros(population, dtype=np.int64)
    for round in range(1, rounds + 1):
        if plan.clip_schedule.statistic.due(round):
            concerned[sampler.cohort(population, round, Streams(1))] += 1
    event = plan.lines[0].event
    assert event.most >= concerned.max()
    histograms = gaussian_epsilon(math.sqrt(event.most) / event.curator.multiplier, 1e-8)
    assert 0.98 * 0.8 < histograms <= 0.8
