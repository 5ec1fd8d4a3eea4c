"""Records in a CSV file, one column of which says whose they are: central DP over 120 clinics."""

import csv
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from torch import nn

import fedveil as fv


def write_example(path: Path) -> None:
    """A made-up file: clinic, age, blood pressure, dose, and whether the patient recovered."""
    random = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["clinic", "age", "pressure", "dose", "recovered"])
        for number in range(3600):
            age, pressure, dose = random.normal((50, 120, 5), (15, 20, 2))
            recovered = int((dose - 5) / 2 - (age - 50) / 15 + random.normal() / 2 > 0)
            out.writerow([f"clinic-{number % 125}", age, pressure, dose, recovered])


def read(path: Path) -> fv.FederatedData:
    """One client per clinic; the last five clinics are the test split and nobody's clients.

    Features are scaled by public numbers: scales fitted on the records would be a release.
    """
    records = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            features = [(float(row["age"]) - 50) / 15, (float(row["pressure"]) - 120) / 20]
            features.append((float(row["dose"]) - 5) / 2)
            records[row["clinic"]].append((features, int(row["recovered"])))
    clinics = [(name, *map(np.array, zip(*rows, strict=True))) for name, rows in records.items()]
    held_out = [np.concatenate(part) for part in zip(*(c[1:] for c in clinics[-5:]), strict=True)]
    return fv.FederatedData.from_clients(clinics[:-5], test=tuple(held_out), classes=2)


with tempfile.TemporaryDirectory() as folder:
    write_example(Path(folder) / "patients.csv")
    data = read(Path(folder) / "patients.csv")

task = fv.Task(nn.Linear(3, 2), fv.cross_entropy, {"accuracy": fv.correct})
plan = fv.central(
    fv.Poisson(0.5), data.clients, fv.Fixed(0.5), rounds=20, budget=fv.Budget(4, 1e-5)
)
work = fv.ClientSgd(fv.Batches(size=10, epochs=1), lr=0.3)
for result in fv.train(fv.Training(task, data, plan, work)):
    print(result.round, f"{result.metrics['accuracy']:.3f}", result.claim.short)
