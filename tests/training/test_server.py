"""The server: what it accepts, and how it steps."""

import math

import pytest
import torch

from fedveil.errors import BadInput
from fedveil.privacy.clipping import Bound
from fedveil.training.server import AdamServer, ServerState, SgdServer, accept

BOUND = Bound(2.0)


def state(size=4, round=0):
    return ServerState(round, torch.arange(size, dtype=torch.float32), {}, torch.zeros(0))


def means(count, size=4):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, size, generator=generator, dtype=torch.float64)


def test_good_reports_pass_unchanged():
    reports = torch.tensor([[1.0, 0.5], [0.0, 0.0]])
    accepted = accept(reports, 2, BOUND)
    assert torch.equal(accepted.rows, reports)
    assert not accepted.clipped.any()
    assert not accepted.refused.any()


def test_a_report_a_thousand_times_too_long_is_scaled_to_the_bound():
    accepted = accept(torch.tensor([[1200.0, 1600.0]]), 2, BOUND)
    assert accepted.clipped.tolist() == [True]
    assert float(accepted.rows.double().norm()) <= BOUND.value
    assert torch.allclose(accepted.rows, torch.tensor([[1.2, 1.6]]), rtol=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bound", [None, BOUND])
def test_reports_that_are_not_finite_count_as_zero(poison, bound):
    accepted = accept(torch.tensor([[1.0, poison], [1.0, 1.0]]), 2, bound)
    assert accepted.refused.tolist() == [True, False]
    assert accepted.rows.tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    "odd",
    [
        torch.ones(3),
        torch.ones(1),
        torch.ones(0),
        torch.ones(1, 2),
        torch.ones(()),
        torch.ones(2, dtype=torch.int64),
        torch.full((2,), 1e300, dtype=torch.float64),
    ],
    ids=["long", "short", "empty", "matrix", "scalar", "integers", "beyond-float32"],
)
def test_reports_of_the_wrong_shape_count_as_zero(odd):
    accepted = accept([torch.ones(2), odd], 2, BOUND)
    assert accepted.refused.tolist() == [False, True]
    assert accepted.rows.tolist() == [[1, 1], [0, 0]]


def test_a_matrix_of_the_wrong_width_is_refused_row_by_row():
    accepted = accept(torch.ones(2, 3), 2, BOUND)
    assert accepted.refused.tolist() == [True, True]
    assert accepted.rows.tolist() == [[0, 0], [0, 0]]


def test_no_reports():
    assert accept(torch.empty(0, 2), 2, BOUND).rows.shape == (0, 2)
    assert accept([], 2, BOUND).rows.shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_reports_of_another_precision_are_taken_as_float32(dtype):
    accepted = accept(torch.tensor([[30.0, 40.0]], dtype=dtype), 2, BOUND)
    assert accepted.rows.dtype is torch.float32
    assert float(accepted.rows.double().norm()) <= BOUND.value
    assert accepted.clipped.tolist() == [True]


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
