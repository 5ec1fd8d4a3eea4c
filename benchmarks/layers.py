"""The table of docs/layers.md: what record-level clipping does with each kind of layer, how fast.

The kinds are those of tests/training/gradients/kinds.py, where each one is compared with a loop
over single records, and the way it goes is asserted. fedveil and Opacus take turns in one process
with one thread, on the same batch: forward, backward, every record's gradient clipped, their sum.

.venv-bench/bin/python benchmarks/layers.py
"""

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from opacus.validators import ModuleValidator
from peers.opacus_dp_sgd import wrapped
from torch import nn

from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.privacy.clip import Clip
from fedveil.training.gradients.per_example import ClippedExamples

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "layers.md"
RECORDS, TURNS, SHORTEST = 256, 5, 0.02
CLIP = 1.0
WAYS = {
    "formula": "formula",
    "mixed": "formulas, and a copy per record for other parameters",
    "copies": "a copy of the parameters per record",
    "looped": "record by record",
}
HEAD = f"""# Kinds of layers under record-level clipping

`benchmarks/layers.py` writes this page from `tests/training/gradients/kinds.py`. The tests
compare the clipped gradients of every kind (L2 and L1) with a loop over single records, to 1e-4.

The second column says how the gradients are clipped:

- *formula*: lengths and sums follow from the inputs of a layer and the gradients of its outputs.
- *a copy per record*: under `vmap` each record has its own copy of the parameter, so autograd
  gives the gradient of the record. For small parameters (norms, PReLU, positions) this costs
  almost nothing.
- *record by record*: `vmap` has no rule for an operation. This is always right, and slow.

Each row is a module with that layer and a linear head, which has a formula. L1 clips always
compute one gradient per record. Some layers are refused, and the message names a way out: batch
norm, sparse gradients, `max_norm`, weights that a hook computes (`torch.nn.utils.weight_norm`).

Speeds are thousands of records per second, from the forward pass to the clipped sum. They were
measured with {RECORDS} records at a time on one thread. Opacus runs in the fastest of its modes
that works (hooks, functorch, ghost clipping), with its own layers for attention and recurrent
cells. These modules are tiny, so the numbers show the cost of the bookkeeping.
benchmarks/RESULTS.md has modules of a usual size.

| kind | how its gradients are clipped | fedveil | Opacus | ratio |
|---|---|---|---|---|
"""

Step = Callable[[], object]


def ours(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    task = Task(module, cross_entropy)
    examples = ClippedExamples(task, x[:2], y[:2])
    examples.prepare()
    flat, row, clip = task.parameters.clone(), torch.zeros(task.size), Clip(CLIP)
    return lambda: examples.add_clipped_(row.zero_(), flat, x, y, clip)


def theirs(make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor) -> Iterator[Step]:
    """Every mode of Opacus that takes the module."""
    for mode in ("hooks", "functorch", "ghost"):
        with suppress(Exception):  # whatever it refuses a module with
            module = make() if mode == "functorch" else ModuleValidator.fix(make())
            model, optimizer, loss = wrapped(module, mode, 0.1, len(y), multiplier=0.0)

            def step(model: Any = model, optimizer: Any = optimizer, loss: Any = loss) -> None:
                loss(model(x), y).backward()
                if not optimizer.pre_step():
                    raise AssertionError("a step was skipped")
                optimizer.zero_grad(set_to_none=True)

            step()
            yield step


def seconds(step: Step) -> float:
    """The best of a few steps that take a moment each."""
    step()
    began = time.perf_counter()
    step()
    times = max(1, int(SHORTEST / (time.perf_counter() - began)))
    best = float("inf")
    for _ in range(TURNS):
        began = time.perf_counter()
        for _ in range(times):
            step()
        best = min(best, (time.perf_counter() - began) / times)
    return best


def row(name: str, kind: Any, words: int) -> str:
    torch.manual_seed(1)
    shape = (RECORDS, *kind.shape)
    x = torch.randint(words, shape) if kind.words else torch.randn(shape)
    y = torch.arange(RECORDS) % 3
    mine = seconds(ours(kind.make(), x, y))
    others = [seconds(step) for step in theirs(kind.make, x, y)]
    start = f"| {name} | {WAYS[kind.way]} | {speed(mine)} |"
    if not others:
        return f"{start} refused | |"
    return f"{start} {speed(min(others))} | {min(others) / mine:.2g} |"


def speed(seconds: float) -> str:
    return f"{RECORDS / seconds / 1e3:,.1f}"


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.training.gradients.kinds import KINDS, WORDS

    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    rows = []
    for name, kind in KINDS.items():
        rows.append(row(name, kind, WORDS))
        print(rows[-1], flush=True)
    PAGE.write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
