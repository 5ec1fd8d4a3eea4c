"""What leaves a training beside its model: owners' means, priced metrics, diagnostics, times."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.data.provenance import PUBLIC
from fedveil.models.metrics import cross_entropy, metric_of
from fedveil.models.task import Task
from fedveil.privacy.clip_schedules import Fixed
from fedveil.privacy.priced_metrics import priced_metrics
from fedveil.privacy.releases.central import central
from fedveil.privacy.sampling import Everyone
from fedveil.privacy.secure import planned_for, with_secure_noise
from fedveil.training.evaluate import owner_means, owners_to_measure, priced_names
from fedveil.training.session import Training, train
from fedveil.training.work import OneGradient

CLIENTS, ROUNDS = 30, (1, 2)


def with_test(data, owners):
    return replace(data, test_owners=np.array(owners, dtype=np.int64))


def without_test(data):
    return replace(data, test_x=data.test_x[:0], test_y=data.test_y[:0], test_owners=None)


@pytest.fixture
def clients(make_data):
    return make_data((3, 2) * (CLIENTS // 2))


@pytest.fixture
def held_out(clients):
    """20 test records of 10 owners, in no order."""
    return with_test(clients, [-2 - (7 * k % 10) for k in range(20)])


def task_of(metrics=("accuracy",)):
    torch.manual_seed(0)
    return Task(nn.Linear(6, 3), cross_entropy, list(metrics))


def training_of(data, *, secure=False, names=("accuracy", "loss"), task=None, **rest):
    owners = owners_to_measure(data)
    made = planned_for if secure else lambda budget: budget
    metrics = priced_metrics(
        names,
        len(owners),
        budget=made(fv.Budget(1.0, 1e-3)),
        rounds=ROUNDS,
        loss_clip=2.0,
        of_clients=owners.of_clients,
    )
    plan = central(
        *(Everyone(), data.clients, Fixed(1.0)),
        rounds=2,
        budget=made(fv.Budget(4.0, 1e-3)),
        metrics=metrics if owners.of_clients else None,
    ).measuring(metrics, 1)
    task = task or task_of()
    if secure:
        plan = with_secure_noise(plan, task.size, diagnostics=False)
    return Training(task=task, data=data, plan=plan, work=OneGradient(), workers=1, **rest)


# On whose records.


def test_held_out_owners_come_first(held_out):
    owners = owners_to_measure(held_out)
    assert (len(owners), owners.of_clients) == (10, False)
    for k in range(10):
        rows = owners.record_rows[owners.offsets[k] : owners.offsets[k + 1]]
        assert len(rows) == 2
        assert len(set(held_out.test_owners[rows])) == 1


def test_public_and_clients_rows_beside_held_out_owners_are_left_out(clients):
    data = with_test(clients, [-2] * 3 + [-3] * 4 + [PUBLIC] * 5 + [1] * 8)
    owners = owners_to_measure(data)
    assert (len(owners), owners.of_clients) == (2, False)
    assert sorted(owners.record_rows) == list(range(7))


def test_clients_on_their_own_test_records(clients):
    owners = owners_to_measure(with_test(clients, [4] * 12 + [0] * 8))
    assert (len(owners), owners.of_clients) == (2, True)
    assert np.diff(owners.offsets).tolist() == [8, 12]


def test_clients_on_all_their_records_where_there_is_no_test_split(clients):
    owners = owners_to_measure(without_test(clients))
    assert (len(owners), owners.of_clients) == (CLIENTS, True)
    assert np.array_equal(owners.offsets, clients.offsets)


def test_public_records_have_no_price(clients):
    with pytest.raises(BadInput, match="nothing to protect; omit it"):
        owners_to_measure(clients)


def test_records_elsewhere_are_not_measured(clients, held_out):
    """Not even those that the server has of them: sites count what they release themselves."""
    for data in (without_test(clients), with_test(clients, [0] * 10 + [1] * 10)):
        with pytest.raises(BadInput, match="at their sites"):
            owners_to_measure(data.at_sites([f"client-{k}" for k in range(CLIENTS)]))
    assert len(owners_to_measure(held_out.at_sites(["a", "b"]))) == 10


def test_an_owner_of_many_records_is_computed_in_pieces(make_data, monkeypatch):
    data, task = without_test(make_data((7, 1, 11))), task_of()
    asked = (task, task.parameters, owners_to_measure(data), ("accuracy", "loss"), 2.0)
    whole = owner_means(*asked)
    monkeypatch.setattr("fedveil.training.evaluate.BATCH", 3)
    assert torch.allclose(owner_means(*asked), whole, atol=1e-6)


# What they come to.


def by_hand(task, data, owners, name, clip):
    found = []
    for k in range(len(owners)):
        rows = owners.record_rows[owners.offsets[k] : owners.offsets[k + 1]]
        x, y = torch.tensor(owners.x[rows]), torch.tensor(owners.y[rows])
        each = task.measure_batch(task.parameters, x, y).per_example[name].double()
        found.append(float((each / clip).clamp(0, 1).mean()))
    return found


def test_every_owner_counts_by_the_mean_of_its_records(clients):
    data, task = without_test(clients), task_of()
    owners = owners_to_measure(data)
    found = owner_means(task, task.parameters, owners, ("accuracy", "loss"), 0.9)
    for column, (name, clip) in enumerate((("accuracy", 1.0), ("loss", 0.9))):
        hand = by_hand(task, data, owners, name, clip)
        assert found[:, column].tolist() == pytest.approx(hand, abs=1e-6)
    assert float(found[:, 1].max()) == 1.0  # some losses are above the clip


def test_an_owner_s_row_depends_on_nobody_else_to_the_last_bit(held_out):
    task, names = task_of(), ("accuracy", "loss")
    before = owner_means(task, task.parameters, owners_to_measure(held_out), names, 3.0)
    x = held_out.test_x.copy()
    x[held_out.test_owners == -2] *= 1e6
    changed = replace(held_out, test_x=x)
    after = owner_means(task, task.parameters, owners_to_measure(changed), names, 3.0)
    moved = (before != after).any(dim=1)
    assert int(moved.sum()) == 1


def test_a_metric_that_sees_the_whole_batch_sees_one_owner(held_out):
    """`torch.take` reads the first records of what it is given."""

    def first(outputs, targets):
        return torch.take(torch.sigmoid(outputs), torch.zeros(len(targets), dtype=torch.long))

    task, names = task_of([first]), ("first", "loss")
    before = owner_means(task, task.parameters, owners_to_measure(held_out), names, 3.0)
    x = held_out.test_x.copy()
    x[held_out.test_owners == -2] *= 1e6
    changed = replace(held_out, test_x=x)
    after = owner_means(task, task.parameters, owners_to_measure(changed), names, 3.0)
    assert int((before != after).any(dim=1).sum()) == 1


def test_clients_own_test_records_need_a_price_beside_secure_noise(clients):
    data = with_test(clients, [0] * 10 + [1] * 10)
    training = training_of(data, secure=True)
    assert training.plan.metrics.of_clients
    plan = replace(training.plan, metrics=None)
    with pytest.raises(BadInput, match=r"give metrics a price \(evaluate\.epsilon\)"):
        Training(task=task_of(), data=data, plan=plan, work=OneGradient())


def test_a_diverged_model_is_measured_as_the_worst(held_out):
    task = task_of()
    broken = torch.full_like(task.parameters, math.nan)
    owners = owners_to_measure(held_out)
    found = owner_means(task, broken, owners, ("accuracy", "loss"), 2.0)
    assert found.tolist() == [[0.0, 1.0]] * 10


def test_metrics_that_are_no_means_from_0_to_1_are_refused():
    for name in ("f1", "auroc", "perplexity"):
        with pytest.raises(BadInput, match=f"metric '{name}' is not one"):
            priced_names(task_of([name]))
    assert priced_names(task_of(["top-2", "accuracy"])) == ("top-2", "accuracy", "loss")


def test_a_metric_of_one_s_own_is_cut_to_0_and_1(held_out):
    def wild(outputs, targets):
        return torch.full((len(targets),), 7.0)

    task = task_of([wild])
    owners = owners_to_measure(held_out)
    found = owner_means(task, task.parameters, owners, ("wild", "loss"), 2.0)
    assert found[:, 0].tolist() == [1.0] * 10


def test_different_metrics_of_one_name_share_no_noise(held_out):
    torch.manual_seed(0)
    layer = nn.Linear(6, 3)
    tasks = [Task(layer, cross_entropy, {"hits": m}) for m in (fv.correct, metric_of("top-2"))]
    found = [training_of(held_out, names=("hits", "loss"), task=task).digest for task in tasks]
    assert found[0] != found[1]


def test_metrics_of_clients_claim_nothing_by_themselves(clients):
    """Models depend on the same clients, and metrics with them."""
    training = training_of(without_test(clients))
    assert training.plan.metrics.of_clients
    claims = training.plan.claims(training.plan.rounds)
    assert {claim.covers for claim in claims} == {"updates and metrics"}


def test_the_whole_plan_has_one_source_of_noise(held_out):
    seeded, secure = (training_of(held_out, secure=s).plan for s in (False, True))
    for plan, metrics in ((seeded, secure.metrics), (secure, seeded.metrics)):
        with pytest.raises(BadInput, match="some of the plan's lines have secure noise"):
            replace(plan, metrics=metrics).check_lines()


def test_statistics_of_the_owners_that_are_paid_for_are_refused(held_out):
    with pytest.raises(BadInput, match="means were fitted on their records in the clear"):
        training_of(replace(held_out, fitted_on_test="means"))


# A training with them.


@pytest.mark.parametrize("secure", [False, True])
def test_what_is_measured_is_noisy_and_close_to_the_truth(held_out, secure):
    """Within six intervals of the true mean: one false alarm in about 1e31."""
    training = training_of(held_out, secure=secure)
    results = list(train(training))
    for result in results:
        means = owner_means(
            *(training.task, result.state.params, owners_to_measure(held_out)),
            *(("accuracy", "loss"), 2.0),
        ).mean(dim=0)
        for name, true, unit in zip(("accuracy", "loss"), means, (1, 2.0), strict=True):
            width = result.metrics[f"{name}/interval"]
            assert width == training.plan.metrics.intervals[name]
            assert 0 < abs(result.metrics[name] - float(true) * unit) < 6 * width


def test_a_measurement_is_charged_before_it_is_computed(held_out, monkeypatch):
    training = training_of(held_out)
    ledger, order = training.new_ledger(), []
    charge = ledger.charge_measurement

    def noted(round):
        order.append(("charge", round))
        return charge(round)

    monkeypatch.setattr(ledger, "charge_measurement", noted)
    monkeypatch.setattr(
        "fedveil.training.gate.owner_means",
        lambda *a, **k: order.append("measure") or torch.zeros(10, 2, dtype=torch.float64),
    )
    list(training.rounds(training.start(), ledger))
    assert order == [("charge", 1), "measure", ("charge", 2), "measure"]


def test_what_the_ledger_does_not_allow_is_not_measured(held_out, monkeypatch):
    training = training_of(held_out)
    ledger = training.new_ledger()
    monkeypatch.setattr(ledger, "charge_measurement", lambda round: False)
    monkeypatch.setattr("fedveil.training.gate.owner_means", None)
    assert [r.metrics for r in training.rounds(training.start(), ledger)] == [{}, {}]


def test_nothing_is_measured_in_the_clear_beside_a_price(held_out, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("measured in the clear")

    training = training_of(held_out, every=1)
    monkeypatch.setattr("fedveil.training.engines.serial.measure_batch", forbidden)
    monkeypatch.setattr("fedveil.training.evaluate.measure_batch", forbidden)
    monkeypatch.setattr("fedveil.training.session.over_clients", forbidden)
    results = list(train(training))
    gate = training.gate
    assert gate.first_numbers(training.start().params) == {}
    said = gate.last([r.numbers() for r in results], results[-1].state.params)
    assert said["metrics"] == {n: results[-1].metrics[n] for n in ("accuracy", "loss")}
    assert said["measured_after"] == 2
    assert gate.last([], results[-1].state.params)["metrics"] == {}


def test_the_claims_say_nothing_of_test_records_in_the_clear(held_out):
    texts = {text for c in training_of(held_out).plan.claims(2) for text in c.assumptions}
    assert not any("in the clear" in text for text in texts)


def test_across_clients_is_refused_beside_a_price_on_the_same_records(clients, held_out):
    with pytest.raises(BadInput, match=r"evaluate\.clients would measure in the clear"):
        training_of(without_test(clients), clients_every=1)
    assert training_of(held_out, clients_every=1).clients_every == 1


def test_plans_of_other_metrics_or_owners_are_refused(held_out, clients):
    with pytest.raises(BadInput, match="make the plan for this task"):
        training_of(held_out, names=("top-2", "loss"))
    other = training_of(with_test(clients, [-2] * 10 + [-3] * 10)).plan
    with pytest.raises(BadInput, match="2 held-out owners and the data have 10"):
        Training(task=task_of(), data=held_out, plan=other, work=OneGradient())


# Diagnostics.


def test_with_secure_noise_a_round_s_result_holds_nothing_private(held_out):
    for result in train(training_of(held_out, secure=True)):
        private = (result.clients, result.clipped, result.snr, result.seconds)
        assert private == (None,) * 4
        assert (result.refused, result.over_clients, result.notes) == ((), {}, {})
        assert result.numbers()["refused"] is None


def test_diagnostics_of_secure_noise_are_named_by_the_claim_or_refused(held_out):
    with pytest.raises(BadInput, match="so that its claims say so"):
        training_of(held_out, secure=True, diagnostics=True)


def test_times_are_told_with_diagnostics_only(held_out):
    shown = training_of(held_out).gate.timing(10.0, 5, 40)
    assert shown == {"seconds_per_round": 2.0, "client_updates_per_second": 4.0}
    hidden = training_of(held_out, diagnostics=False).gate.timing(10.0, 5, 40)
    assert set(hidden.values()) == {None}


def test_names_of_refused_clients_are_told_with_diagnostics_only(held_out):
    training = training_of(held_out)
    result = replace(next(train(training)), refused=(0, 2))
    assert training.gate.refused_names(result) == ["client-0", "client-2"]
    hidden = training_of(held_out, diagnostics=False).gate
    assert hidden.refused_names(result) == []
    assert hidden.result(result).refused == ()
