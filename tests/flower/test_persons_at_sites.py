"""Claims per person over the wire: a site counts its own people, and its owner pays per person."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.flower import site as site_module
from fedveil.flower.bundle import Bundle
from fedveil.flower.deployment import load_for_sites, registered
from fedveil.flower.federation_files import read_federation
from fedveil.flower.federation_server import Server
from fedveil.flower.joining import joining
from fedveil.flower.messages import Answer, Refusal
from fedveil.flower.one_machine import write_trial
from fedveil.flower.owner import Owner
from fedveil.flower.policy import build_for_plan
from fedveil.flower.site import Site
from fedveil.flower.site_check import report_lines, site_report
from fedveil.privacy.accounting.claims import Relation, Trust, Unit
from fedveil.privacy.accounting.events import GroupSampled
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.release import Round
from fedveil.runs.recipe import load_recipe
from fedveil.training.cohort import CohortData
from fedveil.training.exchange import client_report
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.reports import ClientBatch
from tests.flower.sites import Server as Asker
from tests.flower.sites import records, write_policy
from tests.flower.transports import InProcess
from tests.flower.wards import NAMES, SIZES, deployed, joined, owners, write_files

PERSON = ("client.unit=person", "client.cap=3")
CAPPED = ("client.unit=record", "client.cap=2")
DP_SGD = (
    *("client.kind=dp-sgd", "client.rate=0.3", "client.steps=2", "client.lr=0.5"),
    *("noise.kind=gaussian", "noise.where=training", "noise.multiplier=1.5", "sample.kind=all"),
)
HEADER = "patient,age,dose,ward,remark,well"


def several(count: int, seed: int) -> str:
    """Rows of people who have 1 to 5 of them, in no order."""
    random, lines = np.random.default_rng(seed), []
    for k in range(count):
        age, dose = random.uniform(20, 90), random.uniform(0, 5)
        ward = ("icu", "er", "out")[random.integers(3)]
        well = "yes" if dose > 2.5 else "no"
        lines.append(f"p{int((k % 36) ** 0.8)},{age:.1f},{dose:.2f},{ward},{k},{well}")
    return "\n".join([HEADER, *lines]) + "\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    for number, name in enumerate(NAMES):
        (tmp_path / f"{name}.csv").write_text(several(SIZES[name], number))
    owners(tmp_path)
    return tmp_path


def sites_of(place: Path, *settings: str) -> list[Site]:
    """Three joined sites of a recipe with these settings."""
    deployed(place, *settings).write_folder(place / "fed")
    return [Site.open(joined(place, name, place / "fed" / "bundles")) for name in NAMES]


def report(site: Site, records: fv.FederatedData) -> torch.Tensor:
    """What the site would send in round 1 of a new run with other records."""
    limits = {"person": 1e6, "record": 1e6}
    write_policy(Path(site.file.policy).parent, {"epsilon": limits, "delta": 0.5, "seeded": True})
    answer = Asker(Site(site.file, site.recipe, records)).answer()
    assert isinstance(answer, Answer)
    return answer.report.double()


@pytest.mark.parametrize(
    ("settings", "sent"), [(PERSON, "sum"), (CAPPED, "sum"), ((*DP_SGD, *PERSON), "update")]
)
def test_a_site_s_report_is_the_simulator_s_for_its_people(
    place: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], sent: str
) -> None:
    """Whose records are whose, the cap, the draws and the clip per person, beside each other."""
    monkeypatch.setattr(site_module.secrets, "randbits", lambda bits: 7)
    sites = sites_of(place, "noise.source=seeded", *settings)
    everyone = sites[0].found.concatenated(*(site.found for site in sites[1:]))
    training = build_for_plan(sites[0].recipe, everyone, allow_code=True)
    assert [line.unit for line in training.plan.lines if not line.reading] == [Unit.PERSON]
    everyone = everyone.capped(3 if PERSON[1] in settings else 2)
    ids, start = np.arange(3), training.start()
    clip = training.plan.clip(start.adaptive_state, 1)
    round = Round(1, ids, start.params, clip, start.adaptive_state, Streams(7))
    gradients = gradients_of(training.task, Mode.VECTORISED, everyone, private=True)
    batch = ClientBatch.from_round(round, CohortData(everyone, ids), gradients)
    simulated = client_report(training.work, training.plan, batch).reports.rows
    for site, row in zip(sites, simulated, strict=True):
        # the site's plan has its noise by the declared numbers, of which the multiplier is no part
        report = Asker(site).answer(1).report
        torch.testing.assert_close(report, row.to(report.dtype), rtol=0, atol=2e-4)
        assert float(report.abs().max()) > (0.1 if sent == "sum" else 0.01)


def test_a_run_per_person_over_the_wire(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deploy, join, run with secure noise: claims, ledgers and policies are per person."""
    sites = {site.name: site for site in sites_of(place, *PERSON)}
    transport = InProcess(dict(sites))
    monkeypatch.chdir(place / "fed" / "server")
    server = Server.start_or_resume(
        load_recipe("recipe.toml"),
        read_federation(Path("federation.toml")),
        transport,
        Path("run"),
        allow_code=True,
        clock=transport.clock,
        sleep=transport.sleep,
    )
    result = server.serve()
    assert result["rounds"] == 3
    first = result["claims"][0]
    assert [first[k] for k in ("unit", "trust", "noise")] == ["person", "site", "secure"]
    assert not [text for text in first["assumptions"] if "not per person" in text]
    assert [text for text in first["assumptions"] if "at most 3 records of a person" in text]
    outcomes = [json.loads(x) for x in Path("run/sites.jsonl").read_text().splitlines()]
    assert [x["answered"] for x in outcomes if "answered" in x] == [[*NAMES]] * 3
    for site in sites.values():
        (cost,) = site.ledger.run_costs().values()
        (claim,) = cost.costs
        assert (claim.unit, claim.trust) == (Unit.PERSON, Trust.SITE)
        assert claim.epsilon == pytest.approx(first["epsilon"], rel=1e-9)
        assert site.policy.epsilon.person == pytest.approx(claim.epsilon, rel=1e-3)
        assert (site.policy.epsilon.record, site.policy.epsilon.client) == (None, None)


def test_declared_numbers_are_of_people_where_people_are_drawn(place: Path) -> None:
    deployment = deployed(place, *PERSON)
    assert deployment.plan_sizes == [*SIZES.values()]
    assert deployment.plan.release.divisor(1.0, 1.0) == pytest.approx(0.3 * sum(SIZES.values()))
    recipe = load_for_sites(str(place / "wards.toml"), PERSON, 3)
    keys = [(place / name / "node.pub").read_text().strip() for name in NAMES]
    with pytest.raises(BadInput, match=r"--records is north=90, and a round draws people"):
        registered(recipe, NAMES, keys, SIZES)
    with pytest.raises(BadInput, match=r"how many people 'south' has.*--people south=N"):
        registered(recipe, NAMES, keys, {}, {"north": 9})
    recipe = load_for_sites(str(place / "wards.toml"), CAPPED, 3)
    with pytest.raises(BadInput, match=r"--people is north=90, and a round draws records"):
        registered(recipe, NAMES, keys, {}, SIZES)


def test_the_cap_and_the_units_of_a_site(place: Path) -> None:
    (north, *_) = sites_of(place, *PERSON)
    counts = north.found.person_index.record_counts
    assert counts.max() > 3  # otherwise the cap would leave nothing out
    assert north.records.person_index.record_counts.max() == 3
    assert north.records.cap == 3
    assert north.units == len(counts) < north.records.records < north.found.records == 90


def test_records_beyond_the_cap_never_count(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their content may change as it likes: the report stays the same to the last bit."""
    monkeypatch.setattr(site_module.secrets, "randbits", lambda bits: 3)
    (north, *_) = sites_of(place, *PERSON, "noise.source=seeded", "sample.kind=all")
    kept, x = north.found.person_index.counted_records(3), np.array(north.found.x)
    x[~kept] = 1e6
    changed = replace(north.found, x=x.copy())
    assert torch.equal(report(north, changed), report(north, north.found))
    x[np.flatnonzero(kept)[0]] = 1e6
    assert not torch.equal(report(north, replace(changed, x=x)), report(north, changed))


@pytest.mark.parametrize(("settings", "within"), [(PERSON, True), (("client.unit=record",), False)])
def test_a_person_moves_the_sum_by_no_more_than_a_replacement_of_one(
    place: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], within: bool
) -> None:
    """All records of the person with most of them become others. Per record they move it more."""
    monkeypatch.setattr(site_module.secrets, "randbits", lambda bits: 3)
    (north, *_) = sites_of(place, *settings, "noise.source=seeded", "sample.kind=all")
    counts = north.found.person_index.record_counts
    whose = np.asarray(north.found.persons) == counts.argmax()
    x, y = np.array(north.found.x), np.array(north.found.y)
    x[whose], y[whose] = 1e3 * np.sign(x[whose] - x.mean(axis=0)), 1 - y[whose]
    other = replace(north.found, x=x, y=y)
    moved = report(north, other) - report(north, north.found)
    assert (float(moved.norm()) <= 2 * 0.5 + 1e-4) is within
    assert float(moved.norm()) > 0.1


def test_a_site_that_does_not_know_whose_records_are_whose_is_refused(place: Path) -> None:
    with pytest.raises(BadInput, match=r"client.cap is 3 and data.person is left out"):
        deployed(place, *PERSON, "data.person=none")
    deployed(place, *PERSON).write_folder(place / "fed")
    records(1).save(place / "saved")  # of nobody in particular
    file = place / "north" / "owner.toml"
    file.write_text(file.read_text().replace("../north.csv", "../saved"))
    owner, bundle = Owner.open(place / "north"), Bundle.read(place / "fed" / "bundles" / "north")
    with (
        pytest.raises(BadInput, match="nobody says which records are whose"),
        joining(owner, bundle, allow_code=True),
    ):
        pass
    assert not (place / "north" / "federations").exists()


def test_a_capped_site_holds_its_plan_to_the_cap(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the cap of the records lost on the way, the site would not open."""
    (north, *_) = sites_of(place, *PERSON)
    monkeypatch.setattr(fv.FederatedData, "capped", lambda self, cap: self)
    with pytest.raises(BadInput, match="at most 3 records of a person and the data have"):
        Site(north.file, north.recipe, north.found)


def test_one_patient_in_two_files_of_a_site_is_one_person(place: Path) -> None:
    (place / "more.csv").write_text(f"{HEADER}\np0,33.0,1.5,er,0,yes\nnew,44.0,4.5,er,1,no\n")
    deployed(place, *PERSON).write_folder(place / "fed")
    first = Site.open(joined(place, "north", place / "fed" / "bundles"))
    file = place / "north" / "owner.toml"
    text = file.read_text()
    file.write_text(text.replace('"../north.csv"', '["../north.csv", "../more.csv"]'))
    folder = place / "north" / "again"
    both = Site.open(joined(place, "north", place / "fed" / "bundles", folder=folder))
    assert both.found.records == first.found.records + 2
    assert both.units == first.units + 1


def test_what_taking_part_costs_is_stated_per_person(place: Path) -> None:
    deployed(place, *PERSON).write_folder(place / "fed")
    owner, bundle = Owner.open(place / "north"), Bundle.read(place / "fed" / "bundles" / "north")
    with joining(owner, bundle, allow_code=True) as one:
        text = "\n".join(one.status_lines())
        report = site_report(one.own_site)
        path = one.accept()
    most = int(one.own_site.found.person_index.record_counts.max())
    assert (
        f"people    {one.own_site.units} by the column 'patient', with up to {most} records" in text
    )
    assert "at most 3 records of a person count" in text
    assert "per person (zero-out, site trust, PLD, secure noise)" in text
    assert "each single person of this site, taken out" in text
    assert "declared  90 people of this site, which is public" in text
    assert "accepting epsilon.person = " in text
    assert (report["people"], report["records"]) == (one.own_site.units, 90)
    assert [claim["unit"] for claim in report["cost"]] == ["person"]
    assert site_report(Site.open(path))["takes_part"]


def test_per_record_the_owner_sees_what_it_costs_the_person_with_most_records(
    place: Path,
) -> None:
    (north, *_) = sites_of(place, "client.unit=record")
    report = site_report(north)
    most = int(north.found.person_index.record_counts.max())
    claim = north.terms.costs[0].for_units(most)
    assert report["persons"][1] == f"the recipe protects records: {claim.short}"
    assert claim.epsilon > 2 * north.terms.costs[0].epsilon
    assert any(line.endswith(report["persons"][1]) for line in report_lines(north, report))


def test_the_owner_s_limits_are_per_person(place: Path) -> None:
    """A limit per record alone refuses it; one per person holds over federations."""
    (north, *_) = sites_of(place, *PERSON)
    (cost,) = north.terms.costs
    folder, enough = place / "north", 1.01 * cost.epsilon

    def opened(**epsilon: float) -> Site:
        write_policy(folder, {"epsilon": epsilon, "delta": 0.5})
        return Site.open(north.file.recipe.replace("recipe.toml", "site.toml"))

    refused: Any = Asker(opened(record=100.0)).answer()
    assert isinstance(refused, Refusal)
    assert refused.reason == "the claim is per person, and policy.epsilon.person is not given"
    refused = Asker(opened(person=0.99 * cost.epsilon)).answer()
    assert refused.reason == "the run may cost more than policy.epsilon.person leaves"
    refused = Asker(opened(person=enough, record=0.5)).answer()  # it is about each record too
    assert refused.reason == "the run may cost more than policy.epsilon.record leaves"
    site = opened(person=enough)
    assert isinstance(Asker(site).answer(), Answer)
    second = Asker(site).answer()  # another run
    assert second.reason == "the run may cost more than policy.epsilon.person leaves"


def test_cap_and_account_charges_a_group_of_records(place: Path) -> None:
    (north, *_) = sites_of(place, *CAPPED)
    (line,) = north.terms.charged_lines
    assert isinstance(line.event, GroupSampled)
    assert (line.unit, line.event.size) == (Unit.PERSON, 2)
    assert north.units == north.records.records
    assert isinstance(Asker(north).answer(), Answer)


def test_dp_sgd_per_person_with_a_nominal_number_of_people(place: Path) -> None:
    (north, *_) = sites_of(place, *DP_SGD, *PERSON, "client.nominal=40")
    assert north.plan.secure
    assert north.plan.lines[0].relation is Relation.ADD_REMOVE
    assert isinstance(Asker(north).answer(), Answer)
    with (place / "north.csv").open("a") as table:
        table.write("".join(f"q{k},33.0,1.5,er,0,yes\n" for k in range(40)))
    with pytest.raises(BadInput, match=r"people and client.nominal is 40"):
        Site.open(Path(north.file.recipe).parent / "site.toml")


def test_delta_must_be_below_one_in_the_people_that_are_declared(place: Path) -> None:
    deployed(place, *PERSON, "budget.delta=0.004")
    with pytest.raises(BadInput, match=r"not below 1 / 220 people"):
        deployed(place, *PERSON, "budget.delta=0.005")


def test_a_trial_on_one_machine_keeps_whose_records_are_whose(place: Path) -> None:
    """Divided data: a share's people are the client's, and numbers are of people."""
    data = [f"{name}.csv" for name in NAMES]
    text = (place / "wards.toml").read_text()
    paths = json.dumps(data)
    text = text.replace('name = "table"', f'name = "table"\npath = {paths}')
    text = text.replace("columns.age", 'features = ["age", "dose", "ward"]\ncolumns.age')
    (place / "trial.toml").write_text(text)
    recipe = load_for_sites(str(place / "trial.toml"), PERSON, 3, divided=True)
    own = recipe.load_data(None)
    deployment = write_trial(
        place / "trial",
        recipe,
        own,
        [own.client_name(k) for k in range(3)],
        superlink=deployed(place, *PERSON).superlink,
        allow_code=True,
    )
    assert deployment.plan_sizes == own.people.tolist()
    for number, name in enumerate(deployment.site_names):
        site = Site.open(place / "trial" / "sites" / name / "site.toml")
        assert site.units == own.people[number] < own.sizes[number]
        counts = np.diff(own.person_index.begins)[slice(*own.person_index.first[number:][:2])]
        assert sorted(site.found.person_index.record_counts) == sorted(counts)
