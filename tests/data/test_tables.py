"""Reading tables: the same rows are the same records, whatever they come in."""

import csv

import numpy as np
import pandas
import pyarrow
import pytest
from pyarrow import parquet

from fedveil import FederatedData
from fedveil.data.tables import quoted_names, read_table

ROWS = 60
COLUMNS = {
    "site": [f"s{k // 5}" for k in range(ROWS)],
    "age": [20 + k for k in range(ROWS)],
    "dose": [None if k % 7 == 0 else k / 4 for k in range(ROWS)],
    "smokes": [k % 3 == 0 for k in range(ROWS)],
    "city": [("bonn", "rome", None)[k % 3] for k in range(ROWS)],
    "well": [k % 2 for k in range(ROWS)],
}
DECLARED = {"dose": {"fill": 5}, "city": {"fill": "oslo"}}


def as_csv(folder):
    path = folder / "t.csv"
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(COLUMNS)
        out.writerows(zip(*COLUMNS.values(), strict=True))  # None is written as nothing
    return path


def as_parquet(folder):
    parquet.write_table(as_arrow(folder), folder / "t.PARQUET")
    return str(folder / "t.PARQUET")


def as_arrow(folder):
    return pyarrow.table(COLUMNS)


def as_pandas(folder):
    return pandas.DataFrame(COLUMNS)


def as_pandas_with_its_own_types(folder):
    frame = as_pandas(folder).convert_dtypes()
    return frame.astype({"city": "category"})


def as_polars(folder):
    return pytest.importorskip("polars").DataFrame(COLUMNS)


def as_arrays(folder):
    dose = np.array([np.nan if d is None else d for d in COLUMNS["dose"]])
    return {**{k: np.array(v) for k, v in COLUMNS.items()}, "dose": dose}


FORMS = [
    as_csv,
    as_parquet,
    as_arrow,
    as_pandas,
    as_pandas_with_its_own_types,
    as_polars,
    as_arrays,
]


@pytest.mark.parametrize("form", FORMS)
def test_the_same_rows_are_the_same_data(form, tmp_path):
    options = {"client": "site", "target": "well", "columns": DECLARED, "test": "by-client"}
    plain = FederatedData.from_table(COLUMNS, **options)
    data = FederatedData.from_table(form(tmp_path), **options)
    assert data.schema == plain.schema
    assert data.fingerprint == plain.fingerprint
    assert data.record_shape == (3 + 2,)


def test_types_that_other_rows_decide_do_not_matter():
    """A data frame stores whole numbers as floats if somebody's entry is missing."""
    options = {"client": "site", "target": "well", "features": ["age"], "test": "by-client"}
    options["columns"] = {"age": {"values": [*range(20, 80)], "fill": 20}}
    whole = FederatedData.from_table(pandas.DataFrame(COLUMNS), **options)
    missing = [*COLUMNS["age"]]
    missing[0] = None
    frame = pandas.DataFrame({**COLUMNS, "age": missing})
    assert frame["age"].dtype.kind == "f"
    assert FederatedData.from_table(frame, **options).fingerprint == whole.fingerprint


def test_a_csv_file_may_have_a_mark_blank_lines_quotes_and_spaces(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbfa , b\r\n\r\n1,"x, ""y"""\r\n 2 , z\r\n')
    table = read_table(path)
    assert {name: column.tolist() for name, column in table.arrays.items()} == {
        "a": ["1", " 2 "],
        "b": ['x, "y"', " z"],
    }
    assert table.row_numbers.tolist() == [1, 2]


def test_rows_keep_their_numbers():
    table = read_table({"a": [10, 20, 30, 40]}).take(np.array([3, 1]))
    assert table.arrays["a"].tolist() == [40, 20]
    assert str(table.entry_error("a", 0, "is odd")) == "the table: row 4 of column 'a' is odd"


def test_a_table_is_a_table_already():
    table = read_table({"a": [1]})
    assert read_table(table) is table


def test_column_names_become_texts():
    assert list(read_table(pandas.DataFrame({0: [1.0], 1: [2.0]})).arrays) == ["0", "1"]
    twice = pandas.DataFrame([[1, 2]], columns=["a", "a"])
    with pytest.raises(ValueError, match="has 2 columns 'a': rename all but one"):
        read_table(twice)


def test_a_parquet_file_says_what_it_needs(tmp_path, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr("fedveil.data.data_files.importlib.import_module", missing)
    with pytest.raises(
        ValueError, match=r"a parquet file needs pyarrow: pip install 'fedveil\[data"
    ):
        read_table(tmp_path / "t.parquet")


def test_long_lists_are_cut():
    assert quoted_names(["a", "b"]) == "'a', 'b'"
    assert quoted_names([*range(12)]).endswith(", 11")
    assert quoted_names([*range(13)]).endswith("8, 9 and 3 more")
