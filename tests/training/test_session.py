"""`Training` and `train`: parts that are checked together, and whole trainings."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil.attacks.adversary import ReportAttack
from fedveil.base.errors import BadInput
from fedveil.models.zoo import build_task
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.clip_schedules import Fixed
from fedveil.privacy.plan import unprotected
from fedveil.privacy.releases.central import central
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson
from fedveil.training.cohort import Batches
from fedveil.training.evaluate import evaluate
from fedveil.training.gradients.modes import Mode
from fedveil.training.server import SgdServer, Weights
from fedveil.training.session import Training, train
from fedveil.training.work import ClientSgd, OneGradient


def training_of(task, data, **changes):
    parts = {"plan": unprotected(Everyone(), data.clients, rounds=3), "work": OneGradient()}
    return Training(task=task, data=data, **{**parts, **changes})


def private_plan(data, rounds=3, **changes):
    arguments = {"budget": Budget(float("inf"), 1e-3), "multiplier": 1.0, **changes}
    return central(Poisson(0.5), data.clients, Fixed(0.5), rounds=rounds, **arguments)


@pytest.fixture(params=["softmax", "linear", "mlp", "small-cnn"])
def family(request, make_family):
    return make_family(request.param)


def test_modes_agree_on_whole_private_trainings(family):
    task, data = family
    work = ClientSgd(Batches(3, epochs=2), lr=0.05, momentum=0.5)
    ends = []
    for mode in Mode:
        training = training_of(task, data, plan=private_plan(data, 2), work=work, mode=mode)
        start = task.parameters.clone()
        *_, last = train(training)
        task.parameters.copy_(start)
        ends.append(last.state.params)
    assert float((ends[0] - ends[1]).norm() / ends[1].norm()) < 1e-5


def test_one_client_and_one_full_batch_step_is_plain_sgd(make_data, task):
    data = make_data(sizes=(12,))
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    flat = task.parameters.clone().requires_grad_()
    optimiser = torch.optim.SGD([flat], lr=0.4)
    for _ in range(3):
        optimiser.zero_grad()
        task.losses(task.named(flat), x, y).mean().backward()
        optimiser.step()
    work = ClientSgd(Batches(0, epochs=1), lr=0.4)
    *_, last = train(training_of(task, data, work=work))
    assert torch.allclose(last.state.params, flat.detach(), rtol=1e-5, atol=1e-7)


def test_fedsgd_by_examples_is_gradient_descent_on_all_records(task, data):
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    flat = task.parameters.clone().requires_grad_()
    optimiser = torch.optim.SGD([flat], lr=0.7)
    for _ in range(3):
        optimiser.zero_grad()
        task.losses(task.named(flat), x, y).mean().backward()
        optimiser.step()
    training = training_of(task, data, server=SgdServer(lr=0.7), weights=Weights.EXAMPLES)
    *_, last = train(training)
    assert torch.allclose(last.state.params, flat.detach(), rtol=1e-5, atol=1e-7)


def test_train_leaves_the_result_in_the_module(task, data):
    *_, last = train(training_of(task, data))
    assert torch.equal(task.parameters, last.state.params)
    assert task.parameters.any()


def test_training_twice_gives_the_same_model(task, data):
    training = training_of(task, data, plan=private_plan(data))
    first, second = ([r.state.params for r in train(training)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_seed_decides_noise_and_cohorts(task, data):
    ends = []
    for seed in (1, 1, 2):
        training = training_of(task, data, plan=private_plan(data), seed=seed)
        ends.append(next(iter(train(training))).state.params)
        task.parameters.zero_()
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_the_budget_ends_a_training(task, data):
    def plan_for(budget):
        return central(
            Everyone(), data.clients, Fixed(0.5), rounds=5, budget=budget, multiplier=1.0
        )

    free = plan_for(Budget(float("inf"), 1e-3)).lines[0]
    limit = (free.claims(2)[0].epsilon + free.claims(3)[0].epsilon) / 2
    plan = plan_for(Budget(limit, 1e-3))
    done = list(train(training_of(task, data, plan=plan)))
    assert len(done) == 2
    assert done[-1].metrics


def test_bad_reports_are_named_and_training_goes_on(task, data):
    def silent(round, ids, reports):
        reports[np.isin(ids, [1, 4])] = torch.nan
        return reports

    plan = central(
        Everyone(),
        data.clients,
        Fixed(0.5),
        rounds=3,
        budget=Budget(float("inf"), 1e-3),
        multiplier=1.0,
    )
    done = list(train(training_of(task, data, plan=plan, participants=ReportAttack(silent))))
    assert [result.refused for result in done] == [(1, 4)] * 3
    assert bool(torch.isfinite(done[-1].state.params).all())


def test_measuring_every_few_rounds_includes_the_last(task, data):
    plan = unprotected(Everyone(), data.clients, rounds=5)
    measured = [bool(r.metrics) for r in train(training_of(task, data, plan=plan, every=3))]
    assert measured == [False, False, True, False, True]


def test_evaluation_is_the_mean_over_the_test_split(task, data):
    torch.manual_seed(0)
    params = torch.randn(task.size)
    x, y = torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)
    outputs = task.outputs(task.named(params), x)
    expected = {
        "loss": float(torch.nn.functional.cross_entropy(outputs, y)),
        "accuracy": float((outputs.argmax(1) == y).float().mean()),
    }
    for batch in (1, 7, 1000):
        assert evaluate(task, params, data, batch) == pytest.approx(expected, rel=1e-5)


def test_weights_by_examples_are_refused_with_noise(task, data):
    with pytest.raises(BadInput, match=r"server.weights is 'examples' under central DP"):
        training_of(task, data, plan=private_plan(data), weights=Weights.EXAMPLES)


def test_a_plan_for_other_data_is_refused(task, data):
    with pytest.raises(BadInput, match="plan is for 9 clients and the data have 5"):
        training_of(task, data, plan=unprotected(FixedSize(2), 9, rounds=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"every": 0}, "every is 0"), ({"chunk": -1}, "chunk is -1")],
)
def test_settings_out_of_range_are_refused(task, data, changes, message):
    with pytest.raises(BadInput, match=message):
        training_of(task, data, **changes)


def test_records_that_are_not_finite_are_refused(task, data):
    x = data.x.copy()
    x[7, 0] = np.nan
    with pytest.raises(BadInput, match=r"x row 7 \(client 'client-1'\) is not finite"):
        training_of(task, replace(data, x=x))


def test_labels_and_features_that_do_not_fit_the_model_are_refused(make_data, task):
    with pytest.raises(BadInput, match="does not fit records of shape"):
        training_of(task, make_data(shape=(4,)))
    with pytest.raises(BadInput, match="3 outputs and the data 9 labels"):
        training_of(task, make_data(classes=9))


def test_mode_and_chunk_are_filled_in_and_kept_when_given(task, data):
    assert training_of(task, data).engine.mode is Mode.VECTORISED
    assert training_of(task, data).engine.chunk > 0
    given = training_of(task, data, mode=Mode.LOOPED, chunk=3).engine
    assert (given.mode, given.chunk) == (Mode.LOOPED, 3)


def test_a_linear_model_learns(make_data):
    data = make_data(sizes=(30, 20), classes=0)
    data = replace(data, y=data.x.sum(1), test_y=data.test_x.sum(1))
    task = build_task("linear", data.record_shape, 0, seed=1, hidden=())
    plan = unprotected(Everyone(), data.clients, rounds=30)
    *_, last = train(training_of(task, data, plan=plan, work=ClientSgd(Batches(5, epochs=1), 0.05)))
    assert last.metrics["loss"] < 1e-3
