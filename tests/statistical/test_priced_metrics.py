"""Metrics with a price on Fashion-MNIST: 3,000 owners held out, epsilon 0.5 for all four."""

import math
import os

import numpy as np
import pytest

import fedveil as fv
from fedveil.data.load import load_records
from fedveil.privacy.noise.streams import Streams
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.evaluate import owner_means, owners_to_measure
from fedveil.training.gate import Gate
from fedveil.training.session import train

pytestmark = pytest.mark.slow

REAL = os.environ.get("FEDVEIL_DATA")
OWNERS, RECORDS, CLIENTS, DRAWS = 3000, 4, 400, 200
CLOSE, SHARE = 0.015, 0.95

SETS = {
    "rounds": 8,
    "model.name": "softmax",
    "sample.rate": 0.5,
    "client.epochs": 1,
    "client.batch": 20,
    "client.lr": 0.1,
    "budget.epsilon": 8.0,
    "budget.delta": 1e-5,
    "evaluate.epsilon": 0.5,
    "engine.workers": 1,
}


@pytest.fixture(scope="module")
def measured():
    """One training; its plan's metrics, the owners' means after each measured round, and what the
    training itself published of them.
    """
    if not REAL:
        pytest.skip("FEDVEIL_DATA is not set")
    found = load_records("fashion-mnist")
    order = np.random.default_rng(0).permutation(len(found.y))
    x, y = found.x.reshape(len(found.y), -1)[order], found.y[order]
    held, size = OWNERS * RECORDS, 20
    rows = [slice(held + size * k, held + size * (k + 1)) for k in range(CLIENTS)]
    data = fv.FederatedData.from_clients(
        [(f"c{k}", x[part], y[part]) for k, part in enumerate(rows)],
        test=(x[:held], y[:held]),
        test_owners=[f"owner {k // RECORDS}" for k in range(held)],
        classes=10,
    )
    training = build(load_recipe("central", SETS, own=["data"]), data=data)
    metrics, owners = training.plan.metrics, owners_to_measure(data)
    means, published = {}, {}
    for result in train(training):
        if result.metrics:
            published[result.round] = result.metrics
            means[result.round] = owner_means(
                training.task, result.state.params, owners, metrics.names, metrics.loss_clip
            )
    return training, means, published


def test_four_measurements_are_planned_and_the_line_says_how_wide(measured):
    training, means, published = measured
    metrics = training.plan.metrics
    assert isinstance(training.gate, Gate)
    assert (metrics.owners, metrics.rounds) == (OWNERS, (2, 4, 6, 8))
    assert means.keys() == published.keys() == {2, 4, 6, 8}
    assert "accuracy +-1.03 points" in metrics.described()
    assert metrics.clip.weights[1] ** 2 <= 0.2 + 1e-12
    spent = metrics.line.claims(4)[0]
    assert (spent.epsilon <= 0.5, spent.delta) == (True, 1e-5)


def test_the_model_has_learnt_something_that_is_worth_measuring(measured):
    _, means, _ = measured
    assert float(means[8][:, 0].mean()) > 0.6


@pytest.mark.parametrize("secure", [False, True], ids=["seeded", "secure"])
def test_accuracies_are_within_a_point_and_a_half_in_95_of_100_draws(measured, secure):
    """Each is 2.9 standard deviations: fewer than 190 of 200 is one chance in 1e8."""
    training, means, _ = measured
    metrics = training.plan.metrics
    close = dict.fromkeys(means, 0)
    for draw in range(DRAWS):
        streams = Streams(1000 + draw, secure=secure)
        for round, rows in means.items():
            found = metrics.measure(rows, round, streams)["accuracy"]
            close[round] += abs(found - float(rows[:, 0].mean())) <= CLOSE
    assert min(close.values()) >= SHARE * DRAWS


def test_what_the_training_published_is_such_a_draw(measured):
    """Within six standard deviations: one false alarm in 5e8 numbers."""
    training, means, published = measured
    for round, numbers in published.items():
        for column, (name, unit) in enumerate(
            zip(training.plan.metrics.names, (1.0, 2 * math.log(10)), strict=True)
        ):
            true = unit * float(means[round][:, column].mean())
            off = abs(numbers[name] - true)
            assert 0 < off < 6 / 1.96 * numbers[f"{name}/interval"]
