"""DP-SGD inside clients: every record is protected from the server, with an own module."""

import tempfile

from sklearn.datasets import load_breast_cancer
from torch import nn

import fedveil as fv

cancer = load_breast_cancer()
table = dict(zip(cancer.feature_names, cancer.data.T, strict=True))
table["diagnosis"] = cancer.target_names[cancer.target]
table["clinic"] = [f"clinic-{row % 10}" for row in range(len(cancer.data))]

# scales are fitted on held-out clinics, which are no clients
labels = {"diagnosis": {"values": ["benign", "malignant"]}}
whose = {"client": "clinic", "target": "diagnosis", "test": "by-client"}
data = fv.FederatedData.from_table(table, columns=labels, **whose)
net = nn.Sequential(nn.Linear(30, 8), nn.Tanh(), nn.Linear(8, 2))
settings = {"rounds": 20, "sample.kind": "all", "client.steps": 4, "client.lr": 0.5}

with tempfile.TemporaryDirectory() as folder:
    run = fv.run("dp-sgd", model=net, data=data, out=f"{folder}/run", set=settings)
    print(data, run.claim, f"accuracy {run.result['metrics']['accuracy']:.3f}", sep="\n")
