"""What goes wrong in a federation, with real processes: every case ends, explained and charged."""

import pytest

from fedveil.flower.certificates import write_node_key
from fedveil.flower.federation_files import fingerprint
from fedveil.privacy.ledger.file import read_charges
from tests.e2e.federations import PATIENCE, live, peak_of, wait_for

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NAMES = ("honest", "nan", "short", "bomb", "replay", "refuse", "die")
BAD = ("nan", "short", "bomb", "replay", "die")
ALL = "sample.kind=all"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flower") / "federation"
    with live(folder, *NAMES, bad=BAD, offline=("die",), unforked=("honest",)) as found:
        yield found


def test_an_unknown_key_is_not_let_in(federation):
    place = federation.stranger("stranger")
    for name in ("node", "node.pub"):
        (place / name).unlink()
    write_node_key(place, "stranger")
    said = federation.turned_away("stranger")
    assert "is not registered with SuperLink" in said
    key = (federation.server / "nodes" / "honest.pub").read_text()
    assert fingerprint(key) not in said


def test_a_node_without_a_key_is_not_let_in(federation):
    federation.stranger("bare", auth_supernode_private_key="--max-retries 2 #")
    assert "Failed to initialize the connection" in federation.turned_away("bare")


def test_sites_that_misbehave_are_named_and_the_rest_goes_on(federation):
    """NaN, a report that is too short or too long, an old one, a refusal, and one who is away."""
    federation.use("ldp-sgd", ALL, "rounds=2", "budget.epsilon=15")
    file = federation.owner("refuse") / "policy.toml"
    file.write_text(file.read_text().replace("epsilon.client = ", "epsilon.client = 0.1 #"))
    run = federation.federation.start_run("bad")
    wait_for(lambda: federation.outcomes("bad"), "the first round was over")
    assert peak_of(federation.server_app()) < 1000  # Python, PyTorch and Flower take some 500
    run.wait(PATIENCE)
    result = federation.federation.read_result("bad")
    assert (result["rounds"], result["stopped"]) == (2, "rounds")

    first, second = federation.outcomes("bad")
    for line in (first, second):
        assert "not finite, or not of this model" in line["refused"]["nan"]
        for name, size in (("short", "649"), ("bomb", "400000000")):
            assert f"report is 'float32' of shape ({size},)" in line["refused"][name]
        assert "policy.epsilon.client" in line["declined"]["refuse"]
        assert "honest" in line["answered"]
        assert line["absent"] == ["die"]
        assert line["enough"]
    assert "replay" in first["answered"]
    assert "attempt 0 at round 1" in second["refused"]["replay"]

    both = {(1, 0), (2, 0)}
    charged = read_charges(federation.server / "bad" / "ledger.db")
    assert {(charge.round, charge.attempt) for charge in charged} == both
    for name in NAMES:
        turns = {charge.round for charge in federation.charges(name)}
        assert turns == (set() if name in ("refuse", "die") else {1, 2})


def test_a_server_that_is_killed_resumes_and_no_charge_is_lost(federation):
    """ServerApp is killed in round 2, SuperLink in round 3; both are started again.

    What sites answered before is not lost: they answer the same ask again, and no turn is spare.
    """
    federation.use("ldp-sgd", ALL, "rounds=3", "budget.epsilon=15")

    def asked(number):
        return any(line.get("asking") == number for line in federation.asks("killed"))

    first = federation.federation.start_run("killed")
    wait_for(lambda: asked(2), "round 2 was asked for")
    federation.kill_server_app()
    second = federation.federation.start_run("killed")
    wait_for(lambda: asked(3), "round 3 was asked for")
    federation.kill_superlink()
    first.kill()
    second.kill()

    federation.federation.start_superlink(federation.url)
    result = federation.run("killed")
    assert (result["rounds"], result["stopped"]) == (3, "rounds")

    asks = [line for line in federation.asks("killed") if "asking" in line]
    tried = [(line["asking"], line["attempt"]) for line in asks]
    assert tried == [(1, 0), (2, 0), (3, 0)]
    charged = read_charges(federation.server / "killed" / "ledger.db")
    assert {(charge.round, charge.attempt) for charge in charged} == set(tried)
    assert result["claims"][0]["epsilon"] <= 15

    answers = [line["answered"] for line in federation.outcomes("killed")]
    for name in NAMES[:-1]:
        turns = len({charge.round for charge in federation.charges(name)})
        assert sum(name in line for line in answers) <= turns <= 3
    assert len([1 for line in answers if "honest" in line]) == 3


def test_a_site_that_dies_in_mid_round_is_charged_and_counts_as_absent(federation):
    federation.use("ldp-sgd", ALL, "rounds=1", "budget.epsilon=15", deadline=60)
    federation.federation.start_site("die")
    federation.federation.wait_until_connected("die")
    result = federation.run("dead")
    assert (result["rounds"], result["stopped"]) == (1, "rounds")
    (line,) = federation.outcomes("dead")
    assert "die" not in line["answered"]
    assert "die" in [*line["absent"], *line["refused"]]
    wait_for(lambda: not federation.federation.sites["die"].running, "dead")
    assert {charge.round for charge in federation.charges("die")} == {1}
