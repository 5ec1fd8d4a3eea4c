"""Constants from data: by hand, by brute force, and losses the theory does not cover."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from fedveil import FederatedData, Task, cross_entropy
from fedveil.base.errors import BadInput
from fedveil.models import squared_error
from fedveil.models.zoo import build_task
from fedveil.tuning.theory_plan import constants_of


def federation(clients, classes=0):
    """From (x, y) of each client."""
    named = [
        (
            f"client-{k}",
            np.asarray(x, np.float32),
            np.asarray(y, np.int64 if classes else np.float32),
        )
        for k, (x, y) in enumerate(clients)
    ]
    return FederatedData.from_clients(named, test=named[0][1:], classes=classes)


def linear(features, weights=0.0, bias=True):
    module = nn.Linear(features, 1, bias=bias)
    for parameter in module.parameters():
        nn.init.constant_(parameter, weights)
    return Task(module, squared_error)


def drawn(sizes, features, seed=0, classes=0):
    random = np.random.default_rng(seed)
    clients = []
    for k, n in enumerate(sizes):
        x = random.normal(0.3 * k, 1.0 + 0.2 * k, (n, features))
        if classes:
            scores = x @ random.normal(size=(features, classes)) + random.gumbel(size=(n, classes))
            clients.append((x, scores.argmax(axis=1)))
        else:
            clients.append((x, x @ random.normal(size=features) + random.normal(size=n)))
    return federation(clients, classes)


def test_by_hand():
    """Client 0: x = +-1, y = 2 x + 1, so H = 2 I, optimum (2, 1). Client 1: x = +-2, y = 0, so
    H = diag(8, 2), optimum 0. Mean: H = diag(5, 2), h = (2, 1), optimum (0.4, 0.5)."""
    data = federation([([[1.0], [-1.0]], [3.0, -1.0]), ([[2.0], [-2.0]], [0.0, 0.0])])
    found = constants_of(linear(1, weights=1.0), data)
    assert found.exact
    assert found.smoothness == pytest.approx(8.0, rel=1e-12)
    assert found.convexity == pytest.approx(2.0, rel=1e-12)
    gaps = (1.6**2 + 0.5**2, (8 * 0.4**2 + 2 * 0.5**2) / 2)
    assert found.heterogeneity == pytest.approx(sum(gaps) / 2, rel=1e-12)
    assert found.gradient == pytest.approx(math.hypot(8.0, 2.0), rel=1e-12)  # client 1 at the start
    assert found.distance == pytest.approx(0.6**2 + 0.5**2, rel=1e-12)


def test_the_gradient_may_be_longest_at_the_optimum():
    data = federation([([[1.0], [-1.0]], [3.0, -1.0]), ([[2.0], [-2.0]], [0.0, 0.0])])
    task = linear(1)
    task.parameters.copy_(torch.tensor([0.5, 0.5]))
    found = constants_of(task, data)
    at_optimum = (math.hypot(2 * 1.6, 2 * 0.5), math.hypot(8 * 0.4, 2 * 0.5))
    at_start = (math.hypot(2 * 1.5, 2 * 0.5), math.hypot(8 * 0.5, 2 * 0.5))
    assert found.gradient == pytest.approx(max(*at_optimum, *at_start), rel=1e-12)
    task.parameters.copy_(torch.tensor([0.4, 0.5]))
    assert constants_of(task, data).gradient == pytest.approx(max(at_optimum), rel=1e-6)


def mean_loss(data, client):
    """The loss of a linear model with a bias, from the records, in float64."""
    a, b = data.offsets[client], data.offsets[client + 1]
    x, y = data.x[a:b].astype(np.float64), data.y[a:b].astype(np.float64)
    return lambda w: float(((x @ w[:-1] + w[-1] - y) ** 2).mean())


def numeric_hessian(loss, at, step=1e-4):
    """Second differences; exact for a quadratic function up to rounding."""
    p = len(at)
    eye = step * np.eye(p)
    found = np.empty((p, p))
    for i in range(p):
        for j in range(p):
            ahead = loss(at + eye[i] + eye[j]) + loss(at - eye[i] - eye[j])
            aside = loss(at + eye[i] - eye[j]) + loss(at - eye[i] + eye[j])
            found[i, j] = (ahead - aside) / (4 * step**2)
    return found


def numeric_gradient(loss, at, step=1e-5):
    eye = step * np.eye(len(at))
    return np.array([(loss(at + e) - loss(at - e)) / (2 * step) for e in eye])


def brute_force(losses, start):
    """All constants from values of the losses alone, by differences and general minimisers."""

    def pooled(w):
        return sum(loss(w) for loss in losses) / len(losses)

    def lowest(loss, at):
        return minimize(loss, at, method="BFGS", options={"gtol": 1e-7, "maxiter": 2000})

    best = lowest(pooled, start).x
    values = np.array(
        [np.linalg.eigvalsh(numeric_hessian(f, w, 1e-3)) for f in losses for w in (start, best)]
    )
    gaps = [f(best) - lowest(f, best).fun for f in losses]
    lengths = [np.linalg.norm(numeric_gradient(f, w)) for f in losses for w in (start, best)]
    return {
        "smoothness": values.max(),
        "convexity": values.min(),
        "heterogeneity": sum(gaps) / len(gaps),
        "gradient": max(lengths),
        "distance": ((best - start) ** 2).sum(),
    }


# BFGS by differences stops on rounding: it says so, and is right to four digits
@pytest.mark.filterwarnings("ignore:Desired error")
@pytest.mark.parametrize("sizes", [(20, 30, 25), (5, 60, 8, 14)])
def test_least_squares_against_brute_force(sizes):
    data = drawn(sizes, 3, seed=len(sizes))
    found = constants_of(linear(3, weights=0.5), data)
    wanted = brute_force([mean_loss(data, k) for k in range(len(sizes))], np.full(4, 0.5))
    assert found.exact
    for name, value in wanted.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3), name


class WithReference(nn.Module):
    """Softmax regression whose first class has the score 0: strongly convex, unlike the usual."""

    def __init__(self, features, classes):
        super().__init__()
        self.inner = nn.Linear(features, classes - 1)
        nn.init.zeros_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x):
        return nn.functional.pad(self.inner(x), (1, 0))


def softmax_loss(data, client, classes):
    a, b = data.offsets[client], data.offsets[client + 1]
    x, y = data.x[a:b].astype(np.float64), data.y[a:b]
    features = x.shape[1]

    def loss(w):
        scores = np.zeros((len(x), classes))
        scores[:, 1:] = (
            x @ w[: -(classes - 1)].reshape(classes - 1, features).T + w[-(classes - 1) :]
        )
        top = scores.max(axis=1)
        total = top + np.log(np.exp(scores - top[:, None]).sum(axis=1))
        return float((total - scores[np.arange(len(x)), y]).mean())

    return loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Desired error")
def test_softmax_regression_against_brute_force():
    """All clients are in the sample here, so that what is estimated is close."""
    data = drawn((120, 150, 90), 2, seed=3, classes=3)
    found = constants_of(Task(WithReference(2, 3), cross_entropy), data)
    wanted = brute_force([softmax_loss(data, k, 3) for k in range(3)], np.zeros(6))
    assert not found.exact
    for name, value in wanted.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.02), name


@pytest.mark.slow
def test_estimates_agree_with_what_is_exact():
    """The same least squares, once with a loss that is not recognised as such."""
    data = drawn((20, 30, 25, 40), 3, seed=8)
    exact = constants_of(linear(3, weights=0.5), data)
    other = linear(3, weights=0.5)
    other = Task(other.module, lambda outputs, targets: squared_error(outputs, targets))
    found = constants_of(other, data)
    assert (exact.exact, found.exact) == (True, False)
    for name in ("smoothness", "convexity", "heterogeneity", "gradient", "distance"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=1e-3), name


@pytest.mark.slow
def test_a_sample_of_many_clients_is_near_and_repeatable():
    """50 clients, of whom 32 are looked at: extremes may be missed, means are near."""
    data = drawn((30,) * 50, 2, seed=9)
    exact = constants_of(linear(2), data)
    other = Task(linear(2).module, lambda outputs, targets: squared_error(outputs, targets))
    found = constants_of(other, data, seed=1)
    assert found == constants_of(other, data, seed=1)
    assert found != constants_of(other, data, seed=2)
    assert exact.smoothness / 3 <= found.smoothness <= exact.smoothness * 1.001
    assert exact.convexity * 0.99 <= found.convexity <= exact.convexity * 3
    assert exact.heterogeneity / 3 <= found.heterogeneity <= exact.heterogeneity * 3
    assert exact.gradient / 3 <= found.gradient <= exact.gradient * 3


def test_the_model_is_left_as_it_was():
    data = drawn((20, 30), 3)
    task = Task(linear(3, weights=0.5).module, lambda o, t: squared_error(o, t))
    constants_of(task, data)
    assert (task.parameters == 0.5).all()


REFUSED = "strongly convex, smooth losses; simulate instead"


@pytest.fixture(scope="module")
def own_loss():
    """A task whose loss is captured once for all seeds."""
    return Task(linear(3).module, lambda o, t: squared_error(o, t))


@pytest.mark.parametrize("seed", range(12))
def test_a_client_with_fewer_records_than_parameters_is_refused(own_loss, seed):
    """Its least eigenvalue is zero up to rounding, of either sign: never a tiny mu."""
    data = drawn((30, 3, 30), 3, seed=seed)
    with pytest.raises(BadInput, match=REFUSED):
        constants_of(linear(3), data)
    with pytest.raises(BadInput, match=REFUSED):
        constants_of(own_loss, data)


@pytest.mark.parametrize(
    ("name", "features", "classes", "sizes"),
    [
        ("softmax", 6, 3, (60,) * 4),
        ("softmax", 6, 10, (20,) * 4),
        ("softmax", 40, 5, (200,) * 2),
        ("mlp", 6, 3, (60,) * 4),
        ("mlp", 6, 0, (60,) * 4),
    ],
)
def test_flat_and_bent_losses_are_refused(name, features, classes, sizes):
    """Softmax regression does not change when all scores do; networks are not convex."""
    data = drawn(sizes, features, classes=classes)
    task = build_task(name, data.record_shape, classes, seed=1, hidden=(5,))
    with pytest.raises(BadInput, match=REFUSED) as refused:
        constants_of(task, data)
    assert "\n" not in str(refused.value)


def test_one_client_with_a_flat_loss_is_enough():
    """Theory needs every client's loss to be strongly convex, not their mean."""
    random = np.random.default_rng(0)
    both, one = random.normal(size=(40, 2)), random.normal(size=(40, 2))
    one[:, 1] = 0.0
    data = federation([(both, both.sum(axis=1)), (one, one.sum(axis=1))])
    with pytest.raises(BadInput, match=REFUSED):
        constants_of(Task(linear(2).module, lambda o, t: squared_error(o, t)), data)
    with pytest.raises(BadInput, match=REFUSED):
        constants_of(linear(2), data)


def test_losses_that_are_no_numbers_are_refused():
    data = drawn((20, 30), 3)
    task = Task(linear(3).module, lambda o, t: squared_error(o, t) * math.nan)
    with pytest.raises(BadInput, match=REFUSED):
        constants_of(task, data)
