"""ResNet-18 written out, with group norm in place of batch norm, under client-level DP."""

import tempfile

import torch
from torch import nn

import fedveil as fv


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        norms = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.path = nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1])
        short = nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
        self.short = nn.Sequential(*short) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.path(x) + self.short(x)).relu()


def make(shape: tuple[int, ...], classes: int, width: int = 64) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(shape[0], width, 3, padding=1, bias=False)]
    layers += [nn.BatchNorm2d(width), nn.ReLU(), Block(width, width, 1), Block(width, width, 1)]
    for wide in (2 * width, 4 * width, 8 * width):
        layers += [Block(wide // 2, wide, 2), Block(wide, wide, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, classes))


if __name__ == "__main__":
    torch.manual_seed(0)
    net = fv.models.without_batch_norm(make((1, 8, 8), 10, width=8), groups=8)
    settings = {"rounds": 3, "data.clients": 100, "sample.rate": 0.2, "client.epochs": 1}
    with tempfile.TemporaryDirectory() as folder:
        run = fv.run("central", model=net, out=f"{folder}/run", set=settings, quiet=True)
        print(run.claim, f"{run.task.size} numbers per update", sep="\n")
