"""Records in a CSV file, one column of which says whose they are: central DP over 123 clinics."""

import csv
import tempfile
from pathlib import Path

import numpy as np
from torch import nn

import fedveil as fv

# Public knowledge, so nothing of the records decides how they are encoded.
COLUMNS = {
    "age": {"low": 0, "high": 100},
    "pressure": {"mean": 120, "std": 20},
    "dose": {"low": 0, "high": 10},
    "recovered": {"values": ["no", "yes"]},
}

with tempfile.TemporaryDirectory() as folder:
    path, random = Path(folder) / "patients.csv", np.random.default_rng(0)
    with path.open("w", newline="") as file:  # a made-up file
        out = csv.writer(file)
        out.writerow(["clinic", *COLUMNS])
        for number in range(4500):
            age, pressure, dose = random.normal((50, 120, 5), (15, 20, 2))
            recovered = (dose - 5) / 2 - (age - 50) / 15 + random.normal() / 2 > 0
            row = [f"clinic-{number % 150}", age, pressure, dose, ("no", "yes")[int(recovered)]]
            out.writerow(row)
    whose = {"client": "clinic", "target": "recovered", "test": "by-client"}
    data = fv.FederatedData.from_table(path, columns=COLUMNS, **whose)

task = fv.Task(nn.Linear(3, 2), fv.cross_entropy, {"accuracy": fv.correct})
sampler, budget = fv.samplers.Poisson(0.5), fv.Budget(4, 1e-5)
plan = fv.central(sampler, data.clients, fv.clips.Fixed(0.5), rounds=20, budget=budget)
training = fv.Training(task, data, plan, fv.ClientSgd(fv.Batches(size=10, epochs=1), lr=0.3))
for result in fv.train(training):
    print(result.round, f"{result.metrics['accuracy']:.3f}", result.claim.short)
