"""Flower's threads draw from a generator of their own."""

import random
import sys

import pytest

from fedveil.flower.own_draws import separate_draws

USED = ("flwr.supercore.heartbeat", "flwr.supercore.retry.retry_invoker")


@pytest.fixture
def flower(monkeypatch):
    pytest.importorskip("flwr.supernode.cli")
    for name, module in tuple(sys.modules.items()):
        if name.split(".")[0] == "flwr" and getattr(module, "random", None) is not None:
            monkeypatch.setattr(module, "random", random)


@pytest.mark.usefixtures("flower")
def test_a_heartbeat_leaves_the_common_generator_as_it_was():
    separate_draws()
    before = random.getstate()
    for name in USED:
        module = sys.modules[name]
        assert 0.7 <= module.random.uniform(0.7, 0.9) <= 0.9
    assert random.getstate() == before


def test_both_apps_see_to_it(monkeypatch, flower):
    for name in ("server_app", "client_app"):
        monkeypatch.delitem(sys.modules, f"fedveil.flower.{name}", raising=False)
        heartbeat = sys.modules["flwr.supercore.heartbeat"]
        heartbeat.random = random
        __import__(f"fedveil.flower.{name}")
        assert heartbeat.random is not random
