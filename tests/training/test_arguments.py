"""What a training is built from: each argument is what it is called, or refused with one line."""

import pytest
from torch import nn

from fedveil import Task, unprotected
from fedveil.base.errors import BadInput
from fedveil.models import squared_error
from fedveil.privacy.sampling import Everyone
from fedveil.training.agreement import check_arguments
from fedveil.training.gradients.modes import Mode
from fedveil.training.server import SgdServer, Weights
from fedveil.training.work import OneGradient


@pytest.fixture
def arguments(make_data):
    data = make_data()
    return {
        "task": Task(nn.Linear(3, 1), squared_error),
        "data": data,
        "plan": unprotected(Everyone(), data.clients, rounds=1),
        "work": OneGradient(),
        "server": SgdServer(),
        "weights": Weights.UNIFORM,
        "seed": 0,
        "mode": None,
        "chunk": 0,
        "memory": 512,
        "workers": 0,
        "every": 1,
        "clients_every": None,
    }


def test_arguments_that_are_what_they_are_called(arguments):
    for changes in ({}, {"mode": Mode.LOOPED, "weights": Weights.EXAMPLES}):
        given = {**arguments, **changes}
        check_arguments(given)
        with pytest.raises(BadInput):
            check_arguments({**given, "mode": "looped"})


REFUSED = {
    "clients never measured": ({"clients_every": 0}, "clients_every is 0"),
    "mode fast": ({"mode": "fast"}, "mode is 'fast': use one of Mode.VECTORISED"),
    "mode as text": ({"mode": "looped"}, "mode is 'looped'"),
    "weights as text": ({"weights": "examples"}, "weights is 'examples'"),
    "no weights": ({"weights": None}, "weights is None"),
    "half a seed": ({"seed": 1.5}, "seed is 1.5"),
    "seed as text": ({"seed": "1"}, "seed is '1'"),
    "negative seed": ({"seed": -1}, "seed is -1"),
    "half a chunk": ({"chunk": 2.5}, "chunk is 2.5"),
    "no memory": ({"memory": 0}, "memory is 0"),
    "memory as text": ({"memory": "1G"}, "memory is '1G'"),
    "a thousand workers": ({"workers": 100_000}, "workers is 100000"),
    "half a worker": ({"workers": 0.5}, "workers is 0.5"),
    "never measured": ({"every": 0}, "every is 0"),
    "every as text": ({"every": "2"}, "every is '2'"),
    "no task": ({"task": None}, "task is None: a Task is needed"),
    "a module for a task": ({"task": nn.Linear(1, 1)}, "a Task is needed"),
    "lists for data": ({"data": [1, 2]}, "data is [1, 2]: a FederatedData is needed"),
    "a sampler for a plan": ({"plan": Everyone()}, "a PrivacyPlan is needed"),
    "a class for work": ({"work": OneGradient}, "work is"),
    "text for work": ({"work": "sgd"}, "work is 'sgd': an instance of ClientSgd"),
    "a class for a server": ({"server": SgdServer}, "server is"),
    "text for a server": ({"server": "adam"}, "server is 'adam': an instance of SgdServer"),
}


@pytest.mark.parametrize(("wrong", "message"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_are_not(arguments, wrong, message):
    with pytest.raises(BadInput) as refusal:
        check_arguments({**arguments, **wrong})
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
