"""How the server steps."""

import math
from dataclasses import replace

import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.training.server import (
    AdagradServer,
    AdamServer,
    RateSchedule,
    RateShape,
    ServerState,
    SgdServer,
    YogiServer,
)

SERVERS = {
    "sgd": SgdServer(0.5),
    "momentum": SgdServer(0.5, 0.9),
    "adam": AdamServer(0.5),
    "yogi": YogiServer(0.5),
    "adagrad": AdagradServer(0.5),
}


def state(size=4, round=0):
    return ServerState(round, torch.arange(size, dtype=torch.float32), {}, torch.zeros(0))


def means(count, size=4):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, size, generator=generator, dtype=torch.float64)


def test_plain_sgd_adds_the_mean_update():
    after = SgdServer(lr=0.5).step(state(), torch.ones(4, dtype=torch.float64))
    assert after.params.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert (after.round, after.memory) == (1, {})


def test_a_large_model_is_stepped_piece_by_piece_to_the_same_bits():
    before, (mean,) = state(100_003), means(1, 100_003)
    after = SgdServer(lr=0.3).step(before, mean)
    assert torch.equal(after.params, (0.3 * mean + before.params).to(torch.float32))


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


def test_yogi_is_that_of_the_paper():
    """Coordinate by coordinate in plain numbers; moments grow and fall."""
    server, now = YogiServer(lr=0.1, beta1=0.8, beta2=0.9, floor=0.5), state()
    updates = torch.cat([means(4), 0.1 * means(4), 3 * means(4)])
    expected = now.params.tolist()
    first, second = [0.0] * 4, [0.25] * 4
    changes = []
    for mean in updates:
        now = server.step(now, mean)
        for k, value in enumerate(mean.tolist()):
            first[k] = 0.8 * first[k] + 0.2 * value
            change = 0.1 * value**2 * (1 if second[k] < value**2 else -1)
            second[k] += change
            changes.append(change)
            expected[k] += 0.1 * first[k] / (math.sqrt(second[k]) + 0.5)
    assert min(changes) < 0 < max(changes)
    assert now.params.tolist() == pytest.approx(expected, rel=1e-5)
    assert now.memory["second"].tolist() == pytest.approx(second, rel=1e-12)


def test_adagrad_is_torch_adagrad():
    server, now = AdagradServer(lr=0.1, floor=0.2), state()
    theirs = now.params.to(torch.float64).requires_grad_()
    optimiser = torch.optim.Adagrad([theirs], lr=0.1, initial_accumulator_value=0.04, eps=0.2)
    for mean in means(6):
        now = server.step(now, mean)
        theirs.grad = -mean
        optimiser.step()
    assert torch.allclose(now.params.double(), theirs.detach(), rtol=1e-6)


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_a_mean_of_nothing_leaves_a_model_that_was_not_moved(server):
    now = server.step(state(), torch.zeros(4, dtype=torch.float64))
    assert now.params.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_a_server_follows_the_schedule(server):
    """Its memory does not: from the same state, a step is as long as the round's rate."""
    schedule, now = RateSchedule(RateShape.COSINE, 6, warmup=2), state()
    for round, mean in enumerate(means(6), 1):
        there = replace(server, schedule=schedule).step(now, mean)
        here = replace(server, lr=0.5 * schedule.factor(round)).step(now, mean)
        assert torch.equal(there.params, here.params)
        assert there.memory.keys() == here.memory.keys()
        assert all(torch.equal(there.memory[name], here.memory[name]) for name in here.memory)
        now = there


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
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
        (lambda: SgdServer(lr=0.0), "lr is 0.0"),
        (lambda: SgdServer(lr=math.nan), "lr is nan"),
        (lambda: SgdServer(momentum=1.0), "momentum is 1.0"),
        (lambda: AdamServer(lr=-1.0), "lr is -1.0"),
        (lambda: YogiServer(lr=-1.0), "lr is -1.0"),
        (lambda: YogiServer(beta2=1.0), "beta2 is 1.0"),
        (lambda: YogiServer(floor=0.0), "floor is 0.0"),
        (lambda: AdagradServer(lr=0.0), "lr is 0.0"),
        (lambda: AdagradServer(floor=math.inf), "floor is inf"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(BadInput, match=message):
        make()
