"""Your own module and data under central DP: 60 clients, epsilon 8, in a few seconds."""

import torch
from torch import nn

import fedveil as fv

generator = torch.Generator().manual_seed(0)
x = torch.randn(1300, 5, generator=generator)
y = (x[:, 0] * x[:, 1] > 0).long()
clients = [(f"site-{k}", x[20 * k : 20 * k + 20], y[20 * k : 20 * k + 20]) for k in range(60)]
data = fv.FederatedData.from_clients(clients, test=(x[1200:], y[1200:]), classes=2)

task = fv.Task(
    nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2)),
    loss=fv.cross_entropy,
    metrics={"accuracy": fv.correct},
)
plan = fv.central(
    fv.Everyone(), data.clients, fv.Fixed(1.0), rounds=30, budget=fv.Budget(8.0, 1e-5)
)
work = fv.ClientSgd(fv.Batches(size=10, epochs=5), lr=0.3)

training = fv.Training(task, data, plan, work)
for result in fv.train(training):
    print(result.round, result.metrics["accuracy"], result.claim.short)
print(*training.plan.claims(result.round), sep="\n")
