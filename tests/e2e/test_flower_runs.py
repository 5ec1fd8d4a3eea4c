"""Recipes over a real SuperLink and three real SuperNodes, with TLS and authentication."""

import os
import re
import signal
import stat
import subprocess
import sys
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file

from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from tests.e2e.federations import SAID, live, processes_of

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ALL = "sample.kind=all"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flower") / "federation"
    with live(folder, "north", "south", "east") as found:
        yield found
    assert processes_of(folder) == []


def simulated(federation, tmp_path):
    """The same recipe in the simulator."""
    recipe = load_recipe(str(federation.server / "recipe.toml"), ("engine.workers=1",))
    run = Run.start(recipe, tmp_path / "simulated", None)
    return run.execute(), load_file(tmp_path / "simulated" / "model.safetensors")


def said(claims):
    return [{key: claim[key] for key in SAID} for claim in claims]


def test_without_noise_the_model_is_the_simulator_s(federation, tmp_path):
    federation.use("fedavg", ALL, "rounds=2")
    result = federation.run("fedavg")
    assert (result["rounds"], result["stopped"], result["claims"]) == (2, "rounds", [])
    theirs, model = simulated(federation, tmp_path)
    ours = load_file(federation.server / "fedavg" / "model.safetensors")
    assert ours.keys() == model.keys()
    for name, value in model.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-5)
    assert result["metrics"]["loss"] == pytest.approx(theirs["metrics"]["loss"], abs=1e-5)
    assert all(line["answered"] == [*federation.names] for line in federation.outcomes("fedavg"))


def test_superlink_leaves_no_model_and_no_report_on_disk(federation):
    """Of a run in which it saw every site's update; what it writes is for its owner alone."""
    federation.use("fedavg", ALL, "rounds=2")
    federation.run("seen")
    kept = [federation.owner(name) / "ledger" / "answer.safetensors" for name in federation.names]
    vectors = [load_file(path)["report"] for path in kept]
    newest = max((federation.server / "seen" / "checkpoint").glob("*.safetensors"))
    vectors.append(load_file(newest)["params"])
    pieces = set()
    for vector in vectors:
        parts = vector.numpy().tobytes()
        pieces |= {parts[k : k + 32] for k in range(0, len(parts) - 32, 4)}
    pieces = {piece for piece in pieces if any(piece)}
    runs = [path.parent for path in federation.server.glob("*/federation.json")]
    places = [path for path in federation.server.rglob("*") if not {*runs} & {*path.parents}]
    written = [path for path in (*places, *federation.federation.logs.iterdir()) if path.is_file()]
    assert any(path.name == "state.db" and path.stat().st_size > 10_000 for path in written)
    for path in written:
        content = path.read_bytes()
        found = {content[k : k + 32] for k in range(len(content))} & pieces
        assert not found, path
    made = [*federation.server.glob("state.db*"), *(federation.server / "flower").rglob("*")]
    for path in (*made, federation.server / "operator.token"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_site_whose_fork_server_was_killed_has_another(federation):
    before = {name: federation.fork_servers(name) for name in federation.names}
    assert all(len(found) == 1 for found in before.values())
    os.kill(before["north"][0], signal.SIGKILL)
    federation.use("fedavg", ALL, "rounds=1")
    assert federation.run("forked")["rounds"] == 1
    assert [line["answered"] for line in federation.outcomes("forked")] == [[*federation.names]]
    after = {name: federation.fork_servers(name) for name in federation.names}
    assert after.pop("north") != before.pop("north")
    assert after == before


def test_nobody_else_on_a_site_s_machine_is_handed_its_messages(federation):
    """SuperNode's port is open to all who can log in there; its secret is not."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.interceptors import (
        RuntimeVersionHttpInterceptor,
        SuperExecAuthHttpInterceptor,
    )
    from flwr.supercore.runtime import RuntimeHttpClient
    from httpx import HTTPStatusError

    place = federation.site("north")
    assert stat.S_IMODE((place / "secret").stat().st_mode) == 0o600
    (port,) = re.findall(r"^port=(\d+)", (place / "supernode.sh").read_text(), re.MULTILINE)

    def acquired(*secrets):
        methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        shown = [
            SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods)
            for secret in secrets
        ]
        client = RuntimeHttpClient.from_server_address(
            server_address=f"127.0.0.1:{port}",
            insecure=True,
            root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), *shown],
        )
        with closing(client):
            return client.AcquireTask(AcquireTaskRequest())

    assert not acquired((place / "secret").read_bytes()).token  # there is nothing to do
    for strangers in ((), (b"another secret",)):
        with pytest.raises(HTTPStatusError, match="401 Unauthorized"):
            acquired(*strangers)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("central", ("sample.rate=0.8", "noise.source=seeded")),
        ("ldp-sgd", (ALL, "budget.epsilon=15")),
        ("ldp-fl", (ALL, "shuffle=none", "noise.epsilon=0.005")),
    ],
)
def test_claims_are_the_simulator_s(federation, tmp_path, recipe, settings):
    federation.use(recipe, "rounds=3", *settings)
    result = federation.run(recipe)
    assert (result["rounds"], result["stopped"]) == (3, "rounds")
    theirs, _ = simulated(federation, tmp_path)
    assert said(result["claims"]) == said(theirs["claims"])
    assert result["claims"]
    for line in federation.outcomes(recipe):
        assert (line["declined"], line["refused"], line["absent"]) == ({}, {}, [])
    if recipe == "ldp-sgd":  # its owner and an auditor see what it cost
        for place in (federation.owner("north") / "ledger", federation.server / recipe):
            assert "none changed, removed, inserted or moved" in verified(place)
    turns = {name: len(federation.charges(name)) for name in federation.names}
    lines = len({charge.covers for name in turns for charge in federation.charges(name)})
    asked = {name for line in federation.asks(recipe) for name in line.get("sites", ())}
    for name, charged in turns.items():
        if recipe == "central":  # who is asked is secret: all rounds are charged, asked or not
            assert charged == (3 * lines if name in asked else 0)
        else:
            assert charged == 3 * lines


def test_reports_go_to_a_mixer_that_sites_reach_by_themselves(federation, tmp_path):
    """Shuffled LDP-FL: TLS to a party of its own, and SuperLink carries no report."""
    settings = ("rounds=2", "shuffle.minimum=3", "noise.epsilon=0.01")
    federation.use("ldp-fl", *settings)
    federation.federation.start_mixer()
    result = federation.run("shuffled")
    assert (result["rounds"], result["stopped"]) == (2, "rounds")
    theirs, _ = simulated(federation, tmp_path)
    assert said(result["claims"]) == said(theirs["claims"])
    assert result["claims"][0]["trust"] == "shuffled"
    for line in federation.outcomes("shuffled"):
        assert line["answered"] == [*federation.names]
        assert line["enough"]
    moved = [line["loss"] for line in federation.federation.round_lines("shuffled")]
    assert len(set(moved)) == len(moved)  # what the mixer handed on has moved the model


def verified(place):
    """What `fedveil ledger --verify` says of a site's ledger, or of a run's."""
    done = subprocess.run(
        [sys.executable, "-m", "fedveil", "ledger", place, "--verify"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
