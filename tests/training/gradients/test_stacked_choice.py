"""Which modules, records and works are batched algebra, and which are left to vmap."""

import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.base.errors import BadInput
from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.privacy.clip import Clip, Norm
from fedveil.training.cohort import Batches, CohortData
from fedveil.training.gradients.linear_chains import DualTrajectory, StackedTrajectory
from fedveil.training.gradients.modes import Vectorised
from fedveil.training.gradients.trajectories import VmappedTrajectory
from fedveil.training.work import ClientSgd, OneGradient
from tests.asking import batch_of
from tests.training.gradients.chains import ROUND, STREAMS, WIDE, assert_close, away, chain, whole


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDE, 3)

    def forward(self, x):
        return self.layer(x)


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def shared():
    layer = nn.Linear(WIDE, WIDE)
    return nn.Sequential(layer, nn.Tanh(), layer)


def hooked(kind, place):
    module = chain()
    getattr(module[place], kind)(lambda *seen: None)
    return module


def watched():
    module = chain()
    module.register_forward_hook(lambda *seen: None)
    return module


def tied(name):
    module = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE))
    setattr(module[2], name, getattr(module[0], name))
    return module


def doubled(change):
    """A chain that does something other than its classes say."""
    module = nn.Sequential(nn.Flatten(), chain())
    change(module)
    return module


def twice(module, *seen):
    return 2 * seen[-1] if len(seen) == 2 else (2 * seen[0][0],)


def replace_forward(module):
    module.forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), module)


CHANGES = {
    "flatten-hook": lambda m: m[0].register_forward_hook(twice),
    "flatten-pre-hook": lambda m: m[0].register_forward_pre_hook(twice),
    "sequence-pre-hook": lambda m: m.register_forward_pre_hook(twice),
    "inner-pre-hook": lambda m: m[1].register_forward_pre_hook(twice),
    "sequence-forward": replace_forward,
    "layer-forward": lambda m: replace_forward(m[1][0]),
    "function-forward": lambda m: replace_forward(m[1][1]),
    "extra-parameter": lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(4))),
}


PICKED = {
    **{name: (lambda c=c: doubled(c), VmappedTrajectory) for name, c in CHANGES.items()},
    "tied-weights": (lambda: tied("weight"), VmappedTrajectory),
    "tied-biases": (lambda: tied("bias"), VmappedTrajectory),
    "linear": (lambda: nn.Linear(WIDE, 3), StackedTrajectory),
    "chain": (chain, StackedTrajectory),
    "flatten": (lambda: nn.Sequential(nn.Flatten(), *chain()), StackedTrajectory),
    "nested": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(WIDE, 5))),
            nn.Sequential(nn.ReLU(), nn.Linear(5, 3)),
        ),
        StackedTrajectory,
    ),
    "custom": (Custom, VmappedTrajectory),
    "custom-inside": (lambda: nn.Sequential(Custom(), nn.Linear(3, 3)), VmappedTrajectory),
    "subclass": (lambda: nn.Sequential(Halved(WIDE, 3)), VmappedTrajectory),
    "shared": (shared, VmappedTrajectory),
    "hook": (lambda: hooked("register_forward_hook", 0), VmappedTrajectory),
    "hook-on-function": (lambda: hooked("register_forward_hook", 1), VmappedTrajectory),
    "pre-hook": (lambda: hooked("register_forward_pre_hook", 0), VmappedTrajectory),
    "hook-on-sequence": (watched, VmappedTrajectory),
    "function-first": (lambda: nn.Sequential(nn.ReLU(), nn.Linear(WIDE, 3)), VmappedTrajectory),
    "flatten-late": (lambda: nn.Sequential(nn.Linear(WIDE, 3), nn.Flatten()), VmappedTrajectory),
    "softmax": (lambda: nn.Sequential(nn.Linear(WIDE, 3), nn.Softmax(1)), VmappedTrajectory),
    "parameters": (lambda: nn.Sequential(nn.Linear(WIDE, 3), nn.PReLU()), VmappedTrajectory),
    "norm": (lambda: nn.Sequential(nn.Linear(WIDE, 3), nn.LayerNorm(3)), VmappedTrajectory),
}


ALIKE = {
    *("flatten-pre-hook", "sequence-pre-hook", "inner-pre-hook", "function-forward"),
    *("custom-inside", "subclass", "hook-on-function", "pre-hook", "hook-on-sequence"),
}
"""Modules that are captured, and differ little from another of them."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in ALIKE else []) for n in PICKED]
)
def test_chains_of_linear_layers_are_batched_algebra_and_all_are_right(make_walks, name):
    module, kind = PICKED[name]
    walk, general = make_walks(module())
    assert type(walk) is kind
    for moved in (None, away(walk)):
        assert_close(walk.mean_update(moved, whole(walk)), general.mean_update(moved, whole(walk)))


@pytest.mark.parametrize("name", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_hook_that_changes_gradients_is_not_forgotten(make_walks, name):
    with pytest.raises(BadInput, match="its gradients are not those of the operators"):
        make_walks(hooked(name, 0))


@pytest.mark.parametrize(
    ("module", "shape", "kind"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 3)), (2, 3, 4), StackedTrajectory),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 3)), (24,), StackedTrajectory),
        (lambda: nn.Linear(4, 3), (6, 4), VmappedTrajectory),
        (lambda: nn.Sequential(nn.Flatten(2), nn.Linear(4, 3)), (6, 2, 2), VmappedTrajectory),
        (lambda: nn.Sequential(nn.Flatten(1, 2), nn.Linear(4, 3)), (2, 3, 4), VmappedTrajectory),
    ],
)
def test_records_with_axes_are_flattened_or_not_taken(make_walks, module, shape, kind):
    def loss(outputs, targets):
        outputs = outputs if outputs.ndim == 2 else outputs.mean(1)
        return cross_entropy(outputs, targets)

    walk, general = make_walks(module(), loss, shape=shape)
    assert type(walk) is kind
    assert_close(walk.mean_update(None, whole(walk)), general.mean_update(None, whole(walk)))


def test_records_of_integers_are_not_taken(make_data):
    data = make_data(shape=(WIDE,))
    task = Task(chain(), cross_entropy)
    whole_numbers = replace(data, x=data.x.astype(np.int64), test_x=data.test_x.astype(np.int64))
    cohort = CohortData(whole_numbers, np.arange(data.clients))
    found = Vectorised(task, whole_numbers).trajectory(task.parameters, cohort, spanned=True)
    assert type(found) is VmappedTrajectory


@pytest.mark.parametrize(
    ("spanned", "inputs", "kind"),
    [
        (True, 24, DualTrajectory),
        (True, 20, DualTrajectory),
        (True, 19, StackedTrajectory),
        (False, 24, StackedTrajectory),
    ],
)
def test_few_wide_records_are_walked_in_their_span(make_walks, spanned, inputs, kind):
    """The largest client has 10 records."""
    walk, _ = make_walks(chain(inputs=inputs), spanned=spanned, shape=(inputs,))
    assert type(walk) is kind


@pytest.mark.parametrize(
    ("work", "clip", "kind"),
    [
        (ClientSgd(Batches(0, epochs=1), lr=0.1), None, DualTrajectory),
        (ClientSgd(Batches(0, epochs=1), lr=0.1), Clip(1.0), DualTrajectory),
        (ClientSgd(Batches(0, epochs=1), lr=0.1, weight_decay=0.1), None, StackedTrajectory),
        (ClientSgd(Batches(0, epochs=1), lr=0.1), Clip(1.0, Norm.L1), StackedTrajectory),
        (OneGradient(), None, StackedTrajectory),
    ],
)
def test_the_span_is_asked_for_where_it_holds_every_step(make_data, work, clip, kind):
    data = make_data(shape=(WIDE,))
    task, seen = Task(chain(), cross_entropy), []

    class Spying(Vectorised):
        def trajectory(self, start, cohort, *, spanned):
            seen.append(super().trajectory(start, cohort, spanned=spanned))
            return seen[-1]

    cohort = CohortData(data, np.arange(data.clients))
    work.updates(batch_of(ROUND, task.parameters, cohort, clip, Spying(task, data), STREAMS))
    assert [type(walk) for walk in seen] == [kind]
