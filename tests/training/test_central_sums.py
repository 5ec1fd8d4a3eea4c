"""Central DP in shares, round by round: coins at the clients, one noisy sum for the server.

Statistical tests have a false-alarm rate of 1e-6 each.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.attacks.adversary import ReportAttack
from fedveil.base.errors import BadInput
from fedveil.masking.rehearsal import rehearse
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.clip_schedules import Fixed, Quantile
from fedveil.privacy.noise import mechanisms
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.release import Round
from fedveil.privacy.releases.central_sum import central_sum
from fedveil.privacy.releases.secure_sum import report_grid
from fedveil.privacy.sampling import FixedSize, Poisson
from fedveil.privacy.secure import planned_for, with_secure_noise
from fedveil.training.aggregates import Krum
from fedveil.training.cohort import Batches, CohortData
from fedveil.training.exchange import client_report, server_sum
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.reports import ClientBatch
from fedveil.training.server import Weights
from fedveil.training.session import Training, train
from fedveil.training.work import ClientSgd

ALARM = 1e-6
FREE = Budget(math.inf, 1e-5)
SIZES = (6, 3, 9, 4, 5)
SGD = ClientSgd(Batches(0, steps=2), lr=0.5)
BITS = Quantile(0.1, 0.5, noise=6.0)


def plan_of(data, *, multiplier=2.0, rate=0.5, clip=None, secure=None, sampler=None, **more):
    given = {"threshold": 3, "honest": data.clients, **more}
    plan = central_sum(
        sampler or Poisson(rate),
        data.clients,
        clip or Fixed(0.1),
        rounds=3,
        budget=FREE if secure is None else planned_for(FREE),
        multiplier=multiplier,
        **given,
    )
    return plan if secure is None else with_secure_noise(plan, secure, diagnostics=False)


def asked_of(plan, task, ids, streams, number=1):
    state = plan.first_state(task.parameters)
    return Round(number, ids, task.parameters, plan.clip(state, number), state, streams)


def reports_of(plan, task, data, streams, ids, work=SGD, number=1):
    """The reports and statistics of clients, one by one, as sites make them."""
    looped = gradients_of(task, Mode.LOOPED, data)
    found = []
    for client in ids:
        cohort = CohortData(data, np.array([client]))
        asked = asked_of(plan, task, cohort.ids, streams, number)
        found.append(client_report(work, plan, ClientBatch.from_round(asked, cohort, looped)))
    return found


@pytest.mark.parametrize("mode", list(Mode))
def test_a_round_is_a_step_along_the_sum_of_those_whose_coin_says_so(make_family, mode):
    task, data = make_family("softmax", SIZES)
    plan = plan_of(data, multiplier=1e-6)
    training = Training(task, data, plan, SGD, mode=mode)
    start = training.start()
    coins = plan.sampler.coins(np.arange(5), 1, training.streams)
    assert 0 < coins.sum() < 5
    cohort = CohortData(data, np.arange(5))
    asked = training.round(1, np.arange(5), start)
    batch = ClientBatch.from_round(asked, cohort, gradients_of(task, mode, data))
    rows = SGD.updates(batch).rows.double()
    total = rows[torch.from_numpy(coins)].sum(dim=0)
    (first, *_) = train(training)
    moved = first.state.params - start.params
    assert torch.allclose(moved, (total / (0.5 * 5)).float(), atol=1e-5)
    assert first.clients == 5


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("answering", [3, 4, 5])
def test_every_sum_has_the_noise_that_is_accounted(make_family, answering, secure):
    """With 5 clients and a threshold of 3: whoever drops out, updates and bits alike."""
    task, data = make_family("softmax", SIZES)
    plan = plan_of(data, clip=BITS, secure=task.size if secure else None, rate=1e-9)
    rows, bits = [], []
    for repetition in range(60):
        found = reports_of(plan, task, data, Streams(repetition, secure), range(answering))
        rows.append(sum(sent.reports.rows[0] for sent in found))
        bits.append(sum(sent.statistic_values[0] for sent in found))
    scale = plan.release.multiplier * 0.1
    for noise, accounted in ((torch.cat(rows), scale), (torch.cat(bits), 6.0)):
        square, count = float((noise.double() ** 2).sum()) / accounted**2, noise.numel()
        spread = square * 3 / answering  # more answers, more noise: never less than accounted
        assert ALARM < stats.chi2.sf(spread, count) < 1 - ALARM
        assert stats.chi2.cdf(square, count) > ALARM


@pytest.mark.parametrize("secure", [False, True])
def test_a_client_that_is_not_drawn_sends_its_noise_share_and_nothing_else(make_family, secure):
    """Its report is the same whatever its records are; one that is drawn shows a difference."""
    task, data = make_family("softmax", SIZES)
    other = replace(data, x=data.x[::-1].copy())
    plan = plan_of(data, clip=BITS, rate=0.5)
    streams = Streams(5)
    coins = plan.sampler.coins(np.arange(5), 1, streams)
    assert 0 < coins.sum() < 5
    pairs = zip(
        reports_of(plan, task, data, streams, range(5)),
        reports_of(plan, task, other, streams, range(5)),
        strict=True,
    )
    for coin, (here, there) in zip(coins, pairs, strict=True):
        same = torch.equal(here.reports.rows, there.reports.rows)
        assert same != coin


def test_bits_of_clients_that_are_not_drawn_are_zero(make_family, monkeypatch):
    task, data = make_family("softmax", SIZES)
    plan, streams = plan_of(data, clip=BITS), Streams(5)
    silence(monkeypatch)
    coins = plan.sampler.coins(np.arange(5), 1, streams)
    values = [
        float(sent.statistic_values) for sent in reports_of(plan, task, data, streams, range(5))
    ]
    assert [value != 0 for value in values] == list(coins)
    assert all(abs(value) in (0.0, 0.5) for value in values)


def silence(monkeypatch):
    """Noise is drawn, put on its grid, and left out."""

    def nothing(source, scale, shape):
        return np.zeros(shape, dtype=np.int64)

    monkeypatch.setattr(mechanisms, "gaussian_int", nothing)
    monkeypatch.setattr(mechanisms, "add_normals_", lambda rows, scales, keys: rows)


def test_the_same_work_is_done_whatever_the_coin_says(make_family):
    task, data = make_family("softmax", SIZES)
    worked = []

    class Watched(ClientSgd):
        def updates(self, clients):
            worked.extend(clients.cohort.ids.tolist())
            return super().updates(clients)

    plan = plan_of(data, rate=1e-9)
    reports_of(plan, task, data, Streams(0), range(5), Watched(Batches(0, steps=2), lr=0.5))
    assert worked == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_one_client_moves_the_sum_by_one_clip_on_the_grid(make_family, monkeypatch, rate):
    """Through the real round, with the noise silenced: each client left out once."""
    task, data = make_family("softmax", SIZES)
    plan = plan_of(data, clip=replace(BITS, value=0.07), secure=task.size, rate=rate)
    silence(monkeypatch)
    monkeypatch.setattr(
        type(plan.sampler),
        "coins",
        lambda self, ids, round, streams: ids % 2 == 0,
        raising=False,
    )
    training = Training(task, data, plan, SGD)
    state = training.start()
    clip = plan.clip(state.adaptive_state, 1)
    grid = report_grid(plan, clip, task.size)

    def summed(ids):
        done = training.engine.run(training.round(1, np.array(ids), state))
        return torch.cat([done.total, done.statistic_values])

    whole = summed(range(5))
    assert grid.holds(whole)
    for left_out in range(5):
        moved = whole - summed([client for client in range(5) if client != left_out])
        assert grid.holds(moved)
        assert float(moved[:-1].norm()) <= 0.07
        if rate < 1 and left_out % 2:
            assert not moved.any()
        else:
            assert float(moved[:-1].norm()) > 0.06  # these updates are long
            assert abs(float(moved[-1])) == 0.5


@pytest.mark.parametrize("clip", [None, BITS], ids=["fixed", "quantile"])
@pytest.mark.parametrize("missing", [(), (1,), (0, 4)])
def test_masked_sums_are_those_in_the_clear_to_the_last_bit(
    make_family, open_ledger, monkeypatch, clip, missing
):
    task, data = make_family("softmax", SIZES)
    plan = plan_of(data, clip=clip, secure=task.size, masks=True)
    training = Training(task, data, plan, SGD)
    ledger, state, seen = open_ledger(plan), training.start(), []
    asked = training.begin(state, ledger)
    assert list(asked.ids) == [0, 1, 2, 3, 4]
    cohort = training.engine.run(asked)
    reports = {
        int(site): row
        for ids, rows in cohort.updates_by_client
        for site, row in zip(ids, rows, strict=True)
    }
    assert all(len(row) == task.size + plan.width for row in reports.values())
    whole = torch.cat([cohort.total, cohort.statistic_values])
    assert torch.equal(torch.stack(list(reports.values())).sum(dim=0), whole)
    kept = [site for site in reports if site not in missing]
    cohort.updates_by_client[:] = [(np.array([site]), reports[site][None]) for site in kept]
    in_clear = torch.stack([reports[site] for site in kept]).sum(dim=0)
    cohort.total.fill_(7.0)
    cohort.statistic_values.fill_(7.0)
    cohort.weight -= len(missing)
    from fedveil.privacy.releases import secure_sum

    def watched(vectors, *numbers):
        seen.append([vector is not None for vector in vectors])
        return rehearse(vectors, *numbers)

    monkeypatch.setattr(secure_sum, "rehearse", watched)
    result = training.end(asked, state, cohort, ledger)
    assert seen == [[site in kept for site in range(5)]]
    update, bits = in_clear[: task.size], in_clear[task.size :]
    assert torch.equal(result.state.params, state.params + (update / 2.5).float())
    if clip is not None:
        expected = BITS.next_value(0.1, bits, 2.5, 1)
        assert float(result.state.adaptive_state) == expected


def test_below_the_threshold_model_and_clip_stay_and_the_charge_too(make_family, open_ledger):
    task, data = make_family("softmax", SIZES)
    for answered, moves in ((5, True), (3, True), (2, False)):
        plan = plan_of(data, clip=BITS)
        training = Training(task, data, plan, SGD)
        ledger, state = open_ledger(plan), training.start()
        asked = training.begin(state, ledger)
        cohort = training.engine.run(asked)
        cohort.weight = float(answered)
        after = training.end(asked, state, cohort, ledger).state
        assert torch.equal(after.params, state.params) != moves
        assert torch.equal(after.adaptive_state, state.adaptive_state) != moves
        assert ledger.charged() == 1


def test_noise_that_is_too_long_for_a_clip_is_not_clipped_away(make_family):
    """The server takes a report as it is, bits included: noise is longer than any clip."""
    task, data = make_family("softmax", SIZES)
    plan = plan_of(data, clip=replace(BITS, noise=600.0), multiplier=100.0)
    training, streams = Training(task, data, plan, SGD), Streams(3)
    (sent,) = reports_of(plan, task, data, streams, [2])
    report, bit = sent.reports.rows[0].clone(), sent.statistic_values[0].clone()
    assert float(report.norm()) > 1.0
    assert abs(float(bit)) > 0.5
    total = training.engine.job.zero()
    asked = asked_of(plan, task, np.array([2]), streams)
    server_sum([(total, slice(None))], plan, asked, sent, torch.ones(1, dtype=torch.float64))
    assert torch.equal(total.total, report)
    assert torch.equal(total.statistic_values, bit)


@pytest.mark.parametrize("value", [1e-6, 0.1, 1e6])
def test_updates_and_bits_have_grids_of_their_own(make_family, value):
    """However long updates are: bits would not be multiples of a large clip's grid."""
    task, data = make_family("softmax", SIZES)
    plan = plan_of(data, clip=replace(BITS, value=value), secure=task.size)
    grid = report_grid(plan, plan.clip(plan.first_state(task.parameters), 1), task.size)
    for sent in reports_of(plan, task, data, Streams(0, secure=True), range(5)):
        report = torch.cat([sent.reports.rows[0], sent.statistic_values[0]])
        assert grid.holds(report)
        assert torch.equal(grid.dequantise(grid.quantise(report)), report)


def test_a_fixed_cohort_is_all_who_report(make_family, open_ledger):
    task, data = make_family("softmax", SIZES)
    plan = plan_of(data, sampler=FixedSize(4), secure=task.size, masks=True)
    training = Training(task, data, plan, SGD)
    ledger, state = open_ledger(plan), training.start()
    asked = training.begin(state, ledger)
    assert len(asked.ids) == 4
    cohort = training.engine.run(asked)
    total = cohort.total.clone()
    result = training.end(asked, state, cohort, ledger)
    assert torch.equal(result.state.params, state.params + (total / 4).float())
    assert sorted(ledger.turns(1)) == [0, 1, 1, 1, 1]


def test_the_signal_is_the_sum_of_those_who_were_drawn(make_family):
    task, data = make_family("softmax", SIZES)
    nobody = Training(task, data, plan_of(data, rate=1e-9), SGD)
    state = nobody.start()
    done = nobody.engine.run(nobody.round(1, np.arange(5), state))
    assert not done.signal.any()
    assert done.total.any()


def test_what_breaks_a_claim_about_the_sum_is_refused(make_family):
    task, data = make_family("softmax", SIZES)
    plan = plan_of(data)
    with pytest.raises(BadInput, match="looks at updates one by one"):
        Training(task, data, plan, SGD, aggregate=Krum(1))
    attack = ReportAttack(lambda round, ids, rows: rows)
    with pytest.raises(BadInput, match="counts on the noise of every site"):
        Training(task, data, plan, SGD, participants=attack)
    with pytest.raises(BadInput, match="of many records would exceed the clip"):
        Training(task, data, plan, SGD, weights=Weights.EXAMPLES)
