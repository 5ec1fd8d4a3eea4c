"""After the run: predictions on raw rows, and metrics on others."""

import csv
import io
import json

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Target
from fedveil.runs.opened_run import StoredModel
from fedveil.runs.sections.model_section import ModelSection

FAST = {"rounds": 6, "sample.rate": 0.5, "noise.multiplier": 0.5, "engine.workers": 1}
FREE = {"budget.epsilon": float("inf"), "budget.delta": 1e-4, "client.lr": 0.5}
COLUMNS = {
    "age": {"low": 0, "high": 100},
    "sex": {"values": ["f", "m"]},
    "well": {"values": ["no", "yes"]},
}


def rows(count, seed=0):
    """People who are well if they are young, in twenty wards."""
    random = np.random.default_rng(seed)
    age, sex = random.integers(0, 100, count), random.choice(["f", "m"], count)
    well = np.where(age + 20 * (sex == "m") < 60, "yes", "no")
    ward = [f"ward {k % 25}" for k in range(count)]
    return {"ward": ward, "age": age, "sex": sex, "well": well}


def written(path, table):
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(table)
        out.writerows(zip(*table.values(), strict=True))
    return path


@pytest.fixture
def run(tmp_path):
    """A run on a table, with a model of the zoo."""
    whose = {"client": "ward", "target": "well", "test": "by-client"}
    data = fv.FederatedData.from_table(rows(1000), columns=COLUMNS, **whose)
    return fv.run("central", data=data, out=tmp_path / "run", set={**FAST, **FREE}, quiet=True)


def test_predictions_are_in_the_tables_own_words(run):
    table = rows(200, seed=1)
    found = run.predict({"age": table["age"], "sex": table["sex"]})
    assert set(found) == {"prediction", "p(no)", "p(yes)"}
    assert np.allclose(found["p(no)"] + found["p(yes)"], 1)
    right = (found["prediction"] == table["well"]).mean()
    assert right == pytest.approx(run.evaluate(table)["accuracy"])
    assert right > 0.8
    features = np.stack([table["age"] / 50 - 1, table["sex"] == "f", table["sex"] == "m"], axis=1)
    outputs = run.module(torch.tensor(features, dtype=torch.float32))
    assert torch.equal(outputs.argmax(1), torch.tensor(found["prediction"] == "yes").long())


def test_numbers_are_predicted_in_their_own_unit(tmp_path):
    table = rows(600)
    table["cost"] = 1000.0 + 10.0 * table.pop("age")
    columns = {"cost": {"low": 1000, "high": 2000}, "sex": COLUMNS["sex"], "well": COLUMNS["well"]}
    whose = {"client": "ward", "target": "cost", "test": "by-client"}
    data = fv.FederatedData.from_table(table, columns=columns, **whose)
    model = nn.Linear(4, 1)
    settings = {**FAST, **FREE, "clip.value": 0.3, "client.lr": 0.1}
    run = fv.run("central", model=model, data=data, out=tmp_path / "n", set=settings, quiet=True)
    found = run.predict(rows(50, seed=2))["prediction"]
    assert 1000 < found.min() < found.max() < 2000
    again = fv.open_run(tmp_path / "n", model=nn.Linear(4, 1)).predict(rows(50, seed=2))
    assert np.array_equal(again["prediction"], found)


def test_arrays_are_predicted_as_they_are(tmp_path):
    run = fv.run(
        "central", out=tmp_path / "d", set={**FAST, **FREE, "data.clients": 20}, quiet=True
    )
    from sklearn.datasets import load_digits

    x = load_digits().data.astype(np.float32)[:30].reshape(30, 1, 8, 8) / 16
    x = x.reshape(30, *run.stored.record_shape)
    found = run.predict(x)
    assert set(found) == {"prediction", *(f"p({k})" for k in range(10))}
    assert np.array_equal(run.predict(torch.tensor(x))["prediction"], found["prediction"])
    with pytest.raises(BadInput, match="column 'x'"):
        run.predict(x.reshape(30, -1)[:, :5])


def test_a_prediction_needs_no_guessing(run, cli, tmp_path):
    table = rows(40, seed=3)
    source = written(tmp_path / "new.csv", {k: table[k] for k in ("sex", "ward", "age")})
    code, out, err = cli("predict", run.folder, source)
    assert (code, err) == (0, "")
    found = list(csv.DictReader(io.StringIO(out)))
    expected = run.predict(table)
    assert [row["prediction"] for row in found] == expected["prediction"].tolist()
    assert [row["p(yes)"] for row in found] == [f"{p:.6f}" for p in expected["p(yes)"]]
    cli("predict", run.folder, source, "--out", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == out


def test_predictions_keep_an_id(run, cli, tmp_path):
    ids = [f"00{k}" for k in range(40)]
    table = {**rows(40, seed=3), "id": ids}
    source = written(tmp_path / "new.csv", table)
    code, out, err = cli("predict", run.folder, source, "--id", "id")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith("id,prediction,p(")
    assert [row["id"] for row in csv.DictReader(io.StringIO(out))] == ids
    plain = cli("predict", run.folder, source)[1].splitlines()
    assert [line.partition(",")[2] for line in out.splitlines()] == plain
    for option, message in (
        ("number", "new.csv has no column 'number': its columns are"),
        ("prediction", "--id is 'prediction', which is a column of predictions: rename it"),
    ):
        source = written(tmp_path / "new.csv", {**table, "prediction": ids})
        code, out, err = cli("predict", run.folder, source, "--id", option)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
    np.save(tmp_path / "new.npy", np.zeros((2, 2)))
    err = cli("predict", run.folder, tmp_path / "new.npy", "--id", "id")[2]
    assert "new.npy is no table: omit it" in err


def test_evaluating_a_table_and_the_test_split(run, cli, tmp_path):
    source = written(tmp_path / "new.csv", rows(100, seed=4))
    told = json.loads(cli("evaluate", run.folder, "--data", source, "--json")[1])
    assert told == run.evaluate(rows(100, seed=4))
    line = cli("evaluate", run.folder)[2]
    assert "give a table with --data" in line
    settings = {**FAST, **FREE, "data.clients": 20}
    zoo = fv.run("central", out=tmp_path / "zoo", set=settings, quiet=True)
    told = json.loads(cli("evaluate", zoo.folder, "--json")[1])
    assert told == zoo.result["metrics"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("new.csv", "age,ward\n3,a\n", "has no column 'sex'"),
        ("new.csv", "age,sex\n3,x\n", "'x'"),
        ("new.csv", "age,sex\nold,f\n", "'old'"),
        ("new.txt", "age,sex\n3,f\n", "name a .csv, .parquet or .npy file"),
        ("new.npy", "nothing", "cannot be read"),
    ],
)
def test_rows_that_do_not_fit_are_one_line(run, cli, tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    code, out, err = cli("predict", run.folder, tmp_path / name, "--out", tmp_path / "out.csv")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert not (tmp_path / "out.csv").exists()


def test_the_claim_travels_with_the_weights(run):
    assert [claim.to_dict() for claim in run.stored.claims] == run.result["claims"]
    assert run.stored.model.name == "softmax"


def test_arrays_are_columns_as_they_are():
    """The schema of records that were arrays follows from their shapes and types."""

    def schema(shape, kind, target):
        return StoredModel(
            {}, ModelSection(name="softmax"), shape, kind, target, (), "", None
        ).schema

    one = schema((2, 3), "int64", Target(4))
    assert one.to_dict() == {
        "features": [{"name": "x", "shape": [2, 3], "whole": True}],
        "target": {"name": "y", "whole": True, "classes": 4},
    }
    named = schema({"ids": (5,), "age": ()}, {"ids": "uint8", "age": "float32"}, Target(0))
    assert [(c.name, c.shape, c.whole, c.mean) for c in named.feature_columns] == [
        ("ids", (5,), True, None),
        ("age", (), False, 0.0),
    ]
    assert named.by_name
    assert (named.target_column.mean, named.target_column.std) == (0.0, 1.0)
