"""Item b without any framework: what the two cores can do on the CNN's forward and backward.

Two processes with one torch thread each take half of the cohort, ten clients. Every client's
batch goes forward, through the loss and backward once per local step; gradients are zeroed,
nothing is optimised, averaged or sent. Model and images are in channels-last memory format, which
torch's CPU convolutions like best. `--batch` cuts the same images into batches of another size, to
find the size that the loop likes best; `--keep-memory` has malloc keep what is freed, as a faster
allocator would.

python benchmarks/peers/bare_loop.py --rounds 10
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
from work import WORK

PROCESSES = 2
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


def loop(batch: int, half: int) -> Round:
    """Forward and backward over one half of the cohort, in batches of `batch` images."""
    work = WORK["b"]
    clients = range(half, work.cohort, PROCESSES)
    x, y = (torch.from_numpy(array[clients]).flatten(0, 1) for array in work.arrays())
    x = x.contiguous(memory_format=torch.channels_last)
    batches = list(zip(x.split(batch), y.split(batch), strict=True))
    module = work.module().to(memory_format=torch.channels_last)

    def round() -> int:
        for images, labels in batches:
            for _ in range(work.steps):
                module.zero_grad()
                work.loss(module(images), labels).backward()
        return work.steps * len(x)

    return round


def main() -> None:
    """Print the seconds of each round as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=0, help="0: the client's whole batch")
    parser.add_argument("--keep-memory", action="store_true")
    options = parser.parse_args()
    batch = options.batch or WORK["b"].records
    with two_processes(options.keep_memory, loop, batch) as work:
        seconds, examples = timed(work, options.rounds)
    memory = ", memory kept" if options.keep_memory else ""
    line = {
        "peer": "bare loop",
        "item": "b",
        "configuration": f"two processes, channels-last, batches of {batch}{memory}",
        "seconds": seconds,
        "examples": examples,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
