"""What makes two trainings the same: their parts, told in the same way in every process."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

from fedveil.privacy.identity import LATER, identity, seed_of
from fedveil.privacy.steps import NoisySteps
from fedveil.training.batches import Batches
from fedveil.training.directions import Adam
from fedveil.training.dp_sgd import ClientDpSgd
from fedveil.training.rates import RateSchedule, RateShape
from fedveil.training.server import AdamServer, SgdServer
from fedveil.training.work import ClientSgd


@dataclass(frozen=True)
class Pushed:
    lr: float
    drag: float = field(default=0.0, metadata=LATER)


@pytest.mark.parametrize("other", [Pushed(0.25), Pushed(0.5, 0.25)])
def test_other_parts_have_other_seeds(other):
    assert seed_of(Pushed(0.5)) == seed_of(Pushed(0.5, 0.0))
    assert seed_of(Pushed(0.5)) != seed_of(other)


TOLD = {
    "sgd": (
        ClientSgd(Batches(0, epochs=1), 0.5),
        "fedveil.training.work.ClientSgd(batches=fedveil.training.batches.Batches(size=0,epochs=1,"
        "steps=None),lr=0.5,momentum=0.0,weight_decay=0.0,decay=None)",
    ),
    "dp-sgd": (
        ClientDpSgd(NoisySteps(0.5, 1, 2.0), 0.5),
        "fedveil.training.dp_sgd.ClientDpSgd(noisy=fedveil.privacy.steps.NoisySteps(rate=0.5,"
        "steps=1,multiplier=2.0,nominal=None),lr=0.5)",
    ),
    "server": (SgdServer(), "fedveil.training.server.SgdServer(lr=1.0,momentum=0.0)"),
    "adam": (
        AdamServer(),
        "fedveil.training.server.AdamServer(lr=0.01,beta1=0.9,beta2=0.99,floor=0.001)",
    ),
}


@pytest.mark.parametrize(("part", "text"), TOLD.values(), ids=TOLD)
def test_what_a_training_draws_does_not_change_with_what_others_may_choose(part, text):
    """Runs that were begun before a choice was there repeat and resume as they were."""
    assert identity(part) == text
    other = replace(part, schedule=RateSchedule(RateShape.STEP, 5))
    assert identity(other).startswith(f"{text[:-1]},schedule=fedveil.training.rates.RateSchedule(")


def test_every_choice_draws_for_itself():
    changes = [{}, {"proximal": 0.1}, {"adam": Adam()}, {"adam": Adam(0.5)}, {"momentum": 0.1}]
    changes += [{"schedule": RateSchedule(shape, 5)} for shape in RateShape]
    works = [ClientSgd(Batches(0, epochs=1), 0.5, **change) for change in changes]
    works += [ClientDpSgd(NoisySteps(0.5, 1, 2.0), 0.5, **change) for change in changes]
    assert len({seed_of(work) for work in works}) == len(works)


OWN = """
from torch import nn

SCALE = {scale}

def helper(x):
    return x * {helped}

def recursive(x, depth=3):
    return x if depth == 0 else helper(recursive(x, depth - 1))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def features(self, x):
        return x + {shift}

    def forward(self, x):
        return self.layer(self.features(x))

class Reading(Net):
    def forward(self, x):
        return self.layer(x * SCALE)

class Helped(Net):
    def forward(self, x):
        return [self.layer(helper(y)) for y in x]

class Recursive(Net):
    def forward(self, x):
        return self.layer(recursive(x))
"""


def written(kind, name="mine", **changes):
    """A module of a class in a file of one's own, as it is or written again."""
    file = {"__name__": name}
    exec(OWN.format(**{"scale": 2, "helped": 3, "shift": 4, **changes}), file)
    return file[kind]()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Net", {"shift": 5}),
        ("Reading", {"scale": 5}),
        ("Helped", {"helped": 5}),
        ("Recursive", {"helped": 5}),
    ],
)
def test_what_a_module_reads_and_calls_is_part_of_it(kind, changes):
    assert identity(written(kind)) == identity(written(kind))
    assert identity(written(kind)) != identity(written(kind, **changes))
    assert identity(nn.Sequential(written(kind))) != identity(
        nn.Sequential(written(kind, **changes))
    )


def test_what_it_does_not_read_is_no_part_of_it():
    assert identity(written("Net")) == identity(written("Net", scale=5, helped=5))


def test_a_function_of_no_file_has_an_identity():
    file = {}
    exec("def loss(outputs, targets): return outputs", file)
    assert identity(file["loss"]) != identity(torch.nn.functional.relu)
