"""All problems of a table are one line, and each of them is one that a run refuses alone."""

import pytest

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.data.own_table import TableOptions, table_problems, table_records

HEADER = ["site", "age", "dose", "city", "well"]
COLUMNS = {
    "age": {"low": 0, "high": 100},
    "dose": {"low": 0, "high": 10},
    "city": {"values": ["bonn", "rome"]},
    "well": {"values": ["no", "yes"]},
}


def write(path, **changes):
    rows = [
        [f"s{k // 4}", str(20 + k), str(k % 7), ("bonn", "rome")[k % 2], ("no", "yes")[k // 2 % 2]]
        for k in range(40)
    ]
    for key, entry in changes.items():
        column, row = key.rsplit("_", 1)
        rows[int(row) - 1][HEADER.index(column)] = entry
    path.write_text("\n".join(",".join(row) for row in [HEADER, *rows]) + "\n")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusal(table="t.csv", **options):
    options = {"client": "site", "target": "well", "columns": COLUMNS, **options}
    with pytest.raises(BadInput) as refused:
        fv.FederatedData.from_table(table, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_three_problems_are_one_line(tmp_path):
    write(tmp_path / "t.csv", age_3="", city_4="oslo", well_7="perhaps")
    assert refusal() == (
        "t.csv: 3 problems: (1) row 3 of column 'age' is empty: declare a public value for such "
        "entries (columns.age.fill), or missing = 'fill' for all columns, or remove the row; (2) "
        "row 4 of column 'city' is 'oslo', which is none of its values 'bonn', 'rome': add it to "
        "columns.city.values, or declare columns.city.other = true; (3) row 7 of column 'well' is "
        "'perhaps', which is none of its values 'no', 'yes': declare all labels in "
        "columns.well.values"
    )


def test_names_that_are_not_there_are_told_together(tmp_path):
    write(tmp_path / "t.csv")
    line = refusal(client="clinic", target="ill", features=["age", "bmi"], columns={})
    assert line.startswith("t.csv: 3 problems: (1) t.csv has no column 'ill'")
    assert "(2) t.csv has no column 'clinic'" in line
    assert "(3) t.csv has no column 'bmi'" in line


def test_one_problem_is_itself(tmp_path):
    write(tmp_path / "t.csv", age_3="old")
    assert refusal().startswith("t.csv: row 3 of column 'age' is 'old': a number is needed")


def test_five_problems_are_shown_of_more(tmp_path):
    write(tmp_path / "t.csv", age_1="x", dose_1="x", city_1="x", well_1="x", site_1="")
    names = {f"n{k}": [str(k)] * 39 + [""] for k in range(6)}
    columns = {name: {"low": 0, "high": 1} for name in names}
    table = {"site": [f"s{k // 4}" for k in range(40)], "well": ["no", "yes"] * 20, **names}
    columns["well"] = {"values": ["no", "yes"]}
    line = refusal(table, columns=columns)
    assert line.startswith("the table: 6 problems: (1) row 40 of column 'n0' is empty")
    assert "(5) row 40 of column 'n4'" in line
    assert "'n5'" not in line
    assert line.endswith("; and 1 more (fedveil data check lists all)")
    checked = fv.check_table(table, client="site", target="well", columns=columns)
    assert len(checked.problems) == 6
    assert "'n5'" in checked.problems[5]


@pytest.mark.parametrize("statistics", [None, "clients", "public"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"age_3": "old"},
        {"age_3": "", "dose_9": "inf"},
        {"site_2": "", "city_3": ""},
        {f"well_{k}": "no" for k in range(1, 41)},
        {f"dose_{k}": "3" for k in range(1, 41)},
        {f"city_{k}": f"text {k}" for k in range(1, 41)},
    ],
)
def test_problems_are_there_exactly_if_the_table_is_refused(tmp_path, changes, statistics):
    """And the first that is met is among them."""
    write(tmp_path / "t.csv", **changes)
    options = TableOptions("well", "site", test="by-client", statistics=statistics)
    problems = table_problems("t.csv", options)
    if not problems:
        assert len(table_records("t.csv", options).y) > 20
        assert not changes or (statistics is None and "city_1" in changes)  # few in the test rows
        return
    with pytest.raises(BadInput) as refused:
        table_records("t.csv", options)
    assert all(p.removeprefix("t.csv: ") in str(refused.value) for p in problems)
