"""A CSV file, an own module, a run that is killed and resumed, and predictions on new rows."""

import csv
import os
import signal
import tempfile
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedveil as fv

SETTINGS = {"rounds": 12, "sample.rate": 0.5, "client.lr": 0.3, "budget.epsilon": 6}
COLUMNS = {"age": {"low": 0, "high": 100}, "dose": {"low": 0, "high": 10}}


def parts(path: Path) -> dict:
    """The same module and data in every process; about a fifth of the hospitals is held out."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    columns = {**COLUMNS, "recovered": {"values": ["no", "yes"]}}
    table = {"client": "hospital", "target": "recovered", "columns": columns}
    return {"model": net, "data": fv.FederatedData.from_table(path, **table)}


def killed(path: Path) -> None:
    """A run whose process dies, as by a power cut, after round 5."""
    die = lambda line: line["round"] == 5 and os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    fv.run("central", out=path.parent / "run", set=SETTINGS, on_round=die, **parts(path))


with tempfile.TemporaryDirectory() as folder:
    path, random = Path(folder) / "patients.csv", np.random.default_rng(0)
    with path.open("w", newline="") as file:
        csv.writer(file).writerow(["hospital", "age", "dose", "recovered"])
        for n in range(6000):
            age, dose = random.integers(0, 100), round(random.uniform(0, 10), 1)
            csv.writer(file).writerow([f"h{n % 150}", age, dose, "yes" if 9 * dose > age else "no"])
    process = get_context("spawn").Process(target=killed, args=(path,))
