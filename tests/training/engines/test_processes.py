"""Workers: as many as there are, alive or not, the result is the same; so is every mode."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.attacks.adversary import ReportAttack
from fedveil.base.errors import BadInput
from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.models.zoo import build_task
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import Fixed, Median, PerGradient, Quantile
from fedveil.privacy.plan import unprotected
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.releases.central import central
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.releases.dp_sgd import dp_sgd
from fedveil.privacy.releases.two_point import two_point
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson, RoundRobin
from fedveil.training.cohort import Batches
from fedveil.training.engines.processes import WorkerLost
from fedveil.training.gradients.modes import Mode
from fedveil.training.server import Weights
from fedveil.training.session import Training, train
from fedveil.training.work import ClientDpSgd, ClientSgd, OneGradient

CLIENTS = 24
FREE = Budget(float("inf"), 1e-3)
STEPS = ClientSgd(Batches(0, steps=3), lr=0.1)
SGD = ClientSgd(Batches(2, epochs=2), lr=0.1, momentum=0.5)


def unclipped(sampler):
    return unprotected(sampler, CLIENTS, rounds=3)


def centrally(schedule):
    return central(Poisson(0.8), CLIENTS, schedule, rounds=3, budget=FREE, multiplier=0.5)


def locally(schedule, laplace=False):
    return client_noise(
        RoundRobin(20),
        CLIENTS,
        schedule,
        laplace=laplace,
        rounds=3,
        budgets=(FREE,),
        multiplier=0.05,
    )


def in_steps():
    return dp_sgd(
        FixedSize(20, 3),
        CLIENTS,
        0.5,
        rate=0.6,
        steps=3,
        rounds=3,
        budget=FREE,
        multiplier=0.1,
    )


def perturbed(task, shuffled=0):
    ranges = Ranges(0.0, 0.5, task.layer_sizes, adaptive=True, perturb=Perturb.UPDATE)
    return two_point(
        Everyone(), CLIENTS, ranges, epsilon=3.0, rounds=3, budget=FREE, shuffled=shuffled
    )


RECIPES = {
    "fedavg": lambda task: (unclipped(FixedSize(20)), SGD),
    "fedsgd": lambda task: (unclipped(Everyone()), OneGradient()),
    "central": lambda task: (centrally(Fixed(0.05)), SGD),
    "central-quantile": lambda task: (centrally(Quantile(0.1, 0.5, noise=2.0)), SGD),
    "local": lambda task: (in_steps(), ClientDpSgd(in_steps().noisy_steps, 0.2)),
    "ldp-sgd": lambda task: (locally(Median(0.1, -6, 2, 1, Budget(2.0, 1e-4))), OneGradient()),
    "dp-fedavg": lambda task: (
        locally(PerGradient(Fixed(0.3, Norm.L1), STEPS.reach), laplace=True),
        STEPS,
    ),
    "dp-fedavg-gaussian": lambda task: (locally(PerGradient(Fixed(0.3), STEPS.reach)), STEPS),
    "ldp-fl": lambda task: (perturbed(task, shuffled=20), STEPS),
}


@pytest.fixture
def ragged(make_data):
    return make_data(sizes=[1 + (5 * k) % 7 for k in range(CLIENTS)])


def net(data, name="mlp"):
    return build_task(name, data.record_shape, data.classes, seed=2, hidden=(5,))


def trained(task, data, plan, work, **changes):
    """The models after each round, and what the rounds said, from the same start."""
    task.parameters.copy_(net(data).parameters)
    results = list(train(Training(task, data, plan, work, chunk=3, **changes)))
    said = [(r.clients, r.clipped, r.clip, r.refused, r.metrics, r.snr) for r in results]
    return torch.stack([r.state.params for r in results]), said


ONE_BY_ONE = ("central-quantile", "local", "ldp-sgd")  # where the quick run loops over clients
SPREAD = [(name, mode, n) for name in RECIPES for mode in Mode for n in (2, 3)]
QUICK = {(n, Mode.LOOPED if n in ONE_BY_ONE else Mode.VECTORISED, 3) for n in RECIPES}


@pytest.mark.parametrize(
    ("recipe", "mode", "workers"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in SPREAD],
)
def test_the_number_of_workers_changes_nothing(ragged, recipe, mode, workers):
    task = net(ragged)
    plan, work = RECIPES[recipe](task)
    alone, said = trained(task, ragged, plan, work, mode=mode, workers=1)
    together, also = trained(task, ragged, plan, work, mode=mode, workers=workers)
    assert torch.equal(together, alone)
    assert also == said


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(r, marks=[] if r in ("central", *ONE_BY_ONE) else pytest.mark.slow)
        for r in RECIPES
    ],
)
def test_modes_agree_over_rounds(ragged, recipe):
    task = net(ragged)
    plan, work = RECIPES[recipe](task)
    (one, _), (other, _) = (
        trained(task, ragged, plan, work, mode=mode, workers=1) for mode in Mode
    )
    assert float((one - other).norm() / one.norm()) < 1e-5


def test_weights_by_examples_do_not_depend_on_workers(ragged):
    task = net(ragged)
    plan, work = RECIPES["fedavg"](task)
    changes = {"mode": Mode.VECTORISED, "weights": Weights.EXAMPLES}
    alone, _ = trained(task, ragged, plan, work, workers=1, **changes)
    assert torch.equal(trained(task, ragged, plan, work, workers=2, **changes)[0], alone)


def training_of(data, workers=2, **changes):
    task = net(data)
    plan, work = RECIPES["central"](task)
    return Training(task, data, plan, work, chunk=3, workers=workers, mode=Mode.LOOPED, **changes)


def pids(training):
    return [worker.process.pid for worker in training.engine._pool._workers]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("victims", [1, 2])
def test_workers_that_die_between_rounds_are_replaced(ragged, open_ledger, victims):
    training, expected = training_of(ragged), training_of(ragged, workers=1)
    wanted = [r.state.params for r in expected.rounds(expected.start(), open_ledger(expected.plan))]
    found = []
    for result in training.rounds(training.start(), open_ledger(training.plan)):
        found.append(result.state.params)
        for pid in pids(training)[:victims]:
            os.kill(pid, signal.SIGKILL)
    assert torch.equal(torch.stack(found), torch.stack(wanted))


class ClipStatistic:
    """A work that does something first, and then what it is told."""

    def __init__(self, work, first):
        self.work, self.first, self.parent = work, first, os.getpid()

    def __getattr__(self, name):
        return getattr(self.work, name)

    def updates(self, turn):
        if os.getpid() != self.parent:
            self.first()
        return self.work.updates(turn)


def dying(marker, always):
    def first():
        if always or not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return first


def deadly(data, tmp_path, workers, always=False):
    task = Task(nn.Linear(6, 3), cross_entropy)
    task.parameters.copy_(torch.linspace(-1, 1, task.size))
    plan, work = RECIPES["dp-fedavg-gaussian"](task)
    training = Training(task, data, plan, work, chunk=3, workers=workers, mode=Mode.LOOPED)
    return watched(training, dying(tmp_path / "died", always))


def watched(training, first):
    """The training with an engine whose work does something first, in workers."""
    engine = training.engine
    job = replace(engine.job, work=ClipStatistic(engine.job.work, first))
    vars(training)["engine"] = replace(engine, job=job)
    return training


def test_a_chunk_whose_worker_died_is_done_again_with_the_same_randomness(ragged, tmp_path):
    expected = [r.state.params for r in train(deadly(ragged, tmp_path, workers=1))]
    assert not (tmp_path / "died").exists()
    found = [r.state.params for r in train(deadly(ragged, tmp_path, workers=2))]
    assert (tmp_path / "died").exists()
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_a_chunk_that_always_kills_its_worker_ends_the_run(ragged, tmp_path):
    training = deadly(ragged, tmp_path, workers=2, always=True)
    with pytest.raises(WorkerLost, match="3 workers in a row died on a chunk of 3 clients"):
        list(train(training))
    assert not training.engine._started


@pytest.mark.parametrize("error", [BadInput("no such thing"), RuntimeError("broken")])
def test_an_error_in_a_worker_is_raised_here(ragged, error):
    def first():
        raise error

    task = Task(nn.Linear(6, 3), cross_entropy)
    plan, work = RECIPES["fedavg"](task)
    training = Training(task, ragged, plan, work, chunk=3, workers=2, mode=Mode.LOOPED)
    training = watched(training, first)
    with pytest.raises(type(error), match=str(error)) as raised:
        list(train(training))
    assert "in a worker process" in "".join(raised.value.__notes__)


def test_workers_end_with_the_training(ragged, open_ledger):
    training = training_of(ragged)
    rounds = training.rounds(training.start(), open_ledger(training.plan))
    next(rounds)
    started = pids(training)
    assert all(alive(pid) for pid in started)
    rounds.close()
    assert not any(alive(pid) for pid in started)


def test_workers_ignore_the_interrupt_that_is_meant_for_the_parent(ragged, open_ledger):
    training, seen = training_of(ragged), []
    for _ in training.rounds(training.start(), open_ledger(training.plan)):
        seen.append(pids(training))
        for pid in seen[-1]:
            os.kill(pid, signal.SIGINT)
    assert seen == [seen[0]] * 3


def test_a_cohort_of_one_chunk_needs_no_workers(ragged, open_ledger):
    training = replace(training_of(ragged), chunk=CLIENTS)
    for _ in training.rounds(training.start(), open_ledger(training.plan)):
        assert not training.engine._started


def test_an_adversary_keeps_everything_in_one_process(ragged):
    seen = []

    def watching(round, ids, reports):
        seen.extend(ids.tolist())
        return reports

    list(train(replace(training_of(ragged), participants=ReportAttack(watching))))
    assert len(set(seen)) > 15


def test_records_are_measured_the_same_by_workers(make_data, open_ledger):
    data = make_data(sizes=[3, 200] * (CLIENTS // 2))
    many = replace(
        data,
        test_x=np.tile(data.test_x, (150, 1)),
        test_y=np.tile(data.test_y, 150),
        test_owners=None,
    )
    measured = []
    for workers in (1, 2):
        training = replace(training_of(many, workers), work=OneGradient(), clients_every=2)
        training.task.measuring(["accuracy", "top-2", "f1", "auroc", "perplexity"])
        measured.append([(r.metrics, r.over_clients) for r in train(training)])
    assert measured[0] == measured[1]
    assert [bool(over_clients) for _, over_clients in measured[0]] == [False, True, True]
    assert len(measured[0][0][0]) == 6
