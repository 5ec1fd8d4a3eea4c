"""An item as one writes it first: client after client in plain PyTorch, in one process.

Every client starts from the global model, takes its local steps by `torch.optim.SGD` on its whole
batch, and the mean of the clients' weights is the next model. There is no clip and no noise.

python benchmarks/peers/plain_loop.py k --rounds 10
"""

import argparse
import copy
import json
import time

import torch
from work import WORK, Work


def rounds(work: Work, count: int) -> list[float]:
    """The seconds of each round, after one round of warm-up."""
    x, y = (torch.from_numpy(array) for array in work.arrays())
    module, seconds = work.module(), []
    for number in range(count + 1):
        began = time.perf_counter()
        start = copy.deepcopy(module.state_dict())
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        first = number * work.cohort
        for k in range(first, first + work.cohort):
            module.load_state_dict(start)
            optimiser = torch.optim.SGD(module.parameters(), lr=work.lr)
            for _ in range(work.steps):
                optimiser.zero_grad()
                work.loss(module(x[k % work.clients]), y[k % work.clients]).backward()
                optimiser.step()
            for name, value in module.state_dict().items():
                total[name] += value / work.cohort
        module.load_state_dict(total)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def main() -> None:
    """Print the seconds of each round as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("item", choices=WORK)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    told = f"one process, {options.threads} threads" if options.threads > 1 else "one thread"
    line = {"peer": "plain loop", "item": options.item, "configuration": told}
    print(json.dumps({**line, "seconds": rounds(WORK[options.item], options.rounds)}))


if __name__ == "__main__":
    main()
