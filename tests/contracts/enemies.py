"""What an enemy of the public API begins with: a plan, a model and a training."""

import math

import torch
from torch import nn

import fedveil as fv

CLIENTS = 30
FREE = fv.Budget(math.inf, 1e-3)
SGD = fv.ClientSgd(fv.Batches(0, steps=2), lr=0.5)


def central(schedule=None, sampler=None, **more):
    settings = {"rounds": 3, "budget": FREE, "multiplier": 2.0, **more}
    return fv.central(
        sampler or fv.samplers.Everyone(), CLIENTS, schedule or fv.clips.Fixed(1.0), **settings
    )


def net(between=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), between(), nn.Linear(4, 3))


def training(data, module=None, loss=fv.cross_entropy, plan=None, work=SGD, **more):
    task = fv.Task(module or net(), loss)
    return fv.Training(task, data, plan or central(), work, **{"workers": 1, **more})
