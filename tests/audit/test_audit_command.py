"""`fedveil audit`: the table, JSON, exit codes, and a run that is left as it was."""

import json
import os
import shutil
import sys
from dataclasses import replace

import pytest

from fedveil.audit import audit_command
from fedveil.audit.membership import ShadowModels
from fedveil.cli import main as commands
from fedveil.privacy.accounting.events import Gaussian
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.runs.build import build
from fedveil.runs.ledgers import SharedLedger
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from tests.contracts.test_no_bare_epsilon import bare, bare_in_json

FEW = ("--draws", "2000", "--canaries", "60", "--references", "4", "--quiet")


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
    attacks = "randomiser,canaries,membership"
    code, out, err = cli(central, "--attacks", attacks, *FEW)
    assert code == 0, err
    assert "no claim is violated" in out
    assert "at delta 1e-05 per client (zero-out, central trust)" in out
    for word in ("randomiser", "canaries", "the final model", "all rounds"):
        assert word in out
    for word in ("LiRA", "RMIA, offline", "AUC", "TPR at 0.1 % FPR", "in one row"):
        assert word in out
    assert bare(out) + bare(err) == []
    assert left(central) == before


@pytest.mark.slow
def test_all_attacks_that_fit_are_one_row_and_leave_the_run_as_it_was(cli, central):
    before = left(central)
    code, out, err = cli(central, *FEW)
    assert code == 0, err
    for word in ("active client", "planted, passively", "inversion", "PSNR", "in one row"):
        assert word in out
    assert bare(out) == []
    assert left(central) == before


@pytest.mark.slow
def test_what_does_not_fit_is_left_out_unless_it_was_asked_for(cli, tmp_path):
    folder = made(
        tmp_path / "run", "fedavg", "data.name=diabetes", "model.name=linear", "client.lr=0.1"
    )
    code, out, err = cli(folder, *FEW)
    assert code == 0, err
    assert "default: inversion: inversion is of images" in out
    code, _, err = cli(folder, "--attacks", "inversion", *FEW)
    assert code == 2
    assert "inversion is of images" in err


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
        (("RUN", "--references", "5"), "--references is 5: an even number from 4"),
        (("RUN", "--workers", "-1"), "--workers is -1"),
        (("RUN", "--out", "RUN"), "in the run's own directory"),
        (("RUN", "--out", __file__), "is a file: name a directory"),
        (("--self-test", "--out", "somewhere"), "leave out --attacks, --data and --out"),
        (("RUN", "--attacks", "one-run"), "none of them is for epsilon"),
    ],
)
def test_bad_settings_get_one_line(cli, central, arguments, words):
    code, out, err = cli(*(central if a == "RUN" else a for a in arguments))
    assert code == 2
    assert out == ""
    assert words in err
    assert len(err.strip().splitlines()) == 1


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit") / "run"
    return made(folder, "fedavg", "data.clients=20", "sample.size=5", "client.epochs=1")


def test_a_run_that_claims_nothing_has_no_claim_to_violate(cli, baseline):
    code, _, err = cli(baseline, "--attacks", "randomiser")
    assert code == 2
    assert "claims nothing" in err
    assert "--attacks membership" in err


@pytest.mark.slow
def test_a_run_that_claims_nothing_is_attacked_and_left_as_it_was(cli, baseline, tmp_path):
    before = left(baseline)
    attack = (baseline, "--attacks", "randomiser,membership", *FEW)
    code, out, err = cli(*attack, "--json", "--out", tmp_path / "out")
    found = json.loads(out)
    assert code == 0, err
    assert found["findings"] == []
    assert [leak["claim"] for leak in found["leaks"]] == [None] * 4
    assert set(found["leaks"][0]["measures"]) == {
        *("AUC", "balanced accuracy", "TPR at 0.1 % FPR", "TPR at 1 % FPR")
    }
    assert (tmp_path / "out" / "membership.png").read_bytes().startswith(b"\x89PNG")
    assert left(baseline) == before
    assert "nothing claimed" in cli(*attack, "--out", tmp_path / "out")[1]


def test_an_audit_that_was_interrupted_goes_on(cli, baseline, tmp_path, monkeypatch):
    attack = (baseline, "--attacks", "membership", *FEW, "--workers", "1", "--json")
    whole = json.loads(cli(*attack)[1])
    trained, calls = ShadowModels.train_models, []

    def stopped(self, numbers):
        calls.append(numbers)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return trained(self, numbers[:1] if len(numbers) > 1 else numbers)

    monkeypatch.setattr(ShadowModels, "train_models", stopped)
    monkeypatch.setattr("fedveil.audit.membership.repetitions_per_chunk", lambda training: 1)
    code, _, err = cli(*attack, "--out", tmp_path / "out")
    assert code == 1
    assert "interrupted: the same command resumes it" in err
    monkeypatch.setattr(ShadowModels, "train_models", trained)
    code, out, _ = cli(*attack, "--out", tmp_path / "out")
    found = json.loads(out)
    assert code == 0
    for mine, wanted in zip(found["leaks"], whole["leaks"], strict=True):
        assert mine["measures"]["AUC"]["value"] == pytest.approx(
            wanted["measures"]["AUC"]["value"], abs=1e-3
        )


def test_another_audit_in_the_folder_is_refused(cli, central, baseline, tmp_path):
    options = ("--attacks", "membership", *FEW, "--out", tmp_path / "out")
    assert cli(baseline, *options)[0] == 0
    for arguments, word in (
        ((baseline, *options, "--seed", "3"), "seed"),
        ((central, *options), "recipe"),
    ):
        code, _, err = cli(*arguments)
        assert code == 2
        assert f"holds another audit (its {word} is" in err
    code, _, err = cli(central, "--attacks", "membership", *FEW, "--out", baseline)
    assert code == 2
    assert "and no audit: use another" in err


def test_a_run_with_other_noise_than_its_recipe_makes_today_is_refused(cli, central, monkeypatch):
    """An audit of other noise than the run had would say nothing about the run."""

    def other(*recipe, **more):
        made = build(*recipe, **more)
        (line,) = made.plan.lines
        twice = replace(line.event, event=Gaussian(2 * line.event.event.multiplier))
        release = replace(made.plan.release, mechanism=GaussianMechanism(twice.event.multiplier))
        plan = replace(made.plan, lines=(replace(line, event=twice),), release=release)
        return replace(made, plan=plan)

    monkeypatch.setattr(audit_command, "build", other)
    code, out, err = cli(central, "--attacks", "randomiser", *FEW)
    assert (code, out) == (2, "")
    assert "was charged for something else than this version of fedveil makes" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["recipe.toml", "result.json", "model.safetensors"])
def test_a_run_that_was_changed_is_refused(cli, central, tmp_path, name):
    folder = tmp_path / "run"
    shutil.copytree(central, folder)
    content = (folder / name).read_bytes()
    if name == "recipe.toml":
        content = content.replace(b"multiplier = 0.", b"multiplier = 8.")
    if name == "result.json":
        content = content.replace(b'"epsilon": 7', b'"epsilon": 1')
    (folder / name).write_bytes(content + b"\n")
    code, _, err = cli(folder, "--attacks", "randomiser", *FEW)
    assert code == 2
    assert name in err
    assert len(err.strip().splitlines()) == 1


def test_a_run_without_its_ledger_is_audited(cli, central, tmp_path):
    """The ledger is private: a model may be given away without it."""
    folder = tmp_path / "run"
    shutil.copytree(central, folder, ignore=shutil.ignore_patterns("ledger*"))
    assert cli(folder, "--attacks", "randomiser", *FEW)[0] == 0


def test_a_ledger_that_runs_share_is_not_charged(cli, tmp_path):
    few = ("engine.workers=1", "evaluate.every=1000", "rounds=2", "data.clients=40")
    shared = SharedLedger(tmp_path / "shared.db", 20.0)
    Run.start(load_recipe("central", few), tmp_path / "run", None, shared).execute()
    before = left(tmp_path)
    assert cli(tmp_path / "run", "--attacks", "randomiser,canaries", *FEW)[0] == 0
    assert left(tmp_path) == before


def test_a_run_that_has_not_ended_is_refused(cli, central, tmp_path):
    (tmp_path / "recipe.toml").write_bytes((central / "recipe.toml").read_bytes())
    code, _, err = cli(tmp_path)
    assert code == 2
    assert "has not ended" in err
