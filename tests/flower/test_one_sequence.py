"""The noise of a round stands in one place: without it, everybody who runs rounds notices."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.audit.observations import server_views, statistic_views
from fedveil.privacy.noise.streams import Streams
from fedveil.training.in_step import train_in_step
from fedveil.training.round import noised_sum

pytest.importorskip("flwr")

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg

from fedveil.flower.drop_in import PrivateStrategy, flatten
from tests.flower.conftest import FREE, SECURE
from tests.flower.sites import CENTRAL
from tests.flower.test_parts import NODES, START, Nodes, at_server, sends

BUDGET = fv.Budget(float("inf"), 1e-5)
CLIENTS = 6


def without_noise(plan, round, cohort):
    return cohort.total


def plan_of(schedule=None):
    return fv.central(
        fv.samplers.Everyone(),
        CLIENTS,
        schedule or fv.clips.Fixed(1.0),
        rounds=2,
        budget=BUDGET,
        multiplier=2.0,
    )


def training():
    """Every client's gradient is zero, so that the model moves by noise alone."""
    x, y = np.zeros((3, 2), dtype=np.float32), np.zeros(3, dtype=np.float32)
    clients = [(str(k), x, y) for k in range(CLIENTS)]
    data = fv.FederatedData.from_clients(clients, test=(x, y), classes=0)
    module = torch.nn.Linear(2, 1, bias=False)
    task = fv.Task(module, fv.models.squared_error)
    return fv.Training(task, data, PLAN, fv.work.OneGradient(), workers=1)


PLAN = plan_of()


def a_training(tmp_path, stand_ins):
    made = training()
    *_, last = fv.train(made)
    return float((last.state.params - made.start().params).norm())


def trainings_in_step(tmp_path, stand_ins):
    several = [made := training(), replace(made, seed=2)]
    *_, last = train_in_step(several)
    return min(float((r.state.params - several[n].start().params).norm()) for n, r in last)


def a_flower_server(tmp_path, stand_ins):
    recipe = {**CENTRAL, "sample": {"kind": "all"}, "noise": SECURE, "budget": FREE, "rounds": 1}
    three = stand_ins(recipe)
    three.server().serve()
    moved = three.model("run") - three.transport.asks[0].params
    return float(moved[3:].norm())  # stand-ins move the first three weights


def a_strategy_of_plain_flower(tmp_path, stand_ins):
    strategy = PrivateStrategy(FedAvg(fraction_train=1.0), at_server(2.0), tmp_path / "a.db")
    grid = Nodes(sends(0.0))
    asked = list(strategy.configure_train(1, START, ConfigRecord(), grid))
    assert len(asked) == len(NODES)
    arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(asked))
    return float(flatten(arrays).norm())


def an_audit_of_the_sum(tmp_path, stand_ins):
    return float(np.abs(server_views(PLAN, Streams(1), 0.0, 1, 1000)).max())


def an_audit_of_the_sum_beside_a_clip(tmp_path, stand_ins):
    sums, _ = statistic_views(plan_of(fv.clips.Quantile(1.0, 0.5, noise=10.0)), Streams(1), 0.0, 50)
    return float(np.abs(sums).max())


USERS = [
    a_training,
    trainings_in_step,
    a_flower_server,
    a_strategy_of_plain_flower,
    an_audit_of_the_sum,
    an_audit_of_the_sum_beside_a_clip,
]


@pytest.fixture
def flower_task(monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.mark.parametrize("user", USERS)
def test_what_is_released_of_nothing_is_noise(user, tmp_path, stand_ins, flower_task):
    assert user(tmp_path, stand_ins) > 1e-3


@pytest.mark.parametrize("user", USERS)
def test_without_the_noise_of_a_round_nothing_is(
    user, tmp_path, stand_ins, flower_task, monkeypatch
):
    """The code of the function is replaced, wherever it was imported to."""
    monkeypatch.setattr(noised_sum, "__code__", without_noise.__code__)
    assert user(tmp_path, stand_ins) == pytest.approx(0.0, abs=1e-6)
