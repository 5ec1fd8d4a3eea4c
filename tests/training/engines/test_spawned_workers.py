"""Workers that are spawned give the bits of forked ones, and of one process."""

import os
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.base import platforms
from fedveil.base.errors import BadInput
from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.training.aggregates import CoordinateMedian
from fedveil.training.engines.processes import SpawnedWorkers
from fedveil.training.engines.serial import Serial
from fedveil.training.gradients.modes import Mode
from fedveil.training.session import Training, train
from fedveil.training.work import OneGradient

from .test_processes import CLIENTS, RECIPES, net, pids, trained, training_of


@pytest.fixture
def ragged(make_data):
    return make_data(sizes=[1 + (5 * k) % 7 for k in range(CLIENTS)])


@pytest.fixture
def spawning(monkeypatch):
    """Let workers be spawned, as on macOS and Windows."""
    monkeypatch.setattr(platforms, "start_method", lambda: "spawn")


QUICK = ("central-quantile",)  # an adaptive state


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=[] if r in QUICK else pytest.mark.slow) for r in RECIPES],
)
@pytest.mark.slow
def test_forked_and_spawned_workers_give_the_bits_of_one_process(ragged, monkeypatch, recipe):
    task = net(ragged)
    plan, work = RECIPES[recipe](task)
    found, said = {}, {}
    for method, workers in (("fork", 1), ("fork", 2), ("spawn", 2)):
        monkeypatch.setattr(platforms, "start_method", lambda method=method: method)
        key = method, workers
        found[key], said[key] = trained(task, ragged, plan, work, workers=workers)
    assert torch.equal(found["fork", 1], found["fork", 2])
    assert torch.equal(found["fork", 1], found["spawn", 2])
    assert said["fork", 1] == said["fork", 2] == said["spawn", 2]


@pytest.mark.slow
def test_clients_updates_and_measurements_come_from_spawned_workers(make_data, spawning):
    data = make_data(sizes=[3, 200] * (CLIENTS // 2))
    many = replace(
        data,
        test_x=np.tile(data.test_x, (150, 1)),
        test_y=np.tile(data.test_y, 150),
        test_owners=None,
    )
    measured = []
    for workers in (1, 2):
        task = net(many)
        plan, _ = RECIPES["fedsgd"](task)
        training = Training(
            task.measuring(["accuracy", "auroc"]),
            many,
            plan,
            OneGradient(),
            chunk=3,
            workers=workers,
            mode=Mode.LOOPED,
            clients_every=2,
            aggregate=CoordinateMedian(),
        )
        measured.append(
            [(r.metrics, r.over_clients, r.state.params.tolist()) for r in train(training)]
        )
    assert measured[0] == measured[1]


@pytest.mark.slow
def test_spawned_workers_that_die_are_replaced(ragged, open_ledger, spawning):
    training, expected = training_of(ragged), training_of(ragged, workers=1)
    wanted = [r.state.params for r in expected.rounds(expected.start(), open_ledger(expected.plan))]
    found, seen = [], set()
    for result in training.rounds(training.start(), open_ledger(training.plan)):
        found.append(result.state.params)
        assert type(training.engine._pool) is SpawnedWorkers
        seen |= set(pids(training))
        os.kill(pids(training)[0], signal.SIGKILL)
    assert len(seen) == 4
    assert torch.equal(torch.stack(found), torch.stack(wanted))


class Unopened:
    """A part that can be sent and not be opened."""

    def __setstate__(self, state):
        raise RuntimeError("not here")

    def __getattr__(self, name):
        raise AttributeError(name)


@pytest.mark.slow
def test_an_engine_that_a_worker_cannot_open_is_an_error_here(ragged, open_ledger, spawning):
    training = training_of(ragged)
    part = Unopened()
    part.kept = 1
    vars(training.engine.job)["unused"] = part
    with pytest.raises(RuntimeError, match="not here"):
        list(training.rounds(training.start(), open_ledger(training.plan)))


class OfTheScript(nn.Linear):
    """A layer that counts as defined in a script."""


@pytest.mark.parametrize("module", ["__main__", "model_path", "a lambda"])
def test_what_a_script_defines_is_not_sent(ragged, spawning, monkeypatch, module):
    """Or a file that a recipe names, which runs as the module `model_path`."""
    file = types.ModuleType("model_path")
    file.__file__, file.OfTheScript = "net.py", OfTheScript
    monkeypatch.setitem(sys.modules, "model_path", file)
    monkeypatch.setattr(OfTheScript, "__module__", module)
    layer, loss, reason = OfTheScript(6, 3), cross_entropy, "OfTheScript is defined in a script"
    if module == "a lambda":
        layer, loss, reason = nn.Linear(6, 3), lambda out, y: cross_entropy(out, y), "lambda"
    task = Task(layer, loss)
    plan, work = RECIPES["fedavg"](task)
    training = Training(task, ragged, plan, work, chunk=3, workers=2)
    with pytest.raises(BadInput, match=f"cannot be sent to worker processes: .*{reason}") as e:
        list(train(training))
    assert "\n" not in str(e.value)
    assert str(e.value).endswith("or use one worker")
    assert type(replace(training, workers=0).engine) is Serial


SCRIPT = """
import os, sys
del os.fork
if {hidden}:
    import ctypes
    whole = ctypes.CDLL
    ctypes.CDLL = lambda name, *_, **__: object() if name is None else whole(name)
import torch
from torch import nn
import fedveil as fv

print("script", flush=True)
x = torch.linspace(-1, 1, 240).reshape(40, 6)
clients = [(str(k), x[2 * k : 2 * k + 2], torch.arange(2)) for k in range(20)]
data = fv.FederatedData.from_clients(clients, classes=2)
settings = {{"rounds": 1000, "sample.kind": "all", "budget.epsilon": 8, "client.lr": 0.1,
            "engine.workers": 2, "engine.chunk": 3, "evaluate.every": 1000}}
rounds = fv.rounds("central", model=nn.Linear(6, 2), data=data, out="run", set=settings)
next(iter(rounds))
import multiprocessing
print(*(p.pid for p in multiprocessing.active_children()), flush=True)
os.kill(os.getpid(), 9)
"""


def has_ended(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "hidden",
    [pytest.param(False, id="prctl"), pytest.param(True, id="no prctl")],
)
def test_spawned_workers_run_no_script_and_end_with_their_parent(tmp_path, hidden):
    """The script has no guard: run once more, it would print its line again."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(hidden=hidden))
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == -signal.SIGKILL, found.stderr
    first, second = found.stdout.splitlines()
    assert first == "script"
    workers = [int(pid) for pid in second.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while not all(map(has_ended, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(has_ended, workers))
