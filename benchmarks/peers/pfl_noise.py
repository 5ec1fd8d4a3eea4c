"""Item e with pfl-research: clip, sum, noise and average ten updates of ten million parameters.

pfl's `GaussianMechanism`, applied centrally, clips each update's L2 norm, its `SumAggregator` adds
the updates up, the mechanism adds noise to the sum, and the statistics divide themselves by their
weight: the calls that pfl's simulated backend makes around local training, on torch tensors, in one
process with two threads. Every update is longer than the clip, so that every one is scaled. The
backend's copy of the first update is left out: clipping has made a new tensor already.

`--tensors` splits the parameters into that many equal tensors, as a model's layers would;
`--keep-memory` has malloc keep what is freed, as a faster allocator would.

python benchmarks/peers/pfl_noise.py --rounds 10
"""

import argparse
import json
import warnings
from importlib.metadata import version

import torch
from peers.bare_loop import Round, keep_memory, timed
from pfl.aggregate.base import SumAggregator
from pfl.common_types import Population
from pfl.context import CentralContext, UserContext
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from pfl.stats import MappedVectorStatistics

CLIENTS, PARAMETERS = 10, 10_000_000
CLIP, MULTIPLIER = 1.0, 1.0


def updates(tensors: int) -> list[MappedVectorStatistics]:
    """The clients' updates, each of weight 1 and in `tensors` equal tensors."""
    torch.manual_seed(7)
    rows = (torch.randn(PARAMETERS).split(PARAMETERS // tensors) for _ in range(CLIENTS))
    return [MappedVectorStatistics({str(i): part for i, part in enumerate(row)}) for row in rows]


def average(clients: list[MappedVectorStatistics]) -> Round:
    """The call that clips, sums, noises and averages, and returns how many numbers it read."""
    mechanism = CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, MULTIPLIER))
    aggregator = SumAggregator()
    user = UserContext(num_datapoints=1, seed=None)
    central = CentralContext(
        current_central_iteration=0,
        do_evaluation=False,
        cohort_size=CLIENTS,
        population=Population.TRAIN,
        algorithm_params=None,
        model_train_params=None,
    )

    def round() -> int:
        total = None
        for client in clients:
            clipped, _ = mechanism.postprocess_one_user(stats=client, user_context=user)
            total = aggregator.accumulate(accumulated=total, user_stats=clipped)
        noisy, _ = mechanism.postprocess_server(
            stats=total, central_context=central, aggregate_metrics=None
        )
        noisy.average()
        return CLIENTS * PARAMETERS

    return round


def main() -> None:
    """Print the seconds of each round as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tensors", type=int, default=1)
    parser.add_argument("--keep-memory", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="To copy construct from a tensor")
    if options.keep_memory:
        keep_memory()
    torch.set_num_threads(2)
    set_framework_module(pytorch_ops)
    seconds, examples = timed(average(updates(options.tensors)), options.rounds)
    memory = ", memory kept" if options.keep_memory else ""
    line = {
        "peer": f"pfl {version('pfl')}",
        "item": "e",
        "configuration": f"two threads, {options.tensors} tensor(s){memory}",
        "seconds": seconds,
        "examples": examples,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
