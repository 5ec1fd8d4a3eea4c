"""Dropout in training: the same masks in every mode and worker, and others for everybody else."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.models.dropout import Dropout
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.streams import Streams
from fedveil.training.cohort import CohortData, Draws
from fedveil.training.gradients.modes import Mode, gradients_of

SIZES = (3, 5, 1)
P = 0.5


def module(p=P):
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(p), nn.Linear(16, 3))


def records(seed=0):
    generator = np.random.default_rng(seed)
    total = sum(SIZES)
    x = generator.normal(size=(total, 4)).astype(np.float32)
    y = generator.integers(3, size=total)
    return fv.FederatedData(x, y, np.cumsum([0, *SIZES]), x[:4].copy(), y[:4].copy(), 3)


def task(p=P):
    torch.manual_seed(0)
    return fv.Task(module(p), fv.cross_entropy)


def by_hand(flat, x, y, key):
    """The gradient of one record by plain autograd, its mask multiplied by hand."""
    with Dropout(key):
        mask = torch.nn.functional.dropout(torch.ones(1, 16), P)
    copy = module()
    nn.utils.vector_to_parameters(flat, copy.parameters())
    hidden = torch.relu(copy[0](x[None])) * mask
    loss = torch.nn.functional.cross_entropy(copy[3](hidden), y[None])
    found = torch.autograd.grad(loss, list(copy.parameters()))
    return torch.cat([g.reshape(-1) for g in found])


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("private", [False, True])
def test_gradients_are_those_of_plain_autograd_with_each_record_s_own_mask(mode, size, private):
    made, data, ids, clip = task(), records(), np.arange(3), Clip(0.5)
    cohort = CohortData(data, ids)
    plan = fv.Batches(size, steps=3).for_round(ids, cohort.sizes, 7, Streams(1))
    walk = gradients_of(made, mode, data).trajectory(made.parameters, cohort, spanned=False)
    for step in (0, 1):
        batch = plan.batch(step)
        found = walk.clipped_sum(None, batch, clip) if private else walk.mean_update(None, batch)
        for k, count in enumerate(SIZES):
            every = np.broadcast_to(np.arange(count), (1, count))
            keys = Draws(Streams(1), 7, ids[k : k + 1], step).record_keys(every)[0]
            chosen = range(count) if batch.index is None else batch.index[k][batch.mask[k] > 0]
            rows = [
                by_hand(made.parameters, cohort.x[k, i], cohort.y[k, i], keys[i]) for i in chosen
            ]
            if private:
                rows = [row * min(1.0, clip.value / float(row.norm())) for row in rows]
            expected = sum(rows) / (1 if private else len(rows))
            assert torch.allclose(found[k], expected, atol=1e-5)


def training(**options):
    plan = fv.central(
        fv.samplers.Everyone(),
        3,
        fv.clips.Fixed(1.0),
        rounds=2,
        budget=fv.Budget(math.inf, 1e-3),
        multiplier=0.1,
    )
    work = fv.ClientSgd(fv.Batches(2, epochs=2), lr=0.5)
    return fv.Training(task(), records(), plan, work, **options)


@pytest.mark.slow
def test_workers_chunks_and_modes_change_rounding_only():
    first, *others = (
        list(fv.train(training(**options)))[-1].state.params
        for options in (
            {"workers": 1, "mode": Mode.LOOPED},
            {"workers": 2, "mode": Mode.LOOPED, "chunk": 1},
            {"workers": 1, "mode": Mode.VECTORISED},
            {"workers": 1, "mode": Mode.VECTORISED, "chunk": 2},
        )
    )
    for other in others:
        assert torch.allclose(first, other, atol=1e-5)


def test_masks_differ_by_round_client_step_record_and_streams():
    """Keys of 64 bits: two of 20,000 are the same with probability 1e-11."""
    ids, index = np.arange(10), np.broadcast_to(np.arange(20), (10, 20))
    every = torch.cat(
        [
            Draws(Streams(seed), round, ids, step).record_keys(index).flatten()
            for seed in range(4)
            for round in range(5)
            for step in range(5)
        ]
    )
    assert len(every.unique()) == len(every) == 20_000


def test_a_record_s_key_is_its_index_s_whoever_is_beside_it():
    draws = Draws(Streams(3), 2, np.array([4, 9]), 1)
    every = draws.record_keys(np.broadcast_to(np.arange(6), (2, 6)))
    some = Draws(Streams(3), 2, np.array([9]), 1).record_keys(np.array([[5, 2]]))
    assert some[0].tolist() == [int(every[1, 5]), int(every[1, 2])]


def test_p_0_trains_as_no_dropout_does():
    ends = []
    for layers in (module(0.0), nn.Sequential(*(m for i, m in enumerate(module()) if i != 2))):
        torch.manual_seed(0)
        for layer in layers:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        made = fv.Task(layers, fv.cross_entropy)
        walk = gradients_of(made, Mode.LOOPED, records())
        cohort = CohortData(records(), np.arange(3))
        batch = fv.Batches(0, steps=1).for_round(cohort.ids, cohort.sizes, 1, Streams(0)).batch(0)
        ends.append(
            walk.trajectory(made.parameters, cohort, spanned=False).mean_update(None, batch)
        )
        assert not made.drops
    assert torch.equal(*ends)


class Sometimes(nn.Module):
    """Draws for some records only, none of which the trial may see."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        h = self.layer(x)
        return h * torch.rand(()) if float(x.detach().max()) > 90 else h


def test_a_module_that_draws_for_some_records_is_refused_when_it_does():
    data = records()
    x = data.x.copy()
    x[5, 0] = 100.0
    data = fv.FederatedData(x, data.y, data.offsets, data.test_x, data.test_y, 3)
    torch.manual_seed(0)
    made = fv.Task(Sometimes(), fv.cross_entropy)
    plan = training().plan
    begun = fv.Training(made, data, plan, fv.work.OneGradient(), mode=Mode.LOOPED, workers=1)
    with pytest.raises(fv.BadInput, match="draws random numbers from torch's generator"):
        list(fv.train(begun))
