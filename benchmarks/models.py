"""Modules of a usual size that `make bench` trains: as a user would write them, in plain torch.

Imports nothing but torch, so that it runs in every environment.
"""

import torch
from torch import nn

WORDS, STEPS = 2_000, 64
"""How many words there are, and how many of them a record has."""


class _Block(nn.Module):
    """Two convolutions with group norm, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(32, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(32, outputs)
        self.around = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm1(self.first(x)))
        return torch.relu(self.norm2(self.second(h)) + self.around(x))


def resnet18(classes: int) -> nn.Module:
    """ResNet-18 for images of 32 x 32 (He et al. 2016) with group norm: 11.2 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64)]
    layers.append(nn.ReLU())
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_Block(inputs, outputs, stride), _Block(outputs, outputs, 1)]
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return nn.Sequential(*layers)


class Transformer(nn.Module):
    """Words and their places, four encoder layers, the mean of all steps: 1.05 million."""

    def __init__(self, classes: int, width: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(STEPS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(x.shape[1]).repeat(len(x), 1))
        return self.out(self.encoder(self.words(x) + places).mean(dim=1))


class Lstm(nn.Module):
    """Words, one LSTM layer, its last step: 0.23 million."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64)
        self.memory = nn.LSTM(64, 128, batch_first=True)
        self.out = nn.Linear(128, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps, _ = self.memory(self.words(x))
        return self.out(steps[:, -1])
