"""Sites in a round: what they send is their own noisy sum, and the model is a step along the total.

Statistical tests have a false-alarm rate of 1e-6 each.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.attacks.adversary import ReportAttack
from fedveil.base.errors import BadInput
from fedveil.masking.rehearsal import rehearse
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.release import NoisySteps
from fedveil.privacy.releases.dp_sgd import dp_sgd
from fedveil.privacy.releases.sites import PART, WHOLE, sites
from fedveil.privacy.sampling import Everyone
from fedveil.privacy.secure import planned_for, with_secure_noise
from fedveil.training.aggregates import Krum
from fedveil.training.cohort import CohortData
from fedveil.training.exchange import client_report
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.reports import ClientBatch
from fedveil.training.session import Training, train
from fedveil.training.work import ClientDpSgd, SiteSum, poisson_batch

ALARM = 1e-6
FREE = Budget(math.inf, 1e-5)


def plan_of(data, *, share=PART, multiplier=1e-6, rate=0.5, secure=None, **more):
    budget = FREE if secure is None else planned_for(FREE)
    plan = sites(
        data.clients,
        0.1,
        records=data.records,
        rate=rate,
        share=share,
        rounds=2,
        budget=budget,
        multiplier=multiplier,
        **more,
    )
    return plan if secure is None else with_secure_noise(plan, secure, diagnostics=False)


def training_of(task, data, plan, **more):
    return Training(task, data, plan, SiteSum(plan.noisy_steps), **more)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_round_is_a_step_along_the_sum_over_the_expected_records(make_family, mode):
    task, data = make_family("softmax", (6, 3, 9))
    plan = plan_of(data)
    training = training_of(task, data, plan, mode=mode)
    start, cohort = training.start(), CohortData(data, np.arange(3))
    batch = poisson_batch(plan.noisy_steps, cohort, 1, 0, training.streams)
    trajectory = gradients_of(task, mode, data).trajectory(start.params, cohort, spanned=False)
    total = trajectory.clipped_sum(None, batch, plan.clip(start.adaptive_state, 1)).sum(dim=0)
    (first, *_) = train(training)
    assert torch.allclose(first.state.params - start.params, -total / (0.5 * 18), atol=1e-6)


@pytest.mark.parametrize("share", [WHOLE, PART])
@pytest.mark.parametrize("secure", [False, True])
def test_the_sum_of_all_sites_has_the_noise_that_is_accounted(
    make_family, monkeypatch, share, secure
):
    """Without gradients, n sites' noise adds up to the multiplier of the line about the sum."""
    task, data = make_family("softmax", (6, 3, 9, 4))
    plan = plan_of(data, share=share, multiplier=2.0, secure=task.size if secure else None)
    work, rows = SiteSum(plan.noisy_steps), []
    looped = gradients_of(task, Mode.LOOPED, data)
    silence(monkeypatch)
    for repetition in range(60):
        streams = Streams(repetition, secure)
        total = torch.zeros(task.size, dtype=torch.float64)
        for site in range(4):
            cohort = CohortData(data, np.array([site]))
            asked = round_of(plan, task, cohort.ids, streams)
            report = client_report(work, plan, ClientBatch.from_round(asked, cohort, looped))
            assert report.reports.rows.dtype is torch.float64
            total += report.reports.rows[0]
        rows.append(total)
    noise = torch.cat(rows).numpy()
    statistic = float((noise**2).sum() / (plan.release.together * 0.1) ** 2)
    assert stats.chi2.sf(statistic, len(noise)) > ALARM
    assert stats.chi2.cdf(statistic, len(noise)) > ALARM
    expected = 2.0 if share == PART else 4.0
    assert plan.release.together == pytest.approx(expected)


def silence(monkeypatch):
    """No record has a gradient."""
    from fedveil.training.gradients import modes

    def nothing(self, moved, batch, clip):
        return torch.zeros(len(self._cohort), self.width)

    def exactly_nothing(self, moved, slots, clip, grid):
        return torch.zeros(self.width, dtype=torch.float64)

    monkeypatch.setattr(modes.LoopedTrajectory, "clipped_sum", nothing)
    monkeypatch.setattr(modes.LoopedTrajectory, "clipped_sum_on_grid", exactly_nothing)


def round_of(plan, task, ids, streams):
    from fedveil.privacy.release import Round

    state = plan.first_state(task.parameters)
    return Round(1, ids, task.parameters, plan.clip(state, 1), state, streams)


def test_secure_sums_stay_on_the_grid_up_to_the_server(make_family):
    task, data = make_family("softmax", (6, 3, 9))
    plan = plan_of(data, multiplier=2.0, secure=task.size)
    from fedveil.privacy.noise.mechanisms import GaussianMechanism

    own = plan.noisy_steps.multiplier
    grid = GaussianMechanism(own).grid(own * 0.1, task.size)
    training = training_of(task, data, plan)
    state = training.start()
    asked = training.round(1, np.arange(3), state)
    cohort = training.engine.run(asked)
    assert grid.holds(cohort.total)
    assert cohort.total.any()


def test_a_share_that_is_missing_leaves_the_model_where_it_is(make_family, open_ledger):
    task, data = make_family("softmax", (6, 3, 9))
    plan = plan_of(data, multiplier=2.0)
    training = training_of(task, data, plan)
    ledger, state = open_ledger(plan), training.start()
    asked = training.begin(state, ledger)
    cohort = training.engine.run(asked)
    cohort.weight -= 1.0
    result = training.end(asked, state, cohort, ledger)
    assert torch.equal(result.state.params, state.params)
    assert ledger.charged() == 1


def test_the_work_and_the_plan_go_together(make_family):
    task, data = make_family("softmax", (6, 3, 9))
    plan = plan_of(data)
    with pytest.raises(BadInput, match="make the work as SiteSum"):
        Training(task, data, plan, SiteSum(NoisySteps(0.5, 1, 7.0)))
    with pytest.raises(BadInput, match="go together"):
        Training(task, data, plan, ClientDpSgd(plan.noisy_steps, lr=1.0))
    steps = dp_sgd(Everyone(), 3, 0.1, rate=0.5, steps=1, rounds=1, budget=FREE, multiplier=1.0)
    with pytest.raises(BadInput, match="go together"):
        Training(task, data, steps, SiteSum(steps.noisy_steps))
    with pytest.raises(BadInput, match="make it as SiteSum"):
        SiteSum(NoisySteps(0.5, 2, 1.0))


@pytest.mark.parametrize("share", [WHOLE, PART])
def test_what_breaks_a_claim_about_the_sum_is_refused(make_family, share):
    """A robust aggregate publishes more than the sum, and an attacker knows its own noise."""
    task, data = make_family("softmax", (6, 3, 9, 4, 5, 6))
    plan = plan_of(data, share=share)
    with pytest.raises(BadInput, match="looks at updates one by one"):
        training_of(task, data, plan, aggregate=Krum(1))
    with pytest.raises(BadInput, match="counts on the noise of every site"):
        training_of(task, data, plan, participants=ReportAttack(lambda round, ids, rows: rows))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("missing", [(), (1,), (0, 4)])
def test_masked_sums_are_those_in_the_clear_to_the_last_bit(
    make_family, open_ledger, monkeypatch, missing, workers
):
    task, data = make_family("softmax", (6, 3, 9, 4, 5))
    plan = plan_of(data, multiplier=2.0, secure=task.size, threshold=3, honest=5, masks=True)
    training = training_of(task, data, plan, workers=workers)
    ledger, state, seen = open_ledger(plan), training.start(), []
    asked = training.begin(state, ledger)
    cohort = training.engine.run(asked)
    training.engine.close()
    reports = {
        int(site): row
        for ids, rows in cohort.updates_by_client
        for site, row in zip(ids, rows, strict=True)
    }
    assert sorted(reports) == [0, 1, 2, 3, 4]
    assert all(row.dtype is torch.float64 for row in reports.values())
    kept = [site for site in reports if site not in missing]
    cohort.updates_by_client[:] = [(np.array([site]), reports[site][None]) for site in kept]
    in_clear = torch.stack([reports[site] for site in kept]).sum(dim=0)
    cohort.total.fill_(7.0)
    cohort.weight -= len(missing)
    from fedveil.privacy.releases import secure_sum

    def watched(vectors, *numbers):
        seen.append(len(vectors))
        return rehearse(vectors, *numbers)

    monkeypatch.setattr(secure_sum, "rehearse", watched)
    result = training.end(asked, state, cohort, ledger)
    assert seen == [5]
    expected = state.params + (in_clear / (0.5 * data.records)).float()
    assert torch.equal(result.state.params, expected)


def test_a_masked_sum_below_its_threshold_is_thrown_away(make_family, open_ledger):
    task, data = make_family("softmax", (6, 3, 9, 4, 5))
    plan = plan_of(data, multiplier=2.0, secure=task.size, threshold=3, masks=True)
    training = training_of(task, data, plan)
    ledger, state = open_ledger(plan), training.start()
    asked = training.begin(state, ledger)
    cohort = training.engine.run(asked)
    cohort.updates_by_client[:] = cohort.updates_by_client[:2]
    cohort.weight = 2.0
    result = training.end(asked, state, cohort, ledger)
    assert torch.equal(result.state.params, state.params)
    assert ledger.charged() == 1


def test_masks_are_for_integers(make_family, open_ledger):
    task, data = make_family("softmax", (6, 3, 9))
    plan = plan_of(data, multiplier=2.0, threshold=2, masks=True)
    with pytest.raises(BadInput, match="these reports are not on a grid"):
        next(train(training_of(task, data, plan)))


def test_a_site_may_be_missing_down_to_the_threshold(make_family, open_ledger):
    task, data = make_family("softmax", (6, 3, 9, 4, 5))
    for answered, moves in ((5, True), (3, True), (2, False)):
        plan = plan_of(data, multiplier=2.0, threshold=3)
        training = training_of(task, data, plan)
        ledger, state = open_ledger(plan), training.start()
        asked = training.begin(state, ledger)
        cohort = training.engine.run(asked)
        cohort.weight = float(answered)
        result = training.end(asked, state, cohort, ledger)
        assert torch.equal(result.state.params, state.params) != moves
