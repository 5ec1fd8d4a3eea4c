"""Modules that break their contract after they were tried, and what a client's row depends on."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.privacy.noise.streams import Streams
from fedveil.training.cohort import CohortData
from fedveil.training.gradients.modes import Mode, gradients_of
from tests.asking import batch_of

FREE = fv.Budget(math.inf, 1e-3)
SGD = fv.ClientSgd(fv.Batches(0, steps=2), lr=0.5)


class Sleeper(nn.Module):
    """Remembers a record, but only one so large that no trial shows it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.kept = torch.zeros(3)

    def forward(self, x):
        h = self.layer(x)
        if bool((x.detach() == 1234.0).any()):
            self.kept = h[0].detach()
        return h + self.kept


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_module_begins_to_remember_ends_with_its_client(make_data, workers):
    data = make_data()
    data.x[int(data.offsets[2]), 0] = 1234.0
    plan = fv.central(
        fv.samplers.Everyone(),
        data.clients,
        fv.clips.Fixed(0.1),
        rounds=2,
        budget=FREE,
        multiplier=1.0,
    )
    training = fv.Training(
        fv.Task(Sleeper(), fv.cross_entropy), data, plan, SGD, workers=workers, chunk=1
    )
    assert training.remark.startswith("each client is computed in a fork")

    def total_of(ids):
        return training.engine.run(training.round(1, ids, training.start())).total.clone()

    everyone = np.arange(data.clients)
    total = total_of(everyone)
    alone = [total_of(np.array([k])) for k in everyone[::-1]]
    training.engine.close()
    assert torch.allclose(total, torch.stack(alone).sum(0), rtol=0, atol=1e-9)


class Renormed(nn.Module):
    """Writes to its parameters, as max_norm does, but only after some passes."""

    def __init__(self, after):
        super().__init__()
        self.weight, self.after = nn.Parameter(torch.ones(3, 6)), after

    def forward(self, x):
        self.after[0] -= 1
        if self.after[0] < 0:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return x @ self.weight.T


def test_what_a_module_writes_never_reaches_the_round_s_model(make_data):
    data, task = make_data(), fv.Task(Renormed([0]), fv.cross_entropy).by_own_code()
    start = task.parameters.clone()
    gradients = gradients_of(task, Mode.LOOPED, data)
    cohort = CohortData(data, np.arange(2))
    SGD.updates(batch_of(1, start, cohort, None, gradients, Streams(1)))
    assert start.tolist() == [1.0] * 18
    assert task.parameters.tolist() == [1.0] * 18


def test_dropout_in_eval_mode_trains_and_measures_the_same_whatever_the_generator(make_data):
    found = []
    for seed in (1, 2):
        torch.manual_seed(5)
        module = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5).eval())
        data = make_data()
        plan = fv.unprotected(fv.samplers.Everyone(), data.clients, rounds=2)
        task = fv.Task(module, fv.cross_entropy, {"accuracy": fv.correct})
        training = fv.Training(task, data, plan, SGD, workers=1, mode=Mode.LOOPED)
        torch.manual_seed(seed)
        *_, last = fv.train(training)
        found.append((last.metrics, last.state.params.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("family", ["mlp", "small-cnn"])
def test_a_row_does_not_depend_on_where_its_records_lie(make_family, family, offset):
    """To the last bit: the same client, its records elsewhere in memory and among other clients."""
    task, data = make_family(family, (9, 4))
    rows = []
    for shift in (0, offset):
        raw = np.zeros(data.x.size + 64, dtype=np.float32)
        place = raw[shift : shift + data.x.size].reshape(data.x.shape)
        place[:] = data.x
        moved = fv.FederatedData(
            place, data.y, data.offsets, data.test_x, data.test_y, data.classes
        )
        turn = batch_of(
            1,
            task.parameters.clone(),
            CohortData(moved, np.array([1])),
            None,
            gradients_of(task, Mode.LOOPED, moved),
            Streams(1),
        )
        rows.append(SGD.updates(turn).rows)
    assert torch.equal(*rows)


@pytest.mark.parametrize("shift", range(5))
def test_records_are_handed_over_on_a_line_of_the_cache(make_data, shift):
    data = make_data(sizes=(3, 2, 8, 1))
    cohort = CohortData(data, np.array([shift % 4]))
    for values in (cohort.x, cohort.y):
        assert values.data_ptr() % 64 == 0


class Writes(nn.Module):
    """Writes to a file, but only for a record so large that no trial shows it."""

    def __init__(self, path):
        super().__init__()
        self.layer, self.path = nn.Linear(6, 3), str(path)

    def forward(self, x):
        if bool((x.detach() == 1234.0).any()):
            with open(self.path, "w") as stream:
                stream.write("seen")
        return self.layer(x)


def test_a_client_s_fork_cannot_write_to_a_file(make_data, tmp_path):
    data = make_data()
    data.x[int(data.offsets[2]), 0] = 1234.0
    plan = fv.central(
        fv.samplers.Everyone(),
        data.clients,
        fv.clips.Fixed(0.1),
        rounds=2,
        budget=FREE,
        multiplier=1.0,
    )
    task = fv.Task(Writes(tmp_path / "kept"), fv.cross_entropy)
    training = fv.Training(task, data, plan, SGD, workers=1)
    with pytest.raises(BadInput, match="does more than compute"):
        training.engine.run(training.round(1, np.array([2]), training.start()))
    assert not (tmp_path / "kept").exists() or not (tmp_path / "kept").read_text()
