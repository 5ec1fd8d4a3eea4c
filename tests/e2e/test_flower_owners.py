"""Three owners with tables of their own, over a real SuperLink, by the commands alone.

Nobody divided the tables: people have several rows, ages and targets are missing, and one site
lacks a category. The model is a module of the recipe's author, and the claim is per person, with
secure noise. One site and the server's program are killed on the way.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil.flower.local_federation import LocalFederation, Process, free_ports, own_environment
from fedveil.privacy.ledger.file import read_charges
from tests.e2e.federations import PATIENCE, QUICK, processes_of, wait_for
from tests.e2e.test_docs import FENCE, commands
from tests.flower.wards import NAMES, PEOPLE, PER_PERSON, rows, write_files

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def fedveil(folder, *arguments, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "fedveil", *map(str, arguments)],
        cwd=folder,
        env=own_environment(**QUICK),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


class Owned(LocalFederation):
    """A deployment whose sites are in their owners' folders."""

    def start_site(self, name, **environment):
        script = self.folder.parent / name / "federations" / "wards" / "supernode.sh"
        self.sites[name] = self._start(name, script, **environment)
        return self.sites[name]


TESTED = ("--test", "public.csv")
MEASURED = (
    *("--set", "data.test=0.3", "--set", "evaluate.where=site"),
    *("--set", "evaluate.epsilon=15", "--set", "evaluate.every=3"),
)


def deploy(folder, address, tested=TESTED):
    """What the owners and the operator type; returns the operator's fingerprint."""
    for name in NAMES:
        told = fedveil(folder, "site", "init", name, "--records", f"{name}.csv")
        assert "SHA256:" in told
    keys = [part for name in NAMES for part in ("--key", f"{name}={name}/node.pub")]
    sizes = [part for name, n in PEOPLE.items() for part in ("--people", f"{name}={n}")]
    command = ("deploy", "wards.toml", "fed", "--sites", ",".join(NAMES), *keys)
    told = fedveil(
        folder,
        *command,
        *sizes,
        *tested,
        *("--allow-code", "--address", address, "--deadline", "120"),
    )
    (line,) = [line for line in told.splitlines() if line.startswith("tell the owners")]
    return line.split()[-1]


@pytest.fixture
def running(tmp_path, request):
    write_files(tmp_path, PER_PERSON)
    port, *own = free_ports(5)
    address = f"127.0.0.1:{port}"
    tested = getattr(request, "param", TESTED)
    operator = deploy(tmp_path, address, tested)
    for number, name in enumerate(NAMES):
        bundle = f"fed/bundles/{name}"
        refused = fedveil(tmp_path, "site", "join", bundle, "--owner", name, "--allow-code", code=1)
        assert "not accepted: nothing was written" in refused
        accepting = ("--accept", "--allow-code", "--operator", operator, "--repeats", "1")
        told = fedveil(tmp_path, "site", "join", bundle, "--owner", name, *accepting)
        assert "epsilon.person = " in told
        if tested is TESTED:  # otherwise some of them are held out
            assert f"{PEOPLE[name]} by the column 'patient', with up to 2 records each" in told
        script = tmp_path / name / "federations" / "wards" / "supernode.sh"
        lines = script.read_text().splitlines()
        text = [f"port={own[number]}" if x.startswith("port=") else x for x in lines]
        script.write_text("\n".join(text) + "\n")
    with Owned(tmp_path / "fed", **QUICK) as federation:
        federation.start_superlink(f"https://{address}")
        federation.register()
        for name in NAMES:
            federation.start_site(name)
        federation.wait_until_connected()
        yield federation
    wait_for(lambda: not processes_of(tmp_path), "all ended")


def test_from_three_tables_to_predictions(running, tmp_path):
    def asked(number):
        path = running.server / "run" / "sites.jsonl"
        text = path.read_text() if path.exists() else ""
        return any(json.loads(x).get("asking") == number for x in text.split("\n") if x)

    first = running.start_run()
    wait_for(lambda: asked(2), "round 2 was asked for")
    found = processes_of(running.server)
    (app,) = [pid for pid, name in found if name == "operator-flwr-serverapp"]
    os.kill(app, signal.SIGKILL)
    running.sites["south"].kill()  # SIGKILL, with all that belongs to it
    assert first.wait(PATIENCE) != 0, first.output
    assert "error: the server's program was ended before the run was" in first.output
    again = running.start_site("south")  # its log goes on
    again.wait_for(lambda: again.output.count("SuperNode ID:") == 2, "back", PATIENCE)

    second = running.start_run()
    assert second.wait(PATIENCE) == 0, second.output
    result = running.read_result()
    assert (result["rounds"], result["stopped"]) == (3, "rounds")
    claim = result["claims"][0]
    assert [claim[k] for k in ("unit", "trust", "noise")] == ["person", "site", "secure"]
    for name in NAMES:
        turns = read_charges(tmp_path / name / "ledger" / "ledger.db")
        least = 2 if name == "south" else 3  # it was away in round 2, charged or not
        assert least <= len({charge.round for charge in turns}) <= 4
    bundle = tmp_path / "bundle.zip"
    told = fedveil(tmp_path, "evidence", running.server / "run", bundle)
    assert all(name in told for name in NAMES)
    assert "not by" not in told
    for name in NAMES:
        told = fedveil(tmp_path, "verify", bundle, "--site", name)
        assert "none missing at the end" in told
        assert told.count("the same software as the server") == 3
    bundle.write_bytes(bundle.read_bytes()[:-1])
    assert fedveil(tmp_path, "verify", bundle, code=2).startswith("error: ")
    new = tmp_path / "new.csv"
    new.write_text("".join(f"{line.rpartition(',')[0]}\n" for line in rows(4, 99).splitlines()))
    place = tmp_path / "north" / "federations" / "wards"  # which has net.py
    told = fedveil(place, "predict", running.server / "run", new, "--allow-code")
    assert len([x for x in told.splitlines() if x.startswith(("yes,", "no,"))]) == 4

    script = running.server / "recipe.toml"
    script.write_text(script.read_text().replace("checkpoint = 1", "checkpoint = 5"))
    refused = running.start_run("other")
    assert refused.wait(PATIENCE) == 2
    assert refused.last_line.startswith("error: engine.checkpoint is 5")
    assert "Traceback" not in refused.output


@pytest.mark.parametrize("running", [MEASURED], indirect=True, ids=["sites measure"])
def test_sites_measure_without_a_public_test_file(running, tmp_path):
    """Over a real SuperLink: each site holds people out, and both ledgers are charged for them."""
    run = running.start_run()
    assert run.wait(PATIENCE) == 0, run.output
    result = running.read_result()
    assert (result["rounds"], result["measured_after"]) == (3, 3)
    assert 0 < result["metrics"]["accuracy"] < 1.5
    assert result["intervals"]["accuracy"] > 0
    (claim,) = [c for c in result["claims"] if c["covers"].startswith("metrics")][:1]
    assert [claim[k] for k in ("unit", "trust", "noise")] == ["person", "site", "secure"]
    text = (running.server / "run" / "sites.jsonl").read_text()
    (line,) = [json.loads(x) for x in text.splitlines() if x.startswith('{"measured"')]
    assert sorted(line["answered"]) == sorted(NAMES)
    for name in NAMES:
        found = read_charges(tmp_path / name / "ledger" / "ledger.db")
        assert sum(charge.run.endswith("-metrics") for charge in found) == 1
        path = tmp_path / name / "federations" / "wards" / "site.toml"
        told = fedveil(tmp_path, "site", "check", path, code=1)  # a second run would be too much
        assert "people that are held out of the training" in told


def test_a_site_whose_records_do_not_fit_says_so_and_does_not_start(tmp_path):
    write_files(tmp_path, PER_PERSON)
    deploy(tmp_path, "127.0.0.1:9092")
    fedveil(
        tmp_path,
        "site",
        "join",
        "fed/bundles/north",
        "--owner",
        "north",
        "--accept",
        "--allow-code",
    )
    (tmp_path / "north.csv").write_text("patient,age\np,1\n")
    script = tmp_path / "north" / "federations" / "wards" / "supernode.sh"
    process = Process.launch("north", ["sh", script], Path(tmp_path / "north.log"))
    assert process.wait(PATIENCE) == 2
    (line,) = process.output.splitlines()
    assert line.startswith("error: ")
    assert "has no column" in line


def test_the_tutorial_s_commands(tmp_path):
    """Every command of docs/tutorials/deploy.md up to the demonstration, in its order."""
    page = (Path(__file__).parents[2] / "docs" / "tutorials" / "deploy.md").read_text()
    page, _, _ = page.partition("## Try a shipped recipe")
    script = []
    for kind, title, block in FENCE.findall(page):
        if title:
            (tmp_path / title).write_text(block)
        elif kind in ("console", "sh"):
            script += commands(block)
    (port,) = free_ports(1)
    assert [line for line in script if line.startswith("kill -9")]  # it fails if nobody is there
    (written,) = [k for k, line in enumerate(script) if line.startswith("fedveil deploy")]
    script[written] += f" --address 127.0.0.1:{port}"  # tests run side by side
    process = Process.launch(
        "tutorial",
        ["sh", "-e", "-c", "\n".join(script)],
        tmp_path / "tutorial.log",
        folder=tmp_path,
        environment=own_environment(**QUICK),
    )
    try:
        assert process.wait(2 * PATIENCE) == 0, process.output
    finally:
        process.kill()  # and the processes behind it
    wait_for(lambda: not processes_of(tmp_path), "all ended")
    assert "All 3 planned rounds are done" in process.output
    assert "prediction,p(no),p(yes)" in process.output
    result = json.loads((tmp_path / "fed/server/run/result.json").read_text())
    claim = result["claims"][0]
    assert [claim[k] for k in ("unit", "trust", "noise")] == ["person", "site", "secure"]
