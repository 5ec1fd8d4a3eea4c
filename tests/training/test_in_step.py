"""Several trainings in step: each client has its own training's model and keys."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.data.federated import FederatedData
from fedveil.models.metrics import cross_entropy, squared_error
from fedveil.models.task import Task
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.clip import Clip
from fedveil.privacy.clip_schedules import Fixed, Quantile
from fedveil.privacy.noise.streams import JointStreams, Streams
from fedveil.privacy.plan import unprotected
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.releases.central import central
from fedveil.privacy.releases.two_point import two_point
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson
from fedveil.training.cohort import Batches, CohortData
from fedveil.training.gradients.least_squares import QuadraticTrajectory
from fedveil.training.gradients.linear_chains import DualTrajectory, StackedTrajectory
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.gradients.trajectories import VmappedTrajectory
from fedveil.training.in_step import repetitions_per_chunk, train_in_step
from fedveil.training.server import Weights
from fedveil.training.session import Training, train
from fedveil.training.work import ClientSgd

CLIENTS = 8


def federation(features, *, classes=3, records=6, seed=1):
    random = np.random.default_rng(seed)
    clients = []
    for k in range(CLIENTS):
        size = records + k % 3
        x = random.normal(size=(size, features)).astype(np.float32)
        y = random.integers(classes, size=size) if classes else random.normal(size=size)
        clients.append((f"{k}", x, y if classes else y.astype(np.float32)))
    return FederatedData.from_clients(clients, test=clients[0][1:], classes=classes)


class Squashed(nn.Module):
    """No chain of linear layers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x):
        return self.inner(x).sin()


WALKS = {
    StackedTrajectory: (lambda: Task(nn.Linear(5, 3), cross_entropy), federation(5)),
    DualTrajectory: (lambda: Task(nn.Linear(40, 3), cross_entropy), federation(40)),
    QuadraticTrajectory: (
        lambda: Task(nn.Linear(3, 1), squared_error),
        federation(3, classes=0, records=40),
    ),
    VmappedTrajectory: (lambda: Task(Squashed(), cross_entropy), federation(5)),
}


@pytest.mark.parametrize("kind", WALKS, ids=lambda kind: kind.__name__)
def test_a_walk_from_several_starts_is_the_walks_from_each(kind):
    make, data = WALKS[kind]
    torch.manual_seed(2)
    task, ids = make(), np.arange(CLIENTS)
    starts = torch.randn(CLIENTS, task.size)
    gradients = gradients_of(task, Mode.VECTORISED, data, full_batches=True)
    clip = Clip(0.7)

    def steps(start, ids):
        cohort = CohortData(data, ids)
        batch = Batches(0, steps=1).for_round(ids, cohort.sizes, 1, Streams(1)).batch(0)
        walk = gradients.trajectory(start, cohort, spanned=True)
        assert type(walk) is kind
        moved = walk.descend_(None, batch, 0.1)
        rows = [walk.update_rows(moved.clone())]
        rows.append(walk.update_rows(walk.descend_(moved, batch, 0.1)))
        if not walk.spanned:
            rows.append(walk.clipped_sum(None, batch, clip))
            rows.append(walk.clipped_sum(moved, batch, clip))
        return torch.stack(rows)

    together = steps(starts, ids)
    alone = torch.cat([steps(starts[k], ids[k : k + 1]) for k in range(CLIENTS)], dim=1)
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0], steps(starts[0], ids)[0], rtol=1e-2)


def test_joint_streams_are_the_streams_side_by_side():
    each = (Streams(1), Streams(7), Streams(9))
    ids = np.array([4, 2, 4, 4, 3])
    joint = JointStreams(each, (2, 0, 3)).keys("noise", 5, ids, 1)
    assert joint[:2].tolist() == each[0].keys("noise", 5, ids[:2], 1).tolist()
    assert joint[2:].tolist() == each[2].keys("noise", 5, ids[2:], 1).tolist()
    assert joint[0] != joint[2]


def several(plan, data, seeds, weights=Weights.UNIFORM):
    """Trainings of one plan, with what the first one's claims say of data and model."""
    trainings = []
    for seed in seeds:
        torch.manual_seed(seed)
        task = Task(nn.Linear(5, 3), cross_entropy)
        work = ClientSgd(Batches(2, epochs=1), 0.1)
        trainings.append(
            Training(
                *(task, data, trainings[0].plan if trainings else plan, work),
                weights=weights,
                seed=seed,
                mode=Mode.VECTORISED,
                workers=1,
            )
        )
    return trainings


PLANS = {
    "central": lambda: central(
        Poisson(0.3), CLIENTS, Fixed(1.0), rounds=6, budget=Budget(9.0, 1e-2), multiplier=2.0
    ),
    "nothing": lambda: unprotected(Everyone(), CLIENTS, rounds=3),
}


@pytest.mark.parametrize("kind", PLANS)
def test_rounds_are_those_of_separate_trainings(kind):
    """Cohorts, empty ones too, are the same; models agree up to rounding, and so do counts."""
    plan, data = PLANS[kind](), federation(5)
    found = [[] for _ in range(3)]
    for results in train_in_step(several(plan, data, (1, 2, 3))):
        for number, result in results:
            found[number].append(result)
    for training, mine in zip(several(plan, data, (1, 2, 3)), found, strict=True):
        theirs = list(train(training))
        assert len(mine) == len(theirs) == plan.permitted
        for a, b in zip(mine, theirs, strict=True):
            assert (a.round, a.clients, a.clipped, a.epsilon) == (
                b.round,
                b.clients,
                b.clipped,
                b.epsilon,
            )
            assert torch.allclose(a.state.params, b.state.params, rtol=1e-4, atol=1e-5)


def test_each_training_weighs_its_own_clients():
    """Cohorts of three, by examples: other clients, and other weights, in each training."""
    plan, data = unprotected(FixedSize(3), CLIENTS, rounds=4), federation(5)
    seeds = (1, 2, 3)
    found = list(train_in_step(several(plan, data, seeds, Weights.EXAMPLES)))
    for number, training in enumerate(several(plan, data, seeds, Weights.EXAMPLES)):
        for results, alone in zip(found, train(training), strict=True):
            together = dict(results)[number].state.params
            assert torch.allclose(together, alone.state.params, rtol=1e-4, atol=1e-5)


def test_what_fits_into_a_chunk_is_computed_together():
    data = federation(5)
    (training,) = several(PLANS["nothing"](), data, [1])
    assert repetitions_per_chunk(training) == training.engine.chunk // CLIENTS > 1


def test_only_repetitions_go_in_step():
    data = federation(5)
    first, second = (several(PLANS["nothing"](), data, [seed])[0] for seed in (1, 2))
    with pytest.raises(AssertionError, match="must have one plan"):
        next(train_in_step([first, second]))


@pytest.mark.parametrize("kind", PLANS)
def test_trainings_on_other_records_are_those_alone(kind):
    """Other records and other sizes at the same clients: each training sees its own."""
    plan = PLANS[kind]()
    datas = [federation(5, records=4 + n, seed=n) for n in range(3)]

    def trainings():
        own = several(plan, datas[0], [0])[0].plan
        return [several(own, data, [seed])[0] for seed, data in enumerate(datas)]

    found = list(train_in_step(trainings()))
    for number, training in enumerate(trainings()):
        for results, alone in zip(found, train(training), strict=True):
            together = dict(results)[number]
            assert together.clients == alone.clients
            assert torch.allclose(together.state.params, alone.state.params, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_one_block_does_not_go_in_step():
    """Clients one by one, or a clip that is another one in each repetition."""
    data, plan = federation(5), PLANS["nothing"]()
    looped = [replace(training, mode=Mode.LOOPED) for training in several(plan, data, (1, 2))]
    schedule, free = Quantile(1.0, 0.5, noise=5.0), Budget(float("inf"), 1e-2)
    moving = central(Poisson(0.3), CLIENTS, schedule, rounds=2, budget=free, multiplier=2.0)
    size = several(plan, data, (1,))[0].task.size
    ranges = Ranges(0.0, 0.5, (size,), adaptive=True, perturb=Perturb.UPDATE)
    points = two_point(Everyone(), CLIENTS, ranges, epsilon=1.0, rounds=2, budget=free)
    for trainings in (looped, several(moving, data, (1, 2)), several(points, data, (1, 2))):
        assert repetitions_per_chunk(trainings[0]) == 1
        with pytest.raises(AssertionError, match="as one block"):
            next(train_in_step(trainings))
