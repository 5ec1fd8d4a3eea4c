"""The active attacker: it breaks no rule, and the model learns what it is told."""

import numpy as np
import pytest
import torch

from fedveil.audit.property_attack import MultiTask, last_layer
from fedveil.base.errors import BadInput
from fedveil.data.image_sets import load_digits
from fedveil.models.zoo import build_task
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.cohort import CohortData
from fedveil.training.engines.serial import Serial
from fedveil.training.gradients.modes import gradients_of
from fedveil.training.reports import ClientBatch, Rows


def attacker(task, ids=(3, 5)):
    records = load_digits()
    x = torch.from_numpy(records.test_x[:200]).clone()
    has = torch.arange(200) % 2 == 1
    x[has] *= 0.6
    return MultiTask(task, np.array(ids), x, torch.from_numpy(records.test_y[:200]), has)


def test_attackers_are_in_every_round_and_nobody_is_left_out():
    plotter = attacker(build_task("mlp", (1, 8, 8), 10, seed=1, hidden=(16,)))
    assert plotter.cohort(1, np.array([1, 5])).tolist() == [1, 3, 5]
    assert plotter.malicious_mask(1, np.array([1, 3, 5])).tolist() == [False, True, True]


def test_the_model_learns_task_and_property():
    task = build_task("mlp", (1, 8, 8), 10, seed=1, hidden=(16,))
    plotter = attacker(task)

    def costs(params):
        named = task.named(params)
        own = task.losses(named, plotter.x, plotter.y).mean()
        return float(own), float(plotter._loss(named) - own)

    before = costs(task.parameters.clone())
    params = task.parameters.clone()
    for _ in range(20):
        params = params + plotter.local_update(params)
    after = costs(params)
    assert after[0] < 0.8 * before[0]
    assert after[1] < 0.8 * before[1]


def test_what_attackers_send_is_clipped_and_noised():
    settings = ("data.clients=40", "model.name=mlp", "model.hidden=[16]", "sample.size=10")
    more = ("rounds=3", "engine.workers=1", "clip.value=1e-3")
    training = build(load_recipe("ldp-sgd", (*settings, *more)), None)
    engine = training.engine
    assert isinstance(engine, Serial)
    gradients = gradients_of(training.task, engine.mode, training.data)
    state = training.start()
    cohort = CohortData(training.data, np.array([3, 5]))
    clients = ClientBatch.from_round(training.round(1, cohort.ids, state), cohort, gradients)
    sent = attacker(training.task).report(training.work, training.plan, clients)
    assert isinstance(sent.reports, Rows)
    rows = sent.reports.rows
    deviation = training.plan.release.noise_length(training.round(1, np.array([3]), state), 1)
    size = rows.shape[1]
    # the mean square of P normal numbers: five deviations, 6e-7, either side
    found = float(((rows[0] - rows[1]) ** 2).mean()) / (2 * deviation**2)
    assert found == pytest.approx(1.0, abs=5 * (2 / size) ** 0.5)


def test_a_model_without_a_hidden_layer_has_nothing_to_learn():
    with pytest.raises(BadInput, match="no hidden layer"):
        last_layer(build_task("softmax", (1, 8, 8), 10, seed=1, hidden=()))
