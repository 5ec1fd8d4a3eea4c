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


@pytest.mark.usefixtures("flower")
def test_the_server_s_app_sees_to_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "fedveil.flower.server_app", raising=False)
    heartbeat = sys.modules["flwr.supercore.heartbeat"]
    __import__("fedveil.flower.server_app")
    assert heartbeat.random is not random


@pytest.mark.usefixtures("flower")
def test_a_site_sees_to_it_in_the_process_that_answers(monkeypatch):
    """Which was forked from the one that imported the app, and is named another parent."""
    from fedveil.flower import client_app

    watched = []
    monkeypatch.setattr(client_app, "end_with_parent", lambda: watched.append(True))
    heartbeat = sys.modules["flwr.supercore.heartbeat"]
    assert heartbeat.random is random
    with client_app.app._lifespan(None):
        assert heartbeat.random is not random
        assert watched
