"""`check_table`: columns, roles, problems, and a [data] section that a run accepts."""

import datetime
import json
import tomllib

import numpy as np
import pytest

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.runs.recipe import load_recipe

HEADER = "patient,hospital,admitted,seen,age,ward,country,remark,empty,pressure,smoker,outcome"
HOSPITALS = ["north", "south", "east", "west", "coast"]


def rows(hospital, count=40, seed=0):
    random = np.random.default_rng(seed)
    lines = []
    for k in range(count):
        day = datetime.date(2020, 1, 1) + datetime.timedelta(int(random.integers(1000)))
        cells = (
            *(f"{hospital}-{k // 2}", hospital, day.isoformat(), day.strftime("%d.%m.%Y")),
            *(random.integers(18, 90), random.choice(["a", "b"]), "de", f"remark {hospital} {k}"),
            *("", "" if k % 10 == 0 else f"{random.normal(120, 9):.1f}"),
            *(random.choice(["true", "false"]), "died" if k == 3 else ("home", "back")[k % 2]),
        )
        lines.append(",".join(map(str, cells)))
    return lines


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for seed, name in enumerate(HOSPITALS):
        lines = rows(name, 3 if name == "coast" else 40, seed)
        (tmp_path / "data" / f"{name}.csv").write_text("\n".join([HEADER, *lines]) + "\n")
    return "data"


def kinds(checked):
    return {column.name: column.kind for column in checked.columns}


def notes(checked):
    return {column.name: column.remarks for column in checked.columns if column.remarks}


def test_columns_and_roles(folder):
    checked = fv.check_table(folder)
    assert kinds(checked) == {
        "file": "text",
        "patient": "text",
        "hospital": "text",
        "admitted": "date",
        "seen": "text",
        "age": "whole number",
        "ward": "text",
        "country": "text",
        "remark": "text",
        "empty": "empty",
        "pressure": "number",
        "smoker": "true or false",
        "outcome": "text",
    }
    assert (checked.client, checked.person, checked.target) == ("file", "patient", "outcome")
    assert (checked.clients, checked.people, checked.most_rows, checked.rows) == (5, 82, 2, 163)
    assert checked.candidates["client"] == ("hospital",)
    assert "smoker" in checked.candidates["target"]
    missing = {column.name: column.missing_share for column in checked.columns}
    assert missing["pressure"] == 17 / 163
    assert missing["age"] == 0


def test_columns_that_are_no_features_say_why(folder):
    checked = fv.check_table(folder)
    found = notes(checked)
    assert found["remark"] == ("an id, no feature: every entry is different",)
    assert found["country"] == ("no feature: 100.0 % of entries are the same",)
    assert found["empty"] == ("no feature: every entry is missing",)
    assert found["seen"] == ("no feature: write dates as YYYY-MM-DD to use them",)
    assert set(checked.feature_names).isdisjoint(found)
    assert checked.feature_names == ("admitted", "age", "ward", "pressure", "smoker")


def test_warnings_and_what_can_be_protected(folder):
    checked = fv.check_table(folder, delta=0.05)
    assert any("class 'died' of 'outcome' has 4 rows: too few" in w for w in checked.warnings)
    assert "client 'coast' has 3 rows" in checked.warnings
    assert "column 'pressure' is missing in 10.4 % of rows" in checked.warnings
    assert checked.warnings[-1] == (
        "delta is 0.05, and there are 82 people: use a delta far below 1 / 82 = 0.012"
    )
    assert not any("delta" in w for w in fv.check_table(folder, delta=0.01).warnings)
    assert checked.protects == (
        "per client (recipe central): all rows of each of 5 clients. Noise that hides one of 5 "
        "drowns the signal: protect records",
        "per person (recipe dp-sgd or sites, client.unit = 'person', client.cap = 4): each of 82 "
        "people, with at most 4 rows each. Let the cap follow from what is public, not from these "
        "rows",
        "per record (recipe dp-sgd): each of 163 rows by itself. For a person with 2 rows, epsilon "
        "is about 2 times as large",
    )


@pytest.mark.parametrize("by", ["folder", "files", "one file"])
def test_the_block_is_a_section_that_a_run_accepts(folder, tmp_path, by):
    files = sorted(f"data/{name}.csv" for name in HOSPITALS)
    given = {"folder": [folder], "files": files, "one file": files[1:2]}[by]
    checked = fv.check_table(*given)
    section = tomllib.loads(checked.block)["data"]
    assert section["path"] == (files if by == "files" else given[0])
    assert section["person"] == "patient"
    assert section["missing"] == "fill"
    assert ("client" in section, "clients" in section) == (False, by == "one file")
    block = checked.block.replace("clients = 100", "clients = 4")
    if by == "one file":  # which has one row of a class, and that is no test row
        (problem,) = checked.problems
        assert problem.startswith("data/east.csv: row 4 of column 'outcome' is 'died', which is no")
        block += '[data.columns.outcome]\nvalues = ["home", "back", "died"]\n'
    else:
        assert checked.problems == ()
    recipe = load_recipe("dp-sgd").model_dump(exclude_none=True)
    data = load_recipe({**recipe, "data": tomllib.loads(block)["data"]}).load_data()
    assert data.clients == (4 if by == "one file" else 4 - data.held_out_owners + 1)
    assert [column.name for column in data.schema.feature_columns] == list(checked.feature_names)


def test_what_a_run_would_refuse_is_listed_whole(folder, tmp_path):
    path = tmp_path / "data" / "north.csv"
    path.write_text(path.read_text().replace("north-3,", ","))
    checked = fv.check_table(folder)
    (problem,) = checked.problems
    assert problem.startswith("data/north.csv: row 7 of column 'patient' is empty")
    path.write_text(path.read_text().replace("outcome", "result"))
    with pytest.raises(BadInput, match="target: data has no column 'outcome'"):
        fv.check_table(folder, target="outcome")
    assert any("north.csv has no column 'outcome'" in p for p in fv.check_table(folder).problems)


def test_declarations_are_checked_as_a_run_would(folder):
    columns = {"age": {"low": 0, "high": 120}, "ward": {"values": ["a"]}}
    options = {"features": ["age", "ward"], "test": "by-client", "columns": columns}
    (problem,) = fv.check_table(folder, target="outcome", **options).problems
    assert "of column 'ward' is 'b', which is none of its values 'a'" in problem
    columns["ward"]["other"] = True
    assert fv.check_table(folder, target="outcome", **options).problems == ()
    (problem,) = fv.check_table(folder, target="outcome", test=2.0).problems
    assert problem == "test is 2.0: a share above 0 and below 1 is needed"


def test_roles_that_are_named_are_taken(folder):
    checked = fv.check_table(folder, client="hospital", person="remark", target="smoker")
    assert (checked.client, checked.person, checked.target) == ("hospital", "remark", "smoker")
    section = tomllib.loads(checked.block)["data"]
    assert (section["client"], section["person"]) == ("hospital", "remark")
    assert (checked.people, checked.most_rows) == (163, 1)
    assert checked.protects[1] == "per record (recipe dp-sgd): each of 163 rows by itself"
    with pytest.raises(BadInput, match="client: data has no column 'clinic'"):
        fv.check_table(folder, client="clinic")


def test_odd_names_and_tables_in_memory():
    odd = {'a "b"\n\x7fé😀': [1.5, 2.5, 3.5, 4.5] * 9, "PatientID": [*range(36)]}
    checked = fv.check_table({**odd, "y": ["no", "yes"] * 18})
    section = tomllib.loads(checked.block)["data"]
    assert section["features"] == ['a "b"\n\x7fé😀']
    assert (checked.paths, checked.person, checked.target) == ((), "PatientID", "y")
    assert json.loads(json.dumps(checked.to_dict()))["block"] == checked.block
    numbers = fv.check_table({"a": np.arange(40.0) / 7, "b": np.arange(40.0) / 3})
    assert numbers.problems == ("no column looks like a target: name it",)
    with pytest.raises(BadInput, match="no table is given: name at least one file"):
        fv.check_table()


def test_an_option_of_the_partition_is_refused_by_name():
    with pytest.raises(BadInput, match="clients does not describe a table"):
        fv.check_table({"a": [1.0, 2.0], "b": [0, 1]}, target="b", clients=2)
