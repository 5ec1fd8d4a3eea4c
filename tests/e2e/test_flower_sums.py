"""A secure sum over real Flower: three sites with TLS, one of which is killed in a round."""

import json
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from statistics import median

import pytest

from fedveil.flower.deployment import Address
from fedveil.flower.local_federation import LocalFederation, free_ports
from fedveil.privacy.ledger.file import read_charges
from tests.e2e.federations import PATIENCE, QUICK, Live, processes_of, wait_for, write_all

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NAMES = ("north", "south", "east")
SECURE = "sum.kind=secure"


@contextmanager
def running(folder, *settings, deadline=PATIENCE):
    """Three sites of the recipe `sites` that have reached their SuperLink."""
    port, operators, *own = free_ports(2 + len(NAMES))
    address = Address(port=port, site_ports=tuple(own), operator_port=operators)
    write_all(folder, "sites", settings, NAMES, address, deadline)
    with LocalFederation(folder, **QUICK) as federation:
        federation.start_superlink(f"https://{address}")
        federation.register()
        for name in NAMES:
            federation.start_site(name)
        federation.wait_until_connected()
        yield Live(folder, NAMES, address, federation)
    wait_for(lambda: not processes_of(folder), "all ended")


def seconds_of(live):
    """The seconds from one answer of the first site to the next, by its own log."""
    text = (live.owner(NAMES[0]) / "ledger" / "log.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    times = [datetime.fromisoformat(line["time"]) for line in lines if line["event"] == "answered"]
    return [(after - before).total_seconds() for before, after in pairwise(times)]


def test_a_secure_sum_trains_and_takes_at_most_twice_as_long_as_a_plain_one(tmp_path):
    seconds = {}
    for name, settings in (("plain", ["noise.share=whole"]), ("masked", [SECURE])):
        with running(tmp_path / name, "rounds=8", *settings) as live:
            result = live.run("run")
            assert (result["rounds"], result["stopped"]) == (8, "rounds")
            assert result["metrics"]["accuracy"] > 0.5
            seconds[name] = median(seconds_of(live))
            for line in live.outcomes("run"):
                assert line["answered"] == list(NAMES)
            claims = [(claim["trust"], claim["epsilon"]) for claim in result["claims"]]
            charges = {name: len(live.charges(name)) for name in NAMES}
            assert charges == dict.fromkeys(NAMES, 8)
            assert claims[0][0] == ("site" if name == "plain" else "secure-sum")
    print(f"seconds a round: {seconds}")
    assert seconds["masked"] <= 2 * seconds["plain"]


def test_a_site_that_is_killed_in_a_round_costs_no_round_and_comes_back(tmp_path):
    with running(tmp_path / "d", "rounds=8", SECURE, deadline=20) as live:
        file = live.server / "federation.toml"  # it waits for a site that SuperLink misses
        file.write_text(file.read_text().replace("minimum = 2", "minimum = 3"))
        run = live.federation.start_run()

        def asked(number):
            return any(line.get("asking") == number for line in live.asks("run"))

        wait_for(lambda: asked(3), "round 3 was asked for")
        live.federation.sites["east"].kill()
        wait_for(lambda: len(live.outcomes("run")) >= 3, "round 3 was over")
        east = live.federation.start_site("east")  # as soon as that, SuperLink takes it for online
        run.wait(PATIENCE)
        result = live.federation.read_result()
        assert (result["rounds"], result["stopped"]) == (8, "rounds")
        lines = live.outcomes("run")
        assert [(line["round"], line["attempt"]) for line in lines] == [(k, 0) for k in range(1, 9)]
        assert all(line["enough"] and "lost" not in line for line in lines)
        assert all({"north", "south"} <= {*line["answered"]} for line in lines)
        assert "east" in lines[0]["answered"]
        assert any("east" not in line["answered"] for line in lines[2:])
        assert "east" in lines[-1]["answered"]
        charged = read_charges(live.server / "run" / "ledger.db")
        assert [charge.round for charge in charged] == [*range(1, 9)]
        assert east.running
        for name in NAMES:
            answers = sum(name in line["answered"] for line in lines)
            assert answers <= len(live.charges(name)) <= 8


def test_a_secure_sum_of_few_bits_trains(tmp_path):
    with running(tmp_path, "rounds=8", SECURE, "sum.bits=20") as live:
        result = live.run("run")
        assert (result["rounds"], result["stopped"]) == (8, "rounds")
        assert result["metrics"]["accuracy"] > 0.5
        assert {claim["accountant"] for claim in result["claims"]} == {"rdp"}
        for line in live.outcomes("run"):
            assert line["answered"] == list(NAMES)
