"""Others reach what is for sites; everything else is for the server's own machine."""

import asyncio

import pytest

from fedveil.flower import flwr_private

CONTROL = (
    "/v1/control/start-run",
    "/v1/control/register-node",
    "/v1/runtime/acquire-task",
    "/docs",
    "/",
)
SITES = ("/v1/fleet/pull-messages", "/v1/fleet/activate-node", "/health")
TRICKS = ("/v1/fleet/../control/start-run", "/v1/fleet", "//v1/fleet/x", "/V1/FLEET/x", "/health/x")


def status(path, client, kind="http"):
    """What somebody at an address gets; 200 stands for whatever is behind the gate."""
    sent = []

    async def inside(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "client": client}
    asyncio.run(flwr_private.SuperLinkGate(inside)(scope, None, send))
    return sent[0].get("status", sent[0].get("code"))


@pytest.mark.parametrize("path", [*CONTROL, *SITES])
@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1"])
def test_this_machine_reaches_everything(path, host):
    assert status(path, (host, 1)) == 200


@pytest.mark.parametrize("path", SITES)
def test_others_reach_what_is_for_sites(path):
    assert status(path, ("192.0.2.7", 1)) == 200


@pytest.mark.parametrize("path", [*CONTROL, *TRICKS])
@pytest.mark.parametrize("client", [("192.0.2.7", 1), ("::ffff:192.0.2.7", 1), ("here", 1), None])
def test_others_reach_nothing_else(path, client):
    assert status(path, client) == 403


def test_nor_by_other_means():
    assert status("/v1/control/x", ("192.0.2.7", 1), "websocket") == 1008


def test_it_stands_before_all_that_superlink_answers(monkeypatch):
    superlink = pytest.importorskip("flwr.superlink.main")
    monkeypatch.setattr(superlink, "_get_middleware", superlink._get_middleware)
    flwr_private.install_gate()
    assert superlink._get_middleware()[0].cls is flwr_private.SuperLinkGate
    assert "_get_middleware" in superlink.create_app.__code__.co_names


def test_a_flower_that_cannot_be_gated_is_not_started(monkeypatch):
    superlink = pytest.importorskip("flwr.superlink.main")
    monkeypatch.delattr(superlink, "_get_middleware")
    with pytest.raises(SystemExit, match="where it is gated"):
        flwr_private.install_gate()


def test_every_path_for_sites_is_flower_s_own():
    """What sites call is below the path that is open, and what operators call is not."""
    fleet = pytest.importorskip("flwr.superlink.routers.fleet.router")
    control = pytest.importorskip("flwr.superlink.routers.control.router")
    assert f"{fleet.router.prefix}/" == flwr_private.FOR_SITES
    assert not control.router.prefix.startswith(flwr_private.FOR_SITES)
