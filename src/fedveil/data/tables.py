"""`Table`: columns by name, read from a file or a data frame, or refused with one line.

A column is a NumPy array of numbers, [rows] or [rows, ...], or of objects: texts and whatever else
a data frame holds, None where an entry is missing. Reading does not interpret entries. Functions at
the end read them one by one as numbers, texts or arrays, independently of other rows.

Data sets of PyTorch and of Hugging Face's `datasets` library become arrays and tables as well.
Neither library is imported, except to read a folder of `datasets`.
"""

import csv
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput, one_line
from fedveil.base.inputs import Inputs
from fedveil.data.data_files import optional_module, reading
from fedveil.data.user_arrays import Array, Rows, array_of

SUFFIXES = (".csv", ".parquet")

_LONGEST_LIST, _SHOWN = 12, 10
_START = 4096  # bytes in which a file shows that it is no text


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of one length: `table[name]` is a column.

    Attributes:
        name: The table's name in messages.
        columns: The columns by name.
        row_numbers: The number of each row, from 1 on.
        source: The same for tables that were read from one file or object, and for copies of a
            file: rows of the same source and number are the same row.
    """

    name: str
    columns: dict[str, Array]
    row_numbers: Rows
    source: str

    def __len__(self) -> int:
        return len(self.row_numbers)

    def __getitem__(self, name: str) -> Array:
        if name not in self.columns:
            raise BadInput(
                f"{self.name} has no column {shown(name)}: its columns are "
                f"{listed(list(self.columns))}"
            )
        return self.columns[name]

    def take(self, rows: Rows) -> "Table":
        """Some of the rows, which keep their numbers."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return replace(self, columns=columns, row_numbers=self.row_numbers[rows])

    def entry_error(self, column: str, row: int, problem: str) -> BadInput:
        """The error about one entry. Rows are counted from 1, without a header."""
        return BadInput(f"{self.name}: row {self.row_numbers[row]} of column {column!r} {problem}")


def listed(names: Sequence[object]) -> str:
    """Names in a sentence, the first few of many."""
    if len(names) <= _LONGEST_LIST:
        return ", ".join(map(repr, names))
    return f"{', '.join(map(repr, names[:_SHOWN]))} and {len(names) - _SHOWN} more"


def read_table(source: object, name: str = "the table") -> Table:
    """Columns of a CSV or Parquet file, a pandas, polars or Arrow table, or a dict of columns.

    None of these libraries is imported: a table is known by what it can do.
    """
    if isinstance(source, Table):
        return source
    if isinstance(source, str | Path):
        return _read_file(Path(source))
    if isinstance(source, Mapping):
        named = [(key, _plain(key, column)) for key, column in source.items()]
    elif hasattr(source, "iloc") and hasattr(source, "columns"):  # pandas
        named = [(key, _from_pandas(source.iloc[:, k])) for k, key in enumerate(source.columns)]
    elif hasattr(source, "get_columns"):  # polars
        named = [(column.name, _from_polars(column)) for column in source.get_columns()]
    elif hasattr(source, "itercolumns") and hasattr(source, "column_names"):  # Arrow
        columns = zip(source.column_names, source.itercolumns(), strict=True)
        named = [(key, from_arrow(column)) for key, column in columns]
    else:
        raise BadInput(
            f"{name} is {shown(source)}: give the path of a .csv or .parquet file, a pandas or "
            "polars data frame, an Arrow table, or a dict of columns"
        )
    return _table(name, [(str(key), column) for key, column in named], f"object {id(source)}")


def _table(name: str, named: Sequence[tuple[str, Array]], source: str) -> Table:
    """Columns of one length with distinct names, or one line."""
    _check_column_names(name, [key for key, _ in named])
    first, rows = named[0][0], len(named[0][1])
    for key, column in named:
        if len(column) != rows:
            raise BadInput(
                f"{name}: column {key!r} has {len(column)} rows and column {first!r} {rows}: give "
                "one entry per row"
            )
    if rows == 0:
        raise BadInput(f"{name} has columns and no rows: there is nothing to learn from")
    return Table(name, dict(named), np.arange(1, rows + 1), source)


def _check_column_names(name: str, names: Sequence[str]) -> None:
    if not names:
        raise BadInput(f"{name} is empty: a header and rows are needed")
    often, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise BadInput(f"{name} has {times} columns {often!r}: rename all but one")


def check_file(path: Path) -> None:
    """Refuse what is no file that can be read as a table, before it is opened."""
    if path.is_dir():
        raise BadInput(
            f"{path} is a folder: name a .csv or .parquet file (for what FederatedData.save wrote, "
            "data.name = 'saved')"
        )
    if path.suffix.lower() not in SUFFIXES:
        raise BadInput(f"{path} is no table that can be read: use a .csv or .parquet file")
    if not path.exists():
        raise BadInput(
            f"{path} does not exist: a relative path is relative to the current directory"
        )


def _read_file(path: Path) -> Table:
    check_file(path)
    if path.suffix.lower() == ".csv":
        with reading(path, "a CSV file"):
            return replace(_read_csv(path), source=_content_digest(path))
    parquet, arrow = (
        optional_module(module, package="pyarrow", needed_by="a parquet file")
        for module in ("pyarrow.parquet", "pyarrow")
    )
    with reading(path, "a parquet file", arrow.ArrowException):
        table = read_table(parquet.ParquetFile(path).read(), str(path))
        return replace(table, source=_content_digest(path))


def _content_digest(path: Path) -> str:
    """A digest of a file's content, wherever the file lies."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_csv(path: Path) -> Table:
    """All entries as texts, without blank lines."""
    with path.open("rb") as binary:
        if b"\0" in binary.read(_START):
            raise BadInput(f"{path} is no text: a CSV file in UTF-8 is needed")
    rows: list[list[str]] = []
    line = 1  # in which the row begins that is read
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        try:
            header = [key.strip() for key in next(reader, [])]
            _check_column_names(str(path), header)
            for separator in (";", "\t"):
                if len(header) == 1 and separator in header[0]:
                    raise BadInput(
                        f"{path} has one column {shown(header[0])}: separate columns by commas, "
                        f"not by {separator!r}"
                    )
            line = reader.line_num + 1
            for row in reader:
                if row and len(row) != len(header):
                    raise BadInput(
                        f"{path}: line {line} has {len(row)} entries and the header "
                        f"{len(header)}: put texts with commas into quotes"
                    )
                if row:
                    rows.append(row)
                line = reader.line_num + 1
        except UnicodeDecodeError as e:
            raise BadInput(
                f"{path} is not UTF-8 (byte {e.object[e.start]:#04x}): save it as UTF-8"
            ) from e
        except csv.Error as e:
            raise BadInput(f"{path}: line {line} cannot be read: {e}; is a quote missing?") from e
    columns = zip(*rows, strict=True) if rows else [()] * len(header)
    arrays = [np.array(column, dtype=object) for column in columns]
    return _table(str(path), list(zip(header, arrays, strict=True)), "")


def _plain(name: object, column: object) -> Array:
    """A column of a dict: an array, or a list, whose entries are kept apart if they are arrays.

    One row's fractions would make real numbers of everybody's otherwise.
    """
    if isinstance(column, str | bytes) or not isinstance(column, Iterable):
        raise BadInput(f"column {shown(name)} is {shown(column)}: a list of entries is needed")
    try:
        array = np.asarray(column)
    except ValueError:  # entries of several shapes
        return _objects(list(column))
    if array.ndim == 0:
        raise BadInput(f"column {shown(name)} is {shown(column)}: a list of entries is needed")
    if array.dtype.kind in "biuf" and (array.ndim == 1 or hasattr(column, "dtype")):
        return array
    return _objects(list(column))


def _from_pandas(series: Any) -> Array:
    if getattr(series.dtype, "kind", "O") in "biuf" and isinstance(series.dtype, np.dtype):
        return np.asarray(series.to_numpy())
    column = np.array(series.to_numpy(dtype=object), dtype=object)
    column[series.isna().to_numpy()] = None
    return column


def _from_polars(series: Any) -> Array:
    if series.dtype.is_numeric() and series.null_count() == 0:
        return np.asarray(series.to_numpy())
    return _objects(series.to_list())


def from_arrow(column: Any) -> Array:
    """A column of an Arrow table."""
    kind = str(column.type)
    if column.null_count == 0 and kind.startswith(("int", "uint", "float", "double", "halffloat")):
        return np.asarray(column.to_numpy())
    return _objects(column.to_pylist())


def _objects(entries: list[Any]) -> Array:
    """One object per entry, whatever it is."""
    column = np.empty(len(entries), dtype=object)
    for row, entry in enumerate(entries):
        column[row] = entry
    return column


Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.bool_]

_MISSING = ("", "na", "n/a", "nan", "null", "none")
"""Words for a number that is not there; of a text, only the empty one is."""

_BITS = {"true": 1.0, "false": 0.0}
_WHOLE = 2.0**53


def as_numbers(column: Array) -> tuple[Floats, Bits]:
    """Entries as numbers, NaN where missing, and a mask of those that are not numbers."""
    if column.ndim > 1:
        return np.full(len(column), math.nan), np.ones(len(column), dtype=bool)
    try:
        return column.astype(np.float64), np.zeros(len(column), dtype=bool)
    except (TypeError, ValueError, OverflowError):
        numbers = [_number(entry) for entry in column]
    odd = np.array([number is None for number in numbers], dtype=bool)
    return np.array([math.nan if n is None else n for n in numbers], dtype=np.float64), odd


def as_texts(column: Array) -> list[str | None]:
    """Entries as texts, None where missing. 1 and 1.0 are the same text."""
    return [_text(entry) for entry in column.tolist()]


def are_bits(column: Array) -> bool:
    """Whether all entries are true or false, as such or as these words."""
    if column.dtype.kind != "O":
        return column.dtype.kind == "b"
    return all(
        isinstance(entry, bool | np.bool_)
        or (isinstance(entry, str) and entry.strip().lower() in _BITS)
        for entry in column
    )


def are_floats(column: Array) -> bool:
    """Whether an entry is written or stored as a real number, though it may be a whole one."""
    if column.dtype.kind != "O":
        return column.dtype.kind == "f"
    return any(
        isinstance(entry, float | np.floating)
        or (isinstance(entry, str) and not entry.strip().lstrip("+-").isdigit())
        for entry in column
    )


def are_arrays(column: Array) -> bool:
    """Whether entries are arrays, judged by the first that is not missing."""
    if column.dtype.kind != "O":
        return column.ndim > 1
    first = next((entry for entry in column if entry is not None), None)
    return isinstance(first, list | tuple | np.ndarray)


def _number(entry: Any) -> float | None:
    """A number, NaN if missing, None if it is not a number."""
    if entry is None:
        return math.nan
    if isinstance(entry, str):
        word = entry.strip().lower()
        if word in _MISSING:
            return math.nan
        if word in _BITS:
            return _BITS[word]
    try:
        return float(entry)
    except (TypeError, ValueError, OverflowError):
        return None


def _text(entry: Any) -> str | None:
    if entry is None:
        return None
    if isinstance(entry, float):
        if math.isnan(entry):
            return None
        whole = entry.is_integer() and abs(entry) < _WHOLE
        return str(int(entry)) if whole else repr(entry)
    return str(entry).strip() or None


def clients_from_datasets(datasets: object) -> list[tuple[str, Inputs[Array], Array]]:
    """(name, features, targets) of a dict of data sets by name, or of a list of them."""
    if isinstance(datasets, list | tuple):
        datasets = dict(enumerate(datasets))
    if not isinstance(datasets, Mapping):
        raise BadInput(
            f"datasets is {shown(datasets)}: a list or a dict by name, with one data set per client"
        )
    named = [(str(name), dataset) for name, dataset in datasets.items()]
    return [(name, *arrays_of(dataset, f"client {name!r}")) for name, dataset in named]


def arrays_of(dataset: Any, whose: str) -> tuple[Inputs[Array], Array]:
    """Features and targets of a sequence of (x, y).

    Each pair is read once, and x may be a dict.
    """
    if isinstance(dataset, str | Mapping) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise BadInput(f"{whose} has {shown(dataset)}: a data set with a length is needed")
    pairs = [dataset[number] for number in range(len(dataset))]
    if not pairs:
        raise BadInput(f"{whose} has no records: leave it out")
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise BadInput(f"record {number} of {whose} is {shown(pair)}: use (x, y)")
    first = pairs[0][0]
    x: Inputs[Array]
    if isinstance(first, Mapping):
        for number, (record, _) in enumerate(pairs):
            if not isinstance(record, Mapping) or record.keys() != first.keys():
                raise BadInput(
                    f"record {number} of {whose} is {shown(record)}, record 0 has "
                    f"{', '.join(first)}: give all the same inputs"
                )
        x = {
            name: _stacked([x[name] for x, _ in pairs], f"input {name!r}", whose, repr(name))
            for name in first
        }
    else:
        x = _stacked([x for x, _ in pairs], "features", whose, "a record")
    return x, _stacked([y for _, y in pairs], "targets", whose, "a target")


def _stacked(values: list[Any], what: str, whose: str, singular: str) -> Array:
    """One array of a value per record."""
    rows = [array_of(f"{what} of {whose}", [value]) for value in values]
    for number, row in enumerate(rows):
        if row.shape != rows[0].shape:
            raise BadInput(
                f"record {number} of {whose} has {singular} of shape {row.shape[1:]}, record 0 "
                f"{rows[0].shape[1:]}: give all one shape (fedveil.data.pad)"
            )
    return np.concatenate(rows)


_NESTED = ("list", "large_list", "fixed_size_list", "struct", "extension")


def tables_of(
    source: object, target: str, client: str | None, features: list[str] | None
) -> tuple[Table, Table | None, dict[str, object]]:
    """The training and test tables of a data set or its folder, and the label names it declares."""
    train, test = _splits_of(source)
    named = [name for name in (client, target) if name is not None]
    wanted = None if features is None else [*features, *named]
    table = _split_table(train, wanted, "the training split")
    test_table = None if test is None else _split_table(test, wanted, "the test split")
    labels = {key: _labels(train, key) for key in table.columns if key != client}
    return table, test_table, {key: {"values": value} for key, value in labels.items() if value}


def _splits_of(source: object) -> tuple[Any, Any | None]:
    """The training split, and the test split if there is one, of a data set or its folder."""
    if isinstance(source, str | Path):
        library = optional_module(
            "datasets", package="datasets", needed_by="a data set on disk", extra="datasets"
        )
        try:
            source = library.load_from_disk(str(source))
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BadInput(f"{source} is no data set that save_to_disk wrote: {one_line(e)}") from e
    splits: tuple[Any, Any | None] = (source, None)
    if isinstance(source, Mapping):
        if "train" not in source:
            raise BadInput(f"the data set has splits {listed(list(source))} and no 'train': add it")
        splits = source["train"], source.get("test")
    for split in splits:
        usable = all(hasattr(split, name) for name in ("features", "with_format", "__len__"))
        if split is not None and not usable:
            raise BadInput(
                f"the data set is {shown(split)}: a Dataset or DatasetDict of the datasets library "
                "is needed, loaded and not streamed"
            )
    return splits


def _split_table(split: Any, wanted: list[str] | None, name: str) -> Table:
    """The wanted columns of a split (None: all), with labels by their names."""
    keys = [key for key in split.features if wanted is None or key in wanted]
    if not keys:
        raise BadInput(f"{name} has no column of {listed(wanted or [])}: see its features")
    arrow = split.with_format("arrow", columns=keys)[:]
    columns: dict[str, Array] = {}
    for key in keys:
        column = arrow.column(key)
        if names := _labels(split, key):
            # A record without a label has None or -1.
            codes = column.to_pylist()
            labels = [None if code is None or code < 0 else names[code] for code in codes]
            columns[key] = np.array(labels, dtype=object)
        elif str(column.type).startswith(_NESTED):
            columns[key] = np.asarray(split.with_format("numpy", columns=[key])[key][:])
        else:
            columns[key] = from_arrow(column)
    return read_table(columns, name)


def _labels(split: Any, key: str) -> list[str] | None:
    return getattr(split.features[key], "names", None)
