"""Frozen parameters and buffers: constants that are shared, told in the claim, and never change."""

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.models.trial import mixes_records
from fedveil.privacy.clip import Clip
from fedveil.training.cohort import CohortData, FullBatch
from fedveil.training.gradients.modes import Mode, gradients_of
from tests.training.conftest import federation


def body(seed=0):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    return module


class Positioned(nn.Module):
    """A buffer that is added to what the layer gives."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("shift", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        return self.layer(x) + self.shift


class Moving(Positioned):
    def forward(self, x):
        self.shift = 0.9 * self.shift + self.layer(x).mean(0).detach()
        return super().forward(x)


class Teacher(nn.Module):
    """A frozen weight that follows the records through `.data`, which counts as no write."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        self.scale.data += 1e-3
        return self.layer(x) * self.scale


def training(module, data, **changes):
    plan = fv.central(
        fv.samplers.Everyone(),
        data.clients,
        fv.clips.Fixed(1.0),
        rounds=3,
        budget=fv.Budget(8, 1e-5),
    )
    task = fv.Task(module, fv.cross_entropy, {"accuracy": fv.correct})
    work = fv.ClientSgd(fv.Batches(0, steps=2), lr=0.5)
    return fv.Training(task, data, plan, work, workers=1, **changes)


def test_only_what_learns_is_in_the_vector():
    task = fv.Task(body(), fv.cross_entropy)
    assert task.size == 5 * 3 + 3
    assert set(task.places) == {"2.weight", "2.bias"}
    assert set(task.frozen) == {"0.weight", "0.bias"}


def test_frozen_weights_are_not_copied():
    module = body()
    task = fv.Task(module, fv.cross_entropy)
    for layers in (task.named_layers, dict(task._measuring.named_modules())):
        assert layers["0"].weight.data_ptr() == module[0].weight.data_ptr()


@pytest.mark.parametrize("mode", Mode)
def test_gradients_are_those_of_the_head_on_fixed_features(mode):
    data = federation(sizes=(4, 2, 3))
    module = body()
    with torch.no_grad():
        features = [module[1](module[0](torch.tensor(x))).numpy() for x in (data.x, data.test_x)]
    head = nn.Linear(5, 3)
    head.load_state_dict(module[2].state_dict())
    small = fv.FederatedData(
        features[0], data.y, data.offsets, features[1], data.test_y, data.classes
    )
    found = []
    for task, records in (
        (fv.Task(module, fv.cross_entropy), data),
        (fv.Task(head, fv.cross_entropy), small),
    ):
        gradients = gradients_of(task, mode, records)
        cohort = CohortData(records, np.arange(3))
        walk = gradients.trajectory(task.parameters, cohort, spanned=False)
        whole = FullBatch(records.sizes, 4)
        found.append((walk.mean_update(None, whole), walk.clipped_sum(None, whole, Clip(0.3))))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_claims_say_what_was_trained_and_that_the_rest_is_public():
    made = training(body(), federation())
    told = "18 of 53 parameters are trained on clients' records; the others are frozen and taken"
    assert all(any(told in a for a in claim.assumptions) for claim in made.plan.claims(1))
    plain = training(body().requires_grad_(True), federation())
    assert not any("frozen" in a for claim in plain.plan.claims(1) for a in claim.assumptions)


def test_frozen_weights_stay_and_the_head_learns():
    module = body()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    list(fv.train(training(module, federation())))
    after = module.state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == {
        "2.weight",
        "2.bias",
    }


def test_another_base_draws_other_noise():
    """Two models that differ in frozen weights alone, with common noise, would tell their sum."""
    data = federation()
    one, other = body(), body()
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-3
    keys = [training(m, data).streams.keys("noise", 1, np.arange(1)) for m in (one, body(), other)]
    assert np.array_equal(keys[0], keys[1])
    assert not np.array_equal(keys[0], keys[2])


@pytest.mark.slow
def test_modes_agree_with_a_constant_buffer():
    data = federation()
    ends = []
    for mode in Mode:
        torch.manual_seed(0)
        made = training(Positioned(), data, mode=mode)
        list(fv.train(made))
        ends.append(made.task.parameters.clone())
    assert torch.allclose(ends[0], ends[1], atol=1e-5)


@pytest.mark.parametrize(("kind", "name"), [(Moving, "shift"), (Teacher, "scale")])
def test_a_constant_that_changes_is_refused_by_name(kind, name):
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    with pytest.raises(BadInput, match=f"'{name}' of the model changes when records pass"):
        mixes_records(fv.Task(kind(), fv.cross_entropy).by_own_code(), x, y)


@pytest.mark.slow
def test_a_frozen_weight_may_be_of_any_type():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
            self.which = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)

        def forward(self, x):
            return (self.layer(x) * self.scale.float())[:, self.which]

    made = training(Scaled(), federation())
    before = made.start().params
    *_, last = fv.train(made)
    assert not torch.equal(last.state.params, before)
