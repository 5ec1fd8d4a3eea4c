"""Every part states what its draws depend on: another value of any field is another identity.

What enters a seed are words and values that parts state. No name of a class, field, member of an
enumeration or file is among them, so that renaming or moving one changes no seeded run.
"""

import importlib
import math
import pkgutil
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import fedveil
from fedveil.attacks.adversary import Adversary, AttackerNoise, BackdoorAttack, ReportAttack, When
from fedveil.audit.canary_clients import CanaryClients
from fedveil.audit.property_attack import MultiTask
from fedveil.audit.white_box import Ascending
from fedveil.base.identity import identity
from fedveil.data.federated import FederatedData
from fedveil.models import metrics, zoo
from fedveil.models.metrics import binary_cross_entropy, correct, cross_entropy, squared_error
from fedveil.models.task import Task
from fedveil.models.zoo import Lstm
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Relation, Unit
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import (
    ClipSchedule,
    Fixed,
    Median,
    PerGradient,
    Poly,
    Quantile,
    _StartsAtValue,
)
from fedveil.privacy.noise.mechanisms import GaussianMechanism, LaplaceMechanism, TwoPointMechanism
from fedveil.privacy.noise.rotation import RotatedGrid
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.priced_metrics import priced_metrics
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.release import NoisySteps, Release
from fedveil.privacy.releases.central import CentralNoise, central
from fedveil.privacy.releases.central_sum import ClientShares
from fedveil.privacy.releases.client_noise import ClientNoise
from fedveil.privacy.releases.dp_sgd import DpSgdSteps
from fedveil.privacy.releases.priv_unit import PrivUnitG, PrivUnitReports
from fedveil.privacy.releases.secure_sum import SecureSum
from fedveil.privacy.releases.sites import SiteNoise
from fedveil.privacy.releases.two_point import TwoPointReports
from fedveil.privacy.sampling import Everyone, FixedSize, OwnCoins, Poisson, RoundRobin
from fedveil.privacy.site_metrics import site_metrics
from fedveil.training.aggregates import CoordinateMedian, Flame, Krum, TrimmedMean
from fedveil.training.cohort import Batches
from fedveil.training.participants import Participants
from fedveil.training.server import (
    AdagradServer,
    AdamServer,
    RateSchedule,
    RateShape,
    SgdServer,
    Weights,
    YogiServer,
)
from fedveil.training.session import Training
from fedveil.training.work import Adam, ClientDpSgd, ClientSgd, Decay, OneGradient, SiteSum

CLIENTS = 6


def data(seed=0, clients=CLIENTS):
    random = np.random.default_rng(seed)
    x = random.normal(size=(clients * 3, 4)).astype(np.float32)
    y = random.integers(2, size=clients * 3)
    return FederatedData(x, y, np.arange(clients + 1) * 3, x[:4], y[:4], 2)


def task(width=5):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
    return Task(module, cross_entropy)


def reversed_(round, ids, rows):
    return -rows


def doubled(round, ids, rows):
    return 2 * rows


class Apart(NamedTuple):
    """Another value that is legal only in another part than the first one."""

    before: object
    value: object


RATES = RateSchedule(RateShape.STEP, 5)
STEPS = NoisySteps(0.5, 2, 1.0)
GRID = RotatedGrid(0.5, 16, 9, 3)
ONE_STEP = replace(STEPS, steps=1)
SGD = ClientSgd(Batches(0, steps=2), 0.5)
PLAN = central(
    Everyone(), CLIENTS, Fixed(1.0), rounds=2, budget=Budget(math.inf, 0.1), multiplier=1.0
)
RANGES = Ranges(0.0, 0.5, (3, 4), adaptive=False, perturb=Perturb.UPDATE)
FLIPPED = Quantile(1.0, 0.5, flip=1.0)
WEIGHTS = replace(RANGES, perturb=Perturb.WEIGHTS)
MOMENTS = {"beta1": 0.5, "beta2": 0.5, "floor": 0.5, "schedule": RATES}
LOCAL = {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.5, "proximal": 0.5, "adam": Adam()}
ACCOUNTS = "accounts for what is released, and decides nothing that is drawn"
ELSEWHERE = "decides where and how fast it is computed"
ACCOUNTS_TOO = "mechanism and line go together: another noise, or other rounds, below"
MEASURED = "decides what is measured, which draws nothing"
AT_SITES = site_metrics(
    ["accuracy"], 3, budget=Budget(1.0, 1e-5), rounds=(2, 4), loss_clip=1.0, unit=Unit.RECORD
)
PRICED = priced_metrics(
    ["accuracy", "loss"], 8, budget=Budget(1.0, 0.01), rounds=(1, 2), loss_clip=1.0
)

PARTS = (
    (Poisson(0.5), {"rate": 0.25}),
    (FixedSize(3), {"size": 2, "max_participations": 1}),
    (RoundRobin(3), {"size": 2}),
    (OwnCoins(0.5), {"rate": 0.25}),
    (Everyone(), {}),
    (Fixed(1.0), {"value": 2.0, "norm": Norm.L1}),
    (
        Poly(1.0, 1.0, 5, 0.1),
        {"value": 2.0, "power": 2.0, "rounds": 6, "floor": 0.2, "norm": Norm.L1},
    ),
    (
        PerGradient(Fixed(1.0), SGD.reach),
        {"inner": Fixed(2.0), "reach": replace(SGD, lr=0.25).reach},
    ),
    (
        Quantile(1.0, 0.5, noise=2.0),
        {
            "value": 2.0,
            "target": 0.25,
            "lr": 0.5,
            "noise": 3.0,
            "flip": Apart(Quantile(1.0, 0.5, flip=1.0), 2.0),
        },
    ),
    (
        Median(1.0, -2, 2, 1, Budget(1.0, 1e-5)),
        {
            "value": 2.0,
            "low": -3,
            "high": 3,
            "every": 2,
            "budget": Budget(2.0, 1e-5),
            "monotone": True,
            "cap": 8.0,
            "noise": 1.0,
        },
    ),
    (GaussianMechanism(1.0), {"multiplier": 2.0}),
    (LaplaceMechanism(1.0), {"multiplier": 2.0}),
    (TwoPointMechanism(1.0), {"epsilon": 2.0}),
    (PrivUnitG(1.0, 7), {"epsilon": 2.0, "dimension": 8}),
    (Release(), {}),
    (PrivUnitReports(PrivUnitG(1.0, 7)), {"mechanism": PrivUnitG(2.0, 7)}),
    (
        CentralNoise(GaussianMechanism(1.0), Relation.ZERO_OUT),
        {"mechanism": GaussianMechanism(2.0), "relation": Relation.REPLACE},
    ),
    (
        ClientNoise(GaussianMechanism(1.0), Relation.REPLACE),
        {
            "mechanism": LaplaceMechanism(1.0),
            "relation": Relation.ZERO_OUT,
            "multipliers": np.ones(CLIENTS),
            "statistic_channel": SecureSum(5, 5, 5),
        },
    ),
    (
        DpSgdSteps(STEPS, Relation.ZERO_OUT),
        {"noisy": replace(STEPS, rate=0.25), "relation": Relation.ADD_REMOVE},
    ),
    (
        SiteNoise(2.0, 0.5, 3, 90, "whole"),
        {
            "multiplier": 3.0,
            "rate": 0.25,
            "site_count": 4,
            "records": 91,
            "share": "part",
            "threshold": Apart(SiteNoise(2.0, 0.5, 3, 90, "part"), 2),
            "honest": Apart(SiteNoise(2.0, 0.5, 3, 90, "part"), 2),
            "masks": ELSEWHERE,
            "cap": 3,
            "unit": Apart(SiteNoise(2.0, 0.5, 3, 90, "whole", cap=3), Unit.PERSON),
            "rotated": Apart(SiteNoise(2.0, 0.5, 3, 90, "part"), GRID),
        },
    ),
    (GRID, {"spacing": 0.25, "bits": 20, "most": 8, "size": 4}),
    (
        ClientShares(2.0, 5, 5, 5),
        {
            "multiplier": 3.0,
            "clients": 6,
            "threshold": 4,
            "honest": 4,
            "masks": ELSEWHERE,
        },
    ),
    (
        TwoPointReports(TwoPointMechanism(1.0), RANGES),
        {
            "mechanism": TwoPointMechanism(2.0),
            "ranges": replace(RANGES, radius=0.25),
            "shuffled": 3,
        },
    ),
    (
        RANGES,
        {
            "centre": Apart(WEIGHTS, 0.5),
            "radius": 0.25,
            "tensor_sizes": (4, 3),
            "adaptive": True,
            "perturb": Perturb.WEIGHTS,
            "growth": 2.0,
        },
    ),
    (
        STEPS,
        {"rate": 0.25, "steps": 3, "multiplier": 2.0, "nominal": 9, "cap": 3}
        | {"unit": Apart(replace(STEPS, cap=3), Unit.PERSON), "rotated": GRID},
    ),
    (
        PLAN,
        {
            "sampler": Poisson(1.0),
            "population": 5,
            "rounds": 3,
            "clip_schedule": Fixed(2.0),
            "release": CentralNoise(GaussianMechanism(2.0), Relation.ZERO_OUT),
            "lines": ACCOUNTS,
            "parameters": ACCOUNTS,
            "metrics": PRICED,
        },
    ),
    (
        PRICED,
        {
            "names": ("loss", "accuracy"),
            "owners": 9,
            "of_clients": True,
            "loss_clip": 2.0,
            "mechanism": ACCOUNTS_TOO,
            "line": ACCOUNTS_TOO,
        },
    ),
    (
        AT_SITES,
        {
            "names": ("loss",),
            "sites": 4,
            "loss_clip": 2.0,
            "mechanism": ACCOUNTS_TOO,
            "line": ACCOUNTS_TOO,
        },
    ),
    (Batches(2, steps=2), {"size": 3, "steps": 3, "epochs": Apart(Batches(2, epochs=1), 2)}),
    (Adam(), {"beta1": 0.5, "beta2": 0.5, "floor": 0.5}),
    (RATES, {"shape": RateShape.LINEAR, "rounds": 6, "warmup": 1, "floor": 0.5}),
    (OneGradient(), {}),
    (Decay(1.0, 1.0), {"mu": 2.0, "gamma": 2.0}),
    (SGD, {**LOCAL, "batches": Batches(0, steps=3), "decay": Decay(1.0, 1.0), "schedule": RATES}),
    (ClientDpSgd(STEPS, 0.5), {**LOCAL, "noisy": replace(STEPS, rate=0.25), "schedule": RATES}),
    (SiteSum(ONE_STEP), {"noisy": replace(ONE_STEP, rate=0.25)}),
    (SgdServer(), {"lr": 0.5, "momentum": 0.5, "schedule": RATES}),
    (AdamServer(), {"lr": 0.5, **MOMENTS}),
    (YogiServer(), {"lr": 0.5, **MOMENTS}),
    (AdagradServer(), {"lr": 0.5, "floor": 0.5, "schedule": RATES}),
    (CoordinateMedian(), {}),
    (TrimmedMean(), {"trim": 0.2}),
    (Krum(1), {"malicious": 2, "chosen": None}),
    (Flame(), {}),
    (Adversary(), {}),
    (Participants(), {}),
    (ReportAttack(reversed_), {"change": doubled}),
    (When(), {"start": 2, "end": 9, "every": 2, "present": False}),
    (
        BackdoorAttack(np.array([1]), (np.zeros((2, 4)), np.zeros(2)), data(1, 1)),
        {
            "attackers": np.array([2]),
            "held_out": (np.ones((2, 4)), np.zeros(2)),
            "records": data(2, 1),
            "boost": 2.0,
            "project": True,
            "work": SGD,
            "noise": AttackerNoise.SKIP,
            "when": When(2),
        },
    ),
    (
        Ascending(task(), data(), 1, {1: np.array([0])}, 1.0),
        {
            "task": task(6),
            "asked": data(1),
            "client": 2,
            "aims": {2: np.array([0])},
            "boost": 2.0,
        },
    ),
    (
        MultiTask(task(), np.array([1]), torch.zeros(2, 4), torch.zeros(2), torch.zeros(2)),
        {
            "task": task(6),
            "ids": np.array([2]),
            "x": torch.ones(2, 4),
            "y": torch.ones(2),
            "has": torch.ones(2),
            "weight": 2.0,
            "steps": 5,
            "lr": 0.5,
            "seed": 1,
        },
    ),
    (
        CanaryClients(np.array([1]), torch.zeros(1, 3), np.ones(1)),
        {"ids": np.array([2]), "directions": torch.ones(1, 3), "signs": -np.ones(1)},
    ),
    (metrics.TopK(2), {"k": 3}),
    (metrics.F1(), {"macro": True}),
    (metrics.Auroc(), {}),
    (metrics.Perplexity(), {}),
    (metrics.BalancedAccuracy(), {}),
    (metrics.WeightedCrossEntropy((1.0, 2.0)), {"weights": (1.0, 3.0)}),
    (metrics.Rmse(), {}),
    (metrics.R2(), {}),
)
TRAINING = Training(task(), data(), PLAN, SGD)
CHANGES = {
    "task": task(6),
    "data": data(1),
    "plan": replace(PLAN, rounds=3),
    "work": replace(SGD, lr=0.25),
    "server": SgdServer(0.5),
    "weights": None,  # other weights need another plan: below
    "seed": None,
    "mode": ELSEWHERE,
    "chunk": ELSEWHERE,
    "memory": ELSEWHERE,
    "workers": ELSEWHERE,
    "every": MEASURED,
    "clients_every": MEASURED,
    "diagnostics": MEASURED,
    "participants": Adversary(),
    "aggregate": None,
    "make_engine": ELSEWHERE,
    "cluster": ELSEWHERE,
    "fastest": ELSEWHERE,
}
MODULES = {
    "lstm": (zoo.TextLstm(9, 4, (3,), 2), zoo.TextLstm(9, 4, (3,), 2, each=True)),
    "transformer": (
        zoo.TextTransformer(9, 5, 4, 1, 1, 2),
        zoo.TextTransformer(9, 5, 4, 1, 1, 2, each=True),
    ),
    "heads": (zoo.TextTransformer(9, 5, 4, 1, 1, 2), zoo.TextTransformer(9, 5, 4, 1, 2, 2)),
    "cells": (Lstm(2, 3), Lstm(2, 4)),
}


def classes():
    """Every class of the package that is not in a module of a missing extra."""
    for found in pkgutil.walk_packages(fedveil.__path__, "fedveil."):
        try:
            module = importlib.import_module(found.name)
        except ImportError:
            continue
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == found.name:
                yield value


def states(kind):
    return isinstance(vars(kind).get("identity"), property)


def test_every_part_is_looked_at_here():
    """Whoever states an identity is listed; whoever is a part states one of its own."""
    listed = {type(part) for part, _ in PARTS}
    modules = {type(layer) for pair in MODULES.values() for m in pair for layer in m.modules()}
    alone = {Training, Task, FederatedData}
    for kind in classes():
        if states(kind):
            assert kind in listed | modules | alone, kind
        bases = (ClipSchedule, _StartsAtValue)
        if issubclass(kind, ClipSchedule | Release | Adversary) and kind not in bases:
            assert states(kind), kind


@pytest.mark.parametrize(("part", "changes"), PARTS, ids=[type(part).__name__ for part, _ in PARTS])
def test_another_value_of_any_field_is_another_identity(part, changes):
    own = identity(part)
    assert identity(replace(part) if is_dataclass(part) else part) == own
    names = {f.name for f in fields(part) if f.init} if is_dataclass(part) else set()
    assert names == set(changes)
    for name, value in changes.items():
        if isinstance(value, str):  # why it is no part of the identity
            continue
        before, after = part, value
        if isinstance(value, Apart):
            before, after = value.before, value.value
        assert identity(replace(before, **{name: after})) != identity(before), name


@pytest.mark.parametrize(
    "change", [{"budget": Budget(2.0, 0.01)}, {"rounds": (1, 2, 3)}, {"rounds": (2, 3)}]
)
def test_metrics_of_another_price_are_others(change):
    said = {"budget": Budget(1.0, 0.01), "rounds": (1, 2), "loss_clip": 1.0, **change}
    assert identity(priced_metrics(["accuracy", "loss"], 8, **said)) != identity(PRICED)


def test_all_parts_have_identities_of_their_own():
    texts = [identity(part) for part, _ in PARTS]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("part", [part for part, _ in PARTS], ids=lambda part: type(part).__name__)
def test_no_name_of_ours_is_in_an_identity(part):
    if isinstance(part, ReportAttack):
        return  # of a function of the user's
    written = identity(part)
    assert "fedveil" not in written
    assert type(part).__qualname__ not in written
    for value in vars(part).values() if is_dataclass(part) else ():
        if isinstance(value, Enum):
            assert value.name not in written


def test_another_value_of_any_argument_is_another_training():
    assert {f.name for f in fields(Training) if f.init} == set(CHANGES)
    for name, value in CHANGES.items():
        if value is None or isinstance(value, str):
            continue
        changed = replace(TRAINING, **{name: value})
        assert changed.digest != TRAINING.digest, name
        assert changed.streams != TRAINING.streams, name
    free = PrivacyPlan(Everyone(), CLIENTS, 2)
    plain = Training(task(), data(), free, SGD)
    for change in ({"weights": Weights.EXAMPLES}, {"aggregate": CoordinateMedian()}):
        assert replace(plain, **change).digest != plain.digest
    again = replace(TRAINING, seed=1)
    assert (again.digest, again.streams != TRAINING.streams) == (TRAINING.digest, True)
    assert replace(TRAINING, workers=1, chunk=3).streams == TRAINING.streams


def test_values_that_do_not_learn_are_part_of_a_training():
    """Frozen weights and buffers decide what is computed, and no vector of parameters has them."""
    digests = set()
    for frozen, kept in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
        module[0].requires_grad_(requires_grad=False).weight[3, 3] = frozen
        module.register_buffer("kept", torch.full((200,), 1.0))
        module.kept[-1] = kept
        digests.add(replace(TRAINING, task=Task(module, cross_entropy)).digest)
    assert len(digests) == 3


def test_losses_have_words():
    losses = (cross_entropy, binary_cross_entropy, squared_error, correct, metrics.absolute_error)
    texts = [identity(each) for each in losses]
    assert len(set(texts)) == len(texts)
    assert not any(each.__name__ in written for each, written in zip(losses, texts, strict=True))


@pytest.mark.parametrize(("a", "b"), MODULES.values(), ids=MODULES)
def test_our_models_are_known_by_what_they_state(a, b):
    assert identity(a) != identity(b)
    assert "fedveil" not in identity(a)
    names = {name for name, _ in a.named_children()} - {"layers"}
    assert not any(f"'{name}'" in identity(a) for name in names)
