"""The small zoo: models of the papers and of the embedded data, none with batch norm."""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from fedveil.base.checks import MODELS, NEXT_WORD, TEXT_MODELS, OneOf
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Target
from fedveil.models.task import Task, usual
from fedveil.models.text import TextLstm, TextTransformer


@dataclass(frozen=True)
class Reading:
    """The size of the vocabulary, and the layer sizes of a model of texts."""

    words: int
    embedding: int = 32
    layers: int = 2
    heads: int = 4

    def count(
        self, name: str, shape: tuple[int, ...], hidden: tuple[int, ...], outputs: int
    ) -> int:
        """The number of parameters."""
        width = self.embedding
        if name.startswith("lstm"):
            widths = (width, *hidden)
            layers = sum(4 * b * (a + b + 2) for a, b in itertools.pairwise(widths))
            return self.words * width + layers + (widths[-1] + 1) * outputs
        layers = self.layers * (8 * width + 7) * width
        return (self.words + math.prod(shape)) * width + layers + (width + 1) * outputs


def build_task(
    name: str,
    record_shape: tuple[int, ...],
    classes: int,
    *,
    seed: int,
    hidden: tuple[int, ...],
    reading: Reading | None = None,
) -> Task:
    """The model `name` for records of `record_shape`, initialised from `seed`.

    `classes` 0 asks for one real output and squared error, otherwise for one logit per label,
    cross-entropy and accuracy; models of the next word have all of it in each place of a text.
    `hidden` is the widths of an MLP's hidden layers, or of an LSTM's; `reading` is what models of
    texts need besides.
    """
    OneOf(MODELS).check("model.name", name)
    if name == "linear" and classes:
        raise BadInput(
            f"model 'linear' predicts a number and the data have {classes} labels: use softmax"
        )
    if name not in ("linear", "mlp") and not classes:
        raise BadInput(f"model {name!r} predicts labels and the data have none: use linear or mlp")
    outputs = classes or 1
    features = math.prod(record_shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        match name:
            case "linear":
                module = linear(features)
            case "softmax":
                module = softmax(features, outputs)
            case "mlp":
                module = mlp(features, outputs, hidden)
            case "fu-cnn":
                module = fu_cnn(*_image(name, record_shape, 28), outputs)
            case "small-cnn":
                module = small_cnn(*_image(name, record_shape, 28), outputs)
            case _ if name in TEXT_MODELS:
                module = _reader(name, record_shape, outputs, hidden, reading)
            case _:
                module = vgg(*_image(name, record_shape, 32), outputs)
    places = record_shape if name in NEXT_WORD else ()
    tried = _tried(name, record_shape, classes, hidden, reading)
    return Task(module, *usual(Target(classes, places))).known_as(tried)


@lru_cache(maxsize=64)
def _tried(
    name: str,
    record_shape: tuple[int, ...],
    classes: int,
    hidden: tuple[int, ...],
    reading: Reading | None,
) -> dict[object, bool]:
    """What trials found about a model of the zoo: one for all seeds."""
    return {}


def linear(features: int) -> nn.Module:
    """Linear regression from zero: 11 parameters on Lending Club's 10 components."""
    return _zeroed(nn.Sequential(nn.Flatten(), nn.Linear(features, 1)))


def softmax(features: int, outputs: int) -> nn.Module:
    """Softmax regression from zero: 650 parameters on the digits."""
    return _zeroed(nn.Sequential(nn.Flatten(), nn.Linear(features, outputs)))


def mlp(features: int, outputs: int, hidden: tuple[int, ...]) -> nn.Module:
    """ReLU layers of the given widths."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width in hidden:
        if width < 1:
            raise BadInput(f"model.hidden has a layer of {width}: widths start at 1")
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, outputs))


def fu_cnn(channels: int, outputs: int) -> nn.Module:
    """The FEMNIST network of Fu et al.: 214,590 parameters with 1 channel and 62 labels."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 7, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, outputs),
    )


def small_cnn(channels: int, outputs: int) -> nn.Module:
    """Two 5x5 convolutions and two linear layers: 21,840 parameters for MNIST."""
    return nn.Sequential(
        nn.Conv2d(channels, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Linear(50, outputs),
    )


def vgg(channels: int, outputs: int) -> nn.Module:
    """Three pairs of 3x3 convolutions for CIFAR-10: 0.3 million parameters."""
    layers: list[nn.Module] = []
    for width in (32, 64, 128):
        for before in (channels, width):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, outputs))


def _reader(
    name: str,
    shape: tuple[int, ...],
    outputs: int,
    hidden: tuple[int, ...],
    reading: Reading | None,
) -> nn.Module:
    if len(shape) != 1 or reading is None:
        raise BadInput(
            f"model {name!r} reads texts, as rows of words, and the records have shape {shape}"
        )
    each = name in NEXT_WORD
    if name.startswith("lstm"):
        return TextLstm(reading.words, reading.embedding, hidden, outputs, each=each)
    if reading.embedding % reading.heads:
        raise BadInput(
            f"model.embedding is {reading.embedding} and model.heads {reading.heads}: heads have "
            "equal parts of the embedding, use a multiple"
        )
    sizes = reading.embedding, reading.layers, reading.heads
    return TextTransformer(reading.words, shape[0], *sizes, outputs, each=each)


def _image(name: str, shape: tuple[int, ...], side: int) -> tuple[int]:
    if len(shape) != 3 or shape[1:] != (side, side):
        raise BadInput(
            f"model {name!r} takes images of {side} x {side} and the records have shape {shape}"
        )
    return (shape[0],)


def _zeroed(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module
