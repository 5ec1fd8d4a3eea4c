"""A federation of owners with tables of their own, without processes: init, deploy, join, run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.flower import site as site_module
from fedveil.flower.federation_files import read_federation
from fedveil.flower.federation_server import Server
from fedveil.flower.messages import Answer, Refusal, plan_digest
from fedveil.flower.owner import Owner
from fedveil.flower.policy import build_for_plan
from fedveil.flower.site import Site
from fedveil.flower.site_check import site_report
from fedveil.privacy.accounting.claims import Unit
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.release import Round
from fedveil.runs.opened_run import OpenedRun
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run_directory import read_metrics
from fedveil.training.cohort import CohortData
from fedveil.training.exchange import client_report
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.reports import ClientBatch
from tests.flower.sites import Server as Asker
from tests.flower.transports import InProcess
from tests.flower.wards import NAMES, SIZES, deployed, joined, owners, rows, write_files


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    owners(tmp_path)
    return tmp_path


@pytest.fixture
def federation(place: Path) -> Path:
    """Three joined sites."""
    deployed(place).write_folder(place / "fed")
    for name in NAMES:
        joined(place, name, place / "fed" / "bundles")
    return place


def site_of(place: Path, name: str) -> Site:
    return Site.open(place / name / "federations" / "wards" / "site.toml")


def serve(place: Path, monkeypatch: pytest.MonkeyPatch, transport: InProcess) -> Server:
    monkeypatch.chdir(place / "fed" / "server")
    return Server.start_or_resume(
        load_recipe("recipe.toml"),
        read_federation(Path("federation.toml")),
        transport,
        Path("run"),
        allow_code=True,
        clock=transport.clock,
        sleep=transport.sleep,
    )


@pytest.mark.slow
def test_three_owners_train_a_module_on_tables_that_nobody_divided(
    federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing values, a category that one site lacks, secure noise per record, own code."""
    sites = {name: site_of(federation, name) for name in NAMES}
    transport = InProcess(dict(sites))
    server = serve(federation, monkeypatch, transport)
    result = server.serve()
    assert (result["rounds"], result["stopped"]) == (3, "rounds")
    first = result["claims"][0]
    assert [first[k] for k in ("unit", "trust", "noise")] == ["record", "site", "secure"]
    assert {ask.plan for ask in transport.asks} == {site.digest for site in sites.values()}
    rows_with_target = {"north": 87, "south": 68, "east": 58}
    for name, site in sites.items():
        assert site.records.records == rows_with_target[name]  # none is held back
        (answer, *_) = transport.sent[name]
        assert isinstance(answer, Answer)
        assert answer.report.dtype is torch.float64  # on the grid: float32 would round it off
        (cost,) = site.ledger.run_costs().values()
        assert [claim.unit for claim in cost.costs] == [Unit.RECORD]
        assert cost.costs[0].epsilon == pytest.approx(first["epsilon"], rel=1e-9)
    outcomes = [json.loads(x) for x in Path("run/sites.jsonl").read_text().splitlines()]
    assert [x["answered"] for x in outcomes if "answered" in x] == [[*NAMES]] * 3
    assert all(x["refused"] == {} for x in outcomes if "answered" in x)  # float64 was expected
    losses = [x["loss"] for x in read_metrics(Path("run/metrics.jsonl"))[0]]
    assert len(set(losses)) == 4
    assert 0 < result["metrics"]["accuracy"] <= 1  # on the public table
    new = federation / "new.csv"
    new.write_text(rows(5, 77))
    monkeypatch.chdir(federation / "north" / "federations" / "wards")  # where net.py is as well
    run = OpenedRun.at(federation / "fed" / "server" / "run", allow_code=True)
    assert set(run.predict(new)["prediction"]) <= {"no", "yes"}


def test_a_site_s_report_is_the_simulator_s_for_that_client(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling, clips, sum and noise are those of three clients side by side."""
    monkeypatch.setattr(site_module.secrets, "randbits", lambda bits: 7)
    deployed(place, "noise.source=seeded").write_folder(place / "fed")
    sites = [Site.open(joined(place, name, place / "fed" / "bundles")) for name in NAMES]
    everyone = sites[0].records.concatenated(*(site.records for site in sites[1:]))
    training = build_for_plan(sites[0].recipe, everyone, allow_code=True)
    ids, start = np.arange(3), training.start()
    clip = training.plan.clip(start.adaptive_state, 1)
    round = Round(1, ids, start.params, clip, start.adaptive_state, Streams(7))
    gradients = gradients_of(training.task, Mode.VECTORISED, everyone, private=True)
    batch = ClientBatch.from_round(round, CohortData(everyone, ids), gradients)
    simulated = client_report(training.work, training.plan, batch).reports.rows
    for site, row in zip(sites, simulated, strict=True):
        report = Asker(site).answer(1).report
        torch.testing.assert_close(report, row, rtol=0, atol=1e-4)
        assert float(report.abs().max()) > 0.1


def test_one_row_more_stays_in_the_same_ledger(federation: Path) -> None:
    site = site_of(federation, "north")
    assert isinstance(Asker(site).answer(), Answer)
    with (federation / "north.csv").open("a") as table:
        table.write("p-new,33.0,1.5,er,x,yes\n")
    again = site_of(federation, "north")
    assert again.records.records == site.records.records + 1
    assert again.records.fingerprint != site.records.fingerprint
    refused = Asker(again).answer()
    assert isinstance(refused, Refusal)
    assert "policy.epsilon.record" in refused.reason


@pytest.mark.slow
def test_another_federation_shares_ledger_and_policy(federation: Path) -> None:
    """The budget is the owner's, not a folder's: a new folder does not start at zero."""
    assert isinstance(Asker(site_of(federation, "north")).answer(), Answer)
    deployed(federation).write_folder(federation / "other")
    place = federation / "north" / "again"
    path = joined(federation, "north", federation / "other" / "bundles", folder=place)
    second = Site.open(path)
    (spent,) = second.ledger.run_costs().values()
    assert second.policy.epsilon.record == pytest.approx(2 * spent.costs[0].epsilon, rel=1e-3)
    assert isinstance(Asker(second).answer(), Answer)
    third = Asker(site_of(federation, "north")).answer()
    assert isinstance(third, Refusal)


def test_a_ledger_from_a_backup_of_the_owner_s_folder_is_refused(federation: Path) -> None:
    site = site_of(federation, "north")
    asker = Asker(site)
    asker.answer(1)
    shutil.copytree(federation / "north", federation / "backup")
    asker.answer(2)
    shutil.rmtree(federation / "north")
    shutil.copytree(federation / "backup", federation / "north")
    with pytest.raises(BadInput, match="1 entries, and there were 2: the end was cut off"):
        site_of(federation, "north")
    shutil.rmtree(federation / "north" / "ledger")
    with pytest.raises(BadInput, match="restore the ledger"):
        site_of(federation, "north")


def test_server_and_sites_have_one_plan(place: Path) -> None:
    deployment = deployed(place)
    deployment.write_folder(place / "fed")
    digest = plan_digest(load_recipe(str(place / "fed/server/recipe.toml")), 3)
    for name in NAMES:
        site = Site.open(joined(place, name, place / "fed" / "bundles"))
        assert site.digest == digest
        assert site.plan.release == deployment.plan.release
        assert site.training.data.sizes.tolist() == [*SIZES.values()]
        assert site_report(site)["takes_part"]
        assert site.terms.planned_turns == 3
        assert not site.terms.at_once


def test_no_row_of_a_site_is_read_for_a_deployment(place: Path) -> None:
    for name in NAMES:
        (place / f"{name}.csv").unlink()
    deployed(place).write_folder(place / "fed")
    assert not [
        path
        for path in (place / "fed").rglob("*")
        if path.suffix == ".csv" or path.name in ("node", "policy.toml", "owner.toml")
    ]


@pytest.mark.slow
def test_without_a_public_table_nothing_is_measured(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed(place, "rounds=1", test=False).write_folder(place / "fed")
    sites = {name: Site.open(joined(place, name, place / "fed/bundles")) for name in NAMES}
    result = serve(place, monkeypatch, InProcess(dict(sites))).serve()
    assert result["rounds"] == 1
    assert "accuracy" not in result["metrics"]


def test_dp_sgd_with_a_nominal_number_needs_no_declaration(place: Path) -> None:
    settings = (
        *("client.kind=dp-sgd", "client.rate=0.3", "client.steps=2", "client.lr=0.5"),
        *("client.nominal=100", "noise.kind=gaussian", "noise.where=training"),
        *("noise.multiplier=1.5", "sample.kind=all"),
    )
    deployment = deployed(place, *settings)
    assert deployment.plan_sizes == [100, 100, 100]
    deployment.write_folder(place / "fed")
    path = joined(place, "north", place / "fed" / "bundles")
    site = Site.open(path)
    assert site.plan.secure
    assert isinstance(Asker(site).answer(), Answer)
    with (place / "north.csv").open("a") as table:
        table.write(rows(60, 5, whole=True).partition("\n")[2])
    with pytest.raises(BadInput, match=r"147 records and client.nominal is 100"):
        Site.open(path)


def test_a_site_adds_up_no_more_records_than_the_grid_was_made_for(federation: Path) -> None:
    with (federation / "north.csv").open("a") as table:
        table.write(rows(200, 5, whole=True).partition("\n")[2])
    with pytest.raises(BadInput, match="the declared number of all sites is 220"):
        site_of(federation, "north")


def test_the_owner_s_file_is_read_strictly(place: Path) -> None:
    file = place / "north" / "owner.toml"
    whole = file.read_text()
    file.write_text(whole + 'recrods = "x"\n')
    with pytest.raises(BadInput, match="unknown key recrods"):
        Owner.open(place / "north")
    file.unlink()
    with pytest.raises(BadInput, match="fedveil site init"):
        Owner.open(place / "north")
