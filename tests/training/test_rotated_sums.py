"""Sums of few bits in a round: one record's influence, noise, masks, and the model that comes out.

Statistical tests have a false-alarm rate of 1e-6 each.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.audit.audit_command import AuditSettings, run_attacks
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Accountant, Trust, Unit
from fedveil.privacy.accounting.events import PoissonSampled, Skellam
from fedveil.privacy.noise import rotation
from fedveil.privacy.noise.rotation import RotatedGrid
from fedveil.privacy.noise.secure_random import SecureRandom
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.release import Round
from fedveil.privacy.releases.sites import PART, WHOLE, most_joined, sites
from fedveil.privacy.secure import planned_for, with_secure_noise
from fedveil.training import work as work_module
from fedveil.training.cohort import CohortData, FullBatch
from fedveil.training.exchange import client_report
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.reports import ClientBatch
from fedveil.training.session import Training, train
from fedveil.training.work import ClientDpSgd, SiteSum

ALARM = 1e-6
FREE = Budget(math.inf, 1e-5)


def plan_of(data, size, *, bits=16, multiplier=2.0, rate=0.5, clip=0.1, secure=True, **more):
    plan = sites(
        data.clients,
        clip,
        records=data.records,
        rate=rate,
        share=PART,
        rounds=2,
        budget=planned_for(more.pop("budget", FREE)) if secure else FREE,
        multiplier=multiplier,
        bits=bits,
        parameters=size,
        **more,
    )
    return with_secure_noise(plan, size, diagnostics=False) if secure else plan


def training_of(task, data, plan, **more):
    return Training(task, data, plan, SiteSum(plan.noisy_steps), **more)


def report_of(task, data, plan, site=0):
    """What a site sends in round 1, in whole steps."""
    state = plan.first_state(task.parameters)
    ids, streams = np.array([site]), Streams(0, secure=True)
    asked = Round(1, ids, task.parameters, plan.clip(state, 1), state, streams)
    looped = gradients_of(task, Mode.LOOPED, data)
    batch = ClientBatch.from_round(asked, CohortData(data, ids), looped)
    report = client_report(SiteSum(plan.noisy_steps), plan, batch).reports.rows
    grid = plan.release.rotated.report_grid
    assert report.dtype is torch.float64
    assert grid.holds(report)
    return grid.quantise(report)[0].numpy()


@pytest.fixture
def no_noise(monkeypatch):
    """Sites add no noise, and every call for rounding has the same words."""

    class Same(SecureRandom):
        def words(self, count):
            return np.random.default_rng(9).integers(0, 2**64, count, dtype=np.uint64)

    monkeypatch.setattr(rotation, "SecureRandom", Same)
    monkeypatch.setattr(RotatedGrid, "add_noise_", lambda self, steps, multiplier: None)


@pytest.mark.parametrize(
    ("family", "clip"),
    [("softmax", 0.1), pytest.param("softmax", 50.0, marks=pytest.mark.slow), ("mlp", 1e-3)],
)
def test_one_record_moves_a_report_by_no_more_than_the_claimed_sensitivity(
    make_family, no_noise, monkeypatch, family, clip
):
    """Each record of a site leaves the real round in turn, and all others stay."""
    task, data = make_family(family, (6, 3, 9))
    plan = plan_of(data, task.size, clip=clip)
    event = plan.lines[0].event.event
    assert isinstance(event, Skellam)
    reports = {}
    for missing in (None, *range(6)):
        joined = np.ones((1, 6), dtype=np.bool_)
        if missing is not None:
            joined[0, missing] = False
        monkeypatch.setattr(work_module, "_joined", lambda *_, joined=joined: joined)
        reports[missing] = report_of(task, data, plan)
    moved = [reports[None] - reports[missing] for missing in range(6)]
    for steps in moved:
        assert 0 < int((steps * steps).sum()) <= plan.release.rotated.most
        assert math.sqrt(int((steps * steps).sum())) <= event.sensitivity
    assert np.array_equal(sum(moved), reports[None]), "a report is the sum of records' rows"


def test_a_gradient_that_is_not_finite_moves_nothing(make_family, no_noise, monkeypatch):
    task, data = make_family("softmax", (6, 3, 9))
    plan = plan_of(data, task.size, rate=1.0)
    x = np.array(data.x)
    own = report_of(task, data, plan)
    x[2] = np.nan
    spoilt = data.with_clients(x, data.y, data.offsets)
    joined = np.ones((1, 6), dtype=np.bool_)
    joined[0, 2] = False
    monkeypatch.setattr(work_module, "_joined", lambda *_: joined)
    without = report_of(task, data, plan)
    monkeypatch.undo()
    assert not np.array_equal(own, without)
    monkeypatch.setattr(RotatedGrid, "add_noise_", lambda self, steps, multiplier: None)

    class Same(SecureRandom):
        def words(self, count):
            return np.random.default_rng(9).integers(0, 2**64, count, dtype=np.uint64)

    monkeypatch.setattr(rotation, "SecureRandom", Same)
    assert np.array_equal(report_of(task, spoilt, plan), without)


@pytest.mark.parametrize(("threshold", "honest"), [(None, None), (3, 4), (4, 3)])
def test_released_noise_has_at_least_the_accounted_variance(
    make_family, monkeypatch, threshold, honest
):
    """Of the least number of honest sites, with records that have no gradient."""
    task, data = make_family("softmax", (6, 3, 9, 4))
    plan = plan_of(data, task.size, multiplier=1.5, threshold=threshold, honest=honest)
    from fedveil.training.gradients import modes

    def nothing(self, moved, slots, clip, grid):
        return torch.zeros(self.width, dtype=torch.float64)

    monkeypatch.setattr(modes.LoopedTrajectory, "clipped_sum_on_grid", nothing)
    line, own = plan.lines
    needed = (line.event.event.multiplier * line.event.event.sensitivity) ** 2
    single = (own.event.event.multiplier * own.event.event.sensitivity) ** 2
    least = plan.release.channel.divisor
    total, alone = [], []
    for _ in range(60):
        shares = [report_of(task, data, plan, site) for site in range(least)]
        total.append(sum(shares))
        alone.append(shares[0])
    for noise, variance in ((total, needed), (alone, single)):
        squares = np.concatenate(noise).astype(np.float64) ** 2
        statistic = float(squares.sum()) / variance
        assert ALARM < stats.chi2.cdf(statistic, len(squares)) < 1 - ALARM
    assert plan.release.rotated.variance(plan.noisy_steps.multiplier) * least >= needed


@pytest.mark.parametrize(("bits", "missing"), [(16, ()), (21, (0, 4)), (32, ())])
def test_masked_sums_are_those_in_the_clear_to_the_last_bit(
    make_family, open_ledger, monkeypatch, missing, bits
):
    task, data = make_family("softmax", (6, 3, 9, 4, 5))
    given = {"threshold": 3, "honest": 5, "bits": bits}
    plan = plan_of(data, task.size, masks=True, **given)
    clear = plan_of(data, task.size, **given)
    assert (plan.release.channel.bits, clear.release.channel.keeps_reports) == (bits, False)
    training = training_of(task, data, plan)
    ledger, state = open_ledger(plan), training.start()
    asked = training.begin(state, ledger)
    cohort = training.engine.run(asked)
    reports = {
        int(site): row
        for ids, rows in cohort.updates_by_client
        for site, row in zip(ids, rows, strict=True)
    }
    kept = [site for site in reports if site not in missing]
    cohort.updates_by_client[:] = [(np.array([site]), reports[site][None]) for site in kept]
    in_clear = torch.stack([reports[site] for site in kept]).sum(dim=0)
    expected = in_clear.clone()
    clear.release.channel.decode_(expected, asked)
    assert not torch.equal(expected, in_clear)
    cohort.total.fill_(7.0)
    cohort.weight -= len(missing)
    result = training.end(asked, state, cohort, ledger)
    model = state.params + (expected / (0.5 * data.records)).float()
    assert torch.equal(result.state.params, model)


@pytest.mark.parametrize("bits", [17, pytest.param(32, marks=pytest.mark.slow)])
def test_a_round_is_the_step_of_exact_sums_up_to_rounding(make_family, monkeypatch, bits):
    """Without noise. Rounding has at most a quarter of a squared step per row and coordinate."""
    task, data = make_family("softmax", (60, 30, 90))
    plan = plan_of(data, task.size, bits=bits, rate=1.0, clip=0.5)
    monkeypatch.setattr(RotatedGrid, "add_noise_", lambda self, steps, multiplier: None)
    training = training_of(task, data, plan)
    start, cohort = training.start(), CohortData(data, np.arange(3))
    trajectory = gradients_of(task, Mode.LOOPED, data).trajectory(
        start.params, cohort, spanned=False
    )
    everyone = FullBatch(cohort.sizes, cohort.longest)
    total = trajectory.clipped_sum(None, everyone, plan.clip(start.adaptive_state, 1)).sum(dim=0)
    (first, *_) = train(training)
    found = (first.state.params - start.params).double() * data.records
    error = float((found + total).norm())
    rounding = plan.release.rotated.spacing * math.sqrt(task.size * data.records / 4)
    assert error < 2 * rounding + 1e-3
    assert error < 0.02 * float(total.norm())


def test_persons_are_rounded_as_a_whole(make_family):
    task, data = make_family("softmax", (6, 3, 9))
    plan = plan_of(data, task.size, unit=Unit.PERSON, cap=3)
    assert isinstance(plan.lines[0].event, PoissonSampled)
    with pytest.raises(BadInput, match="use unit = 'person'"):
        plan_of(data, task.size, cap=3)
    assert plan_of(data, task.size, cap=1).lines[0].unit is Unit.PERSON


def test_lines_claim_skellam_noise_on_the_plans_own_grid(make_family):
    task, data = make_family("softmax", (6, 3, 9, 4))
    plan = plan_of(data, task.size, budget=Budget(2.0, 1e-5), multiplier=None, threshold=3)
    first, second = plan.lines
    assert (first.trust, second.trust) == (Trust.SECURE_SUM, Trust.SITE)
    grid = plan.release.rotated
    assert first.event == PoissonSampled(0.5, Skellam(plan.release.multiplier, grid.sensitivity))
    own = plan.release.multiplier / math.sqrt(3)
    assert second.event.event.multiplier == pytest.approx(own)
    assert second.event.event.sensitivity == grid.sensitivity
    claim = plan.claims(2)[0]
    assert claim.accountant is Accountant.RDP
    assert 1.9 < claim.epsilon <= 2.0
    plan.check_lines()
    assert "Skellam noise" in plan.describe()
    again = plan_of(data, task.size, multiplier=plan.release.multiplier, threshold=3)
    assert again.release == plan.release


CLAIMS_TOO_MUCH = {
    "a smaller sensitivity": lambda e: replace(e, event=replace(e.event, sensitivity=9.0)),
    "more noise": lambda e: replace(e, event=replace(e.event, multiplier=e.event.multiplier * 2)),
    "a smaller rate": lambda e: replace(e, rate=0.1),
}


@pytest.mark.parametrize("name", CLAIMS_TOO_MUCH)
@pytest.mark.parametrize("number", [0, 1])
def test_plans_that_claim_more_than_they_do_are_refused(make_family, name, number):
    task, data = make_family("softmax", (6, 3, 9))
    plan = plan_of(data, task.size)
    lines = list(plan.lines)
    lines[number] = replace(lines[number], event=CLAIMS_TOO_MUCH[name](lines[number].event))
    with pytest.raises(BadInput, match="the plan's line about"):
        replace(plan, lines=tuple(lines)).check_lines()


def test_only_sites_and_no_audit_have_sums_of_few_bits(make_family):
    """Rows of DP-SGD and of attacks would be in rotated coordinates that nobody decodes."""
    task, data = make_family("softmax", (6, 3, 9))
    plan = plan_of(data, task.size)
    with pytest.raises(BadInput, match="for sums of sites"):
        ClientDpSgd(plan.noisy_steps, lr=1.0)
    with pytest.raises(BadInput, match=r"sum\.bits is 16: audits know sums of 64 bits only"):
        run_attacks(training_of(task, data, plan), AuditSettings())


def test_seeded_noise_is_refused(make_family):
    task, data = make_family("softmax", (6, 3, 9))
    with pytest.raises(BadInput, match="secure noise only"):
        next(train(training_of(task, data, plan_of(data, task.size, secure=False))))


def test_a_model_of_another_size_is_refused(make_family):
    task, data = make_family("softmax", (6, 3, 9))
    with pytest.raises(BadInput, match="coordinates for"):
        with_secure_noise(plan_of(data, task.size, secure=False), 99, diagnostics=False)


def test_too_few_bits_are_refused_with_the_number_that_is_enough():
    given = {"records": 10**6, "rate": 0.3, "share": PART, "rounds": 2, "budget": FREE}
    with pytest.raises(BadInput, match=r"bits is 16: sums of about .* use at least 2\d") as e:
        sites(3, 1.0, multiplier=1.0, bits=16, parameters=100, **given)
    enough = int(str(e.value).split("use at least ")[1][:2])
    sites(3, 1.0, multiplier=1.0, bits=enough, parameters=100, **given)
    with pytest.raises(BadInput, match="bits is"):
        sites(3, 1.0, multiplier=1.0, bits=enough - 1, parameters=100, **given)
    with pytest.raises(BadInput, match="parameters is missing"):
        sites(3, 1.0, multiplier=1.0, bits=20, **given)
    with pytest.raises(BadInput, match="bits is 40: 64, or 16 to 32"):
        sites(3, 1.0, multiplier=1.0, bits=40, parameters=100, **given)
    with pytest.raises(BadInput, match="share is 'whole'"):
        sites(3, 1.0, multiplier=1.0, bits=20, parameters=100, **{**given, "share": WHOLE})
    with pytest.raises(BadInput, match="no table that large"):
        sites(3, 1.0, multiplier=9e5, bits=32, parameters=10**6, **given)


@pytest.mark.parametrize("rate", [1e-3, 0.3, 1.0])
def test_no_more_records_join_than_are_expected_at_most(rate):
    most = most_joined(rate, 5000)
    assert most <= 5000
    assert stats.binom.sf(math.floor(most), 5000, rate) < 1e-7


def test_a_sum_without_enough_sites_is_not_decoded(make_family, open_ledger):
    task, data = make_family("softmax", (6, 3, 9, 4, 5))
    plan = plan_of(data, task.size, threshold=3)
    training = training_of(task, data, plan)
    ledger, state = open_ledger(plan), training.start()
    asked = training.begin(state, ledger)
    cohort = training.engine.run(asked)
    cohort.weight = 2.0
    result = training.end(asked, state, cohort, ledger)
    assert torch.equal(result.state.params, state.params)
    assert ledger.charged() == 1
