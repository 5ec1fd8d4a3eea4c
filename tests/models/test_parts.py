"""The parts of a task are refused by name, one line each, before anything is done with them."""

import pytest
from torch import nn

from fedveil.base.errors import BadInput
from fedveil.models.metrics import (
    F1,
    TAKEN,
    TopK,
    correct,
    cross_entropy,
    named_metrics,
    squared_error,
)
from fedveil.models.task import Task
from fedveil.training.round import RoundResult


def test_parts_that_are_what_they_are_called():
    for module, metrics, size in (
        (nn.Linear(2, 3), {}, 9),
        (nn.EmbeddingBag(5, 3), {"accuracy": correct}, 15),
    ):
        Task(module, cross_entropy)
        assert named_metrics(metrics) == metrics
        assert Task(module, cross_entropy, metrics).size == size


@pytest.mark.parametrize(
    ("module", "loss", "metrics", "message"),
    [
        (None, cross_entropy, {}, "module is None"),
        (nn.Linear, cross_entropy, {}, "an instance of torch.nn.Module"),
        (nn.Linear(2, 3), None, {}, "loss is None"),
        (nn.Linear(2, 3), cross_entropy, correct, "metrics is <function correct"),
        (nn.Linear(2, 3), cross_entropy, "accuracy", "metrics is 'accuracy': use"),
        (nn.Linear(2, 3), cross_entropy, {"accuracy": 5}, "metric 'accuracy' is 5"),
        (nn.Linear(2, 3), cross_entropy, {"f": F1}, "metric 'f' is <class"),
        (nn.Linear(2, 3), cross_entropy, [lambda o, t: o], "has no name"),
        (nn.Linear(2, 3), cross_entropy, [F1()], "has no name"),
        (nn.Linear(2, 3), cross_entropy, ["f1", "f1"], "metric 'f1' is there twice"),
        (nn.Linear(2, 3), cross_entropy, ["auoc"], "did you mean auroc?"),
        (nn.Linear(2, 3), cross_entropy, {"mine": "top-0"}, "did you mean top-5?"),
        (
            nn.Linear(2, 3),
            cross_entropy,
            {"clients/loss/mean": correct},
            "a name that a run uses",
        ),
        (nn.Linear(2, 3), cross_entropy, {3: correct}, "metric 3 has a name"),
    ],
)
def test_parts_that_are_not(module, loss, metrics, message):
    with pytest.raises(BadInput) as refusal:
        Task(module, loss, metrics)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", sorted(TAKEN))
def test_a_metric_cannot_overwrite_a_number_of_the_run(name):
    with pytest.raises(BadInput, match=f"metric '{name}' has a name that a run uses"):
        named_metrics({name: correct})


def test_metrics_by_name_by_function_or_both():
    task = Task(nn.Linear(2, 3), cross_entropy, ["accuracy", "top-2", squared_error])
    expected = {"accuracy": correct, "top-2": TopK(2), "squared_error": squared_error}
    assert task.measures == expected
    assert Task(nn.Linear(2, 3), cross_entropy, {"mine": "f1"}).measures == {"mine": F1()}


def test_every_number_of_a_round_is_taken():
    fields = dict.fromkeys(RoundResult.__dataclass_fields__)
    empty = {"metrics": {}, "over_clients": {}, "notes": {}, "refused": ()}
    result = RoundResult(**{**fields, **empty, "spent": lambda: None, "quoted": lambda: None})
    assert set(result.numbers()) <= TAKEN
