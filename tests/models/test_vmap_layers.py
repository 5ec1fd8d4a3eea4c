"""Group norm under vmap: torch's numbers and gradients, in the order in which images lie."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedveil.models.vmap_layers import write_out_


def net(affine=True):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4, affine=affine))


def changed(module):
    return write_out_(copy.deepcopy(module))


def loss(module, named, x):
    out = functional_call(module, named, (x,))
    return (out * torch.linspace(-1, 1, out.numel()).view_as(out)).tanh().sum()


LAID = {
    "as usual": lambda x: x,
    "channels last": lambda x: x.movedim(2, -1).contiguous().movedim(-1, 2),
    "every second": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "turned": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("laid", LAID)
def test_gradients_of_every_kind_are_torchs(affine, laid):
    """Of each record and of the image, outside and inside of vmap, twice around, and without it."""
    module, plain = net(affine), torch.randn(5, 3, 2, 6, 7)
    named = {name: value.detach() for name, value in module.named_parameters()}

    def found(module, x):
        every = vmap(grad(loss, argnums=(1, 2)), (None, None, 0))
        yield every(module, named, x)
        yield vmap(every, (None, None, 0))(module, named, x[:, :, None])
        yield grad(loss, argnums=(1, 2))(module, named, x[0])
        leaves = {name: value.clone().requires_grad_() for name, value in named.items()}
        image = x.clone().requires_grad_()
        total = vmap(lambda x: loss(module, leaves, x))(image).sum()
        yield {}, torch.autograd.grad(total, [image, *leaves.values()])

    pairs = zip(found(changed(module), LAID[laid](plain)), found(module, plain), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_channels_that_lie_last_stay_there():
    x = torch.randn(5, 4, 6, 7).contiguous(memory_format=torch.channels_last)
    norm = changed(nn.GroupNorm(2, 4))
    out = vmap(lambda x: norm(x[None])[0])(x)
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out, nn.functional.group_norm(x, 2), rtol=1e-5, atol=1e-6)


def test_what_somebody_changed_is_left_alone():
    class Own(nn.GroupNorm):
        def forward(self, input):
            return super().forward(input) + 1

    module = nn.Sequential(Own(2, 4))
    assert type(write_out_(module)[0]) is Own
    out = vmap(module)(torch.zeros(3, 1, 4, 5)).detach()
    assert torch.equal(out, torch.ones_like(out))
