"""What records leave in models: losses, gradients by layer, and models uphill on them."""

import pytest
import torch

from fedveil.audit.membership import losses_of
from fedveil.audit.white_box import gradients_at, raise_loss, traces
from tests.audit.test_shadow_models import plain


def test_traces_are_losses_and_products_by_layer():
    training = plain()
    data, task = training.data, training.task
    before = training.start().params
    after = before + 0.1 * torch.randn(task.size, generator=torch.Generator().manual_seed(1))
    rows = traces(task, before, after, data.x[:4], data.y[:4])
    first, last = (losses_of(task, p, data.x[:4], data.y[:4]) for p in (before, after))
    assert rows.shape == (4, 3 + 3 * 2)
    assert rows[:, 0] == pytest.approx(last)
    assert rows[:, 1] == pytest.approx(first - last)
    for k in range(4):
        leaf = before.clone().requires_grad_()
        x, y = torch.from_numpy(data.x[k : k + 1]), torch.from_numpy(data.y[k : k + 1])
        task.loss(x @ leaf[:15].view(3, 5).T + leaf[15:], y).sum().backward()
        for layer, part in enumerate((slice(0, 15), slice(15, 18))):
            gradient, step = leaf.grad[part], (after - before)[part]
            along = -float(gradient @ step)
            assert rows[k, 3 + layer] == pytest.approx(float(gradient.norm().log()), abs=1e-4)
            assert rows[k, 5 + layer] == pytest.approx(along, abs=1e-5)
            cosine = along / float(gradient.norm() * step.norm())
            assert rows[k, 7 + layer] == pytest.approx(cosine, abs=1e-4)
    still = traces(task, before, before, data.x[:4], data.y[:4])
    assert (still[:, [1, 5, 6, 7, 8]] == 0).all()


def test_traces_of_many_records_are_taken_in_pieces(monkeypatch):
    training = plain()
    data, task, start = training.data, training.task, training.start().params
    whole = traces(task, start, start + 1, data.x, data.y)
    monkeypatch.setattr("fedveil.audit.white_box._AT_ONCE", 5 * task.size)
    pieces = traces(task, start, start + 1, data.x, data.y)
    assert pieces == pytest.approx(whole, rel=1e-4, abs=1e-5)


def test_an_ascended_model_has_a_higher_loss_on_its_records():
    training = plain()
    data, task = training.data, training.task
    start = training.start().params
    few = data.x[:5], data.y[:5]
    higher = raise_loss(task, start, *few)
    rise = losses_of(task, higher, *few).mean() - losses_of(task, start, *few).mean()
    assert 1.0 <= rise < 4.0
    along, step = gradients_at(task, start, *few).sum(dim=0), higher - start
    assert torch.allclose(step / step.norm(), along / along.norm(), atol=1e-5)
