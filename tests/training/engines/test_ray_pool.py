"""Ray against one machine: the same models to the last bit, whoever dies on the way."""

import os
import pickle
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.attacks.adversary import BackdoorAttack
from fedveil.attacks.backdoors import PixelTrigger
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.models.zoo import build_task
from fedveil.privacy.clip_schedules import Fixed
from fedveil.privacy.plan import unprotected
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.sampling import FixedSize, RoundRobin
from fedveil.privacy.secure import with_secure_noise
from fedveil.training.aggregates import CoordinateMedian
from fedveil.training.engines import ray_pool as pool
from fedveil.training.engines.processes import Processes, WorkerLost
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.training.engines.ray_pool import RayPool
from fedveil.training.engines.serial import Serial
from fedveil.training.gradients.modes import Mode
from fedveil.training.session import Training, train
from fedveil.training.work import OneGradient
from tests.asking import asked
from tests.training.engines.test_processes import FREE, RECIPES, net, ragged, trained
from tests.training.engines.test_ray_tasks import sent

assert ragged
pytestmark = pytest.mark.filterwarnings(  # Ray leaves files and sockets open
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


class Here:
    """In the place of a cluster's tasks: calls are made here, one after the other."""

    workers, nodes = 1, 1

    def __init__(self, cluster, workers, thing, what):
        self.thing, self.calls = sent(thing), []

    def put(self, value):
        return value

    def ordered(self, function, calls, block=1, join=None):
        assert block == 1
        self.calls += [(function, len(calls))]
        return (pickle.loads(pickle.dumps(function(self.thing, *given))) for given in calls)

    def close(self):
        self.thing = None


@pytest.mark.parametrize("recipe", ["central-quantile", "dp-fedavg-gaussian"])
@pytest.mark.parametrize(("chunk", "tasks"), [(1, [3]), (2, [2]), (4, [1]), (6, [4]), (24, [])])
def test_tasks_of_several_chunks_come_to_the_same(ragged, monkeypatch, recipe, chunk, tasks):
    monkeypatch.setattr(pool, "Tasks", Here)
    monkeypatch.setattr(pool, "_TASKS", 1)
    task = net(ragged)
    plan, work = RECIPES[recipe](task)
    settings = {"mode": Mode.LOOPED, "chunk": chunk}
    job = Training(task, ragged, plan, work, **settings, workers=1).engine.job
    here = Serial(job, Mode.LOOPED, chunk)
    there = Processes(job, Mode.LOOPED, chunk, 0, lambda e, w: RayPool(RayCluster(), e, w))
    round = asked(plan, task.parameters.clone(), np.arange(24), streams=job.streams)
    one, other = (engine.run(round) for engine in (here, there))
    assert torch.equal(one.total, other.total)
    assert torch.equal(one.statistic_values, other.statistic_values)
    assert one.rest == other.rest
    assert one.signal is None or torch.equal(one.signal, other.signal)
    assert [n for _, n in there._pool._tasks.calls] == tasks if tasks else not there._started


@pytest.mark.slow
def test_every_recipe_comes_to_the_same_on_several_nodes(ragged, open_cluster, monkeypatch):
    monkeypatch.setattr(pool, "_LARGE", 1)  # so that small sums are added on the nodes, too
    cluster = RayCluster(open_cluster(1, 1, 1).address)
    with cluster.joined(0) as workers:
        assert workers == 3
        for name, recipe in RECIPES.items():
            task = net(ragged)
            plan, work = recipe(task)
            for mode in Mode if name == "central" else (Mode.LOOPED,):
                alone, said = trained(task, ragged, plan, work, mode=mode, workers=1)
                together, also = trained(task, ragged, plan, work, mode=mode, cluster=cluster)
                assert torch.equal(together, alone), name
                assert also == said, name
        check_others(ragged, cluster)


def check_others(data, cluster):
    """What is not in `RECIPES`: rows, secure noise, test records and clients' own."""
    task = net(data)
    plan, work = RECIPES["fedavg"](task)
    settings = {"mode": Mode.LOOPED, "aggregate": CoordinateMedian()}
    alone, _ = trained(task, data, plan, work, workers=1, **settings)
    assert torch.equal(trained(task, data, plan, work, cluster=cluster, **settings)[0], alone)
    tiled = {"test_x": np.tile(data.test_x, (150, 1)), "test_y": np.tile(data.test_y, 150)}
    many = replace(data, **tiled, test_owners=None)
    _, said = trained(task, many, plan, work, mode=Mode.LOOPED, workers=1)
    _, also = trained(task, many, plan, work, mode=Mode.LOOPED, cluster=cluster)
    assert said == also
    noisy = {"laplace": False, "rounds": 3, "budgets": (FREE,), "multiplier": 5.0}
    plan = client_noise(RoundRobin(20), data.clients, Fixed(0.3), **noisy)
    safe = with_secure_noise(plan, task.size, diagnostics=True)
    settings = {"mode": Mode.LOOPED, "cluster": cluster}
    one, other = (trained(task, data, safe, OneGradient(), **settings)[0] for _ in range(2))
    assert bool(torch.isfinite(one).all())
    assert not torch.equal(one, other)


class Slow:
    """Local work that says on which node it is computed, and takes its time there."""

    def __init__(self, inner, folder, seconds=0.2):
        self.inner, self.folder, self.seconds, self.parent = inner, folder, seconds, os.getpid()

    def __getattr__(self, name):
        if name.startswith("__") or "inner" not in vars(self):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def updates(self, turn):
        if os.getpid() != self.parent:
            self.elsewhere()
        return self.inner.updates(turn)

    def elsewhere(self):
        import ray

        (self.folder / ray.get_runtime_context().get_node_id()).touch()
        time.sleep(self.seconds)


def slowly(data, folder, kind=Slow, **changes):
    task = Task(nn.Linear(6, 3), cross_entropy)
    task.parameters.copy_(torch.linspace(-1, 1, task.size))
    plan, work = RECIPES["central"](task)
    return Training(task, data, plan, kind(work, folder), mode=Mode.LOOPED, **changes)


@pytest.mark.slow
def test_a_node_that_is_killed_in_mid_round_changes_nothing(ragged, open_cluster, tmp_path):
    expected = [r.state.params for r in train(slowly(ragged, tmp_path, workers=1, chunk=2))]
    cluster = open_cluster(1, 1, 1)
    victim = cluster.list_all_nodes()[-1]
    killed = []

    def kill():
        while not (tmp_path / victim.node_id).exists():
            time.sleep(0.01)
        cluster.remove_node(victim, allow_graceful=False)
        killed.append(victim)

    killer = threading.Thread(target=kill)
    killer.start()
    training = slowly(ragged, tmp_path, cluster=RayCluster(cluster.address), chunk=2)
    found = [r.state.params for r in train(training)]
    killer.join(60)
    assert killed
    assert torch.equal(torch.stack(found), torch.stack(expected))


class DiesOnce(Slow):
    def elsewhere(self):
        if not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class DiesAlways(Slow):
    def elsewhere(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Raises(Slow):
    def elsewhere(self):
        raise BadInput("no such thing")


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_an_error_is_passed_on(ragged, tmp_path):
    def of(kind, **changes):
        return slowly(ragged, tmp_path, kind, chunk=3, **changes)

    expected = [r.state.params for r in train(of(DiesOnce, workers=1))]
    cluster = RayCluster()
    with cluster.joined(2):
        found = [r.state.params for r in train(of(DiesOnce, cluster=cluster))]
        assert (tmp_path / "died").exists()
        assert torch.equal(torch.stack(found), torch.stack(expected))
        with pytest.raises(BadInput, match="no such thing") as raised:
            list(train(of(Raises, cluster=cluster)))
        assert "on a Ray worker" in "".join(raised.value.__notes__)
        with pytest.raises(WorkerLost, match="3 workers in a row died"):
            list(train(of(DiesAlways, cluster=cluster)))


@pytest.mark.slow
def test_attackers_and_files_that_nodes_do_not_see(make_data, tmp_path, monkeypatch):
    images = make_data(sizes=[4] * 12, shape=(1, 28, 28))
    images.save(tmp_path / "data")
    data = FederatedData.open(tmp_path / "data")
    task = build_task("softmax", data.record_shape, data.classes, seed=2, hidden=())
    attack = BackdoorAttack.of(data, PixelTrigger(target=0), attackers=2, boost=3.0)
    plan, (_, work) = unprotected(FixedSize(10), 12, rounds=3), RECIPES["fedavg"](task)
    training = Training(
        task, data, plan, work, chunk=2, mode=Mode.LOOPED, participants=attack, workers=1
    )
    start = task.parameters.clone()
    expected = [r.state.params for r in train(training)]
    cluster = RayCluster()
    with cluster.joined(2):
        for seen in (True, False):
            task.parameters.copy_(start)
            again = replace(training, workers=2, cluster=cluster)
            again.open()
            if not seen:
                (tmp_path / "data").rename(tmp_path / "elsewhere")
            found = [r.state.params for r in train(again)]
            assert torch.equal(torch.stack(found), torch.stack(expected))
