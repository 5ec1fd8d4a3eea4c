"""An enemy who reads the published loss of a test split, the model and the features.

A loss of n records with two labels each is one of 2^n sums. Half of them against the other half
(meet in the middle) finds the one that a float64 mean singles out, and with it every label.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binom

import fedveil as fv
from fedveil.privacy.noise.streams import Streams
from fedveil.training.server import ServerState

OWNERS, DRAWS, FALSE_ALARM = 20, 50, 1e-6

SETS = {
    "rounds": 2,
    "model.name": "softmax",
    "budget.epsilon": 4.0,
    "budget.delta": 1e-3,
    "noise.source": "secure",
    "engine.workers": 1,
}


@pytest.fixture(scope="module")
def data():
    """Labels have nothing to do with features, so that nothing but the loss tells them."""
    random = np.random.default_rng(5)
    x = random.normal(size=(140, 6)).astype(np.float32)
    y = random.integers(2, size=140)
    clients = [(f"c{k}", x[4 * k : 4 * k + 4], y[4 * k : 4 * k + 4]) for k in range(30)]
    return fv.FederatedData.from_clients(
        clients,
        test=(x[120:], y[120:]),
        test_owners=[f"held out {k}" for k in range(OWNERS)],
        classes=2,
    )


def labels_from(total, losses):
    """The labels whose losses, [n, 2], add up to what is nearest to `total`."""
    half = len(losses) // 2
    choices = (np.arange(2**half)[:, None] >> np.arange(half)) & 1

    def sums(part):
        return part[np.arange(half), choices].sum(axis=1)

    left, right = sums(losses[:half]), sums(losses[half:])
    order = np.argsort(right)
    at = np.clip(np.searchsorted(right[order], total - left), 1, len(right) - 1)
    at -= np.abs(total - left - right[order][at - 1]) < np.abs(total - left - right[order][at])
    best = np.argmin(np.abs(total - left - right[order][at]))
    return np.concatenate([choices[best], choices[order[at[best]]]])


def losses_of(task, params, x):
    """What each record's loss would be with either label."""
    with torch.inference_mode():
        return np.stack(
            [
                task.measure_batch(params, torch.tensor(x), torch.full((len(x),), label))
                .per_example["loss"]
                .double()
                .numpy()
                for label in (0, 1)
            ],
            axis=1,
        )


def test_a_loss_in_the_clear_tells_every_label(data, tmp_path):
    """So the claim counts those owners as not protected, in so many words."""
    # Seeded: with other models, sums of two choices of labels may be equal to the last digits.
    sets = {**SETS, "noise.source": "seeded"}
    run = fv.run("central", data=data, out=tmp_path / "run", set=sets, quiet=True)
    published = json.loads((run.folder / "result.json").read_text())["metrics"]["loss"]
    found = labels_from(OWNERS * published, losses_of(run.task, run.task.parameters, data.test_x))
    assert (found == data.test_y).all()
    assert any("20 records are held out" in text for text in run.claims[0].assumptions)


def test_a_loss_with_a_price_tells_no_better_than_chance(data, tmp_path):
    """50 measurements of one model, 1,000 labels: more right than this is one chance in 1e6."""
    sets = {**SETS, "evaluate.epsilon": 0.5}
    run = fv.run("central", data=data, out=tmp_path / "run", set=sets, quiet=True)
    result = json.loads((run.folder / "result.json").read_text())
    assert result["metrics"]["loss"] is not None
    training = training_of(data, sets)
    params = some_model(training)
    losses, right = losses_of(training.task, params, data.test_x), 0
    for _ in range(DRAWS):
        published = measured(training, params)["loss"]
        right += int((labels_from(OWNERS * published, losses) == data.test_y).sum())
    assert right <= binom.isf(FALSE_ALARM, OWNERS * DRAWS, 0.5)


def test_the_same_attack_through_the_same_gate_finds_all_where_there_is_no_noise(data, monkeypatch):
    """It is the noise that stops it, and not that the loss is clipped or scaled."""
    training = training_of(data, {**SETS, "evaluate.epsilon": 0.5, "evaluate.loss_clip": 64.0})
    monkeypatch.setattr(
        "fedveil.privacy.priced_metrics.add_to_sum_", lambda mechanism, total, scale, keys: None
    )
    monkeypatch.setattr("fedveil.privacy.noise.grid.Grid.cut_", lambda self, rows: rows)
    params = some_model(training)
    published = measured(training, params)["loss"]
    found = labels_from(OWNERS * published, losses_of(training.task, params, data.test_x))
    assert (found == data.test_y).all()


def training_of(data, sets):
    from fedveil.runs.build import build
    from fedveil.runs.recipe import load_recipe

    return build(load_recipe("central", sets, own=["data"]), data=data)


def some_model(training):
    """Weights with which no two records have the same loss."""
    return torch.randn(training.task.size, generator=torch.Generator().manual_seed(3))


def measured(training, params):
    """A measurement of a model, as the first round's: with new noise each time."""
    metrics = training.plan.metrics
    ledger = training.new_ledger()
    for round in range(1, metrics.rounds[0] + 1):
        ledger.charge(round)
    state = replace(training.start(), round=metrics.rounds[0], params=params)
    assert isinstance(state, ServerState)
    return training.gate.evaluate_round(state, ledger, Streams(0, secure=True))
