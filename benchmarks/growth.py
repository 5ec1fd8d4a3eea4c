"""How fedveil grows: seconds per round over the cohort, the clients and the parameters; memory.

Every point runs in a process of its own, so that its peak memory is its own.
"""

import argparse
import json
import math
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from ours import MOST_ROUNDS, whole_rounds

import fedveil as fv
from fedveil.models import zoo
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.plan import PrivacyPlan
from fedveil.training.gradients.modes import Mode

COHORTS = tuple(10 * 2**k for k in range(11))
CLIENTS = (10**2, 10**3, 10**4, 10**5, 10**6)
PARAMETERS = (10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000)


def central(clients: int, cohort: int, rounds: int) -> PrivacyPlan:
    return fv.central(
        fv.samplers.RoundRobin(cohort),
        clients,
        fv.clips.Fixed(1.0),
        rounds=rounds,
        budget=fv.Budget(math.inf, 1e-7),
        multiplier=1.0,
    )


def federation(
    clients: int, records: int, shape: tuple[int, ...], classes: int
) -> fv.FederatedData:
    """Random records, written to disk and mapped into memory."""
    random = np.random.default_rng(3)
    x = random.standard_normal((clients * records, *shape), dtype=np.float32)
    y = random.integers(classes, size=len(x)) if classes else x.reshape(len(x), -1)[:, 0].copy()
    offsets = np.arange(0, len(x) + 1, records)
    data = fv.FederatedData(x, y, offsets, x[:10], y[:10], classes)
    with tempfile.TemporaryDirectory() as folder:
        data.save(Path(folder) / "data")
        return fv.FederatedData.open(Path(folder) / "data")


def measured(training: fv.Training, warm_up: int) -> dict[str, float]:
    """The median round, the peak memory of this process and of its largest worker, in MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = whole_rounds(training, warm_up)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {
        "seconds": statistics.median(seconds),
        "parameters": training.task.size,
        "start_mib": before / 1024,
        "peak_mib": own / 1024,
        "worker_mib": worker / 1024,
    }


def trained(
    task: fv.Task,
    data: fv.FederatedData,
    cohort: int,
    rounds: int,
    warm_up: int = 2,
    mode: Mode | None = None,
) -> dict[str, float]:
    plan = central(data.clients, cohort, rounds + warm_up)
    work = fv.ClientSgd(fv.Batches(0, steps=1), lr=0.1)
    return measured(fv.Training(task, data, plan, work, mode=mode, every=MOST_ROUNDS), warm_up)


def by_cohort(cohort: int) -> dict[str, float]:
    """A two-layer CNN of 21,840 parameters, 10 images a client, one step, always looped.

    The two modes are about equally fast here, and a curve must not jump between them.
    """
    data = federation(COHORTS[-1], 10, (1, 28, 28), 10)
    task = fv.Task(zoo.small_cnn(1, 10), fv.cross_entropy)
    rounds = max(2, min(20, 1_000 // cohort))
    return trained(task, data, cohort, rounds, warm_up=1, mode=Mode.LOOPED)


def by_clients(clients: int, cohort: int) -> dict[str, float]:
    """A regression of 11 parameters, 10 records a client, one step."""
    began = time.perf_counter()
    data = federation(clients, 10, (10,), 0)
    task = fv.Task(zoo.linear(10), fv.models.squared_error)
    answer = trained(task, data, cohort, rounds=30)
    return {**answer, "total": time.perf_counter() - began}


def by_parameters(parameters: int) -> dict[str, float]:
    """An MLP 8-h-2 with about that many parameters, 20 clients of 10 records, one step."""
    hidden = max(1, (parameters - 2) // 11)
    data = federation(20, 10, (8,), 2)
    task = fv.Task(zoo.mlp(8, 2, (hidden,)), fv.cross_entropy)
    return trained(task, data, 20, rounds=5)


def large_model() -> dict[str, float]:
    """An MLP of 10 million parameters, 100 clients per round, 5 records each, two steps.

    `buffers` is what a worker came to need beyond what it was forked with, in models.
    """
    torch.manual_seed(0)
    data = federation(200, 5, (784,), 10)
    task = fv.Task(zoo.mlp(784, 10, (2048, 2048, 2048)), fv.cross_entropy)
    work = fv.ClientSgd(fv.Batches(0, steps=2), lr=0.1)
    training = fv.Training(task, data, central(200, 100, 2), work, every=MOST_ROUNDS)
    pids = [worker.process.pid for worker in training.engine._pool._workers]
    inherited = [_status(pid, "RssAnon") + _status(pid, "RssFile") for pid in pids]
    ledger, peak, seconds = Ledger.create(None, LedgerRun({"run": "benchmark"}, (), 2)), 0.0, []
    for result in training.rounds(training.start(), ledger):
        grown = [_status(p, "VmHWM") - i for p, i in zip(pids, inherited, strict=True)]
        peak = max(peak, *grown)
        seconds.append(result.seconds)
    buffers = peak * 1024 / (4 * task.size)
    return {"seconds": min(seconds), "parameters": task.size, "buffers": buffers}


def _status(pid: int | None, name: str) -> int:
    """One of the sizes, in KiB, that the kernel reports of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


CURVES = {
    "cohort": by_cohort,
    "clients": lambda n: by_clients(n, 100),
    "clients-10000": lambda n: by_clients(n, 10_000),
    "parameters": by_parameters,
    "large": lambda _: large_model(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("curve", choices=CURVES)
    parser.add_argument("value", type=int)
    arguments = parser.parse_args()
    answer = CURVES[arguments.curve](arguments.value)
    print(json.dumps({"curve": arguments.curve, "value": arguments.value, **answer}))


if __name__ == "__main__":
    main()
