"""Seconds per round of pfl-research's simulator on one work item.

Measured: from the end of one central iteration to the end of the next, which is everything from
drawing the cohort to the updated global model. The first iteration is warm-up and left out.

The configuration is pfl's fast path. Every user's dataset is built once, as tensors, before the
first round; local_batch_size is None, which hands over a user's records whole; no local or central
privacy mechanism, no postprocessor, no evaluation after the warm-up, no metrics reported, and no
callback but the one that reads the clock. pfl trains a cohort's users one after another, so two
cores can be used in two ways, and both are here: one process whose tensor operations have two
threads, or pfl's own multi-process mode (torch.distributed, gloo), each process training half of
the cohort on one thread. The second starts the processes as torchrun would, on loopback only.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.version import __version__
from torch import nn
from torch.distributed import TCPStore
from work import WORK, Work

CONFIGURATIONS = {1: "one process, two threads", 2: "two processes, one thread each"}


class Module(nn.Module):
    """The work's model with the two methods that pfl calls."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work
        self.layers = work.module()

    def loss(self, records: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """What a local step differentiates."""
        return self.work.loss(self.layers(records), targets)

    def metrics(self, records: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        """Nothing: pfl asks once, in the warm-up."""
        return {}


class Clock(TrainingProcessCallback):
    """The time at the end of every central iteration."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Read the clock and go on."""
        self.times.append(time.perf_counter())
        return False, Metrics()

    def seconds(self) -> list[float]:
        """How long each iteration after the first one took."""
        return [end - start for start, end in zip(self.times, self.times[1:], strict=False)]


def users(work: Work) -> FederatedDataset:
    """All clients' data in memory, sampled uniformly."""
    records, targets = map(torch.from_numpy, work.arrays())
    datasets = [PyTorchTensorDataset(pair) for pair in zip(records, targets, strict=True)]
    sampler = get_user_sampler("random", range(work.clients))
    return FederatedDataset(datasets.__getitem__, sampler)


def train(work: Work, rounds: int) -> list[float]:
    """Run a warm-up and then `rounds` rounds of federated averaging."""
    np.random.seed(7)  # pfl draws its cohorts from here, and all its processes must agree
    module = Module(work)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    data, clock = users(work), Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds + 1,
            evaluation_frequency=rounds + 1,
            train_cohort_size=work.cohort,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=None,
            local_num_epochs=work.steps,
            local_learning_rate=work.lr,
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    return clock.seconds()


def start_processes(count: int) -> int:
    """Run this command in `count` processes which find each other on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
    shared = {
        "TORCHELASTIC_RUN_ID": "benchmark",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    return max([abs(process.wait()) for process in processes])


def main() -> int:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("item", choices=[work.name for work in WORK.values() if not work.batch])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processes", type=int, choices=CONFIGURATIONS, default=1)
    options = parser.parse_args()
    if options.processes > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return start_processes(options.processes)
    torch.set_num_threads(2 // options.processes)
    seconds = train(WORK[options.item], options.rounds)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        report = {
            "peer": f"pfl-research {__version__}",
            "item": options.item,
            "configuration": CONFIGURATIONS[options.processes],
            "seconds": seconds,
        }
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
