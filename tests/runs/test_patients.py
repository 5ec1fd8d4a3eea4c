"""Hospitals' tables per patient: from one command and from Python, and what a report says."""

import csv
import datetime
import json
import random

import numpy as np
import pytest
from typer.testing import CliRunner

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.cli.main import app
from fedveil.data.federated import FederatedData
from fedveil.privacy.accounting.claims import Trust, Unit
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe, to_toml
from fedveil.runs.report import report_html

COLUMNS = {
    "admitted": {"low": "2020-01-01", "high": "2026-01-01"},
    "age": {"low": 18, "high": 100},
    "ward": {"values": ["surgery", "general"]},
    "outcome": {"values": ["home", "readmitted", "died"]},
}
PATIENTS = {"north": 40, "south": 30, "east": 20, "west": 35, "island": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five hospitals: several rows a patient, missing entries, dates, a rare class, three rows."""
    generator, place = random.Random(3), tmp_path_factory.mktemp("hospitals")
    for hospital, count in PATIENTS.items():
        with open(place / f"{hospital}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["patient", "admitted", "age", "ward", "outcome"])
            for patient in range(count):
                age = generator.randint(18, 95)
                for _ in range(generator.choice([1, 2, 5]) if count > 2 else 1 + patient):
                    day = datetime.date(2020, 1, 1) + datetime.timedelta(generator.randrange(2000))
                    risk = age / 50 + generator.random()
                    outcome = "died" if risk > 2.8 else "readmitted" if risk > 1.7 else "home"
                    shown = "" if generator.random() < 0.1 else age
                    ward = generator.choice(["surgery", "general"])
                    name = f"{hospital}-{patient}"
                    writer.writerow([name, day.isoformat(), shown, ward, outcome])
    return place


def document(folder, **client):
    return {
        "name": "patients",
        "rounds": 4,
        "data": {
            "path": str(folder),
            "person": "patient",
            "target": "outcome",
            "test": 0.2,
            "missing": "fill",
            "columns": COLUMNS,
        },
        "model": {"name": "softmax"},
        "sample": {"kind": "poisson", "rate": 0.5},
        "client": {"kind": "gradient", **client},
        "clip": {"kind": "fixed", "value": 1.0},
        "noise": {"kind": "gaussian", "where": "site"},
        "budget": {"epsilon": 4.0, "delta": 1e-4},
        "server": {"lr": 1.0},
    }


@pytest.fixture
def recipe_of(tmp_path):
    """The recipe of a document, read from a file."""

    def read(document):
        (tmp_path / "patients.toml").write_text(to_toml(document))
        return load_recipe(str(tmp_path / "patients.toml"))

    return read


def test_patients_are_protected_from_one_command(folder, tmp_path):
    """And the report says who, from whom, and what for a patient with several rows."""
    (tmp_path / "recipe.toml").write_text(to_toml(document(folder)))
    out = tmp_path / "run"
    keys = ["--set", "client.unit=person", "--set", "client.cap=3"]
    given = ["run", str(tmp_path / "recipe.toml"), *keys, "--out", str(out)]
    ran = CliRunner().invoke(app, given)
    assert ran.exit_code == 0, ran.output
    text = " ".join(ran.output.replace("│", " ").split())
    for words in (
        "per person (zero-out, site trust",
        "for one person at 2 clients",
        "at most 3 records of a person count",
        "a person at two sites counts as two",
        "people are held out for testing",
    ):
        assert words in text
    assert "this claim is not per person" not in text
    result = json.loads((out / "result.json").read_text())
    assert {claim["unit"] for claim in result["claims"]} == {"person"}
    assert {claim["trust"] for claim in result["claims"]} == {"site", "central"}
    page = report_html(out).decode()
    for words in (
        "One person at one client, with all of that person",
        "clients that have one person",
        "The site that has the data has to be trusted",
        "at most 3 records of a person count",
    ):
        assert words in page


def from_python(folder, **more):
    return FederatedData.from_table(
        str(folder),
        target="outcome",
        person="patient",
        columns=COLUMNS,
        missing="fill",
        test=0.2,
        **more,
    )


def test_the_same_from_python(recipe_of, folder, tmp_path):
    data = from_python(folder).capped(3)
    assert data.clients == 5
    assert data.person_index.record_counts.max() == 3
    recipe = recipe_of(document(folder, unit="person", cap=3))
    training = build(recipe)
    assert training.data.fingerprint == data.fingerprint
    done = fv.run(recipe, out=tmp_path / "run", quiet=True)
    assert done.claims[0].unit is Unit.PERSON
    people = int(data.people.sum())
    assert training.plan.release.records == people
    assert (training.plan.noisy_steps.unit, training.plan.noisy_steps.cap) == (Unit.PERSON, 3)
    assert training.plan.lines[0].trust is Trust.SITE


def test_people_on_trial_are_owners_of_their_records(folder):
    """Nobody is on both sides, and whoever is held out is a person and not a hospital."""
    data = from_python(folder)
    capped = data.capped(3)
    assert data.test_of_clients  # by client, as before
    assert not capped.test_of_clients
    held_out = len(np.unique(data.test_persons))
    assert capped.held_out_owners == held_out
    capped.check_secure()
    (text,) = (t for t in capped.test_assumptions if "held out" in t)
    assert text.startswith(f"{held_out} people are held out for testing")


def test_two_ways_to_protect_a_person_and_one_to_protect_a_record(recipe_of, folder):
    units, noise = [], []
    for client in ({}, {"unit": "person", "cap": 3}, {"cap": 3}):
        training = build(recipe_of(document(folder, **client)))
        units.append(str(training.plan.lines[0].unit))
        noise.append(training.plan.release.multiplier)
        several = training.plan.claims(4)[0].for_units(2)
        assert several.epsilon > training.plan.claims(4)[0].epsilon
    assert units == ["record", "person", "person"]
    assert noise[0] == noise[1]
    assert 2 * noise[0] < noise[2] < 3.1 * noise[0]


def test_a_recipe_per_record_is_what_it_was(recipe_of, folder):
    """Persons that nothing depends on change neither data nor seeds."""
    training = build(recipe_of(document(folder, unit="record")))
    bare = fv.FederatedData(
        **{
            name: getattr(training.data, name)
            for name in ("x", "y", "offsets", "test_x", "test_y", "classes", "names")
        },
        test_owners=training.data.test_owners,
        schema=training.data.schema,
    )
    assert training.data.persons is not None
    assert training.data.fingerprint == bare.fingerprint
    assert any(
        "this claim is not per person" in text for text in training.plan.lines[0].assumptions
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"client": {"kind": "gradient", "unit": "person"}}, "client.cap is missing"),
        ({"client": {"kind": "gradient", "cap": 0}}, "cap"),
        (
            {"client": {"kind": "gradient", "cap": 2}, "data": {"person": None}},
            r"nobody says which records are whose: name the column \(data.person\)",
        ),
        (
            {"client": {"kind": "gradient", "unit": "person", "cap": 2}, "noise": None},
            "client.unit is 'person' and has no effect",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(recipe_of, folder, change, words):
    raw = document(folder)
    for section, value in change.items():
        if section == "data":
            raw["data"].pop("person")
            raw["data"]["features"] = ["age", "ward"]
            del raw["data"]["columns"]["admitted"]
        elif section == "noise":
            raw["noise"] = {"kind": "none"}
            raw.pop("budget")
        else:
            raw[section] = value
    with pytest.raises(BadInput, match=words) as refusal:
        build(recipe_of(raw))
    assert "\n" not in str(refusal.value)


def test_a_check_writes_a_recipe_per_person(folder, tmp_path):
    out = tmp_path / "patients.toml"
    given = ["data", "check", str(folder), "--target", "outcome", "--recipe", "dp-sgd"]
    checked = CliRunner().invoke(app, [*given, "--out", str(out)])
    assert "per person (recipe dp-sgd or sites" in " ".join(checked.output.split())
    written = out.read_text()
    assert 'person = "patient"' in written
    assert 'unit = "person"' in written
    assert "cap = 4" in written
    changes = ["rounds=2", "data.statistics=clients", "budget.delta=0.001", "sample.kind=all"]
    changes += ["sample.size=none", "sample.max_participations=none"]
    keys = [part for change in changes for part in ("--set", change)]
    ran = CliRunner().invoke(app, ["run", str(out), *keys, "--out", str(tmp_path / "run")])
    assert ran.exit_code == 0, ran.output
    assert "per person" in ran.output
