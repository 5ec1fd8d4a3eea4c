"""The work that fedveil and its peers do in `make bench`: same data, same model, same local steps.

Imports nothing but numpy, torch and fedveil's model zoo, so that it runs in every environment.
"""

from dataclasses import dataclass

import models
import numpy as np
import torch
from torch import nn

from fedveil.models import zoo
from fedveil.models.zoo import TextLstm

_OWN = {
    "resnet": models.resnet18,
    "transformer": models.Transformer,
    "lstm": models.Lstm,
    "small-lstm": lambda classes: TextLstm(models.WORDS, 16, (32,), classes),
}
_OF_WORDS = ("transformer", "lstm", "small-lstm")


@dataclass(frozen=True)
class Work:
    """One round: `cohort` of `clients`, each taking `steps` full-batch steps on its `records`.

    With `batch`, the steps are DP-SGD on Poisson batches of that expected size instead. With
    `chunk`, so many clients are summed together, one after the other.
    """

    name: str
    title: str
    model: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    cohort: int
    records: int
    steps: int
    lr: float
    batch: int = 0
    chunk: int = 0

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Records [clients, records, ...] and targets [clients, records], always the same."""
        random = np.random.default_rng(7)
        if self.model in _OF_WORDS:
            x = random.integers(models.WORDS, size=(self.clients, self.records, *self.shape))
            return x, random.integers(self.classes, size=(self.clients, self.records))
        x = random.standard_normal((self.clients, self.records, *self.shape), dtype=np.float32)
        if self.classes:
            return x, random.integers(self.classes, size=(self.clients, self.records))
        weights = random.standard_normal(self.shape, dtype=np.float32)
        noise = random.standard_normal((self.clients, self.records), dtype=np.float32)
        return x, x @ weights + noise

    def module(self) -> nn.Module:
        """The model, initialised the same everywhere."""
        torch.manual_seed(7)
        if self.model in _OWN:
            return _OWN[self.model](self.classes)
        if self.model == "linear":
            return zoo.linear(self.shape[0])
        if self.model == "mlp":
            return zoo.mlp(int(np.prod(self.shape)), self.classes, (200,))
        return zoo.fu_cnn(1, self.classes)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch."""
        if self.classes:
            return nn.functional.cross_entropy(outputs, targets)
        return ((outputs.squeeze(-1) - targets) ** 2).mean()


def _regression(steps: int) -> Work:
    title = f"Fu's regression, 11 parameters, 500 of 5,000 clients, 80 records, E = {steps}"
    return Work(f"a-{steps}", title, "linear", (10,), 0, 5_000, 500, 80, steps, 0.05)


def _mlp(steps: int) -> Work:
    title = f"MLP 784-200-10, 100 of 1,000 clients, 20 records, E = {steps}"
    return Work(f"c-{steps}", title, "mlp", (784,), 10, 1_000, 100, 20, steps, 0.1)


def _module(letter: str, model: str, title: str, shape: tuple[int, ...], size: int) -> list[Work]:
    """A module as users write them: local SGD of 4 clients, and DP-SGD inside of 4 clients."""
    plain = f"{title}, 4 clients of {size} records, 2 steps"
    private = f"DP-SGD on {title}, 4 clients of {4 * size} records, 2 Poisson batches of {size}"
    return [
        Work(f"{letter}-loop", plain, model, shape, 10, 4, 4, size, 2, 0.01),
        Work(f"{letter}-dp", private, model, shape, 10, 4, 4, 4 * size, 2, 0.01, batch=size),
    ]


WORK = {
    work.name: work
    for work in (
        _regression(1),
        _regression(10),
        Work(
            "b",
            "Fu's CNN, 20 of 100 clients, 200 images, E = 2",
            "fu-cnn",
            (1, 28, 28),
            62,
            100,
            20,
            200,
            2,
            0.05,
        ),
        _mlp(1),
        _mlp(5),
        Work(
            "d",
            "DP-SGD on Fu's CNN, 4 clients of 2,000 images, 8 Poisson batches of 64",
            "fu-cnn",
            (1, 28, 28),
            62,
            4,
            4,
            2_000,
            8,
            0.05,
            batch=64,
        ),
        *_module("f", "resnet", "ResNet-18 with group norm, 32 x 32 images", (3, 32, 32), 16),
        *_module("g", "transformer", "a transformer of 4 layers, 64 words", (models.STEPS,), 64),
        *_module("h", "lstm", "words and an LSTM, 64 words", (models.STEPS,), 128),
        Work(
            "j",
            "Fu's CNN, 20 clients, 100 images, E = 2; 2 of them attack, with 100 poisoned beside",
            "fu-cnn",
            (1, 28, 28),
            62,
            20,
            20,
            100,
            2,
            0.05,
        ),
        Work(
            "k",
            "an LSTM of 32 units, 40 of 100 clients, 20 texts of 20 words, E = 4: 64,000 words",
            "small-lstm",
            (20,),
            2,
            100,
            40,
            20,
            4,
            0.1,
        ),
        Work(
            "l",
            "an MLP 16-200-10, 40 clients of 1 record in chunks of 1: what a chunk costs by itself",
            "mlp",
            (16,),
            10,
            40,
            40,
            1,
            1,
            0.1,
            chunk=1,
        ),
    )
}
