"""How a model does across clients: every client once, by its own records, and never in secret."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.training.evaluate import client_spread, measure_clients, over_clients, record_slices
from fedveil.training.session import Training, train
from fedveil.training.work import OneGradient


def one_by_one(task, data):
    """Loss and accuracy of every client, client by client."""
    found = {"loss": [], "accuracy": []}
    for k in range(data.clients):
        own = slice(*data.offsets[k : k + 2])
        x, y = torch.tensor(data.x[own]), torch.tensor(data.y[own])
        each = task.measure_batch(task.parameters, x, y).per_example
        for name, values in found.items():
            values.append(float(each[name].double().mean()))
    return {name: np.sort(values) for name, values in found.items()}


def task_of(metrics=("accuracy", "f1", "auroc")):
    torch.manual_seed(3)
    return fv.Task(nn.Linear(6, 3), fv.cross_entropy, metrics)


@pytest.mark.parametrize("batch", [1, 3, 10, 1000])
@pytest.mark.parametrize("sizes", [(7, 1, 4, 10, 3), (1,) * 25, (30,), (1, 40, 1, 1)])
def test_every_client_counts_once_however_records_are_cut(make_data, sizes, batch):
    data, task = make_data(sizes), task_of()
    pieces = (measure_clients(task, task.parameters, data, p) for p in record_slices(data, batch))
    found = client_spread(data, pieces)
    tenth = math.ceil(len(sizes) / 10)
    for name, means in one_by_one(task, data).items():
        wanted = {
            "mean": means.mean(),
            "lowest_decile": means[:tenth].mean(),
            "highest_decile": means[-tenth:].mean(),
        }
        for what, value in wanted.items():
            assert found.pop(f"clients/{name}/{what}") == pytest.approx(value, rel=1e-6)
    assert not found  # what is no mean over examples is not there


@pytest.mark.slow
def test_thousands_of_clients_take_no_longer_than_their_records(make_data):
    """One pass over records: 20,000 clients of one record are not 20,000 passes."""
    many, few = make_data((1,) * 20_000), make_data((10_000,) * 2)
    task, seconds = task_of(["accuracy"]), []
    for data in (few, many):
        began = time.perf_counter()
        for _ in range(3):
            over_clients(task, task.parameters, data)
        seconds.append(time.perf_counter() - began)
    assert seconds[1] < 20 * seconds[0]


def test_a_model_that_diverged_has_no_spread(make_data):
    data, task = make_data(), task_of()
    found = over_clients(task, torch.full_like(task.parameters, math.nan), data)
    assert found
    assert all(math.isnan(value) for value in found.values())


def training_of(data, plan=None, **changes):
    plan = plan or fv.unprotected(fv.samplers.Everyone(), data.clients, rounds=5)
    return Training(task_of(), data, plan, OneGradient(), workers=1, **changes)


@pytest.mark.parametrize(
    ("every", "rounds"), [(None, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])]
)
def test_it_is_measured_when_it_was_asked_for(data, every, rounds):
    results = list(train(training_of(data, clients_every=every)))
    assert [r.round for r in results if r.over_clients] == rounds
    for result in results:
        told = [name for name in result.numbers() if name.startswith("clients/")]
        assert bool(told) == (result.round in rounds)


def test_measuring_clients_changes_nothing_else(data):
    plain, measured = (list(train(training_of(data, clients_every=e))) for e in (None, 1))
    for one, other in zip(plain, measured, strict=True):
        assert torch.equal(one.state.params, other.state.params)
        assert one.metrics == other.metrics


def test_without_diagnostics_it_is_not_told(data):
    *_, last = train(training_of(data, clients_every=1, diagnostics=False))
    assert not last.over_clients
    assert not any(name.startswith("clients/") for name in last.numbers())
    assert "decile" not in repr(last)


def test_secure_noise_refuses_it(make_data):
    data = make_data((3,) * 30)
    budget = fv.releases.planned_for(fv.Budget(float("inf"), 1e-3))
    plan = fv.central(
        fv.samplers.Poisson(0.5),
        data.clients,
        fv.clips.Fixed(0.5),
        rounds=2,
        budget=budget,
        multiplier=2.0,
    )
    secured = fv.releases.with_secure_noise(plan, 21, diagnostics=True)
    training_of(data, secured)
    with pytest.raises(BadInput, match=r"'secure' and evaluate\.clients .* in the clear"):
        training_of(data, secured, clients_every=1)


@pytest.mark.parametrize("every", [0, -1, 1.5, "end", True])
def test_a_number_of_rounds_is_needed(data, every):
    with pytest.raises(BadInput, match=r"^clients_every is"):
        training_of(data, clients_every=every)


def test_another_engine_measures_clients_as_well(data):
    class Elsewhere:
        def __init__(self, job):
            self._engine = replace(training_of(data), make_engine=None).engine

        def run(self, *asked):
            return self._engine.run(*asked)

        def evaluate(self, params):
            return {}

        def close(self):
            self._engine.close()

    here = list(train(training_of(data, clients_every=1)))
    there = list(train(training_of(data, clients_every=1, make_engine=Elsewhere)))
    assert [r.over_clients for r in here] == [r.over_clients for r in there]
