"""The written-out LSTM is PyTorch's, with one bias instead of two."""

import pytest
import torch
from torch import nn

from fedveil.models.zoo import Lstm

SHAPES = [(4, 6, 3, 5), (1, 1, 3, 5), (3, 9, 5, 1), (2, 4, 1, 7)]


def pair(inputs, hidden):
    """An `Lstm` and an `nn.LSTM` with the same weights."""
    torch.manual_seed(1)
    ours, theirs = Lstm(inputs, hidden), nn.LSTM(inputs, hidden, batch_first=True)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.input.weight)
        theirs.weight_hh_l0.copy_(ours.hidden.weight)
        theirs.bias_ih_l0.copy_(ours.input.bias)
        theirs.bias_hh_l0.zero_()
    return ours, theirs


@pytest.mark.parametrize(("batch", "steps", "inputs", "hidden"), SHAPES)
def test_outputs_are_those_of_pytorch(batch, steps, inputs, hidden):
    ours, theirs = pair(inputs, hidden)
    x = torch.randn(batch, steps, inputs)
    found = ours(x)
    assert found.shape == (batch, steps, hidden)
    assert torch.allclose(found, theirs(x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("batch", "steps", "inputs", "hidden"), SHAPES)
def test_gradients_are_those_of_pytorch(batch, steps, inputs, hidden):
    ours, theirs = pair(inputs, hidden)
    x = torch.randn(batch, steps, inputs, requires_grad=True)
    weights = torch.randn(batch, steps, hidden)
    mine = [x, ours.input.weight, ours.input.bias, ours.hidden.weight]
    other = [x, theirs.weight_ih_l0, theirs.bias_ih_l0, theirs.weight_hh_l0]
    found = torch.autograd.grad((ours(x) * weights).sum(), mine)
    expected = torch.autograd.grad((theirs(x)[0] * weights).sum(), other)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_large_inputs_saturate_as_they_do_in_pytorch():
    ours, theirs = pair(3, 5)
    x = 100 * torch.randn(4, 6, 3)
    assert torch.allclose(ours(x), theirs(x)[0], rtol=1e-4, atol=1e-5)


def test_a_step_depends_on_earlier_steps_only():
    ours, _ = pair(3, 5)
    x = torch.randn(2, 6, 3)
    later = x.clone()
    later[:, 4:] += 1
    assert torch.equal(ours(x)[:, :4], ours(later)[:, :4])
    assert not torch.allclose(ours(x)[:, 4:], ours(later)[:, 4:])


def test_an_example_depends_on_itself_only():
    ours, _ = pair(3, 5)
    x = torch.randn(4, 6, 3)
    alone = torch.cat([ours(x[k : k + 1]) for k in range(4)])
    assert torch.allclose(ours(x), alone, rtol=1e-5, atol=1e-6)


def test_weights_begin_as_pytorch_begins_them():
    torch.manual_seed(1)
    ours = Lstm(20, 25)
    assert sum(p.numel() for p in ours.parameters()) == 4 * 25 * (20 + 25 + 1)
    for parameter in ours.parameters():
        assert 0.15 < float(parameter.detach().abs().max()) <= 0.2
