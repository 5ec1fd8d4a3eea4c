"""The parts of a task are refused by name, one line each, before anything is done with them."""

import pytest
from torch import nn

from fedveil.errors import BadInput
from fedveil.models.parts import TAKEN, check_parts
from fedveil.models.task import Task, correct, cross_entropy
from fedveil.training.round import RoundResult


def test_parts_that_are_what_they_are_called():
    for module, metrics, size in (
        (nn.Linear(2, 3), {}, 9),
        (nn.EmbeddingBag(5, 3), {"accuracy": correct}, 15),
    ):
        check_parts(module, cross_entropy, metrics)
        assert Task(module, cross_entropy, metrics).size == size


@pytest.mark.parametrize(
    ("module", "loss", "metrics", "message"),
    [
        (None, cross_entropy, {}, "module is None"),
        (nn.Linear, cross_entropy, {}, "an instance of torch.nn.Module"),
        (nn.Linear(2, 3), None, {}, "loss is None"),
        (nn.Linear(2, 3), cross_entropy, [correct], "metrics is ["),
        (nn.Linear(2, 3), cross_entropy, {"accuracy": 5}, "metric 'accuracy' is 5"),
        (nn.Linear(2, 3), cross_entropy, {3: correct}, "metric 3 has a name"),
    ],
)
def test_parts_that_are_not(module, loss, metrics, message):
    with pytest.raises(BadInput) as refusal:
        check_parts(module, loss, metrics)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", sorted(TAKEN))
def test_a_metric_cannot_overwrite_a_number_of_the_run(name):
    with pytest.raises(BadInput, match=f"metric '{name}' has a name that is taken"):
        check_parts(nn.Linear(2, 3), cross_entropy, {name: correct})


def test_every_number_of_a_round_is_taken():
    fields = dict.fromkeys(RoundResult.__dataclass_fields__)
    result = RoundResult(**{**fields, "metrics": {}, "refused": (), "spent": lambda: None})
    assert set(result.numbers()) <= TAKEN
