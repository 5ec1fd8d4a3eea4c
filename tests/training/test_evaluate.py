"""Metrics are those of the whole test split, however it is cut into batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.training import evaluate as evaluation
from fedveil.training.evaluate import check_kept, evaluate
from fedveil.training.session import Training
from fedveil.training.work import OneGradient


@pytest.fixture
def tested(data, make_data):
    """The same clients with a test split of many records."""

    def with_test(records):
        other = make_data((records,), seed=4)
        return FederatedData(data.x, data.y, data.offsets, other.x, other.y, data.classes)

    return with_test


@pytest.mark.parametrize(
    ("records", "batch"), [(1, 10), (10, 10), (11, 10), (29, 10), (2001, 1000)]
)
def test_every_record_counts_once(task, tested, records, batch):
    data = tested(records)
    torch.manual_seed(1)
    params = torch.randn(task.size)
    x, y = torch.tensor(data.test_x), torch.tensor(data.test_y)
    found = evaluate(task, params, data, batch)
    assert found["loss"] == pytest.approx(
        float(task.losses(task.named(params), x, y).double().mean())
    )
    right = (task.outputs(task.named(params), x).argmax(dim=1) == y).double().mean()
    assert found["accuracy"] == pytest.approx(float(right))


@pytest.mark.parametrize("batch", [1000, 10, 7])
def test_metrics_that_are_no_means_see_every_record(tested, batch):
    data = tested(29)
    torch.manual_seed(1)
    task = fv.Task(nn.Linear(6, 3), fv.cross_entropy, ["auroc", "accuracy", "f1"])
    outputs = task.outputs(task.named(task.parameters), torch.tensor(data.test_x)).detach()
    found = evaluate(task, task.parameters, data, batch)
    assert list(found) == ["loss", "auroc", "accuracy", "f1"]
    expected = f1_score(data.test_y, outputs.argmax(-1), average="macro")
    assert found["f1"] == pytest.approx(expected)
    scores = torch.softmax(outputs.double(), -1).numpy()
    assert found["auroc"] == pytest.approx(roc_auc_score(data.test_y, scores, multi_class="ovr"))


class Largest:
    """A metric of one's own: the largest output there is."""

    def statistics(self, outputs, targets):
        return (np.array([float(outputs.max())]),)

    def value(self, largest):
        return largest.max()


def test_a_metric_of_one_s_own_is_an_object_with_two_methods(tested):
    data, metric = tested(29), Largest()
    assert isinstance(metric, fv.models.Metric)
    task = fv.Task(nn.Linear(6, 3), fv.cross_entropy, {"largest": metric})
    outputs = task.outputs(task.named(task.parameters), torch.tensor(data.test_x))
    assert evaluate(task, task.parameters, data, 10)["largest"] == float(outputs.max())


def test_memory_is_bounded_by_a_refusal_with_the_numbers_in_it(tested, monkeypatch):
    task = fv.Task(nn.Linear(6, 3), fv.cross_entropy, ["perplexity", "auroc"])
    monkeypatch.setattr(evaluation, "MOST_KEPT", 29 * 20)  # three scores and a label
    check_kept(task, tested(29))
    for check in (check_kept, lambda task, data: evaluate(task, task.parameters, data)):
        with pytest.raises(BadInput, match=r"metric 'auroc' would keep .* 30 records"):
            check(task, tested(30))
    sums = fv.Task(nn.Linear(6, 3), fv.cross_entropy, ["perplexity", "accuracy"])
    check_kept(sums, tested(2001))


def trained(data, metrics, outputs=3, loss=fv.cross_entropy):
    task = fv.Task(nn.Linear(6, outputs), loss, metrics)
    plan = fv.unprotected(fv.samplers.Everyone(), data.clients, rounds=1)
    return Training(task, data, plan, OneGradient())


@pytest.mark.parametrize("name", ["mae", "rmse", "r2"])
def test_metrics_of_numbers_are_refused_for_labels(data, name):
    with pytest.raises(BadInput, match=f"metric '{name}' is of numbers and the data have 3 labels"):
        trained(data, [name])


@pytest.mark.parametrize("name", ["accuracy", "top-2", "f1", "f1-macro", "auroc", "perplexity"])
def test_metrics_of_labels_are_refused_for_numbers(make_data, name):
    with pytest.raises(BadInput, match=f"metric '{name}' is of labels and the data have numbers"):
        trained(make_data(classes=0), [name], 1, fv.models.squared_error)


def test_metrics_that_tell_nothing_are_refused_beforehand(data, make_data):
    with pytest.raises(BadInput, match="'top-3' is 1 for every model of 3 labels: omit it"):
        trained(data, ["top-3"])
    one = replace(data, test_y=np.zeros_like(data.test_y))
    with pytest.raises(BadInput, match="'auroc' needs two labels, and the test split has one"):
        trained(one, ["auroc"])
    trained(one, ["f1", "top-2"])
    numbers = make_data(classes=0)
    alike = replace(numbers, test_y=np.ones_like(numbers.test_y))
    with pytest.raises(BadInput, match="'r2' needs targets that differ"):
        trained(alike, ["r2"], 1, fv.models.squared_error)
    trained(alike, ["mae", "rmse"], 1, fv.models.squared_error)
