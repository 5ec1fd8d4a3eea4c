"""A site's ledger that is lost, put back or changed; and what `fedveil ledger` makes of it."""

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from fedveil.base.errors import BadInput
from fedveil.flower.federation_files import read_site_file
from fedveil.flower.messages import Answer, Refusal
from fedveil.flower.site import Site
from fedveil.flower.site_ledger import SiteLedger
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.runs import evidence
from fedveil.runs.evidence import export_ledger, statements_of, verify_ledger
from tests.flower.sites import (
    CENTRAL,
    FEDAVG,
    LOCAL,
    POLICY,
    TWO_POINT,
    Server,
    charges,
    open_site,
    witness,
)

OPEN = {**POLICY, "epsilon": {"client": 1000.0}, "delta": 0.1}


def unusable(answer: Any) -> None:
    assert isinstance(answer, Refusal)
    assert answer.reason == "the site's ledger cannot be used: its owner was told why"


def test_a_ledger_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path))
    server.answer()
    shutil.rmtree(server.site.ledger.folder)
    unusable(server.answer(2))
    unusable(Server(server.site).answer())
    with pytest.raises(BadInput, match="what this site has spent is unknown"):
        Site.open(tmp_path / "site.toml")


def test_a_ledger_that_was_put_back_is_noticed(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path))
    server.answer(1)
    shutil.copytree(server.site.ledger.folder, tmp_path / "copy")
    server.answer(2)
    shutil.rmtree(server.site.ledger.folder)
    shutil.copytree(tmp_path / "copy", server.site.ledger.folder)
    unusable(server.answer(2, 1))
    assert charges(server.site) == 1
    with pytest.raises(BadInput, match="the end was cut off"):
        Site.open(tmp_path / "site.toml")


def test_a_ledger_that_was_changed_is_noticed(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path))
    server.answer(1)
    with sqlite3.connect(server.site.ledger.file) as db:
        db.execute("UPDATE charges SET charged_at = '2001-01-01'")
    unusable(server.answer(2))


def test_a_witness_that_is_gone_has_to_be_accepted(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path))
    server.answer(1)
    assert witness(server.site)["length"] == 1
    server.site.ledger.witness_path.unlink()
    unusable(server.answer(2))
    with pytest.raises(BadInput, match="fedveil site accept"):
        Site.open(tmp_path / "site.toml")
    assert SiteLedger.from_site_file(read_site_file(tmp_path / "site.toml")).accept().length == 1
    assert isinstance(server.answer(2), Answer)
    assert witness(server.site)["length"] == 2


def test_the_witness_has_the_charge_before_the_answer(tmp_path: Path, monkeypatch: Any) -> None:
    from fedveil.flower import site as site_module

    site = open_site(tmp_path)
    seen = []
    real = site_module.client_report
    monkeypatch.setattr(
        site_module, "client_report", lambda *args: (seen.append(witness(site)), real(*args))[1]
    )
    Server(site).answer()
    assert [told["length"] for told in seen] == [1]


def test_asks_that_are_gone_stop_the_site_and_when_accepted_their_run(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path, LOCAL, OPEN))
    server.answer(1)
    (server.site.ledger.folder / "asks.db").unlink()
    unusable(Server(server.site).answer())
    with pytest.raises(BadInput, match="remembers 1: restore it"):
        Site.open(tmp_path / "site.toml")
    server.site.ledger.accept()
    assert isinstance(server.answer(1), Answer)  # as it was answered
    unusable(server.answer(2))
    assert isinstance(Server(server.site).answer(), Answer)


@pytest.mark.parametrize("recipe", [CENTRAL, FEDAVG], ids=lambda recipe: recipe["name"])
def test_asks_that_were_put_back_are_noticed(tmp_path: Path, recipe: dict[str, Any]) -> None:
    """Where turns are charged at once, or not at all, the noted asks alone stop a replay."""
    server = Server(open_site(tmp_path, recipe, {**OPEN, "unprotected": True}))
    asks = server.site.ledger.folder / "asks.db"
    assert isinstance(server.answer(1), Answer)
    shutil.copy(asks, tmp_path / "copy.db")
    assert isinstance(server.answer(2), Answer)
    shutil.copy(tmp_path / "copy.db", asks)
    unusable(server.answer(2))


def test_a_disk_that_is_full_releases_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*args: Any) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    server = Server(open_site(tmp_path))
    monkeypatch.setattr(Ledger, "charge", full)
    unusable(server.answer())


def test_the_ledger_of_a_run_is_not_taken_for_a_site_s(tmp_path: Path) -> None:
    site = open_site(tmp_path)
    site.ledger.folder.mkdir(parents=True)
    about = {"run": "another", "recipe": "", "data": "", "noise": "secure", "seed": ""}
    ledger = Ledger.create(site.ledger.file, LedgerRun(about, site.plan.lines, 4))
    ledger.charge(1)
    ledger.close()
    site.ledger.accept()
    unusable(Server(site).answer())


@pytest.mark.parametrize("recipe", [LOCAL, CENTRAL, TWO_POINT], ids=lambda r: r["name"])
def test_fedveil_ledger_tells_what_the_site_s_own_turns_are_worth(
    tmp_path: Path, recipe: dict[str, Any]
) -> None:
    site = open_site(tmp_path, recipe, OPEN)
    servers = [Server(site), Server(site)]
    for server in servers:
        for round in (1, 2):
            assert isinstance(server.answer(round), Answer)
    told = statements_of(site.ledger.folder)
    assert told.warnings == []
    assert [run.run for run in told.runs] == [server.run for server in servers]
    turns = 4 if recipe is CENTRAL else 2
    for run in told.runs:
        assert [charge.round for charge in run.charges] == list(range(1, turns + 1))
        assert [c.epsilon for c in run.claims] == [c.epsilon for c in site.plan.claims(turns)]
        assert str(run.claims[0]) == str(site.plan.claims(turns)[0])
    head = witness(site)
    said = verify_ledger(site.ledger.folder, f"{head['head']}:{head['length']}")
    assert f"{2 * turns} entries" in said
    assert evidence.OPEN not in said
    export_ledger(site.ledger.folder, tmp_path / "export.json")
    assert (tmp_path / "export.json").read_text().count('"charged_at"') == 4 * turns


def test_one_run_of_a_site_is_not_called_open(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path))
    server.answer()
    assert statements_of(server.site.ledger.folder).warnings == []
    assert evidence.OPEN not in verify_ledger(server.site.ledger.folder, None)


def test_all_turns_of_a_run_cost_what_the_simulator_claims(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path))
    for round in range(1, 5):
        server.answer(round)
    (run,) = statements_of(server.site.ledger.folder).runs
    assert [str(c) for c in run.claims] == [str(c) for c in server.site.plan.claims(4)]
    assert run.claims[0].epsilon == server.site.terms.costs[0].epsilon
