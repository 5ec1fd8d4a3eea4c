"""Tables that cannot be learnt from: each gets one line that names the thing and the way out."""

import sys

import numpy as np
import pytest

from fedveil import FederatedData
from fedveil.base.errors import BadInput
from fedveil.cli import main as commands
from fedveil.runs.recipe import load_recipe

SITES, EACH = 10, 4
HEADER = ["site", "age", "city", "well"]
SITE = "s0"
"""One that is not held out for testing."""


def rows(**changes):
    """A good table, with entries changed by "column_row" (rows from 1); None leaves a row out."""
    made = [
        [f"s{k // EACH}", str(20 + k), ("bonn", "rome")[k % 2], ("no", "yes")[k // 2 % 2]]
        for k in range(SITES * EACH)
    ]
    for key, value in changes.items():
        column, row = key.rsplit("_", 1)
        made[int(row) - 1][HEADER.index(column)] = value
    return made


def text(table, header=HEADER):
    return "\n".join(",".join(row) for row in [header, *table]) + "\n"


def with_column(name, entry):
    """The good table with one more column, made from the number of the row."""
    return text([[*row, entry(k)] for k, row in enumerate(rows())], [*HEADER, name])


def columns(**said):
    return {"columns": said}


# name: (content of the file, options, what the line says); rows 1 to 4 are s0's, a client's
BAD = {
    "an empty file": ("", {}, "t.csv is empty: a header and rows are needed"),
    "a header only": (
        text([]),
        {},
        "t.csv has columns and no rows: there is nothing to learn from",
    ),
    "no client column": (
        text(rows()),
        {"client": "clinic"},
        "t.csv has no column 'clinic': its columns are 'site', 'age', 'city', 'well'",
    ),
    "no target": (text(rows()), {"target": "ill"}, "t.csv has no column 'ill': its columns are"),
    "no feature": (
        text(rows()),
        {"features": ["age", "dose"]},
        "t.csv has no column 'dose': its columns are 'site'",
    ),
    "a column twice": (
        text(rows(), ["site", "age", "age", "well"]),
        {},
        "t.csv has 2 columns 'age': rename all but one",
    ),
    "a ragged row": (
        text(rows()[:5]) + "s2,30,rome\n",
        {},
        "t.csv: line 7 has 3 entries and the header 4: put texts with commas into quotes",
    ),
    "not UTF-8": (
        text(rows()).replace("bonn", "köln").encode("latin-1"),
        {},
        "t.csv is not UTF-8 (byte 0xf6): save it as UTF-8",
    ),
    "UTF-16": (
        text(rows()).encode("utf-16"),
        {},
        "t.csv is no text: a CSV file in UTF-8 is needed",
    ),
    "a binary file": (
        b"\x89PNG\r\n\x1a\n" + bytes(64),
        {},
        "t.csv is no text: a CSV file in UTF-8 is needed",
    ),
    "a missing number": (
        text(rows(age_3="")),
        {},
        "t.csv: row 3 of column 'age' is empty: declare a public value for such entries "
        "(columns.age.fill), or missing = 'fill' for all columns, or remove the row",
    ),
    "a missing category": (
        text(rows(city_3="")),
        {},
        "t.csv: row 3 of column 'city' is empty: declare a public value",
    ),
    "an unknown category": (
        text(rows(city_2="oslo")),
        columns(city={"values": ["bonn", "rome"]}),
        "t.csv: row 2 of column 'city' is 'oslo', which is none of its values 'bonn', 'rome': add "
        "it to columns.city.values, or declare columns.city.other = true",
    ),
    "a text for a declared number": (
        text(rows(age_4="old")),
        columns(age={"low": 0, "high": 100}),
        "t.csv: row 4 of column 'age' is 'old': a number is needed (or declare columns.age.values",
    ),
    "a text for a number, as the test split has them": (
        text(rows(age_4="old")),
        {},
        "t.csv: row 4 of column 'age' is 'old': a number is needed (or declare columns.age.values",
    ),
    "a number that is not listed": (
        text(rows(age_1="7")),
        columns(age={"values": [*range(20, 60)]}),
        "t.csv: row 1 of column 'age' is '7', which is none of its values 20, 21,",
    ),
    "a client per row": (
        text([[str(k), *row[1:]] for k, row in enumerate(rows())]),
        {},
        "t.csv: column 'site' has a different value in each of its 40 rows, so every client would "
        "have one row: name the column of the rows' owners, or omit client and give a number of",
    ),
    "nobody's row": (
        text(rows(site_6="")),
        {},
        "t.csv: row 6 of column 'site' is empty: say whose row it is, or remove it",
    ),
    "one client": (
        text([["s0", *row[1:]] for row in rows()]),
        {},
        "no name falls into the share of 0.2 that is held out for testing: use another test split "
        "(data.test), or none",
    ),
    "one client, who is held out": (
        text([["s7", *row[1:]] for row in rows()]),
        {},
        "t.csv: column 'site' names one client, 's7', and some are held out for testing: name "
        "another column, or give test a share",
    ),
    "no features listed": (
        text(rows()),
        {"features": []},
        "t.csv: no column is left to be a feature: name at least one",
    ),
    "a constant feature": (
        with_column("unit", lambda k: "5"),
        {},
        "t.csv: column 'unit' is 5 in all test records: leave it out of features, or declare "
        "columns.unit.low and high",
    ),
    "a constant category": (
        with_column("unit", lambda k: "mg"),
        {},
        "t.csv: column 'unit' is 'mg' in all test records: declare columns.unit.values, or omit",
    ),
    "a missing target": (
        text(rows(well_2="")),
        {},
        "t.csv: row 2 of column 'well' is empty, and it is the target: remove the row",
    ),
    "a target that is no number": (
        text(rows(age_2="NaN")),
        {"target": "age", **columns(age={"low": 0, "high": 100})},
        "t.csv: row 2 of column 'age' is empty, and it is the target: remove the row",
    ),
    "an infinite number": (
        text(rows(age_2="inf")),
        {},
        "t.csv: row 2 of column 'age' is 'inf': a finite number of at most 1e+30 is needed",
    ),
    "a label that no test record has": (
        text(rows(well_1="maybe")),
        {},
        "t.csv: row 1 of column 'well' is 'maybe', which is none of its values 'no', 'yes': "
        "declare all labels in columns.well.values",
    ),
    "too many categories": (
        text([["s0", *row[1:], f"w{k}"] for k, row in enumerate(rows())], [*HEADER, "word"]),
        {"test": 0.9},
        "t.csv: column 'word' has 33 different texts in 33 test records: leave it out of features, "
        "or declare columns.word.values",
    ),
    "many whole numbers to predict": (
        with_column("dose", lambda k: str(k)),
        {"target": "dose", "test": 0.7},
        "t.csv: target 'dose' has 22 different whole numbers in test records: declare labels "
        "(columns.dose.values), or a number (columns.dose.low and high)",
    ),
    "whole numbers that are written as real ones": (
        with_column("dose", lambda k: f"{k % 3}.0"),
        {"target": "dose"},
        "t.csv: target 'dose' has 3 different whole numbers, written as real ones, in test records",
    ),
    "low above high": (
        text(rows()),
        columns(age={"low": 9, "high": 3}),
        "columns.age.low is 9 and high is 3: low < high",
    ),
    "a range and values": (
        text(rows()),
        columns(age={"low": 0, "high": 9, "values": [1, 2]}),
        "columns.age has low and high and also values: leave one out",
    ),
    "half a range": (
        text(rows()),
        columns(age={"low": 0}),
        "columns.age has one of low and high: give both",
    ),
    "an unknown column declared": (
        text(rows()),
        columns(dose={"low": 0, "high": 9}),
        "t.csv has no column 'dose': its columns are",
    ),
    "a column declared that is no feature": (
        text(rows()),
        {"features": ["city"], **columns(age={"low": 0, "high": 100})},
        "columns.age is declared and 'age' is neither a feature nor the target: omit it",
    ),
    "the target as a feature": (
        text(rows()),
        {"features": ["age", "well"]},
        "feature 'well' is the target: leave it out of features",
    ),
    "the client as a feature": (
        text(rows()),
        {"features": ["age", "site"]},
        "feature 'site' is the client column: leave it out of features",
    ),
    "a share without a row": (
        text(rows()),
        {"test": 1e-6},
        "test is 1e-06 and no row of t.csv would be held out: raise it, or omit it",
    ),
    "a share of all rows": (
        text(rows()),
        {"test": 1 - 1e-6},
        "test is 0.999999 and every row of t.csv would be held out: lower it, or omit it",
    ),
    "no client with enough records": (
        text(rows()),
        {"min_records": 5},
        "t.csv: no client has 5 records, the most is 4: lower min_records",
    ),
    "a huge field": (
        text([*rows()[:2], ["s0", "30", "x" * 200_000, "no"]]),
        {},
        "t.csv: line 4 cannot be read: field larger than field limit (131072)",
    ),
    "an open quote": (
        text([*rows()[:2], ["s0", "30", '"bonn', "no"], *rows()[3:]]),
        {},
        "t.csv: line 4 cannot be read: unexpected end of data; is a quote missing?",
    ),
    "semicolons": (
        text(rows()).replace(",", ";"),
        {},
        "t.csv has one column 'site;age;city;well': separate columns by commas, not by ';'",
    ),
    "a column without a name": (
        text([[str(k), *row] for k, row in enumerate(rows())], ["", *HEADER]),
        {},
        "t.csv has a column without a name, as pandas writes with index=True: name it, or list",
    ),
    "a name of two lines": (
        text(rows(age_3=""), ["site", '"age\nin years"', "city", "well"]),
        {},
        "row 3 of column 'age\\nin years' is empty: declare a public value for such entries "
        "(columns.age in years.fill), or missing = 'fill' for all columns, or remove the row",
    ),
    "a share of more than all": (text(rows()), {"test": 1.5}, "test is 1.5: a share above 0 and"),
    "a word for the test split": (
        text(rows()),
        {"test": "some"},
        "test is 'some': use a share such as 0.2, 'by-client', 'none', or the path of a .csv",
    ),
    "a split that a table does not have": (
        text(rows()),
        {"test": "records"},
        "test is 'records': a table has no split of its own, use a share such as 0.2",
    ),
    "clients held out of none": (
        text(rows()),
        {"client": None, "features": ["age"], "clients": 5, "test": "by-client"},
        "test is 'by-client' and client is missing: name the column, or a share",
    ),
    "no clients at all": (
        text(rows()),
        {"client": None, "features": ["age"]},
        "no clients: name the column that says whose a row is (client), or give a number",
    ),
    "a partition beside a client column": (
        text(rows()),
        {"partition": "iid"},
        "client 'site' says whose rows are whose and partition is 'iid': leave one of them out",
    ),
    "statistics of nothing": (
        text(rows()),
        {
            "features": ["age"],
            "statistics": "held-out",
            **columns(age={"low": 0, "high": 100}, well={"values": ["no", "yes"]}),
        },
        "statistics is 'held-out', every column is declared: omit it",
    ),
    "one label": (
        text(rows()),
        columns(well={"values": ["yes"]}),
        "columns.well.values has one label: two or more are needed",
    ),
    "a fill for the target": (
        text(rows()),
        columns(well={"fill": "no"}),
        "columns.well is the target, which has no fill or other: remove the rows",
    ),
}
FILES = {
    "a parquet file that is none": ("t.parquet", "age,well\n1,no\n", "expected a parquet file"),
    "half a parquet file": ("t.parquet", "PAR1", "t.parquet: expected a parquet file, found"),
    "another ending": ("t.xlsx", "x", "t.xlsx is no table that can be read: use a .csv or"),
    "no file": ("t.csv", None, "t.csv does not exist: a relative path is relative to the current"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content)


def settings(path, options):
    """The same as a recipe's settings."""
    found = [f"data.path={path}"]
    for key, value in options.items():
        if key == "columns":
            found += [f"data.columns.{name}.{k}={v}" for name, said in value.items()
                      for k, v in said.items()]  # fmt: skip
        elif value is not None:
            found.append(f"data.{key}={value}")
    return found


def refusal(call):
    with pytest.raises(BadInput) as refused:
        call()
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    return str(refused.value)


def test_the_table_that_is_changed_is_a_good_one(here):
    write(here / "t.csv", text(rows()))
    data = FederatedData.from_table("t.csv", client="site", target="well", test="by-client")
    assert data.clients + len(data.test_x) // EACH == SITES
    assert SITE in data.names
    assert data.record_shape == (3,)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_gets_one_line(here, name):
    content, options, message = BAD[name]
    write(here / "t.csv", content)
    options = {"client": "site", "target": "well", "test": "by-client", **options}
    assert message in refusal(lambda: FederatedData.from_table("t.csv", **options))
    recipe = load_recipe("central", settings("t.csv", options))
    assert message in refusal(lambda: recipe.load_data())


@pytest.mark.parametrize(("file", "content", "message"), FILES.values(), ids=FILES)
def test_a_file_that_is_no_table_gets_one_line(here, file, content, message):
    write(here / file, content)
    assert message in refusal(lambda: FederatedData.from_table(file, client="site", target="well"))


def test_a_folder_without_tables_is_no_table(here):
    (here / "t.csv").mkdir()
    write(here / ".hidden.csv", text(rows()))
    for path in ("t.csv", "."):
        line = refusal(lambda path=path: FederatedData.from_table(path, target="well", clients=3))
        assert line.startswith(f"{path} is a folder without .csv or .parquet files: name another (")


OBJECTS = {
    "nothing": (None, "the table is None: give the path of a .csv or .parquet file, a list"),
    "no columns": ({}, "the table is empty: a header and rows are needed"),
    "columns of two lengths": (
        {"age": [1, 2], "well": [0]},
        "the table: column 'well' has 1 rows and column 'age' 2: give one entry per row",
    ),
    "a text for a column": ({"age": "abc"}, "column 'age' is 'abc': a list of entries is needed"),
    "a number for a column": ({"age": 5}, "column 'age' is 5: a list of entries is needed"),
    "an array of no rows": ({"age": np.array(5)}, "column 'age' is array(5): a list of entries"),
}


@pytest.mark.parametrize(("table", "message"), OBJECTS.values(), ids=OBJECTS)
def test_an_object_that_is_no_table_gets_one_line(table, message):
    assert message in refusal(lambda: FederatedData.from_table(table, target="well", clients=2))


ARGUMENTS = {
    "a target that is no name": ({"target": 3}, "target is 3: name a column"),
    "a client that is no name": ({"client": 3}, "client is 3: name a column"),
    "features as a text": ({"features": "age"}, "features is 'age': a list of columns is needed"),
    "columns as a list": (
        {"columns": ["age"]},
        "columns is ['age']: a dict from names of columns is needed",
    ),
    "unknown statistics": ({"statistics": "all"}, "statistics is 'all': use one of held-out, clie"),
    "no records": ({"min_records": 0}, "data.min_records is 0"),
    "a minimum of nobody": ({"client": None, "min_records": 2}, "has no effect without a client"),
    "a feature twice": ({"features": ["age", "age"]}, "features 'age', 'age' has a name twice"),
    "client and target": ({"client": "well"}, "column 'well' is client and target: name two"),
    "a natural partition of nobody": (
        {"client": None, "partition": "natural"},
        "partition is 'natural' and client is missing: name the column",
    ),
}


@pytest.mark.parametrize(("options", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_do_not_go_together_get_one_line(options, message):
    table = dict(zip(HEADER, zip(*rows(), strict=True), strict=True))
    table = {name: list(column) for name, column in table.items()}
    options = {"client": "site", "target": "well", **options}
    assert message in refusal(lambda: FederatedData.from_table(table, **options))


@pytest.mark.parametrize("name", BAD)
def test_the_command_line_says_it_in_one_line(here, name, monkeypatch, capsys):
    content, options, message = BAD[name]
    write(here / "t.csv", content)
    options = {"client": "site", "target": "well", "test": "by-client", **options}
    said = settings("t.csv", options)
    arguments = [part for setting in said for part in ("--set", setting)]
    monkeypatch.setattr(sys, "argv", ["fedveil", "run", "central", *arguments])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith("error: ")
    assert message in line
    assert [path.name for path in here.iterdir()] == ["t.csv"]
