"""The zoo: sizes, initialisation, and records a model cannot take."""

import pytest
import torch
from torch import nn

from fedveil.base.checks import MODELS, NEXT_WORD, TEXT_MODELS
from fedveil.base.errors import BadInput
from fedveil.models.trial import check_fits
from fedveil.models.zoo import Reading, build_task

READING = Reading(words=50, embedding=8, layers=2, heads=2)

SHAPES = {
    "linear": ((10,), 0),
    "softmax": ((1, 8, 8), 10),
    "mlp": ((1, 8, 8), 10),
    "fu-cnn": ((1, 28, 28), 62),
    "small-cnn": ((1, 28, 28), 10),
    "vgg": ((3, 32, 32), 10),
    "lstm": ((7,), 3),
    "transformer": ((7,), 3),
    "lstm-lm": ((7,), 50),
    "transformer-lm": ((7,), 50),
}


def zoo(name, shape=None, classes=None, seed=1, hidden=(32,), reading=READING):
    default_shape, default_classes = SHAPES[name]
    shape = default_shape if shape is None else shape
    classes = default_classes if classes is None else classes
    return build_task(name, shape, classes, seed=seed, hidden=hidden, reading=reading)


def records(name, count=2):
    if name in TEXT_MODELS:
        return torch.randint(0, READING.words, (count, *SHAPES[name][0]))
    return torch.rand(count, *SHAPES[name][0])


def test_every_model_is_tested():
    assert set(SHAPES) == set(MODELS)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("linear", 11),
        ("softmax", 650),
        ("mlp", 64 * 32 + 32 + 32 * 10 + 10),
        ("fu-cnn", 214_590),
        ("small-cnn", 21_840),
        ("vgg", 307_498),
        ("lstm", 50 * 8 + 4 * 32 * (8 + 32 + 2) + 33 * 3),
        ("transformer", 57 * 8 + 2 * (8 * 8 + 7) * 8 + 9 * 3),
    ],
)
def test_parameter_counts(name, size):
    assert zoo(name).size == size


@pytest.mark.parametrize("name", MODELS)
def test_models_fit_their_records(name):
    _, classes = SHAPES[name]
    y = torch.tensor([0, 1]) if classes else torch.tensor([0.5, 1.0])
    if name in NEXT_WORD:
        y = torch.tensor([[3, 4, -100, 5, 6, 7, -100], [-100] * 7])
    task, x = zoo(name), records(name)
    check_fits(task, x, y, classes)
    assert task.losses(task.named(task.parameters), x, y).shape == (2,)


@pytest.mark.parametrize("name", MODELS)
def test_no_batch_norm_and_no_buffers(name):
    module = zoo(name).module
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
    assert not list(module.buffers())


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_start(name):
    assert torch.equal(zoo(name, seed=3).parameters, zoo(name, seed=3).parameters)
    if name not in ("linear", "softmax"):
        assert not torch.equal(zoo(name, seed=3).parameters, zoo(name, seed=4).parameters)


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_convex_models_start_at_zero(name):
    assert not zoo(name).parameters.any()


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    zoo("mlp")
    assert torch.equal(torch.rand(1), expected)


def test_hidden_layers_of_an_mlp():
    assert zoo("mlp", hidden=(5, 4)).size == 64 * 5 + 5 + 5 * 4 + 4 + 4 * 10 + 10
    assert zoo("mlp", classes=0, hidden=(5,)).size == 64 * 5 + 5 + 5 + 1


def test_classification_measures_accuracy_and_regression_does_not():
    assert list(zoo("softmax").measures) == ["accuracy"]
    assert not zoo("linear").measures


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "linear", "classes": 10}, "'linear' predicts a number.*use softmax"),
        ({"name": "softmax", "classes": 0}, "'softmax' predicts labels"),
        ({"name": "small-cnn", "shape": (1, 8, 8)}, r"'small-cnn' takes images of 28 x 28.*8, 8"),
        ({"name": "fu-cnn", "shape": (784,)}, "'fu-cnn' takes images of 28 x 28"),
        ({"name": "vgg", "shape": (3, 28, 28)}, "'vgg' takes images of 32 x 32"),
        ({"name": "mlp", "hidden": (0,)}, "model.hidden has a layer of 0"),
        ({"name": "lstm", "shape": (1, 8, 8)}, r"'lstm' reads texts.*records have shape \(1, 8, 8"),
        ({"name": "lstm", "reading": None}, "'lstm' reads texts"),
        ({"name": "lstm", "classes": 0}, "'lstm' predicts labels"),
        (
            {"name": "transformer", "reading": Reading(50, 8, 2, 3)},
            "model.embedding is 8 and model.heads 3: .* use a multiple",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(BadInput, match=message):
        zoo(**changes)


def test_a_module_of_ones_own_is_none_of_the_zoo():
    with pytest.raises(BadInput, match=r"model.name is 'own': choose one of linear"):
        build_task("own", (3, 32, 32), 10, seed=1, hidden=())


def test_unknown_models_are_refused_with_the_known_ones():
    with pytest.raises(BadInput, match=r"model.name is 'resnet': choose one of linear, softmax"):
        build_task("resnet", (10,), 2, seed=1, hidden=())


@pytest.mark.parametrize("name", TEXT_MODELS)
@pytest.mark.parametrize("hidden", [(32,), (5, 4)])
def test_parameters_of_readers_are_counted_before_there_are_any(name, hidden):
    shape, classes = SHAPES[name]
    assert READING.count(name, shape, hidden, classes) == zoo(name, hidden=hidden).size
