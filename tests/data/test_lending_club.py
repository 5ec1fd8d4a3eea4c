"""Lending Club."""

import csv
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedveil.base.errors import BadInput
from fedveil.data import data_files, tabular_sets
from fedveil.data.provenance import holdout
from fedveil.data.tabular_sets import load_lending_club

REAL = os.environ.get("FEDVEIL_DATA")

LOANS = 200


def loans():
    """Columns of a small table whose rate follows from the grade and three other columns."""
    random = np.random.default_rng(7)
    columns = {f"number_{i}": random.normal(size=LOANS).round(3).tolist() for i in range(9)}
    grade = random.integers(0, 7, LOANS)
    rate = 5 + 3 * grade + np.array(columns["number_0"]) + random.normal(size=LOANS) / 10
    return {
        "id": list(range(LOANS)),
        "int_rate": rate.round(2).tolist(),
        "grade": ["ABCDEFG"[g] for g in grade],
        "term": [36 if g < 3 else 60 for g in grade],
        **columns,
        "total_pymnt": (rate * 1000).tolist(),
    }


def write_parquet(root, columns):
    (root / "lending_club").mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), root / "lending_club/lending_club_loans.parquet")


def write_csv(root, columns, name="loan.csv"):
    (root / "lending_club").mkdir(exist_ok=True)
    with (root / "lending_club" / name).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def as_published(columns):
    """The same loans the way the published csv writes them."""
    return {
        **columns,
        "int_rate": [f" {rate:.2f}%" for rate in columns["int_rate"]],
        "term": [f" {term} months" for term in columns["term"]],
        "desc": ['many\nlines, "quoted"' * 1000] * LOANS,  # more than one block of the reader
    }


def test_parquet(tmp_path):
    write_parquet(tmp_path, loans())
    records = load_lending_club(tmp_path)
    assert (records.name, records.classes, records.record_owners) == ("lending-club", 0, None)
    assert (records.x.shape, records.test_x.shape) == ((160, 10), (40, 10))
    assert (records.x.dtype, records.y.dtype) == (np.float32, np.float32)
    rate = np.float32(loans()["int_rate"])
    train, test = holdout(LOANS)
    np.testing.assert_array_equal(records.y, rate[train])
    np.testing.assert_array_equal(records.test_y, rate[test])


@pytest.mark.parametrize("name", ["loan.csv", "accepted_2007_to_2018Q4.csv"])
def test_csv_gives_what_parquet_gives(tmp_path, name):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    write_parquet(tmp_path / "a", loans())
    write_csv(tmp_path / "b", as_published(loans()), name)
    expected, records = load_lending_club(tmp_path / "a"), load_lending_club(tmp_path / "b")
    np.testing.assert_allclose(records.x, expected.x, atol=2e-4)
    np.testing.assert_allclose(records.test_x, expected.test_x, atol=2e-4)
    np.testing.assert_array_equal(records.y, expected.y)


def test_components_are_centred_uncorrelated_and_sorted_on_the_training_part(tmp_path):
    write_parquet(tmp_path, loans())
    x = load_lending_club(tmp_path).x.astype(np.float64)
    np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-4)
    covariance = np.cov(x.T)
    np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=1e-3)
    assert (np.diff(np.diag(covariance)) < 0).all()


def test_the_fit_ignores_the_test_part(tmp_path):
    columns = loans()
    write_parquet(tmp_path, columns)
    before = load_lending_club(tmp_path)
    _, test = holdout(LOANS)
    for row in test:
        columns["number_1"][row] += 1000
        columns["grade"][row] = "A0"  # would come second in the alphabet
    write_parquet(tmp_path, columns)
    after = load_lending_club(tmp_path)
    np.testing.assert_array_equal(after.x, before.x)
    assert np.abs(after.test_x - before.test_x).max() > 100


def test_one_loan_moves_everybodys_features_and_the_records_say_so(tmp_path):
    """Fitted on the training part: a claim about one client would cover none of this."""
    before, after = (one_income_changed(tmp_path, change) for change in (0, 1000))
    assert (after.x != before.x).any(axis=1).all()
    assert after.fitted == (
        "means, standard deviations, categories and principal components of the features"
    )


def test_fitted_on_the_test_part_one_loan_moves_its_own_features(tmp_path):
    before, after = (one_income_changed(tmp_path, c, held_out=True) for c in (0, 1000))
    assert np.flatnonzero((after.x != before.x).any(axis=1)).tolist() == [3]
    np.testing.assert_array_equal(after.test_x, before.test_x)
    assert after.fitted == ""
    np.testing.assert_allclose(after.test_x.mean(axis=0), 0, atol=1e-4)


def one_income_changed(root, change, **options):
    """A raw number and a word of the fourth training loan, changed before anything is fitted."""
    columns, (train, _) = loans(), holdout(LOANS)
    columns["number_1"][train[3]] += change
    columns["grade"][train[3]] = "A0" if change else "A"
    write_parquet(root, columns)
    return load_lending_club(root, **options)


def test_the_largest_weight_of_every_component_is_positive(tmp_path):
    columns = loans()
    write_parquet(tmp_path, columns)
    train, _ = holdout(LOANS)
    columns["grade"] = ["ABCDEFG".index(grade) for grade in columns["grade"]]
    features = [columns[c] for c in columns if c not in ("id", "int_rate", "total_pymnt")]
    weights = np.corrcoef(np.array(features)[:, train], load_lending_club(tmp_path).x.T)[:-10, -10:]
    np.testing.assert_array_equal(weights.max(axis=0), np.abs(weights).max(axis=0))


def test_a_column_that_is_constant_in_training_is_dropped(tmp_path):
    columns = loans()
    write_parquet(tmp_path, columns)
    before = load_lending_club(tmp_path)
    train, _ = holdout(LOANS)
    columns["policy_code"] = [1 if row in set(train) else 2 for row in range(LOANS)]
    write_parquet(tmp_path, columns)
    np.testing.assert_array_equal(load_lending_club(tmp_path).test_x, before.test_x)


@pytest.mark.parametrize(
    "column", ["total_pymnt", "source", "id", "last_fico_range_low", "loan_status", "title"]
)
def test_columns_that_are_no_features(tmp_path, column):
    columns = loans()
    write_parquet(tmp_path, columns)
    before = load_lending_club(tmp_path)
    columns[column] = [f"{rate:.2f}" for rate in columns["int_rate"]]
    write_parquet(tmp_path, columns)
    np.testing.assert_array_equal(load_lending_club(tmp_path).x, before.x)


@pytest.mark.parametrize("column", ["grade", "sub_grade", "installment"])
def test_without_grades(tmp_path, column):
    columns = loans()
    write_parquet(tmp_path, columns)
    without = load_lending_club(tmp_path, grades=False)
    columns[column] = [str(rate) for rate in columns["int_rate"]]
    write_parquet(tmp_path, columns)
    np.testing.assert_array_equal(load_lending_club(tmp_path, grades=False).x, without.x)
    assert not np.array_equal(load_lending_club(tmp_path).x, without.x)


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["2015-12", "2016-02"], [24191, 24193]),
        (["Dec-2015", "Feb-2016"], [24191, 24193]),
        ([" 36 months", " 60 months"], [36, 60]),
        (["< 1 year", "1 year", "10+ years", "n/a"], [0, 1, 10, np.nan]),
        (["13.56%", " 7.0%", "", None], [13.56, 7, np.nan, np.nan]),
        (["1e3", "-2.5", "1e999"], [1000, -2.5, np.nan]),
        (["RENT", "OWN", "MORTGAGE", "OWN", None], [2, 1, 0, 1, np.nan]),
        (["B2", "A10", "B1"], [2, 0, 1]),
    ],
)
def test_text_to_numbers(words, numbers):
    column = pa.chunked_array([words[:1], words[1:]], type=pa.string())
    rows = np.arange(len(words))
    np.testing.assert_array_equal(tabular_sets._numbers(column, rows), numbers)


def test_text_unseen_in_training_is_missing():
    column = pa.chunked_array([["b", "c", "a"]])
    np.testing.assert_array_equal(tabular_sets._numbers(column, np.array([0, 1])), [0, 1, np.nan])


@pytest.mark.parametrize(("filled", "usable"), [(3, True), (2, False), (0, False)])
def test_columns_more_than_seventy_percent_empty_are_dropped(filled, usable):
    column = np.full(10, np.nan)
    column[:filled] = np.arange(filled)
    assert tabular_sets._is_usable(column) is usable


def test_missing_and_infinite_values_are_filled(tmp_path):
    columns = loans()
    columns["number_1"][:50] = [None] * 50
    columns["number_2"][:50] = [float("inf")] * 50
    write_parquet(tmp_path, columns)
    records = load_lending_club(tmp_path)
    assert np.isfinite(records.x).all()
    assert np.isfinite(records.test_x).all()


def test_rows_without_a_rate_are_left_out(tmp_path):
    columns = as_published(loans())
    columns["int_rate"][3] = ""
    columns["int_rate"][5] = "Total amount funded"
    write_csv(tmp_path, columns)
    records = load_lending_club(tmp_path)
    assert len(records.x) + len(records.test_x) == LOANS - 2
    assert records.y.max() < 40


def test_missing_file(tmp_path):
    with pytest.raises(BadInput, match=r"loan\.csv or .*accepted_\*\.csv or .*Lending Club loans"):
        load_lending_club(tmp_path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"loan_amnt": [1.0, 2.0]}, "distinct columns, one int_rate, found loan_amnt"),
        ({"int_rate": [1.0, 2.0], "term": [36, 60]}, "at least 10 usable feature columns, found"),
        ({"int_rate": ["x", "y"], "term": [36, 60]}, "a number in int_rate, found 0"),
        ({"int_rate": [1.0, 2.0], "term": [[1], [2]]}, "a table of loans"),
    ],
)
def test_wrong_columns(tmp_path, columns, message):
    write_parquet(tmp_path, columns)
    with pytest.raises(BadInput, match=rf"lending_club_loans\.parquet: expected .*{message}"):
        load_lending_club(tmp_path)


def test_truncated_parquet(tmp_path):
    write_parquet(tmp_path, loans())
    path = tmp_path / "lending_club/lending_club_loans.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match=r"loans\.parquet: expected a table of loans, found") as e:
        load_lending_club(tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"int_rate,term\n1,36\n2\n", b"int_rate,int_rate\n1,1\n"],
)
def test_broken_csv(tmp_path, content):
    write_csv(tmp_path, loans())
    (tmp_path / "lending_club/loan.csv").write_bytes(content)
    with pytest.raises(BadInput, match=r"loan\.csv: expected .*, found .") as e:
        load_lending_club(tmp_path)
    assert "\n" not in str(e.value)


def test_without_pyarrow(tmp_path, monkeypatch):
    def missing(module):
        raise ModuleNotFoundError(module)

    write_parquet(tmp_path, loans())
    monkeypatch.setattr(data_files.importlib, "import_module", missing)
    with pytest.raises(BadInput, match=r"needs pyarrow: pip install 'fedveil\[data\]'"):
        load_lending_club(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="FEDVEIL_DATA is not set")
@pytest.mark.parametrize(("grades", "low", "high"), [(True, 2.5, 3.5), (False, 13.0, 15.5)])
def test_real(grades, low, high):
    """Least squares on the components: what any linear model can reach."""
    records = load_lending_club(Path(REAL), grades=grades)
    assert (len(records.x), len(records.test_x)) == (107_930, 26_983)
    train = np.column_stack([records.x, np.ones(len(records.x))])
    test = np.column_stack([records.test_x, np.ones(len(records.test_x))])
    weights = np.linalg.lstsq(train, records.y, rcond=None)[0]
    assert low < np.mean((test @ weights - records.test_y) ** 2) < high
    assert records.test_y.var() == pytest.approx(18.9, abs=0.4)
