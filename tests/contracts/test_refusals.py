"""A client that diverges counts for nothing and is named, in whatever form it is computed.

Clients are computed one by one, side by side as rows, in the span of their records, in worker
processes, on nodes that add up branches, and in several trainings at once. One client's records
overflow, so that its update is not finite.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.training.engines import ray_pool
from fedveil.training.engines.serial import Serial
from fedveil.training.in_step import train_in_step
from fedveil.training.reports import DualUpdates
from fedveil.training.server import Weights

CLIENTS, WIDTH, BROKEN = 7, 20, 2
FREE = fv.Budget(float("inf"), 1e-3)
EVERYBODY = np.arange(CLIENTS)
OTHERS = np.delete(EVERYBODY, BROKEN)


def made(records, plan, **more):
    """A training whose client 2 diverges; few records of many features are computed in their span.

    Sizes differ: client k has k records more.
    """
    generator = np.random.default_rng(0)
    clients = []
    for k in range(CLIENTS):
        x = generator.normal(size=(records + k, WIDTH)).astype(np.float32)
        if k == BROKEN:
            x[:] = 3e38
        clients.append((str(k), x, np.arange(records + k) % 3))
    x = generator.normal(size=(4, WIDTH)).astype(np.float32)
    data = fv.FederatedData.from_clients(clients, test=(x, np.arange(4) % 3), classes=3)
    torch.manual_seed(0)
    task = fv.Task(nn.Linear(WIDTH, 3), fv.cross_entropy)
    task.parameters.fill_(1.0)
    work = fv.ClientSgd(fv.Batches(0, steps=2), lr=0.1)
    return fv.Training(task, data, plan, work, **{"workers": 1, **more})


def unprotected():
    return fv.unprotected(fv.samplers.Everyone(), CLIENTS, rounds=2)


def central():
    return fv.central(
        fv.samplers.Everyone(), CLIENTS, fv.clips.Fixed(0.5), rounds=2, budget=FREE, multiplier=1.0
    )


FORMS = {
    "one by one": (2, {"mode": fv.engines.Mode.LOOPED}),
    "rows": (15, {"mode": fv.engines.Mode.VECTORISED}),
    "span": (2, {"mode": fv.engines.Mode.VECTORISED}),
    "span, in chunks": (2, {"mode": fv.engines.Mode.VECTORISED, "chunk": 2}),
    "workers": (2, {"mode": fv.engines.Mode.VECTORISED, "chunk": 2, "workers": 2}),
    "workers, one by one": (2, {"mode": fv.engines.Mode.LOOPED, "chunk": 2, "workers": 2}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("plan", "weights"),
    [(unprotected, Weights.UNIFORM), (unprotected, Weights.EXAMPLES), (central, Weights.UNIFORM)],
)
def test_a_client_that_diverges_counts_for_nothing(monkeypatch, form, plan, weights):
    records, options = FORMS[form]
    spans, whole = [], DualUpdates.__post_init__
    monkeypatch.setattr(DualUpdates, "__post_init__", lambda self: spans.append(1) or whole(self))
    training = made(records, plan(), weights=weights, **options)
    engine, state = training.engine, training.start()
    found = engine.run(training.round(1, EVERYBODY, state))
    alone = engine.run(training.round(1, OTHERS, state))
    if hasattr(engine, "close"):
        engine.close()
    assert found.refused == (BROKEN,)
    assert alone.refused == ()
    sizes = records + OTHERS if weights is Weights.EXAMPLES else np.ones(len(OTHERS))
    assert found.weight == alone.weight == sizes.sum()
    assert found.clients == CLIENTS
    assert torch.isfinite(found.total).all()
    assert torch.allclose(found.total, alone.total, rtol=1e-5, atol=1e-6)
    if "workers" not in form:  # what other processes do is not seen here
        assert bool(spans) == form.startswith("span")


@pytest.mark.parametrize("form", FORMS)
def test_a_training_names_it_in_every_round(form):
    records, options = FORMS[form]
    results = list(fv.train(made(records, central(), **options)))
    assert [result.refused for result in results] == [(BROKEN,)] * 2
    assert [result.clients for result in results] == [CLIENTS] * 2
    assert torch.isfinite(results[-1].state.params).all()


def test_trainings_in_step_name_it_each():
    plan = central()
    first = made(2, plan, mode=fv.engines.Mode.VECTORISED, seed=1)
    trainings = [first, made(2, first.plan, mode=fv.engines.Mode.VECTORISED, seed=2)]
    found = [result for some in train_in_step(trainings) for result in some]
    assert sorted(n for n, _ in found) == [0, 0, 1, 1]
    assert {result.refused for _, result in found} == {(BROKEN,)}


@pytest.mark.parametrize("chunks", [1, 3])
def test_sums_that_travel_keep_who_was_refused_and_what_is_left(chunks):
    """What nodes of a cluster send: the sums of chunks, and those added up on the way."""
    training = made(2, unprotected(), mode=fv.engines.Mode.VECTORISED)
    engine, state = training.engine, training.start()
    assert isinstance(engine, Serial)
    pieces = np.array_split(EVERYBODY, chunks)
    round = training.round(1, EVERYBODY, state)
    known = (round.start.numpy(), EVERYBODY, round)
    sent = [ray_pool.sum_chunks(engine, *known, [piece]) for piece in pieces]
    size = training.task.size
    together = ray_pool.sum_from(ray_pool.add_branches(size, False, False, *sent), size, False)
    branch = ray_pool.sum_from(ray_pool.sum_chunks(engine, *known, pieces), size, False)
    for found in (together, branch):
        assert found.refused == (BROKEN,)
        assert found.weight == CLIENTS - 1
        assert found.clients == CLIENTS


def test_a_client_that_diverged_in_one_training_of_several_is_that_training_s():
    """Side by side, the part of a block that belongs to a training names its own clients."""
    broken = made(2, central(), mode=fv.engines.Mode.VECTORISED)
    x, offsets = broken.data.x.copy(), broken.data.offsets
    x[offsets[BROKEN] : offsets[BROKEN + 1]] = 1.0
    fine = replace(broken, data=replace(broken.data, x=x))
    results = [dict(some) for some in train_in_step([fine, broken])]
    named = [{n: result.refused for n, result in some.items()} for some in results]
    assert named == [{0: (), 1: (BROKEN,)}] * 2
