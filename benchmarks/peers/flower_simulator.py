"""Seconds per round of Flower's simulation runtime on one work item.

Measured: from the strategy's call to sample the cohort to its return with the averaged arrays, in
the server. The first round, in which the actors import, build the data and warm up, is left out.

The configuration is Flower's recommended one: a ServerApp running FedAvg over messages, a ClientApp
and the Ray backend, one virtual SuperNode per client, exactly the cohort trained per round, no
evaluation. A client takes one of the two cores, so two actors work side by side, with one thread
each. What could be spared is spared: an actor builds the arrays and the model once, the client's
code is importable (so that it is sent by name and not by value), the only metric is the number of
examples that FedAvg needs, and logging is off. Ray listens on loopback only, neither Ray nor Flower
reports its use, and both keep their files in a temporary directory.
"""

import argparse
import functools
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable

import torch
from torch import nn
from work import WORK, Work

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a cluster on the loopback address only
}

import flwr
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client = ClientApp()


@functools.cache
def loaded(item: str) -> tuple[Work, nn.Module, torch.Tensor, torch.Tensor]:
    """The work, its model and all clients' data: once per actor."""
    torch.set_num_threads(1)
    work = WORK[item]
    records, targets = map(torch.from_numpy, work.arrays())
    return work, work.module(), records, targets


@client.train()
def train(message: Message, context: Context) -> Message:
    """One client's full-batch steps."""
    work, module, records, targets = loaded(message.content["config"]["item"])
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=work.lr)
    own = context.node_config["partition-id"]
    x, y = records[own], targets[own]
    for _ in range(work.steps):
        optimizer.zero_grad()
        work.loss(module(x), y).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": work.records}),
    }
    return Message(content=RecordDict(content), reply_to=message)


class TimedFedAvg(FedAvg):
    """FedAvg that notes how long each round took."""

    def __init__(self, work: Work) -> None:
        super().__init__(
            fraction_train=work.cohort / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_available_nodes=work.clients,
        )
        self.cohort = work.cohort
        self.started = 0.0
        self.seconds: list[float] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Start the clock, then sample."""
        self.started = time.perf_counter()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average, then stop the clock."""
        averaged = super().aggregate_train(server_round, replies)
        self.seconds.append(time.perf_counter() - self.started)
        trained = sum(not reply.has_error() for reply in replies)
        if trained != self.cohort:
            raise RuntimeError(f"{trained} of {self.cohort} clients answered")
        return averaged


def measure(work: Work, rounds: int, directory: str) -> list[float]:
    """Run a warm-up and then `rounds` rounds; Flower and Ray keep their files in `directory`."""
    os.environ["FLWR_HOME"] = directory
    strategy = TimedFedAvg(work)
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(work.module().state_dict()),
            num_rounds=rounds + 1,
            train_config=ConfigRecord({"item": work.name}),
        )

    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=work.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "include_dashboard": False, "_temp_dir": directory},
        },
    )
    return strategy.seconds[1:]


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("item", choices=[work.name for work in WORK.values() if not work.batch])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        seconds = measure(WORK[options.item], options.rounds, directory)
    report = {
        "peer": f"Flower {flwr.__version__}",
        "item": options.item,
        "configuration": "Ray, two actors, one thread each",
        "seconds": seconds,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    from flower_simulator import main as importable_main

    importable_main()
