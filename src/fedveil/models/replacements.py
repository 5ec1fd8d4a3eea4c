"""Layers to use in place of torch's under DP: group norm for batch norm, and an LSTM.

Batch norm mixes the records of a batch, so no claim covers it. `Lstm` is written out in linear
layers, for which the norms of single-example gradients are known.
"""

import copy
import math

import torch
from torch import nn

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.identity import Stated

_GROUPS = 32


def without_batch_norm(module: nn.Module, groups: int = _GROUPS) -> nn.Module:
    """A copy of `module` in which every batch norm is a group norm with the same scale and shift.

    A layer of C channels gets gcd(C, groups) groups: the most that divide both. Its statistics are
    dropped, since group norm computes them from each record alone.

    >>> without_batch_norm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
    16
    """
    if not isinstance(module, nn.Module):
        raise BadInput(f"module is {shown(module)}: an instance of torch.nn.Module is needed")
    if groups < 1:
        raise BadInput(f"groups is {groups}: at least one is needed")
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _group_norm(module, groups)
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(parent, name, _group_norm(child, groups))
    return module


def _group_norm(layer: nn.modules.batchnorm._BatchNorm, groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    if channels == 0:
        raise BadInput("a lazy batch norm has no channels yet: pass one batch through the model")
    made = nn.GroupNorm(math.gcd(channels, groups), channels, layer.eps, layer.affine)
    if layer.affine:
        made.weight, made.bias = copy.deepcopy(layer.weight), copy.deepcopy(layer.bias)
    return made.train(layer.training)


class Lstm(nn.Module):
    """A layer of long short-term memory: [B, T, inputs] -> the outputs of all steps [B, T, hidden].

    The same function as `nn.LSTM(inputs, hidden, batch_first=True)` with one bias instead of two,
    which do the same and are clipped and noised twice. It is as fast under DP-SGD
    (`models.unrolled`), and `nn.LSTM` is faster without.

    >>> Lstm(3, 5)(torch.zeros(2, 7, 3)).shape
    torch.Size([2, 7, 5])
    """

    def _get_name(self) -> str:
        return "Lstm"  # stored models have a digest of it

    @property
    def identity(self) -> Stated:
        return (("layer", "lstm"),)

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, 4 * hidden)
        self.hidden = nn.Linear(hidden, 4 * hidden, bias=False)
        reach = hidden**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -reach, reach)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Step through the sequence. The four gates are input, forget, cell and output."""
        driven = self.input(x)
        h = c = x.new_zeros(len(x), self.hidden.in_features)
        steps = []
        for t in range(x.shape[1]):
            i, f, g, o = (driven[:, t] + self.hidden(h)).chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            steps.append(h)
        return torch.stack(steps, dim=1)
