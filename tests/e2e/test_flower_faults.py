"""What goes wrong in a federation, with real processes: every case ends, explained and charged."""

import shutil

import pytest

from fedveil.flower.certificates import node_key
from fedveil.privacy.ledger.file import read_charges
from tests.e2e.federations import live, wait_for

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NAMES = ("honest", "nan", "short", "replay", "die", "refuse")
BAD = {name: name for name in ("nan", "short", "replay", "die")}
DEADLINE = 60.0
ALL = "sample.kind=all"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with live(tmp_path_factory.mktemp("flower") / "federation", *NAMES, bad=BAD) as found:
        yield found


def test_an_unknown_key_is_not_let_in(federation):
    """A site's folder with a key that nobody registered; SuperLink turns it away."""
    stranger = federation.folder / "sites" / "stranger"
    shutil.copytree(federation.site("honest"), stranger)
    for name in ("node", "node.pub"):
        (stranger / name).unlink()
    node_key(stranger, "stranger")
    process = federation.federation.start_site("stranger")
    assert process.wait(200) != 0
    assert "Failed to activate SuperNode" in process.output
    del federation.federation.sites["stranger"]
    shutil.rmtree(stranger)


def test_a_node_without_a_key_is_not_let_in(federation):
    bare = federation.folder / "sites" / "bare"
    shutil.copytree(federation.site("honest"), bare)
    script = bare / "supernode.sh"
    script.write_text(script.read_text().replace("--auth-supernode-private-key node", ""))
    process = federation.federation.start_site("bare")
    assert process.wait(200) != 0
    assert "SuperNode ID" not in process.output
    del federation.federation.sites["bare"]
    shutil.rmtree(bare)


def test_sites_that_misbehave_are_named_and_the_rest_goes_on(federation):
    """Two rounds of local noise: NaN, a short report, an old one, a refusal, and a death."""
    federation.use("ldp-sgd", ALL, "rounds=2", "budget.epsilon=15", deadline=DEADLINE)
    file = federation.site("refuse") / "site.toml"
    file.write_text(file.read_text().replace("epsilon.client = ", "epsilon.client = 0.1 #"))
    result = federation.run("bad")
    assert (result["rounds"], result["stopped"]) == (2, "rounds")

    first, second = federation.outcomes("bad")
    for line in (first, second):
        assert set(line["refused"]) >= {"nan", "short"}
        assert "not finite, or not of this model" in line["refused"]["nan"]
        assert "not finite, or not of this model" in line["refused"]["short"]
        assert "policy.epsilon.client is 0.1" in line["declined"]["refuse"]
        assert "honest" in line["answered"]
        assert line["enough"]
    assert {"replay", "die"} <= set(first["answered"])
    assert "attempt 0 at round 1" in second["refused"]["replay"]
    assert second["absent"] == ["die"]

    assert len(read_charges(federation.server / "bad" / "ledger.db")) == 2 * 2  # two lines a round
    turns = {name: len(federation.charges(name)) for name in NAMES}
    assert turns == {name: 0 if name == "refuse" else turns["honest"] for name in NAMES}
    assert turns["honest"] > 0


def test_a_server_that_is_killed_resumes_and_no_charge_is_lost(federation):
    """ServerApp is killed in round 2, SuperLink in round 3; both are started again."""
    policy = "\nrepeats = 3\n"
    federation.use(
        "ldp-sgd", ALL, "rounds=3", "noise.multiplier=20.0", "budget.epsilon=5", policy=policy
    )

    def asked(number):
        return any(line.get("asking") == number for line in federation.asks("killed"))

    first = federation.federation.run("killed")
    wait_for(lambda: asked(2), "round 2 was asked for")
    federation.kill_server_app()
    second = federation.federation.run("killed")
    wait_for(lambda: asked(3), "round 3 was asked for")
    federation.kill_superlink()
    first.kill()
    second.kill()

    federation.federation.start_superlink(federation.url)
    result = federation.run("killed")
    assert (result["rounds"], result["stopped"]) == (3, "rounds")

    asks = [line for line in federation.asks("killed") if "asking" in line]
    tried = [(line["asking"], line["attempt"]) for line in asks]
    assert len(set(tried)) == len(tried)  # no two asks have one name
    assert tried == [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1)]
    charged = read_charges(federation.server / "killed" / "ledger.db")
    assert {(charge.round, charge.attempt) for charge in charged} >= set(tried)
    assert result["claims"][0]["epsilon"] <= 5
    for name in NAMES:
        if name != "die":
            assert len(federation.charges(name)) <= (3 + 3) * 2
