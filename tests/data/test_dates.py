"""Dates as features: declared or fitted, scaled by day, and the same when rows are predicted."""

import datetime
import json

import numpy as np
import pytest

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.data.columns import Column
from fedveil.data.entries import as_days, day_of
from fedveil.data.schema import TableSchema
from fedveil.data.tables import read_table

RANGE = {"low": "2020-01-01", "high": "2020-01-11"}
FORMS = {
    "texts": ["2020-01-01", "2020-01-06", "2020-01-11"],
    "times": ["2020-01-01T23:59", "2020-01-06 08:00:00", "2020-01-11T00:00:00.5+02:00"],
    "dates": [datetime.date(2020, 1, day) for day in (1, 6, 11)],
    "datetimes": [datetime.datetime(2020, 1, day, 12, 30) for day in (1, 6, 11)],
    "numpy": np.array(["2020-01-01", "2020-01-06", "2020-01-11"], dtype="datetime64[ns]"),
}


def encoded(column, entries):
    return column.encode_entries(read_table({column.name: entries}))[:, 0].tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "declared",
    [RANGE, {"low": datetime.date(2020, 1, 1), "high": datetime.date(2020, 1, 11)}],
    ids=["texts", "dates"],
)
def test_a_range_of_dates_is_scaled_by_day_in_every_form(form, declared):
    column = Column.declared("day", declared)
    assert encoded(column, FORMS[form]) == [-1.0, 0.0, 1.0]


def test_dates_outside_are_clamped_and_a_mean_is_a_date_too():
    column = Column.declared("day", RANGE)
    assert encoded(column, ["1999-12-31", "2020-01-06", "2030-01-01"]) == [-1.0, 0.0, 1.0]
    column = Column.declared("day", {"mean": "2020-01-06", "std": 5})
    assert encoded(column, FORMS["texts"]) == [-1.0, 0.0, 1.0]


def test_data_frames_and_parquet_files_have_dates(tmp_path):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"day": pd.to_datetime([*FORMS["texts"], None])})
    column = Column.declared("day", {**RANGE, "fill": "2020-01-11"})
    assert column.encode_entries(read_table(frame))[:, 0].tolist() == [-1.0, 0.0, 1.0, 1.0]
    pytest.importorskip("pyarrow")
    frame.to_parquet(tmp_path / "t.parquet")
    found = column.encode_entries(read_table(tmp_path / "t.parquet"))
    assert found[:, 0].tolist() == [-1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "entry",
    ["31.01.2026", "2026-02-30", "2026-1-5", "2026-01-05 noon", "20260105", 5, "x", "2026-W01-1"],
)
def test_what_is_no_date_is_refused_with_its_row(entry):
    assert day_of(entry) is None
    with pytest.raises(BadInput, match=r"row 2 of column 'day' is .*: a date such as 2026-01-31"):
        encoded(Column.declared("day", RANGE), ["2020-01-01", entry])


def test_missing_dates():
    days, odd = as_days(np.array(["2020-01-01", "", None, "NA", "NaT"], dtype=object))
    assert np.isnan(days).tolist() == [False, True, True, True, True]
    assert not odd.any()
    with pytest.raises(BadInput, match="row 2 of column 'day' is empty"):
        encoded(Column.declared("day", RANGE), ["2020-01-01", ""])
    with pytest.raises(BadInput, match=r"is '2020-01-01': a number .*low and high as dates"):
        encoded(Column.declared("day", {"low": 0, "high": 1}), ["2020-01-01"])


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"low": "2020-01-01", "high": 5}, "columns.day.low is a date and high is 5: give a date"),
        ({"low": 1, "high": "2020-01-01"}, "columns.day.high is a date and low is 1: give a date"),
        ({**RANGE, "fill": "no"}, "columns.day.low is a date and fill is 'no': give a date"),
        ({"low": "2020-01-01", "high": "soon"}, "columns.day.high is 'soon': a number, or a date"),
        ({"low": "2021-01-01", "high": "2020-01-01"}, "columns.day.low is .* low < high"),
        ({"low": "2021-01-01"}, "columns.day has one of low and high: give both"),
    ],
)
def test_declarations_that_make_no_sense_are_refused(declared, message):
    with pytest.raises(BadInput, match=message):
        Column.declared("day", declared)


def table(count=60):
    random = np.random.default_rng(0)
    days = random.integers(0, 1000, count)
    return {
        "site": [f"s{k % 10}" for k in range(count)],
        "day": [str(datetime.date(2020, 1, 1) + datetime.timedelta(int(day))) for day in days],
        "late": ["yes" if day > 500 else "no" for day in days],
    }


def made(rows, **options):
    options = {"test": "by-client", **options}
    return fv.FederatedData.from_table(rows, client="site", target="late", **options)


def test_dates_that_nobody_declared_are_fitted_as_numbers_are():
    data = made(table())
    assert data.assumptions[0] == (
        "means and standard deviations of 'day', labels of 'late' were fitted on the test records, "
        "which no claim covers"
    )
    (column,) = data.schema.feature_columns
    assert column.dates
    assert abs(data.test_x.mean()) < 1e-6
    assert abs(data.test_x.std() - 1) < 1e-6
    assert data.record_shape == (1,)
    with pytest.raises(BadInput, match="nothing is declared of 'day', 'late'"):
        made(table(), test=None)
    filled = made(table(), columns={"day": {"fill": "2021-01-01"}})
    assert filled.schema.feature_columns[0].fill == day_of("2021-01-01")


def test_one_client_s_text_does_not_make_categories_of_everybody_s_dates():
    rows = table()
    place = rows["site"].index("s0")
    assert "s0" in made(rows).names
    rows["day"][place] = "unknown"
    with pytest.raises(BadInput, match=f"row {place + 1} of column 'day' is 'unknown': a date"):
        made(rows)


def test_a_schema_with_dates_survives_as_json():
    schema = made(table()).schema
    again = TableSchema.from_dict(json.loads(json.dumps(schema.to_dict())))
    assert again == schema
    new = {"day": ["2020-05-05", "2022-05-05"]}
    assert again.encode(new).tolist() == schema.encode(new).tolist()


def test_a_date_is_no_target():
    rows = table()
    columns = {"day": {"low": "2020-01-01", "high": "2023-01-01"}}
    with pytest.raises(BadInput, match="target 'day' is a date: predict a number"):
        fv.FederatedData.from_table(
            rows, client="site", target="day", features=["late"], columns=columns, test="by-client"
        )


def test_a_model_predicts_rows_with_dates(tmp_path):
    columns = {
        "day": {"low": "2020-01-01", "high": "2023-01-01"},
        "late": {"values": ["no", "yes"]},
    }
    settings = {"rounds": 20, "sample.kind": "all", "budget.epsilon": 1000}
    data = made(table(400), columns=columns)
    run = fv.run("central", data=data, out=tmp_path / "run", set=settings, quiet=True)
    found = run.predict({"day": ["2020-02-01", "2022-08-01"]})
    assert found["prediction"].tolist() == ["no", "yes"]
