"""Clipped sums of single-example gradients: layer by layer where that is right, and only there."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedveil.data.federated import FederatedData
from fedveil.models.metrics import squared_error
from fedveil.models.task import Task
from fedveil.privacy.clip import Clip, Norm
from fedveil.training.cohort import Batch, CohortData
from fedveil.training.gradients.layer_gradients import layer_gradient
from fedveil.training.gradients.modes import Looped
from fedveil.training.gradients.per_example import ClippedExamples
from tests.training.gradients.cases import RECORDS, SLOW_UNDER_VMAP, Case, make, relative
from tests.training.gradients.modules import LAYERED, MIXED, WRITTEN_OUT, ZOO, Free, in_place


@pytest.mark.parametrize("case", [*ZOO, *LAYERED], indirect=True)
def test_known_layers_use_their_formulas_and_are_right(case):
    assert case.clips._by_layers
    assert not case.clips._without_formula
    clip = Clip(case.middle())
    assert relative(case.sum(clip), case.by_hand(clip)) < 1e-5


@pytest.mark.parametrize("case", MIXED, indirect=True)
def test_only_parameters_of_no_layer_have_their_gradients_written_out(case):
    assert case.clips._by_layers
    assert case.clips._without_formula
    assert case.clips._output_shapes
    clip = Clip(case.middle())
    assert relative(case.sum(clip), case.by_hand(clip)) < 1e-5


@SLOW_UNDER_VMAP
@pytest.mark.parametrize("case", WRITTEN_OUT, indirect=True)
def test_other_modules_have_their_gradients_written_out_and_are_right(case):
    assert not case.clips._by_layers
    clip = Clip(case.middle())
    assert relative(case.sum(clip), case.by_hand(clip)) < 1e-5


@pytest.mark.parametrize("case", ["mlp", "words", "tied", "small-cnn"], indirect=True)
def test_an_l1_bound_is_on_the_l1_length(case, monkeypatch):
    monkeypatch.setattr(case.clips, "_add_piece_", None)
    clip = Clip(case.middle(order=1), Norm.L1)
    assert relative(case.sum(clip), case.by_hand(clip)) < 1e-5


@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("case", ["mlp", "words", "small-cnn"], indirect=True)
def test_one_piece_or_several_is_the_same(case, norm, monkeypatch):
    clip = Clip(case.middle(order=1 if norm is Norm.L1 else 2), norm)
    whole = case.sum(clip)
    case.clips._piece = 2
    monkeypatch.setattr("fedveil.training.gradients.per_example._MATERIALISED", 2 * case.task.size)
    assert relative(case.sum(clip), whole) < 1e-6


@pytest.mark.slow
def test_more_records_than_one_piece():
    case = make(in_place, (6,), records=600)
    assert case.clips._piece < len(case.x)
    clip = Clip(case.middle())
    assert relative(case.sum(clip), case.by_hand(clip)) < 1e-5


@pytest.mark.parametrize("case", ["mlp", "words", "small-cnn", "tied"], indirect=True)
def test_sums_land_on_top_of_what_was_there(case):
    clip = Clip(case.middle())
    row = torch.full((case.task.size,), 0.25)
    case.clips.add_clipped_(row, case.flat, case.x, case.y, clip)
    assert torch.allclose(row - 0.25, case.sum(clip), atol=1e-6)


@pytest.mark.parametrize("case", ["mlp", "in-place", "words", "small-cnn", "tied"], indirect=True)
def test_nothing_but_the_row_is_touched(case):
    kept = [v.clone() for v in (case.task.parameters, case.flat, case.x, case.y)]
    case.sum(Clip(0.1))
    for before, after in zip(kept, (case.task.parameters, case.flat, case.x, case.y), strict=True):
        assert torch.equal(before, after)
    for module in case.task.module.modules():
        assert not module._forward_hooks
    for parameter in case.task.module.parameters():
        assert parameter.grad is None


def test_no_hook_stays_behind_when_a_record_does_not_fit():
    case = make(in_place, (6,))
    assert case.clips._by_layers
    with pytest.raises(RuntimeError):
        case.clips.add_clipped_(case.flat.clone(), case.flat, torch.zeros(5, 9), case.y, Clip(1))
    assert not any(module._forward_hooks for module in case.task.module.modules())


@pytest.mark.parametrize("case", ["mlp", "words", "small-cnn", "layer-norm", "tied"], indirect=True)
def test_the_parameters_given_count_and_not_the_tasks_own(case):
    clip = Clip(case.middle())
    before = case.sum(clip)
    case.task.parameters.normal_()
    assert torch.equal(case.sum(clip), before)


def test_a_parameter_that_does_not_show_at_the_start_is_not_forgotten():
    case = make(Free, (6,))
    case.task.parameters.zero_()
    assert case.clips._without_formula == ["scale"]
    clip = Clip(case.middle())
    assert relative(case.sum(clip), case.by_hand(clip)) < 1e-5


@pytest.mark.parametrize("case", ["viewed", "frames", "small-cnn"], indirect=True)
def test_the_layout_is_one_that_the_module_takes(case):
    looped = Looped(case.task, case.x[:3], case.y[:3], mixes=False, private=False)
    x, y = case.x.numpy(), case.y.numpy()
    classes = 0 if y.dtype.kind == "f" else int(y.max()) + 1
    data = FederatedData(x, y, np.array([0, RECORDS]), x[:1], y[:1], classes)
    cohort = CohortData(data, np.arange(1))
    walk = looped.trajectory(case.flat, cohort, spanned=False)
    found = walk.mean_update(None, Batch(None, torch.ones(1, RECORDS)))[0]
    assert relative(found, sum(case.gradient(k) for k in range(RECORDS)) / RECORDS) < 1e-5


class LateTied(nn.Module):
    """At the start its last layer lets nothing through."""

    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        nn.init.zeros_(self.out.weight)

    def forward(self, x):
        again = functional.linear(torch.tanh(self.inside(x)), self.inside.weight)
        return self.out(torch.tanh(again))


def test_a_layer_that_begins_with_zeros_hides_nothing():
    case = make(LateTied, (6,))
    case.flat += torch.randn(case.task.size)
    assert list(case.clips._layers) == ["out"]
    clip = Clip(case.middle())
    assert relative(case.sum(clip), case.by_hand(clip)) < 1e-5


@pytest.mark.parametrize("large", [0, 1, 3])
def test_large_records_in_the_sample_hide_nothing(large):
    """A weight that is used outside its layer is found on no record in particular."""
    torch.manual_seed(1)
    case = Case(Task(Quoted(), squared_error), torch.randn(5, 6), torch.randn(5))
    x = case.x[:3].clone()
    x[:large] *= 1e4
    case.clips = ClippedExamples(case.task, x, case.y[:3])
    assert not case.clips._layers
    clip = Clip(case.middle())
    assert relative(case.sum(clip), case.by_hand(clip)) < 1e-5


class Quoted(nn.Module):
    """Uses its weight outside the layer, and only for small records."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x):
        small = (x.abs().amax(1, keepdim=True) < 100).float()
        return self.layer(x) + small * functional.linear(x, self.layer.weight).tanh()


def test_a_formula_that_is_wrong_is_not_used(monkeypatch):
    """The comparison with autograd is what decides, not the kinds of the layers."""
    case = make(in_place, (6,))

    def halved(layer, inputs, errors, **how):
        return layer_gradient(layer, inputs, [e / 2 for e in errors], **how)

    monkeypatch.setattr("fedveil.training.gradients.per_example.layer_gradient", halved)
    assert not case.clips._by_layers
    clip = Clip(case.middle())
    assert relative(case.sum(clip), case.by_hand(clip)) < 1e-5


def test_a_length_that_is_wrong_is_not_used(monkeypatch):
    case = make(in_place, (6,))
    wrong = property(lambda gradient: gradient.errors.double().square().sum((1, 2)))
    monkeypatch.setattr("fedveil.training.gradients.layer_gradients.OuterProducts.squares", wrong)
    assert not case.clips._by_layers
    clip = Clip(case.middle())
    assert relative(case.sum(clip), case.by_hand(clip)) < 1e-5


def test_modules_that_vmap_cannot_see_through_go_one_by_one():
    """A branch on the data is an error under vmap."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Linear(6, 3), nn.LayerNorm(6)

        def forward(self, x):
            return self.small(x if x.sum() > 0 else self.large(x))

    case = make(Branching, (6,))
    assert not case.clips._by_layers
    clip = Clip(case.middle())
    assert relative(case.sum(clip), case.by_hand(clip)) < 1e-5
