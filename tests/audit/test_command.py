"""`fedveil audit`: the table, JSON, exit codes, and a run that is left as it was."""

import json
import os
import sys

import pytest

from fedveil.cli import main as commands
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from tests.contracts.test_no_bare_epsilon import bare, bare_in_json

FEW = ("--draws", "2000", "--canaries", "60", "--quiet")


def made(folder, name, *settings):
    few = ("engine.workers=1", "evaluate.every=1000", "rounds=3", *settings)
    Run.start(load_recipe(name, few), folder, None).execute()
    return folder


@pytest.fixture(scope="module")
def central(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit") / "run"
    return made(folder, "central", "data.clients=40", "client.epochs=1")


@pytest.fixture
def cli(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedveil", "audit", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            commands.main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return called


def left(folder):
    """Every file with its bytes and the time it was changed."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): (p.read_bytes(), os.stat(p).st_mtime_ns) for p in files}


def test_an_audit_shows_claim_and_bound_and_leaves_the_run_as_it_was(cli, central):
    before = left(central)
    code, out, err = cli(central, *FEW)
    assert code == 0, err
    assert "no claim is violated" in out
    assert "at delta 1e-05 per client (zero-out, central trust)" in out
    for word in ("randomiser", "canaries", "the final model", "all rounds"):
        assert word in out
    assert bare(out) + bare(err) == []
    assert left(central) == before


def test_json_is_the_last_on_standard_output(cli, central):
    code, out, _ = cli(central, "--attacks", "randomiser", "--json", *FEW)
    found = json.loads(out)
    assert code == 0
    assert found["recipe"] == "central"
    assert found["violated"] is False
    first = found["findings"][0]
    assert first["claim"]["unit"] == "client"
    assert 0 < first["lower_bound"] < first["claim"]["epsilon"]
    assert first["confidence"] == 0.95
    assert len(found["findings"]) == 2
    assert bare_in_json(found) == []


def test_a_violated_claim_is_exit_code_one(cli, central, monkeypatch):
    whole = GaussianMechanism.add_
    monkeypatch.setattr(
        GaussianMechanism,
        "add_",
        lambda self, rows, scales, keys: whole(self, rows, scales / 9, keys),
    )
    code, out, _ = cli(central, "--attacks", "randomiser", *FEW)
    assert code == 1
    assert "2 of 2 claims are violated" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give a run directory, or --self-test"),
        (("--self-test", "--attacks", "randomiser"), "leave out --attacks"),
        (("--self-test", "--draws", "3"), "--draws is 3: at least 100"),
        (("no-such-run",), "holds no run"),
        (("RUN", "--attacks", "magic"), "--attacks 'magic': use one or more of randomiser"),
        (("RUN", "--attacks", "canaries,canaries"), "name each attack once"),
        (("RUN", "--canaries", "3"), "--canaries is 3: at least 50"),
        (("RUN", "--seed", "-1"), "--seed is -1"),
        (("RUN", "--attacks", "one-run"), "none of them is for epsilon"),
    ],
)
def test_bad_settings_get_one_line(cli, central, arguments, words):
    code, out, err = cli(*(central if a == "RUN" else a for a in arguments))
    assert code == 2
    assert out == ""
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_a_run_that_claims_nothing_is_refused(cli, tmp_path):
    folder = made(tmp_path / "run", "fedavg", "data.clients=20", "sample.size=5", "client.epochs=1")
    code, _, err = cli(folder)
    assert code == 2
    assert "claims nothing" in err


def test_a_run_that_has_not_ended_is_refused(cli, central, tmp_path):
    (tmp_path / "recipe.toml").write_bytes((central / "recipe.toml").read_bytes())
    code, _, err = cli(tmp_path)
    assert code == 2
    assert "has not ended" in err
