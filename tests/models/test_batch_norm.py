"""Group norm in the place of batch norm."""

import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6, eps=1e-3)
        self.inner = nn.ModuleDict({"deep": nn.Sequential(nn.BatchNorm1d(8, affine=False))})

    def forward(self, x):
        return self.norm(self.conv(x)).mean((2, 3))


def test_every_batch_norm_is_replaced_and_keeps_scale_and_shift():
    block = Block()
    with torch.no_grad():
        block.norm.weight.uniform_(1, 2)
        block.norm.bias.uniform_(1, 2)
    made = fv.models.without_batch_norm(block, groups=4)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in made.modules())
    assert (made.norm.num_groups, made.norm.eps) == (2, 1e-3)
    assert torch.equal(made.norm.weight, block.norm.weight)
    assert torch.equal(made.norm.bias, block.norm.bias)
    assert not made.inner["deep"][0].affine
    assert isinstance(block.norm, nn.BatchNorm2d)
    assert made.norm.weight is not block.norm.weight


def test_each_record_is_alone_afterwards():
    made, x = fv.models.without_batch_norm(Block()), torch.randn(4, 3, 5, 5)
    alone = torch.cat([made(x[k : k + 1]) for k in range(4)])
    assert torch.allclose(made(x), alone, atol=1e-6)
    assert fv.Task(made, fv.cross_entropy).size == sum(p.numel() for p in made.parameters())


def test_a_batch_norm_by_itself():
    assert isinstance(fv.models.without_batch_norm(nn.BatchNorm1d(4)), nn.GroupNorm)


@pytest.mark.parametrize(
    ("module", "groups", "told"),
    [
        (nn.BatchNorm1d, 2, "an instance of"),
        (nn.BatchNorm1d(4), 0, "groups is 0"),
        (nn.LazyBatchNorm1d(), 2, "no channels yet"),
    ],
)
def test_what_cannot_be_replaced_is_refused(module, groups, told):
    with pytest.raises(BadInput, match=told):
        fv.models.without_batch_norm(module, groups)
