"""A CSV file, an own module, a run that is killed and resumed, and predictions on new rows."""

import os
import random
import signal
import tempfile
from multiprocessing import get_context
from pathlib import Path

from torch import nn

import fedveil as fv


def killed(line: dict) -> None:  # as in a power cut
    if line["round"] == 5:
        os.kill(os.getpid(), signal.SIGKILL)


with tempfile.TemporaryDirectory() as folder:
    path, lines = Path(folder) / "patients.csv", ["hospital,age,dose,recovered"]
    for number in range(6000):  # made-up patients of 150 hospitals
        age, dose = random.randrange(100), round(random.uniform(0, 10), 1)
        lines.append(f"h{number % 150},{age},{dose},{'yes' if 9 * dose > age else 'no'}")
    path.write_text("\n".join(lines))
    public = {"age": {"low": 0, "high": 100}, "dose": {"low": 0, "high": 10}}
    public["recovered"] = {"values": ["no", "yes"]}
    whose = {"client": "hospital", "target": "recovered", "test": "by-client"}
    data = fv.FederatedData.from_table(path, columns=public, **whose)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    rest = {"out": f"{folder}/run", "set": {"rounds": 12, "client.lr": 0.5}, "on_round": killed}
    process = get_context("fork").Process(
        target=fv.run, args=("central",), kwargs={**rest, "model": net, "data": data}
    )
    process.start()
    process.join()
    run = fv.resume(f"{folder}/run", model=net, data=data)
    print(f"ended by signal {-process.exitcode}, resumed to round {run.result['rounds']}")
    print(run.claim, run.predict({"age": [20, 80], "dose": [8.0, 2.0]})["prediction"], sep="\n")
