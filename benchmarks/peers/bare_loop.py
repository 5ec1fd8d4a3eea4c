"""An item without any framework: what the two cores can do on a module's forward and backward.

Two processes with one torch thread each take half of the cohort. Every client's
batch goes forward, through the loss and backward once per local step; gradients are zeroed,
nothing is optimised, averaged or sent. Where the item is DP-SGD, every record goes alone, and its
gradient is clipped and added up; there is no noise. Model and images are in channels-last memory
format, which torch's CPU convolutions like best; `--contiguous` leaves them as they are. `--batch`
cuts the same images into batches of another size, to find the size that the loop likes best;
`--keep-memory` has malloc keep what is freed, as a faster allocator would.

python benchmarks/peers/bare_loop.py b --rounds 10
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from torch import nn
from work import WORK, Work

PROCESSES = 2
CLIP = 1.0
Round = Callable[[], int]


def keep_memory() -> None:
    """Have glibc keep freed memory, so that big tensors do not cost page faults at every step."""
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_max = -1, -4
    libc.mallopt(trim_threshold, -1)
    libc.mallopt(mmap_max, 0)


@contextmanager
def two_processes(keep: bool, build: Callable[..., Round], *settings: object) -> Iterator[Round]:
    """Two living processes; the call has half 0 and half 1 do `build(*settings, half)()` once.

    It returns the sum of what the halves return, when both are done.
    """
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in range(PROCESSES)]
    processes = [
        context.Process(target=_serve, args=(theirs, keep, build, *settings, half), daemon=True)
        for half, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    ends = [ours for ours, _ in pipes]
    yield lambda: _all_once(ends)
    for end in ends:
        end.send(False)
    for process in processes:
        process.join()


def _all_once(ends: list[Connection]) -> int:
    for end in ends:
        end.send(True)
    return sum(end.recv() for end in ends)


def _serve(end: Connection, keep: bool, build: Callable[..., Round], *settings: object) -> None:
    if keep:
        keep_memory()
    torch.set_num_threads(1)
    work = build(*settings)
    while end.recv():
        end.send(work())


def timed(work: Round, rounds: int) -> tuple[list[float], list[int]]:
    """Seconds and examples of each round, after one round of warm-up."""
    work()
    seconds, examples = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        examples.append(work())
        seconds.append(time.perf_counter() - start)
    return seconds, examples


def loop(item: str, batch: int, layout: torch.memory_format, half: int) -> Round:
    """Forward and backward over one half of the cohort, in batches of `batch` records."""
    work = WORK[item]
    x, y, module = _half(work, layout, half)
    batches = list(zip(x.split(batch), y.split(batch), strict=True))

    def round() -> int:
        for records, labels in batches:
            for _ in range(work.steps):
                module.zero_grad()
                work.loss(module(records), labels).backward()
        return work.steps * len(x)

    return round


def private_loop(item: str, _: int, layout: torch.memory_format, half: int) -> Round:
    """Record by record: its gradient, clipped, on top of the others'."""
    work = WORK[item]
    x, y, module = _half(work, layout, half)
    parameters = list(module.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    count = PROCESSES * work.steps * work.batch

    def round() -> int:
        for k in range(count):
            module.zero_grad()
            work.loss(module(x[k : k + 1]), y[k : k + 1]).backward()
            gradients = [parameter.grad for parameter in parameters]
            length = float(torch.nn.utils.get_total_norm(gradients))
            for place, gradient in zip(total, gradients, strict=True):
                place.add_(gradient, alpha=min(1.0, CLIP / length))
        return count

    return round


def _half(
    work: Work, layout: torch.memory_format, half: int
) -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    """The records of every second client in a row, and the module."""
    clients = range(half, work.cohort, PROCESSES)
    x, y = (torch.from_numpy(array[clients]).flatten(0, 1) for array in work.arrays())
    if x.ndim == 4:
        x = x.contiguous(memory_format=layout)
    return x, y, work.module().to(memory_format=layout)


def main() -> None:
    """Print the seconds of each round as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("item", choices=WORK)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=0, help="0: the client's whole batch")
    parser.add_argument("--contiguous", action="store_true")
    parser.add_argument("--keep-memory", action="store_true")
    options = parser.parse_args()
    work = WORK[options.item]
    batch = options.batch or (1 if work.batch else work.records)
    layout = torch.contiguous_format if options.contiguous else torch.channels_last
    build = private_loop if work.batch else loop
    with two_processes(options.keep_memory, build, work.name, batch, layout) as round:
        seconds, examples = timed(round, options.rounds)
    words = ["two processes"]
    if len(work.shape) == 3:
        words.append("contiguous" if options.contiguous else "channels-last")
    words.append("record by record" if work.batch else f"batches of {batch}")
    line = {
        "peer": "bare loop",
        "item": work.name,
        "configuration": ", ".join([*words, *["memory kept"] * options.keep_memory]),
        "seconds": seconds,
        "examples": examples,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
