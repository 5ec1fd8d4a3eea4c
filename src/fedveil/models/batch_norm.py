"""Batch norm mixes the records of a batch, so no claim covers it: group norm in its place."""

import copy
import math

from torch import nn

from fedveil.checks import shown
from fedveil.errors import BadInput

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
