"""Your own module and data under central DP: 60 clients, epsilon 8, in a few seconds."""

import torch
from torch import nn

import fedveil as fv

torch.manual_seed(0)
x = torch.randn(1300, 5)
y = (x[:, 0] * x[:, 1] > 0).long()
clients = [(f"site-{k}", x[20 * k : 20 * k + 20], y[20 * k : 20 * k + 20]) for k in range(60)]
data = fv.FederatedData.from_clients(clients, test=(x[1200:], y[1200:]), classes=2)
net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))

settings = {"rounds": 30, "sample.kind": "all", "client.lr": 0.3, "budget.epsilon": 8}
run = fv.run("central", model=net, data=data, out="runs/mine", set=settings)

print(run.result["metrics"], *run.claims, sep="\n")
print(run.predict(x[1200:1203])["prediction"], run.module(x[1200:1203]).shape)
