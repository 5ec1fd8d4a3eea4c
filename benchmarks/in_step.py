"""Repetitions of small cells computed together, beside the same one by one, in turns.

FEDVEIL_DATA=... python benchmarks/in_step.py
"""

import time
from dataclasses import replace

import torch

from fedveil.tuning.recipe_grid import axis, cells
from fedveil.tuning.trials import Laboratory, PreparedCell

REPETITIONS, TRIES = 16, 3
LOANS = ("data.name=lending-club", "data.partition=shards", "data.seed=1")
FU = ("clip.value=150", "client.lr=0.05", "budget.delta=1e-6", "budget.epsilon=1")
MANY = (*LOANS, *FU, "data.clients=5000", "data.resample=400000", "sample.size=500")
FEW = (*LOANS, *FU, "data.clients=1349", "sample.size=134")
DIGITS = ("data.clients=100", "data.seed=1", "sample.size=20", "rounds=40")
CASES = (
    ("dp-fedavg", MANY, "client.steps:rounds=2:6,1:60,12:10"),
    ("dp-fedavg", FEW, "client.steps:rounds=2:6,1:60"),
    ("fedavg", DIGITS, "client.epochs=1,5"),
)


def seconds(laboratory: Laboratory, prepared: PreparedCell) -> float:
    began = time.perf_counter()
    for block in prepared.blocks(0, REPETITIONS):
        laboratory.trial(prepared, block)
    return (time.perf_counter() - began) / REPETITIONS


def main() -> None:
    torch.set_num_threads(1)
    laboratory = Laboratory(workers=1)
    for recipe, settings, grid in CASES:
        for cell in cells(recipe, settings, [axis(grid)]):
            prepared = laboratory.prepare(cell)
            alone = replace(prepared, together=1)
            pairs = [
                (seconds(laboratory, prepared), seconds(laboratory, alone)) for _ in range(TRIES)
            ]
            fast, slow = (min(column) for column in zip(*pairs, strict=True))
            print(
                f"{recipe}, {cell.name}: {prepared.together} together {1e3 * fast:.1f} ms each, "
                f"alone {1e3 * slow:.1f} ms: {slow / fast:.2f} x"
            )


if __name__ == "__main__":
    main()
