"""How the server steps."""

import math

import pytest
import torch

from fedveil.errors import BadInput
from fedveil.training.server import AdamServer, ServerState, SgdServer


def state(size=4, round=0):
    return ServerState(round, torch.arange(size, dtype=torch.float32), {}, torch.zeros(0))


def means(count, size=4):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, size, generator=generator, dtype=torch.float64)


def test_plain_sgd_adds_the_mean_update():
    after = SgdServer(lr=0.5).step(state(), torch.ones(4, dtype=torch.float64))
    assert after.params.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert (after.round, after.memory) == (1, {})


def test_sgd_with_momentum_is_torch_sgd():
    server, now = SgdServer(lr=0.3, momentum=0.9), state()
    theirs = now.params.to(torch.float64).requires_grad_()
    optimiser = torch.optim.SGD([theirs], lr=0.3, momentum=0.9)
    for mean in means(5):
        now = server.step(now, mean)
        theirs.grad = -mean
        optimiser.step()
    assert torch.allclose(now.params.double(), theirs.detach(), rtol=1e-6)


def test_adam_is_torch_adam():
    server, now = AdamServer(lr=0.1, beta1=0.9, beta2=0.99, floor=1e-3), state()
    theirs = now.params.to(torch.float64).requires_grad_()
    optimiser = torch.optim.Adam([theirs], lr=0.1, betas=(0.9, 0.99), eps=1e-3)
    for mean in means(6):
        now = server.step(now, mean)
        theirs.grad = -mean
        optimiser.step()
    assert torch.allclose(now.params.double(), theirs.detach(), rtol=1e-6)
    assert now.round == 6


@pytest.mark.parametrize("server", [SgdServer(momentum=0.5), AdamServer()])
def test_a_step_leaves_the_state_before_it_alone(server):
    before = state()
    first = server.step(before, means(1)[0])
    again = server.step(before, means(1)[0])
    assert before.params.tolist() == [0, 1, 2, 3]
    assert before.memory == {}
    assert torch.equal(first.params, again.params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SgdServer(lr=0.0), "server.lr is 0.0"),
        (lambda: SgdServer(lr=math.nan), "server.lr is nan"),
        (lambda: SgdServer(momentum=1.0), "server.momentum is 1.0"),
        (lambda: AdamServer(lr=-1.0), "server.lr is -1.0"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(BadInput, match=message):
        make()
