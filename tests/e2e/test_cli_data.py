"""`fedveil data check`: what it prints and writes, and its one line for bad input."""

import json
from pathlib import Path

import pytest

HEADER = "patient,admitted,age,outcome"


@pytest.fixture
def folder(cli):
    Path("data").mkdir()
    for site in ("north", "south", "east", "west"):
        rows = [
            f"{site}-{k // 2},2020-01-{k + 1:02},{'' if k == 5 else 20 + k},{('no', 'yes')[k % 2]}"
            for k in range(30)
        ]
        Path(f"data/{site}.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    return "data"


@pytest.mark.slow
def test_a_recipe_is_written_checked_and_run(cli, folder):
    told = cli("data", "check", folder, "--recipe", "dp-sgd", "--out", "mine.toml")
    assert (told.code, told.err) == (0, "")
    for line in ("4 clients, one for each file", "  - column", "[data]", "written: mine.toml"):
        assert line in told.out
    assert all(len(line) <= 100 for line in told.out.splitlines())
    told = cli("data", "check", "mine.toml")
    assert told.code == 0
    assert "A run would refuse" not in told.out
    done = cli("run", "mine.toml", "--set", "sample.kind=all", "--set", "rounds=2", "--out", "run")
    assert done.code == 0
    found = cli("predict", "run", "data/north.csv", "--id", "patient").out.splitlines()
    assert found[0] == "patient,prediction,p(no),p(yes)"
    assert found[1].startswith("north-0,")
    assert len(found) == 31


def test_json_has_everything(cli, folder):
    told = cli("data", "check", folder, "--target", "outcome", "--json")
    found = json.loads(told.out)
    assert (found["clients"], found["people"], found["target"]) == (4, 60, "outcome")
    assert found["block"].startswith('[data]\npath = "data"\nperson = "patient"')


def test_problems_are_listed_and_the_code_is_2(cli, folder):
    Path("data/north.csv").write_text(f"{HEADER}\nnorth-1,2020-01-01,old\n")
    Path("data/zoo.csv").write_text("")
    told = cli("data", "check", folder)
    assert told.code == 2
    listed = told.out.partition("A run would refuse:")[2]
    assert "data/north.csv: line 2 has 3 entries and the header 4" in listed
    assert "data/zoo.csv is empty: a header and rows are needed" in listed


def test_a_recipe_is_checked_with_what_it_declares(cli, folder):
    assert cli("data", "check", folder, "--recipe", "dp-sgd", "--out", "mine.toml").code == 0
    with Path("mine.toml").open("a") as file:
        file.write('\n[data.columns.outcome]\nvalues = ["no", "perhaps"]\n')
    told = cli("data", "check", "mine.toml")
    assert told.code == 2
    text = " ".join(told.out.split())
    assert "of column 'outcome' is 'yes', which is none of its values 'no', 'perhaps'" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.csv"], "none.csv does not exist"),
        (["data", "--target", "ill"], "target: data has no column 'ill'"),
        (["data", "--recipe", "dp-sgd"], "--recipe is 'dp-sgd' without --out: name the file"),
        (["data", "--recipe", "dpsgd", "--out", "x.toml"], "'dpsgd'"),
        (["data", "--out", "data/north.csv"], "data/north.csv exists: name another file"),
        (["digits.toml"], "digits.toml: data.name is 'digits': name a recipe with a table"),
        (["digits.toml", "--target", "x"], "digits.toml is a recipe: omit --out"),
        (["data", "--delta", "2"], "--delta"),
    ],
)
def test_bad_input_is_one_line(cli, folder, arguments, message):
    Path("digits.toml").write_text(
        'name = "digits"\nrounds = 1\n[data]\nname = "digits"\nclients = 3\n[model]\n'
        'name = "softmax"\n[sample]\nkind = "all"\n[client]\nkind = "gradient"\n'
        '[server]\nlr = 1.0\n[noise]\nkind = "none"\n'
    )
    before = sorted(Path().rglob("*"))
    told = cli("data", "check", *arguments)
    assert (told.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert message in told.err
    assert sorted(Path().rglob("*")) == before
