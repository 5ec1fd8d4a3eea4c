"""Inversion: beside the closed form of a linear model, and through a convolutional network."""

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.audit.gradient_inversion import (
    Inversion,
    Method,
    Pixels,
    SimulatedClient,
    label_shares,
    labels_of,
    variation,
)
from fedveil.audit.inversion import psnr
from fedveil.base.errors import BadInput
from fedveil.data.image_sets import load_digits
from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.models.zoo import build_task
from fedveil.training.work import OneGradient

PIXELS = Pixels(0.0, 1.0)
STEPS = {Method.DLG: 60, Method.IDLG: 60, Method.COSINE: 150}


def one_gradient(task, x, y):
    client = SimulatedClient(task, OneGradient(), task.parameters.clone(), None, 1, 10)
    return client, client.update(torch.from_numpy(x), torch.from_numpy(y)).detach()


def closed_form(task, seen):
    """Of a linear layer: the weights' gradient of a class over that of its bias."""
    named = list(task.named(seen).values())
    best = int(named[1].abs().argmax())
    return (named[0][best] / named[1][best]).reshape(1, 8, 8).numpy()


@pytest.mark.parametrize("method", list(Method))
def test_a_linear_model_is_inverted_as_by_its_closed_form(method):
    task = build_task("softmax", (1, 8, 8), 10, seed=1, hidden=())
    records = load_digits()
    x, y = records.x[5:6], records.y[5:6]
    client, seen = one_gradient(task, x, y)
    known = closed_form(task, seen)
    np.testing.assert_allclose(known, x[0], atol=1e-5)
    inversion = Inversion(method, steps=STEPS[method], restarts=1, smooth=0.0)
    found = inversion.invert(client, seen, (1, 8, 8), PIXELS, y, seed=3)
    assert found.labels.tolist() == y.tolist()
    assert psnr(found.x[0], known, 1.0) > 30
    assert found.distance < 1e-2


def test_the_closest_of_several_guesses_is_kept():
    task = build_task("mlp", (1, 8, 8), 10, seed=1, hidden=(8,))
    records = load_digits()
    client, seen = one_gradient(task, records.x[:1], records.y[:1])

    def distance(restarts):
        few = Inversion(Method.COSINE, steps=5, restarts=restarts)
        return few.invert(client, seen, (1, 8, 8), PIXELS, records.y[:1], seed=3).distance

    assert distance(6) < distance(1)


def test_what_is_found_lies_in_the_range_of_public_pixels():
    task = build_task("softmax", (1, 8, 8), 10, seed=1, hidden=())
    client, seen = one_gradient(task, load_digits().x[:1], load_digits().y[:1])
    for method in Method:
        few = Inversion(method, steps=5, restarts=1)
        found = few.invert(client, seen, (1, 8, 8), Pixels(-0.5, 0.25), np.array([1]), seed=0)
        assert -0.5 <= found.x.min() <= found.x.max() <= 0.25


def test_total_variation_is_that_of_neighbours():
    image = torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]]])
    assert float(variation(image)) == pytest.approx((1 + 0) / 2 + (0 + 1) / 2)
    assert float(variation(torch.full((2, 1, 4, 4), 0.3))) == 0.0


@pytest.mark.slow
def test_a_28_x_28_digit_is_seen_through_the_cnn():
    records = load_digits()
    x = np.zeros((1, 1, 28, 28), dtype=np.float32)
    x[:, :, 2:26, 2:26] = np.kron(records.x[:1], np.ones((3, 3), dtype=np.float32))
    task = build_task("fu-cnn", (1, 28, 28), 10, seed=1, hidden=())
    client, seen = one_gradient(task, x, records.y[:1])
    inversion = Inversion(steps=200, restarts=1)
    found = inversion.invert(client, seen, (1, 28, 28), PIXELS, records.y[:1], seed=0)
    assert psnr(found.x[0], x[0], 1.0) > 20


def test_a_range_of_nothing_is_refused():
    with pytest.raises(BadInput, match="from 1 to 1: a range is needed"):
        Pixels(1.0, 1.0)


EVEN = np.full(10, 0.1)


def update(task, x, y):
    work = OneGradient()
    return SimulatedClient(task, work, task.parameters.clone(), None, 1, 10).update(x, y).detach()


def without_bias():
    return Task(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10, bias=False)),
        cross_entropy,
    )


@pytest.mark.parametrize("kind", ["softmax", "mlp", "without a bias"])
def test_one_record_tells_its_label(kind):
    if kind == "without a bias":
        task = without_bias()
    else:
        task = build_task(kind, (1, 8, 8), 10, seed=3, hidden=(32,))
    x = torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for label in range(10):
        seen = update(task, x[label : label + 1], torch.tensor([label]))
        assert labels_of(label_shares(task, seen, 10), EVEN, 1).tolist() == [label]


def test_a_batch_tells_how_often_it_has_a_label():
    task = build_task("softmax", (1, 8, 8), 10, seed=3, hidden=())
    x = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for scale in (1.0, 1e-3):  # as if clipped
        seen = scale * update(task, x, torch.tensor([7, 1, 1, 9, 7, 1]))
        assert labels_of(label_shares(task, seen, 10), EVEN, 6).tolist() == [1, 1, 1, 7, 7, 9]


def test_a_model_without_a_row_per_label_is_refused():
    task = Task(nn.Linear(4, 3), cross_entropy)
    with pytest.raises(BadInput, match="one row for each of 10 labels"):
        label_shares(task, task.parameters, 10)
