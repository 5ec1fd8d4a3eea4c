"""Tables in recipes: read from `[data]`, overridden key by key, kept with the run."""

import csv
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedveil import FederatedData
from fedveil.base.errors import BadInput
from fedveil.data.columns import Column
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe, to_toml
from fedveil.runs.run import Run
from fedveil.tuning.trials import Laboratory

COLUMNS = {
    "age": {"low": 0.0, "high": 100.0, "fill": 50},
    "blood.pressure (mm)": {"mean": 120.0, "std": 20.0},
    "well": {"values": ["no", "yes"]},
}
BASE = ["data.path=t.csv", "data.client=site", "data.target=well", "data.test=by-client"]
SHORT = ["rounds=2", "client.epochs=1", "engine.workers=1", "budget.delta=1e-3"]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """t.csv in the current directory: 20 sites of 6 patients."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    with (tmp_path / "t.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["site", "age", "blood.pressure (mm)", "well"])
        for k in range(120):
            age, pressure = random.integers(20, 80), random.normal(120, 20)
            out.writerow([f"s{k % 20}", age, pressure, ("no", "yes")[int(age > 50)]])
    return tmp_path / "t.csv"


def declared():
    found = []
    for name, said in COLUMNS.items():
        found += [f"data.columns.{name}.{key}={value}" for key, value in said.items()]
    return found


def test_a_path_starts_the_data_section_afresh_and_needs_no_name(table):
    section = load_recipe("central", BASE).data
    said = {key: value for key, value in section.model_dump().items() if value is not None}
    named = {"name": "table", "path": "t.csv", "client": "site", "target": "well"}
    assert said == {**named, "test": "by-client"}
    assert load_recipe("central", BASE[::-1]) == load_recipe("central", BASE)


def test_another_path_leaves_what_a_recipe_says_of_its_table(table, tmp_path):
    (tmp_path / "r.toml").write_text(
        to_toml(load_recipe("central", [*BASE, *declared()]).model_dump())
    )
    other = load_recipe(str(tmp_path / "r.toml"), ["data.path=u.csv"]).data
    assert (other.path, other.client, set(other.columns)) == ("u.csv", "site", set(COLUMNS))


def test_columns_are_declared_key_by_key_or_whole():
    whole = "data.columns.age={low=0, high=100, fill=50}"
    recipe = load_recipe("central", [*BASE, *declared()])
    assert recipe.data.columns["age"].model_dump(exclude_none=True) == COLUMNS["age"]
    assert load_recipe("central", [*BASE, whole, *declared()[3:]]) == recipe
    without = load_recipe("central", [*BASE, *declared(), "data.columns.age.fill=none"])
    assert without.data.columns["age"].fill is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.columns.age.lowest=0", r"unknown key data\.columns\.age\.lowest"),
        ("data.columns.age.low=old", r"data\.columns\.age\.low is 'old'"),
        ("data.columns.age=5", r"data\.columns\.age is 5"),
        ("data.columns=5", r"data\.columns is 5"),
        ("data.columns.age.values=5", r"data\.columns\.age\.values is 5"),
        ("data.columns..low=5", "--set"),
        ("data.clients.age.low=5", "--set"),
        ("sample.rate.low=5", "--set"),
        ("data.client=5", r"data\.client is 5"),
        ("data.features=age", r"data\.features is 'age'"),
        ("data.statistics=all", r"data\.statistics is 'all'"),
        ("data.test=true", r"data\.test"),
    ],
)
def test_words_that_are_none_are_refused(setting, message):
    with pytest.raises(BadInput, match=message) as refused:
        load_recipe("central", [*BASE, setting])
    assert "\n" not in str(refused.value)


def test_a_key_of_what_is_no_section_is_refused():
    with pytest.raises(BadInput, match=r"--set data.columns.age.low: data.columns.age is not a se"):
        load_recipe("central", [*BASE, "data.columns.age=5", "data.columns.age.low=3"])


def test_a_recipe_is_what_the_call_is(table):
    options = ["data.test=0.25", "data.min_records=2", *declared()]
    data = load_recipe("central", [*BASE, *options]).load_data()
    same = FederatedData.from_table(
        "t.csv", client="site", target="well", test=0.25, min_records=2, columns=COLUMNS
    )
    assert data.fingerprint == same.fingerprint
    assert data.assumptions == same.assumptions
    settings = ["data.path=t.csv", "data.target=well", 'data.features=["age"]', "data.clients=7"]
    dealt = load_recipe("central", [*settings, "seed=3", "data.test=0.2"]).load_data()
    again = FederatedData.from_table(
        "t.csv", target="well", features=["age"], clients=7, seed=3, test=0.2
    )
    assert dealt.fingerprint == again.fingerprint


def test_recipes_with_columns_are_written_as_they_were_read(table, tmp_path):
    recipe = load_recipe("central", [*BASE, *declared(), "data.test=0.25"])
    text = to_toml(recipe.model_dump())
    (tmp_path / "r.toml").write_text(text)
    assert load_recipe(str(tmp_path / "r.toml")) == recipe
    assert tomllib.loads(text)["data"]["columns"] == COLUMNS


def test_the_recipe_of_the_documentation_is_read(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    block = text.partition("```toml\n")[2].partition("```")[0]
    central = load_recipe("central").model_dump()
    (tmp_path / "r.toml").write_text(to_toml({**central, "data": tomllib.loads(block)["data"]}))
    section = load_recipe(str(tmp_path / "r.toml")).data
    assert (section.name, section.path) == ("table", "patients.csv")
    for name, column in section.columns.items():
        Column.declared(name, column.model_dump(exclude_none=True))
    assert len(section.columns) == 4


@pytest.mark.parametrize("how", ["clients", "public", "held-out"])
def test_statistics_are_said_in_every_claim(table, how):
    training = build(load_recipe("central", [*BASE, *SHORT, f"data.statistics={how}"]))
    start = {"clients": "means and", "public": "declared public: means", "held-out": "means and"}
    end = {"clients": "outside this claim", "public": "'well'", "held-out": "no claim covers"}
    for line in training.plan.lines:
        (said,) = [text for text in line.assumptions if "means" in text]
        assert said.startswith(start[how])
        assert said.endswith(end[how])
    assert training.data.declared_public is (how == "public")
    secure = load_recipe("central", [*BASE, *SHORT, f"data.statistics={how}",
                                     "noise.source=secure"])  # fmt: skip
    if how == "clients":
        with pytest.raises(BadInput, match="'secure' and means"):
            build(secure)
    else:
        assert build(secure).plan.secure


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.path=t.csv"], "data.target is missing: name the column"),
        (["data.name=table", "data.clients=none"], "data.path is missing: name a .csv"),
        ([*BASE, "data.grades=true"], "data.grades has no effect on a table"),
        (["data.client=site"], "data.client has no effect on 'digits': omit it"),
        (["data.columns.age.low=3"], "data.columns has no effect on 'digits'"),
        (["data.test=0.2"], "test is 0.2: use one of by-client, records"),
        (["data.statistics=clients"], "'clients' and nothing of digits was fitted"),
        (["data.path=x", "data.name=saved", "data.target=a"], "data.target has no effect on saved"),
        (["data.path=x", "data.name=saved", "data.statistics=clients"], "'clients' and saved data"),
        (["data.path=x.csv"], "x.csv does not exist: a relative path is relative to the current"),
    ],
)
def test_keys_that_have_no_effect_or_are_missing(table, settings, message):
    with pytest.raises(BadInput, match=message):
        load_recipe("central", settings).load_data()


def test_clients_statistics_are_what_diabetes_has_anyway():
    plain, said = (
        load_recipe("central", ["data.name=diabetes", *more]).load_data()
        for more in ([], ["data.statistics=clients"])
    )
    assert plain.fingerprint == said.fingerprint
    assert plain.assumptions == said.assumptions


def test_a_run_on_a_table_goes_on_where_it_was(table, tmp_path):
    recipe = load_recipe("central", [*BASE, *SHORT])
    run = Run.start(recipe, tmp_path / "run", None)
    assert "clients of t.csv, 2 rounds" in run.describe()
    result = run.execute()
    assert "fitted on the test records, which no claim covers" in str(result["claims"])
    assert Run.resume(tmp_path / "run", None).training.data.schema == run.training.data.schema
    table.write_text(table.read_text().replace("s3,", "s4,", 1))
    with pytest.raises(BadInput, match="data"):
        Run.resume(tmp_path / "run", None).execute()


def test_cells_of_a_sweep_read_their_own_table(table):
    laboratory = Laboratory()
    first = laboratory.federated_data(load_recipe("central", BASE))
    other = laboratory.federated_data(load_recipe("central", [*BASE, "data.test=0.5"]))
    third = laboratory.federated_data(load_recipe("central", [*BASE, 'data.features=["age"]']))
    assert len(first.test_x) != len(other.test_x)
    assert third.record_shape == (1,)


@pytest.mark.parametrize(
    ("settings", "seedless"),
    [
        (BASE, True),
        ([*BASE, "data.clients=3"], False),
        ([*BASE, "data.clients=3", "data.seed=1"], True),
        ([*BASE, "data.resample=99"], False),
        ([*BASE, "data.most_records=2"], False),
        (["data.path=t.csv", "data.target=well", "data.clients=5", "data.test=0.2"], False),
    ],
)
def test_whether_the_seed_divides_the_records(table, settings, seedless):
    sections = [load_recipe("central", [*settings, f"seed={seed}"]) for seed in (1, 2)]
    assert sections[0].data.seedless is seedless
    features = [*settings, "data.features=['age']"]
    first, second = (
        load_recipe("central", [*features, f"seed={seed}"]).load_data().fingerprint
        for seed in (1, 2)
    )
    assert (first == second) is seedless


def test_data_that_were_read_already_are_not_read_again(table, tmp_path):
    recipe = load_recipe("central", [*BASE, *SHORT])
    data = recipe.load_data()
    table.unlink()
    assert Run.start(recipe, tmp_path / "run", None, data=data).training.data is data
