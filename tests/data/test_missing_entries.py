"""`missing = "fill"`: zeros for missing features, and no rows without a target."""

import numpy as np
import pytest

import fedveil as fv
from fedveil.base.errors import BadInput

REMARK = "rows without a target are dropped: which rows have one is taken as public"
COLUMNS = {
    "age": {"low": 0, "high": 100},
    "dose": {"mean": 5, "std": 2},
    "city": {"values": ["bonn", "rome"]},
    "well": {"values": ["no", "yes"]},
}


def table(**changes):
    """Rows of ten sites. `column_row=entry` changes one entry, rows from 0."""
    rows = {
        "site": [f"s{k // 6}" for k in range(60)],
        "age": [str(20 + k) for k in range(60)],
        "dose": [str(k % 7 + k / 60) for k in range(60)],
        "city": [("bonn", "rome")[k % 2] for k in range(60)],
        "well": [("no", "yes")[k // 2 % 2] for k in range(60)],
    }
    for key, entry in changes.items():
        column, row = key.rsplit("_", 1)
        rows[column][int(row)] = entry
    return rows


def made(rows, **options):
    options = {"columns": COLUMNS, "missing": "fill", **options}
    return fv.FederatedData.from_table(rows, client="site", target="well", **options)


def test_missing_features_become_zeros_and_nothing_else_changes():
    before, after = made(table()), made(table(age_1="", dose_2="NA", city_3=""))
    assert before.names.tolist() == after.names.tolist()
    changed = before.x.copy()
    changed[1, 0] = changed[2, 1] = 0.0
    changed[3, 2:] = 0.0
    np.testing.assert_array_equal(after.x, changed)
    assert after.schema.encode({"age": [None], "dose": [""], "city": [""]}).tolist() == [[0.0] * 4]


def test_a_value_of_its_own_wins():
    columns = {**COLUMNS, "age": {"low": 0, "high": 100, "fill": 100}}
    columns["city"] = {"values": ["bonn", "rome"], "fill": "rome"}
    data = made(table(age_1="", city_3=""), columns=columns)
    assert data.x[1, 0] == 1.0
    assert data.x[3, 2:].tolist() == [0.0, 1.0]


def test_without_the_rule_entries_are_refused_and_zeros_are_no_licence_for_unknown_values():
    for missing in (None, "refuse"):
        with pytest.raises(BadInput, match="row 2 of column 'age' is empty: declare a public"):
            made(table(age_1=""), missing=missing)
    with pytest.raises(BadInput, match="row 4 of column 'city' is 'oslo', which is none of"):
        made(table(city_3="oslo"))
    with pytest.raises(BadInput, match="missing is 'drop': use one of refuse, fill"):
        made(table(), missing="drop")


def test_the_mean_of_a_fitted_column_is_that_of_the_entries_that_are_there():
    rows = table()
    tested = made(rows, columns={}, test="by-client")
    held_out = set(rows["site"]) - set(tested.names)
    places = [k for k, name in enumerate(rows["site"]) if name in held_out]
    rows["age"][places[0]] = ""
    data = made(rows, columns={}, test="by-client")
    ages = np.array([float(rows["age"][k]) for k in places[1:]])
    age = data.schema.feature_columns[0]
    assert (age.mean, age.std) == (ages.mean(), ages.std())
    assert data.test_x[:, 0].min() < 0 < data.test_x[:, 0].max()
    assert data.test_x[0, 0] == 0
    for k in places:
        rows["age"][k] = ""
    with pytest.raises(BadInput, match="column 'age' is empty in all test records: leave it out"):
        made(rows, columns={}, test="by-client")


@pytest.mark.parametrize("entry", ["", None, "NA", "NaN", "null"])
@pytest.mark.parametrize("test", [None, "by-client", 0.5])
def test_a_row_without_a_target_is_left_out_and_moves_no_other_row(entry, test):
    before = made(table(), test=test)
    gone = before.names.tolist().index("s0")
    row = next(k for k in range(6) if table()["age"][k] and k not in rows_tested(before))
    after = made(table(**{f"well_{row}": entry}), test=test)
    sizes = before.sizes.copy()
    sizes[gone] -= 1
    assert after.sizes.tolist() == sizes.tolist()
    np.testing.assert_array_equal(before.test_x, after.test_x)
    kept = [r for r in before.x.tolist() if r[0] != after_age(row)]
    assert kept == after.x.tolist()
    assert REMARK in after.assumptions


def after_age(row):
    """The feature of a row's age, as scaled."""
    return float(np.float32((20 + row - 50) / 50))


def rows_tested(data):
    ages = (data.test_x[:, 0] * 50 + 50).round().astype(int) - 20
    return set(ages.tolist())


def test_the_claim_says_so_whether_or_not_a_row_was_left_out():
    assert made(table()).assumptions == made(table(well_0="")).assumptions
    assert REMARK in made(table()).assumptions
    assert REMARK not in made(table(), missing=None).assumptions


def test_words_that_are_labels_are_labels():
    columns = {**COLUMNS, "well": {"values": ["no", "yes", "NA"]}}
    assert made(table(well_0="NA"), columns=columns).records == 60
    assert made(table(well_0="NA")).records == 59
    rows = table()
    rows["well"] = ["none" if word == "no" else word for word in rows["well"]]
    columns = {**COLUMNS, "well": {"values": ["none", "yes"]}}
    assert made(rows, columns=columns).records == 60
    fitted = {key: value for key, value in COLUMNS.items() if key != "well"}
    data = made(rows, columns=fitted, test="by-client")
    assert data.schema.label_names == ("none", "yes")


def test_numbers_to_be_predicted_may_be_missing():
    rows = table(dose_0="NA", dose_1="", dose_2="none")
    options = {"client": "site", "target": "dose", "missing": "fill"}
    data = fv.FederatedData.from_table(rows, columns=COLUMNS, **options)
    assert data.records == 57
    assert data.classes == 0


def test_a_client_without_targets_is_no_client_and_a_table_without_is_refused():
    gone = {f"well_{k}": "" for k in range(6)}
    assert "s0" not in made(table(**gone)).names
    with pytest.raises(BadInput, match="column 'well' is empty in all rows to train on"):
        made(table(**{f"well_{k}": "" for k in range(60)}))


def test_a_run_keeps_the_rule_for_predictions(tmp_path):
    settings = {"rounds": 2, "sample.kind": "all"}
    data = made(table(), test="by-client")
    run = fv.run("central", data=data, out=tmp_path / "run", set=settings, quiet=True)
    again = fv.open_run(tmp_path / "run")
    new = {"age": ["", "50"], "dose": ["5", "5"], "city": ["rome", "rome"]}
    found = again.predict(new)
    assert found["p(no)"][0] == found["p(no)"][1]  # 50 is the middle of the range
    assert run.predict(new)["p(no)"].tolist() == found["p(no)"].tolist()
