"""`fedveil run` and `fedveil ledger` from the outside."""

import fcntl
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.data import load
from fedveil.data.federated import FederatedData
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled


def strict_json(text):
    """The JSON document that `text` ends with; NaN and Infinity are no JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    start = 0 if text.startswith("{") else text.index("\n{") + 1
    return json.loads(text[start:], parse_constant=refuse)


def number(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def test_the_result_as_json(cli, settings):
    told = cli("run", "central", *settings("central"), "--out", "here", "--json")
    assert told.code == 0
    result = strict_json(told.out)
    assert result == json.loads(Path("here/result.json").read_text())
    assert (result["run_dir"], result["recipe"], result["rounds"]) == ("here", "central", 3)
    assert result["stopped"] == "rounds"
    assert number(result["metrics"]["accuracy"])
    assert number(result["metrics"]["loss"])
    assert number(result["timing"]["seconds_per_round"])
    assert number(result["timing"]["client_updates_per_second"])
    assert {claim["accountant"] for claim in result["claims"]} == {"pld", "rdp"}
    for claim in result["claims"]:
        assert number(claim["epsilon"])
        assert claim["delta"] == 1e-4
        assert (claim["unit"], claim["trust"]) == ("client", "central")
        assert (claim["neighbours"], claim["noise"]) == ("zero-out", "seeded")
        assert claim["as_published"] is False
        assert claim["assumptions"]
        assert all(isinstance(a, str) for a in claim["assumptions"])


def test_a_run_without_privacy_claims_nothing(cli, settings):
    told = cli("run", "fedavg", *settings("fedavg"), "--json")
    result = strict_json(told.out)
    assert told.code == 0
    assert (result["claims"], result["budget"]) == ([], None)
    assert Path(result["run_dir"]).is_dir()


def test_a_dead_model_is_still_json(cli, settings):
    told = cli("run", "fedavg", *settings("fedavg", "server.lr=1e38"), "--json")
    result = strict_json(told.out)
    assert told.code == 0
    assert result["metrics"]["loss"] is None
    assert any("not finite" in note for note in result["notes"])


def test_a_dead_model_in_words(cli, settings):
    told = cli("run", "fedavg", *settings("fedavg", "server.lr=1e38"))
    assert told.code == 0
    assert "note: the loss is not finite" in told.out


def test_the_result_in_words(cli, settings):
    told = cli("run", "central", *settings("central"), "--out", "here")
    assert told.code == 0
    words = " ".join(told.out.split())
    for part in (
        "test accuracy",
        "trust, PLD",
        "epsilon (RDP)",
        "per client",
        "It holds if",
        "here",
    ):
        assert part in words


def test_progress_is_a_header_and_one_line_per_round_shown(cli, settings):
    told = cli("run", "central", *settings("central"))
    header, rounds = told.err.splitlines()[:-3], told.err.splitlines()[-3:]
    assert header == [
        "central: softmax with 650 parameters over 20 clients of digits, 3 rounds",
        "Gaussian noise, multiplier 2, at the server",
        "every client is protected from everyone but the server",
        "epsilon is at delta 0.0001 per client (zero-out, central trust)",
        *header[4:],
    ]
    assert " ".join(header[4:]).startswith("warning: 10 clients per round are too few")
    for number, line in enumerate(rounds, 1):
        assert line.startswith(f"round {number}/3  accuracy 0.")


def test_quiet_says_nothing_on_the_way(cli, settings):
    told = cli("run", "fedavg", *settings("fedavg"), "--quiet", "--json")
    assert (told.code, told.err) == (0, "")


@pytest.mark.parametrize("name", ["a[b]", "a[/b]", "a[bold]b", "[red]"])
def test_brackets_in_names_are_just_names(cli, settings, name):
    told = cli("run", "fedavg", *settings("fedavg", f'name="{name}"'), "--out", name)
    assert told.code == 0
    assert name in told.out
    assert Path(name, "result.json").is_file()


def test_a_recipe_file(cli, settings):
    cli("run", "fedavg", *settings("fedavg"), "--out", "first")
    again = cli("run", "first/recipe.toml", "--out", "second", "--json")
    assert again.code == 0
    assert Path("first/model.safetensors").read_bytes() == (
        Path("second/model.safetensors").read_bytes()
    )


def test_the_budget_ends_a_run_before_the_round_that_would_exceed_it(cli, settings):
    event = PoissonSampled(0.5, Gaussian(2.0))
    six, seven = (epsilon(event, n, 1e-4, Relation.ADD_REMOVE) for n in (6, 7))
    limit = f"budget.epsilon={(six + seven) / 2}"
    told = cli("run", "central", *settings("central", "rounds=20", limit), "--json", "--quiet")
    result = strict_json(told.out)
    assert told.code == 0
    assert (result["rounds"], result["stopped"]) == (6, "budget")
    assert result["claims"][0]["epsilon"] == pytest.approx(six, rel=1e-6)


def test_the_ledger_shows_every_charge(cli, settings):
    cli("run", "central", *settings("central"), "--out", "here")
    told = cli("ledger", "here", "--json")
    statement = json.loads(told.out)
    assert told.code == 0
    assert [charge["round"] for charge in statement["charges"]] == [1, 2, 3]
    result = json.loads(Path("here/result.json").read_text())
    assert statement["claims"] == result["claims"]
    words = cli("ledger", "here/ledger.db")
    assert words.code == 0
    assert "3 charges" in words.out
    assert "epsilon" in words.out


@pytest.mark.parametrize("recipe", ["ldp-sgd", "dp-sgd"])
def test_the_ledger_of_a_local_run_shows_the_worst_client(cli, settings, recipe):
    told = cli("run", recipe, *settings(recipe), "--out", "here", "--json", "--quiet")
    result = strict_json(told.out)
    whose = {claim["holds_for"] for claim in result["claims"]}
    assert whose == {"the client that took part most", "the median client"}
    assert result["claims"][0]["holds_for"] == "the client that took part most"
    worst, median = (
        next(c["epsilon"] for c in result["claims"] if c["holds_for"] == who)
        for who in ("the client that took part most", "the median client")
    )
    assert worst > median
    statement = json.loads(cli("ledger", "here", "--json").out)
    assert statement["claims"] == result["claims"]
    words = " ".join(cli("ledger", "here").out.split())
    assert "3 charges for updates" in words
    assert "the client that took part most" in words
    assert "local trust" in words
    assert f"per {'client' if recipe == 'ldp-sgd' else 'record'}" in words
    assert words.endswith("seeded noise (fedveil explain TERM)")


def test_a_local_run_in_words(cli, settings):
    told = cli("run", "ldp-fl", "--set", "rounds=2", "--set", "engine.workers=1")
    assert told.code == 0
    words = " ".join(told.out.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", "").split())
    for part in ("as published", "no limit was set", "shuffled trust", "an ideal shuffler"):
        assert part in words


def test_the_ledger_of_a_run_without_privacy(cli, settings):
    cli("run", "fedavg", *settings("fedavg"), "--out", "here")
    told = cli("ledger", "here")
    assert told.code == 0
    assert "no privacy is claimed" in told.out
    assert json.loads(cli("ledger", "here", "--json").out)["charges"] == []


def test_a_finished_run_resumes_to_itself(cli, settings):
    first = strict_json(cli("run", "central", *settings("central"), "--out", "here", "--json").out)
    before = Path("here/model.safetensors").read_bytes()
    told = cli("run", "--resume", "here", "--json")
    again = strict_json(told.out)
    assert told.code == 0
    assert Path("here/model.safetensors").read_bytes() == before
    for key in ("rounds", "stopped", "metrics", "claims", "budget"):
        assert again[key] == first[key]


def test_a_run_in_use_is_refused_on_one_line(cli, settings):
    cli("run", "fedavg", *settings("fedavg"), "--out", "here")
    Path("here/result.json").unlink()  # a complete run needs no lock
    with Path("here/lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "in use by another process" in cli("run", "--resume", "here").error


def test_resuming_a_changed_recipe_is_refused_on_one_line(cli, settings):
    cli("run", "fedavg", *settings("fedavg"), "--out", "here")
    path = Path("here/recipe.toml")
    path.write_text(path.read_text().replace("lr = 1.0", "lr = 0.5"))
    assert "recipe" in cli("run", "--resume", "here").error


def test_resuming_with_changed_data_is_refused_on_one_line(cli, settings, monkeypatch):
    """The recipe is the same and the records are not."""
    cli("run", "fedavg", *settings("fedavg"), "--out", "here")
    records = load.load_digits()
    x = records.x.copy()
    x[0] += 0.5
    monkeypatch.setitem(load._LOADERS, "digits", (lambda: replace(records, x=x), ()))
    assert "data is" in cli("run", "--resume", "here").error


def test_ctrl_c_before_the_first_round_is_exit_code_one(cli, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedveil.runs.run.Run.start", interrupted)
    told = cli("run", "fedavg")
    assert told.code == 1
    assert told.err.splitlines() == ["interrupted"]


@pytest.fixture
def mine(tmp_path):
    """A recipe of records that were saved, which are mapped into memory and read-only."""
    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    clients = [(f"c{k}", x[4 * k : 4 * k + 4], y[4 * k : 4 * k + 4]) for k in range(5)]
    folder = tmp_path / "saved"
    FederatedData.from_clients(clients, test=(x[20:], y[20:]), classes=2).save(folder)
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f"name = 'mine'\nrounds = 2\n[data]\nname = 'saved'\npath = '{folder}'\n"
        "[model]\nname = 'softmax'\n[sample]\nkind = 'all'\n[client]\nkind = 'gradient'\n"
    )
    return recipe


def test_saved_data_raise_no_warning(cli, mine):
    """A warning is an error here, and torch warns every time, not once per process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        told = cli("run", mine, "--out", "run", "--quiet")
    finally:
        torch.set_warn_always(before)
    assert (told.code, told.err) == (0, "")


@pytest.mark.slow
def test_saved_data_warn_no_user(spawn, mine, tmp_path):
    process = spawn("run", mine, "--out", tmp_path / "run", "--quiet")
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
