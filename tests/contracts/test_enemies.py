"""The public API as an enemy would use it: what made an epsilon false once is refused.

Here the enemy brings losses, works and samplers of its own.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.base.identity import identity
from fedveil.privacy.clip import Clip, Clipped
from fedveil.training.engines.serial import Serial
from tests.contracts.enemies import CLIENTS, FREE, central, net, training


def smoothed(by):
    return lambda outputs, y: nn.functional.cross_entropy(
        outputs, y, reduction="none", label_smoothing=by
    )


@dataclass
class OwnServer:
    lr: float

    def step(self, state, mean):
        return fv.servers.SgdServer(self.lr).step(state, mean)


class OwnWork:
    """Not a dataclass: known by what it holds."""

    def __init__(self, lr, updates=None):
        self.lr, self.own = lr, updates

    def records_per_round(self, records):
        return records

    records_per_step = records_per_round

    def full_batches(self, records):
        return True

    def updates(self, clients):
        rows = torch.full((len(clients.cohort), clients.round.start.shape[-1]), self.lr)
        if self.own is not None:
            return self.own(self, clients, rows)
        return Clipped(rows, torch.ones(len(rows)), torch.zeros(len(rows), dtype=torch.bool))


def silent(client):
    def adversary(round, ids, reports):
        reports[ids == client] = 0
        return reports

    return adversary


PAIRS = {
    "module": lambda d: (training(d), training(d, net(nn.ReLU))),
    "loss": lambda d: (training(d), training(d, loss=smoothed(0.1))),
    "a number in a loss": lambda d: (
        training(d, loss=smoothed(0.1)),
        training(d, loss=smoothed(0.2)),
    ),
    "adversary": lambda d: (
        training(d, participants=fv.attacks.ReportAttack(silent(7))),
        training(d, participants=fv.attacks.ReportAttack(silent(-1))),
    ),
    "own work": lambda d: (training(d, work=OwnWork(0.1)), training(d, work=OwnWork(0.2))),
    "own server": lambda d: (
        training(d, server=OwnServer(1.0)),
        training(d, server=OwnServer(2.0)),
    ),
    "a function in a schedule": lambda d: tuple(
        training(d, plan=per_gradient(reach)) for reach in (lambda r: 1.0, lambda r: 2.0)
    ),
}


def per_gradient(reach):
    schedule = fv.clips.PerGradient(fv.clips.Fixed(1.0), reach)
    return fv.client_noise(
        fv.samplers.Everyone(),
        CLIENTS,
        schedule,
        laplace=False,
        rounds=3,
        budgets=(FREE,),
        multiplier=1.0,
    )


@pytest.mark.parametrize("name", PAIRS)
def test_trainings_that_differ_share_no_noise(data, name):
    one, other = PAIRS[name](data)
    again, _ = PAIRS[name](data)
    assert one.streams == again.streams
    assert one.streams != other.streams


class Ema:
    """A loss that is divided by its running mean."""

    def __init__(self):
        self.mean = 1.0

    def __call__(self, outputs, y):
        losses = fv.cross_entropy(outputs, y)
        self.mean = 0.999 * self.mean + 0.001 * float(losses.detach().mean())
        return losses / self.mean


def warming():
    """The same in a closure, and only after some calls."""
    seen = {"calls": 0, "mean": 1.0}

    def loss(outputs, y):
        losses = fv.cross_entropy(outputs, y)
        seen["calls"] += 1
        if seen["calls"] > 200:
            seen["mean"] = 0.9 * seen["mean"] + 0.1 * float(losses.detach().mean())
        return losses / seen["mean"]

    return loss


class Scale:
    """A callable that a module holds."""

    def __init__(self):
        self.calls = 0

    def __call__(self, h):
        self.calls += 1
        return h


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 3), Scale()

    def forward(self, x):
        return self.scale(self.layer(x))


def remembering(work, clients, rows):
    """A control variate that one client leaves for the next."""
    work.kept = rows.mean(0)
    return Clipped(rows, torch.ones(len(rows)), torch.zeros(len(rows), dtype=torch.bool))


STATEFUL = {
    "a loss": lambda d: training(d, loss=Ema()),
    "a closure": lambda d: training(d, loss=warming()),
    "a callable in a module": lambda d: training(d, Holds()),
    "a work": lambda d: training(d, work=OwnWork(0.1, remembering)),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_state_outside_the_module_ends_a_training_before_a_release(data, name):
    with pytest.raises(BadInput, match=r"changes when|two gradients"):
        next(iter(fv.train(STATEFUL[name](data))))


def centred(work, clients, rows):
    """Lets clients see each other before the clip."""
    return Clipped(rows - rows.mean(0), torch.ones(len(rows)), torch.zeros(len(rows)) > 0)


def test_works_of_one_s_own_are_computed_client_by_client(data):
    found = training(data, work=OwnWork(0.1, centred))
    assert found.engine.mode is fv.engines.Mode.LOOPED
    with pytest.raises(BadInput, match="may let clients see each other"):
        training(data, work=OwnWork(0.1, centred), mode=fv.engines.Mode.VECTORISED)


def test_an_engine_of_ours_is_not_talked_into_computing_side_by_side(data):
    def vectorised(job):
        return Serial(job, fv.engines.Mode.VECTORISED, 100)

    found = training(data, work=OwnWork(0.1, centred), make_engine=vectorised)
    with pytest.raises(BadInput, match="use 'looped'"):
        next(iter(fv.train(found)))


def test_a_training_starts_from_its_own_model(data):
    """From another one it would add the same noise to something else."""
    made = training(data)
    state = replace(made.start(), params=made.start().params + 1)
    with pytest.raises(BadInput, match="the state's parameters are not those"):
        next(made.rounds(state, made.new_ledger()))


def test_classes_written_again_draw_other_noise():
    def schedule(value):
        class Mine(fv.clips.Fixed):
            def clip(self, given, round):
                return Clip(value)

        return Mine(1.0)

    assert identity(schedule(50.0)) == identity(schedule(50.0))
    assert identity(schedule(50.0)) != identity(schedule(100.0))


def counting(work, clients, rows):
    """Says how many of its steps were clipped, not whether."""
    many = torch.full((len(rows),), 50)
    return Clipped(rows, torch.ones(len(rows)), many)


def test_a_bit_is_a_bit_whatever_a_work_says(data):
    plan = central(fv.clips.Quantile(1.0, 0.5, noise=20.0))
    found = training(data, plan=plan, work=OwnWork(0.1, counting))
    watched = found.engine.run(found.round(1, np.arange(CLIENTS), found.start())).statistic_values
    assert float(watched[0]) == -0.5 * CLIENTS


def shapeless(work, clients, rows):
    return Clipped(rows, torch.ones(3, 3), torch.zeros(len(rows), dtype=torch.bool))


def test_a_work_says_one_norm_for_each_client(data):
    found = training(data, work=OwnWork(0.1, shapeless))
    with pytest.raises(BadInput, match="must return one norm"):
        found.engine.run(found.round(1, np.arange(CLIENTS), found.start()))


class Loyal(fv.samplers.Poisson):
    """Always the same clients, with the account of a random cohort."""

    def cohort(self, population, round, streams, counts=None):
        return np.arange(3)


class Again(fv.samplers.RoundRobin):
    def cohort(self, population, round, streams, counts=None):
        return np.arange(self.size)


def test_a_sampler_of_one_s_own_has_no_amplification(data):
    with pytest.raises(BadInput, match="whose law nobody knows"):
        training(data, plan=central(sampler=Loyal(0.1)))


def test_a_sampler_of_one_s_own_has_no_turns_that_central_dp_believes(data):
    """Nobody counts turns there: a client asked in every round would be charged for a tenth."""
    with pytest.raises(BadInput, match="whose order nobody knows"):
        training(data, plan=central(sampler=Again(3)))


class Thrice(fv.samplers.Everyone):
    def cohort(self, population, round, streams, counts=None):
        return np.repeat(np.arange(population), 3)


class Strangers(fv.samplers.Everyone):
    def cohort(self, population, round, streams, counts=None):
        return np.arange(population) + 1


@pytest.mark.parametrize("sampler", [Thrice(), Strangers()])
def test_a_cohort_has_each_client_once(data, sampler):
    """Three rows of one client move the sum by three clip norms."""
    results = fv.train(training(data, plan=central(sampler=sampler)))
    with pytest.raises(BadInput, match="draw each client once"):
        next(results)


def test_a_sampler_that_asks_too_often_is_stopped_by_the_ledger(data):
    plan = fv.client_noise(
        Again(3),
        CLIENTS,
        fv.clips.Fixed(1.0),
        laplace=False,
        rounds=5,
        budgets=(FREE,),
        multiplier=1.0,
    )
    results = fv.train(training(data, plan=plan, work=fv.work.OneGradient()))
    next(results)
    with pytest.raises(BadInput, match="by round 2 the sampler has asked a client 2 times"):
        next(results)
