"""site.toml: read strictly, with paths of its own; and what `fedveil site check` says."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.cli.main import main
from fedveil.flower.federation_files import read_site_file
from fedveil.flower.messages import Answer, Refusal
from fedveil.flower.site import Site
from fedveil.flower.site_check import report_lines, site_report
from fedveil.runs.recipe import to_toml
from tests.flower.sites import (
    CENTRAL,
    DP_SGD,
    FEDAVG,
    LOCAL,
    POLICY,
    QUANTILE,
    TWO_POINT,
    Server,
    open_site,
    records,
    write_policy,
    write_site,
)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"nmae": "x"}, "unknown key nmae: .*name"),
        ({"policy": {"epsilom": 3.0}}, "unknown key policy.epsilom: .*policy.epsilon"),
        ({"policy": {"epsilon": 3.0}}, "policy.epsilon"),
        ({"policy": {"epsilon": {"client": -1.0}}}, "policy.epsilon.client is -1.0"),
        ({"policy": {"epsilon": {"weight": 1.0}}}, "weight"),
        ({"policy": {"delta": 2.0}}, "policy.delta is 2.0"),
        ({"policy": {"days": 0}}, "policy.days is 0"),
        ({"policy": {"repeats": -1}}, "policy.repeats is -1"),
        ({"policy": {"steps": 0}}, "policy.steps is 0"),
        ({"policy": {"trust": ["everybody"]}}, "policy.trust"),
        ({"policy": {"seeded": "yes"}}, "policy.seeded"),
        ({"name": "../north"}, "site is"),
        ({"clients": 0}, "clients is 0"),
        ({"number": 3}, "number is 3: 0 to 2"),
        ({"sizes": [5, 5, 5]}, "sizes has 3 numbers"),
        ({"sizes": [5, 5], "number": 0}, "2 numbers for 3 sites"),
        ({"sizes": [5, 0, 5], "number": 0}, "sizes"),
        ({"witness": "ledger/head.json"}, "inside the ledger's folder"),
        ({"recipe": "central"}, "own copy"),
        ({"recipe": "missing.toml"}, "missing.toml does not exist"),
        ({"data": {"name": "saved", "path": "nowhere"}}, "not a saved data set"),
        ({"data": {"name": "digits", "clients": 3}}, "3 clients: a site is one"),
        ({"data": {"path": "a.csv", "target": "y", "test": 0.2}}, "hold rows back"),
        ({"data": {"path": "a.csv", "target": "y", "test": "by-client"}}, "a site is one client"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    path = write_site(tmp_path)
    plain = {
        "name": "north",
        "recipe": "recipe.toml",
        "clients": 3,
        "data": {"name": "saved", "path": "records"},
    }
    if "policy" in keys:
        write_policy(tmp_path, keys.pop("policy"))
    path.write_text(to_toml({**plain, **keys}))
    with pytest.raises(BadInput, match=words) as refused:
        Site.open(path)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_site_file(tmp_path / "site.toml")
    (tmp_path / "site.toml").write_text("name = ")
    with pytest.raises(BadInput, match="cannot be read"):
        read_site_file(tmp_path / "site.toml")


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    write_site(tmp_path / "there")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    site = Site.open(Path("../there/site.toml"))
    assert isinstance(Server(site).answer(), Answer)
    found = sorted(p.name for p in (tmp_path / "there").iterdir())
    assert found == [
        *("ledger", "north.head.json", "policy.toml", "recipe.toml", "records", "site.toml"),
    ]
    assert list((tmp_path / "here").iterdir()) == []


def test_records_may_be_a_table_of_the_owner_s(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{'yes' if a > b else 'no'}" for a, b in rng.normal(size=(60, 2))]
    path = write_site(tmp_path, {**LOCAL, "clip": {"kind": "fixed", "value": 0.5}})
    (tmp_path / "own.csv").write_text("\n".join(["age,dose,well", *rows[:51]]) + "\n")
    (tmp_path / "public.csv").write_text("\n".join(["age,dose,well", *rows[51:]]) + "\n")
    scaled = {"low": -3.0, "high": 3.0}
    data: dict[str, Any] = {
        "path": "own.csv",
        "target": "well",
        "test": "public.csv",
        "columns": {"age": scaled, "dose": scaled, "well": {"values": ["no", "yes"]}},
    }
    site = {"name": "north", "recipe": "recipe.toml", "clients": 3, "data": data}
    path.write_text(to_toml(site))
    found = Site.open(path)
    assert found.records.records == 51
    answer = Server(found).answer()
    assert isinstance(answer, Answer)
    assert answer.report.shape == (6,)
    del data["test"]
    path.write_text(to_toml(site))
    assert Site.open(path).records.records == 51  # nothing is held back
    (tmp_path / "more.csv").write_text("\n".join(["age,dose,well", *rows[51:]]) + "\n")
    data["path"] = ["own.csv", "more.csv"]
    path.write_text(to_toml(site))
    several = Site.open(path).records
    assert (several.clients, several.records) == (1, 60)  # all files are the site's own
    data["path"] = "own.csv"
    del data["columns"]["age"]
    path.write_text(to_toml(site))
    with pytest.raises(BadInput, match="nothing is declared of 'age'"):
        Site.open(path)


def test_no_records_are_held_back_without_a_word(tmp_path: Path) -> None:
    """Nobody measures anything at a site: a fifth of its records would be lost."""
    data = records()
    held = fv.FederatedData.from_clients(
        [("own", data.x, data.y)], test=(data.x, data.y), classes=3
    )
    assert held.test_of_clients
    with pytest.raises(BadInput, match="holds back 24 test records of this site's own"):
        open_site(tmp_path, LOCAL, POLICY, held)


def test_a_policy_of_an_older_version_is_named(tmp_path: Path) -> None:
    path = write_site(tmp_path)
    path.write_text(path.read_text() + "[policy]\nepsilon.client = 1.0\n")
    with pytest.raises(BadInput, match=r"a file of its own.*fedveil site join"):
        Site.open(path)


def test_an_empty_policy_refuses(tmp_path: Path) -> None:
    for recipe in (LOCAL, CENTRAL, DP_SGD, FEDAVG):
        site = open_site(tmp_path / recipe["name"], recipe, {})
        assert isinstance(Server(site).answer(), Refusal)
        assert not site.ledger.file.exists()
    (tmp_path / "local" / "policy.toml").unlink()
    with pytest.raises(BadInput, match=r"policy\.toml cannot be read"):
        Site.open(tmp_path / "local" / "site.toml")


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (LOCAL, ("epsilon 5.999", "per client", "nobody: what leaves", "randomised here")),
        (
            CENTRAL,
            ("central trust", "the server: it sees", "WITHOUT noise", "L2 length at most 0.5"),
        ),
        (TWO_POINT, ("two-point reports", "randomised here")),
        (QUANTILE, ("by randomised response",)),
        (DP_SGD, ("per record", "DP-SGD", "seeded by the operating system", "policy.seeded")),
        (FEDAVG, ("no privacy is claimed", "everybody who sees", "policy.unprotected is false")),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else None,
)
def test_an_owner_is_told_what_taking_part_means(
    tmp_path: Path, recipe: dict[str, Any], words: tuple[str, ...]
) -> None:
    site = open_site(tmp_path, recipe)
    report = site_report(site)
    text = "\n".join(report_lines(site, report))
    for word in (*words, "no metrics", site.digest, "24 records, one of 3 sites"):
        assert word in text
    assert json.loads(json.dumps(report))["takes_part"] is (not report["objections"])
    assert not site.ledger.folder.exists()  # looking spends nothing


def test_what_was_spent_is_told(tmp_path: Path) -> None:
    site = open_site(tmp_path, LOCAL, {**POLICY, "days": 30})
    Server(site).answer()
    text = "\n".join(report_lines(site, site_report(site)))
    assert "in 30 days: at most 10; runs so far may cost 5.999" in text
    assert "refuses   the run may cost" in text
    assert "other runs may cost 5.999" in text


def command(monkeypatch: Any, capsys: Any, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["fedveil", *words])
    capsys.readouterr()  # what sites logged until now
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out + said.err


def test_the_commands_of_an_owner(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = str(write_site(tmp_path))
    code, text = command(monkeypatch, capsys, "site", "check", path)
    assert (code, text.startswith("site      north")) == (0, True)
    server = Server(Site.open(path))
    server.answer()
    code, text = command(monkeypatch, capsys, "site", "check", path, "--json")
    assert (code, json.loads(text)["takes_part"]) == (1, False)
    code, text = command(monkeypatch, capsys, "ledger", str(tmp_path / "ledger"))
    assert (code, "local trust" in text, "warning" in text) == (0, True, False)
    code, text = command(monkeypatch, capsys, "ledger", str(tmp_path / "ledger"), "--verify")
    assert (code, "1 entries" in text) == (0, True)
    server.site.ledger.witness_path.unlink()
    code, text = command(monkeypatch, capsys, "site", "check", path)
    assert (code, "fedveil site accept" in text) == (2, True)
    code, text = command(monkeypatch, capsys, "site", "accept", path)
    assert (code, "accepted: 1 entries" in text) == (0, True)
    assert command(monkeypatch, capsys, "site", "check", path)[0] == 1
