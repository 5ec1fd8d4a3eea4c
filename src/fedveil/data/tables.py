"""`Table`: columns by name, read from a file or a data frame, or refused with one line.

A column is a NumPy array of numbers, [rows] or [rows, ...], or of objects: texts and whatever else
a data frame holds, None where an entry is missing. Reading does not interpret entries. Functions at
the end read them one by one as numbers, texts or arrays, independently of other rows.

Data sets of PyTorch and of Hugging Face's `datasets` library become arrays and tables as well.
Neither library is imported, except to read a folder of `datasets`.
"""

import csv
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput, one_line
from fedveil.base.inputs import Inputs
from fedveil.data.data_files import optional_module, reading
from fedveil.data.user_arrays import Array, Rows, array_of

SUFFIXES = (".csv", ".parquet")

FILE_COLUMN = "file"
"""The column with the client of a row where each of several files is a client."""

_LONGEST_LIST, _SHOWN = 12, 10
_START = 4096  # bytes in which a file shows that it is no text


@dataclass(frozen=True)
class TablePart:
    """A file or object that rows of a table were read from.

    Attributes:
        name: Its name in messages.
        source: The same for a file and its copies, or for one object: rows of the same source and
            number are the same row.
        rows: The number of its rows.
    """

    name: str
    source: str
    rows: int


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of one length: `table[name]` is a column.

    Attributes:
        name: The table's name in messages.
        arrays: The columns by name.
        row_numbers: The number of each row in its part, from 1 on.
        parts: The files or objects that the rows come from.
        part_places: The place in `parts` of each row.
    """

    name: str
    arrays: dict[str, Array]
    row_numbers: Rows
    parts: tuple[TablePart, ...]
    part_places: Rows

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.row_numbers)

    def __getitem__(self, name: str) -> Array:
        """The column of this name. Raises BadInput if there is none."""
        if name not in self.arrays:
            raise BadInput(
                f"{self.name} has no column {shown(name)}: its columns are "
                f"{quoted_names(list(self.arrays))}"
            )
        return self.arrays[name]

    def take(self, rows: Rows) -> "Table":
        """A table of the rows with the indices `rows`, counted from 0.

        They keep their row numbers.
        """
        columns = {name: column[rows] for name, column in self.arrays.items()}
        numbers, places = self.row_numbers[rows], self.part_places[rows]
        return replace(self, arrays=columns, row_numbers=numbers, part_places=places)

    def numbers_in(self, other: "Table") -> Rows:
        """The place of each row in the parts of `other`, counted from 1 over all of them.

        Rows are known by source and number, whatever they contain. -1 for rows from elsewhere.
        """
        starts, start = {}, 0
        for part in other.parts:
            starts[part.source] = start
            start += part.rows
        of_parts = np.array([starts.get(part.source, -1) for part in self.parts], dtype=np.intp)
        first = of_parts[self.part_places]
        return np.where(first < 0, -1, first + self.row_numbers)

    def with_file_names(self) -> "Table":
        """The table with the column "file": the name of each row's file, without its ending.

        Raises BadInput if there is such a column, or if two files have one name.
        """
        if FILE_COLUMN in self.arrays:
            raise BadInput(
                f"{self.name}: there is a column {FILE_COLUMN!r}, and without a client column each "
                f"file is a client: name the column (client = {FILE_COLUMN!r}), or rename it"
            )
        stems = [Path(part.name).stem for part in self.parts]
        often, times = Counter(stems).most_common(1)[0]
        if times > 1:
            raise BadInput(
                f"{times} files are called {often!r}, and each file is a client of that name: "
                "rename all but one, or name the client column (client)"
            )
        named = _objects([stems[place] for place in self.part_places.tolist()])
        return replace(self, arrays={FILE_COLUMN: named, **self.arrays})

    def entry_error(self, column: str, row: int, problem: str) -> BadInput:
        """The error about one entry. Rows are counted from 1 in each file, without a header."""
        part, number = self.parts[self.part_places[row]], self.row_numbers[row]
        return BadInput(f"{part.name}: row {number} of column {column!r} {problem}")


def quoted_names(names: Sequence[object]) -> str:
    """Names in quotes, separated by commas. Of more than twelve, ten and the number of the rest."""
    if len(names) <= _LONGEST_LIST:
        return ", ".join(map(repr, names))
    return f"{', '.join(map(repr, names[:_SHOWN]))} and {len(names) - _SHOWN} more"


def read_table(source: object, name: str = "the table") -> Table:
    """The table in a CSV or Parquet file, a pandas, polars or Arrow table, or a dict of columns.

    A list of files, or a folder, is one table of all their rows. None of these libraries is
    imported: a table is known by what it can do.
    """
    if isinstance(source, Table):
        return source
    if is_several(source):
        tables, problems = read_files(source)
        raise_together(problems, files_name(source))
        return join_tables(tables, files_name(source))
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
            f"{name} is {shown(source)}: give the path of a .csv or .parquet file, a list of such "
            "paths, a pandas or polars data frame, an Arrow table, or a dict of columns"
        )
    return _table(name, [(str(key), column) for key, column in named], f"object {id(source)}")


def _table(name: str, named: Sequence[tuple[str, Array]], source: str) -> Table:
    """A table of these columns. Raises BadInput for different lengths, equal names or no rows."""
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
    part = TablePart(name, source, rows)
    return Table(name, dict(named), np.arange(1, rows + 1), (part,), np.zeros(rows, dtype=np.intp))


MOST_SHOWN = 5
"""Problems of a table that one message lists."""


def raise_together(problems: Sequence[str], name: str) -> None:
    """Raise one BadInput about all the problems of a table, if there are any.

    >>> raise_together(["t.csv: no rows", "t.csv: no header"], "t.csv")
    Traceback (most recent call last):
    ...
    fedveil.base.errors.BadInput: t.csv: 2 problems: (1) no rows; (2) no header
    """
    lines = [problem.removeprefix(f"{name}: ") for problem in dict.fromkeys(problems)]
    if len(lines) == 1:
        raise BadInput(next(iter(problems)))
    if lines:
        listed = [f"({number}) {line}" for number, line in enumerate(lines[:MOST_SHOWN], 1)]
        if len(lines) > MOST_SHOWN:
            rest = len(lines) - MOST_SHOWN
            listed.append(f"and {rest} more (fedveil data check lists all)")
        raise BadInput(f"{name}: {len(lines)} problems: {'; '.join(listed)}")


def is_several(source: object) -> bool:
    """Whether a table is given as several files: a list of paths, or a folder."""
    if isinstance(source, list | tuple):
        return True
    return isinstance(source, str | Path) and Path(source).is_dir()


def files_name(source: object) -> str:
    """The name of several files in messages: the folder, or the first file and how many more."""
    if not isinstance(source, list | tuple):
        return str(source)
    if len(source) < 2:
        return str(source[0]) if source else "the list of files"
    return f"{source[0]} and {len(source) - 1} more"


def table_files(source: object) -> list[Path]:
    """The paths in a list, or the .csv and .parquet files of a folder in order of their names.

    Raises BadInput if there are none, and for entries of a list that are not files.
    """
    if isinstance(source, list | tuple):
        if not source:
            raise BadInput("the list of files is empty: name at least one .csv or .parquet file")
        for path in source:
            if not isinstance(path, str | Path):
                raise BadInput(f"the list of files has {shown(path)}: name .csv or .parquet files")
        return [Path(path) for path in source]
    folder = Path(str(source))
    files = [p for p in folder.glob("[!.]*") if p.suffix.lower() in SUFFIXES and p.is_file()]
    if not files:
        raise BadInput(
            f"{folder} is a folder without .csv or .parquet files: name another (for what "
            "FederatedData.save wrote, data.name = 'saved')"
        )
    return sorted(files)


def read_files(source: object) -> tuple[list[Table], list[str]]:
    """(the tables in several files, a line for every file that cannot be read or joined)."""
    tables: list[Table] = []
    problems: list[str] = []
    for path in table_files(source):
        try:
            tables.append(_read_file(path))
        except BadInput as e:
            problems.append(str(e))
    by_source: dict[str, str] = {}
    for table in tables:
        (part,) = table.parts
        first = by_source.setdefault(part.source, part.name)
        if first is not part.name:
            problems.append(f"{part.name} and {first} are the same file: leave one out")
    return tables, problems + _differing_columns(tables)


def _differing_columns(tables: Sequence[Table]) -> list[str]:
    """A line for each column that some tables have and some do not."""
    lines = []
    for name in dict.fromkeys(name for table in tables for name in table.arrays):
        lacking = [table.name for table in tables if name not in table.arrays]
        having = [table.name for table in tables if name in table.arrays]
        if not lacking:
            continue
        if len(lacking) <= len(having):
            with_it = having[0] if len(having) == 1 else f"the {len(having)} other files"
            lines += [f"{one} has no column {name!r}, unlike {with_it}: add it" for one in lacking]
        else:
            without = f"the {len(lacking)} other files"
            lines += [f"{one} has a column {name!r}, unlike {without}: remove it" for one in having]
    return lines


def join_tables(tables: Sequence[Table], name: str) -> Table:
    """One table of all rows of tables, with the columns that all of them have."""
    columns = {}
    for key in tables[0].arrays:
        if not all(key in table.arrays for table in tables):
            continue
        pieces = [table[key] for table in tables]
        if all((p.dtype, p.shape[1:]) == (pieces[0].dtype, pieces[0].shape[1:]) for p in pieces):
            columns[key] = np.concatenate(pieces)
        else:  # one file's types change nothing in another's
            columns[key] = _objects([entry for piece in pieces for entry in piece])
    return Table(
        name,
        columns,
        np.concatenate([table.row_numbers for table in tables]),
        tuple(part for table in tables for part in table.parts),
        np.repeat(np.arange(len(tables)), [len(table) for table in tables]),
    )


def _check_column_names(name: str, names: Sequence[str]) -> None:
    """Raise BadInput if there are no names, or if one is there twice."""
    if not names:
        raise BadInput(f"{name} is empty: a header and rows are needed")
    often, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise BadInput(f"{name} has {times} columns {often!r}: rename all but one")


def check_file(path: Path) -> None:
    """Raise BadInput for a path that is no existing .csv or .parquet file."""
    if path.is_dir():
        raise BadInput(f"{path} is a folder: name .csv or .parquet files, or one folder of them")
    if path.suffix.lower() not in SUFFIXES:
        raise BadInput(f"{path} is no table that can be read: use a .csv or .parquet file")
    if not path.exists():
        raise BadInput(
            f"{path} does not exist: a relative path is relative to the current directory"
        )


def _read_file(path: Path) -> Table:
    """The table in a .csv or .parquet file. The source of its part is a digest of the file."""
    check_file(path)
    if path.suffix.lower() == ".csv":
        with reading(path, "a CSV file"):
            return _with_source(_read_csv(path), _content_digest(path))
    parquet, arrow = (
        optional_module(module, package="pyarrow", needed_by="a parquet file")
        for module in ("pyarrow.parquet", "pyarrow")
    )
    with reading(path, "a parquet file", arrow.ArrowException):
        table = read_table(parquet.ParquetFile(path).read(), str(path))
        return _with_source(table, _content_digest(path))


def _with_source(table: Table, source: str) -> Table:
    """A table of one part, whose source is this one."""
    (part,) = table.parts
    return replace(table, parts=(replace(part, source=source),))


def _content_digest(path: Path) -> str:
    """The SHA-256 digest of a file's content, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_csv(path: Path) -> Table:
    """The table in a CSV file, all entries as texts, without blank lines.

    Raises BadInput for files that are not UTF-8 or have rows of different lengths.
    """
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
    """A column of a dict as an array. Lists of entries of several types become objects.

    So no row decides how others are read: a whole number among truth values would make numbers of
    all, and one row's fractions would make fractions of everybody's.
    """
    if isinstance(column, str | bytes) or not isinstance(column, Iterable):
        raise BadInput(f"column {shown(name)} is {shown(column)}: a list of entries is needed")
    try:
        array = np.asarray(column)
    except ValueError:  # entries of several shapes
        return _objects(list(column))
    if array.ndim == 0:
        raise BadInput(f"column {shown(name)} is {shown(column)}: a list of entries is needed")
    entries = array if hasattr(column, "dtype") else list(column)
    one_type = entries is array or (array.ndim == 1 and len(set(map(type, entries))) < 2)
    return array if array.dtype.kind in "biuf" and one_type else _objects(list(entries))


def _from_pandas(series: Any) -> Array:
    """A column of a pandas data frame: numbers, or objects with None where one is missing."""
    if getattr(series.dtype, "kind", "O") in "biuf" and isinstance(series.dtype, np.dtype):
        return np.asarray(series.to_numpy())
    column = np.array(series.to_numpy(dtype=object), dtype=object)
    column[series.isna().to_numpy()] = None
    return column


def _from_polars(series: Any) -> Array:
    """A column of a polars data frame: numbers, or objects with None where one is missing."""
    if series.dtype.is_numeric() and series.null_count() == 0:
        return np.asarray(series.to_numpy())
    return _objects(series.to_list())


def from_arrow(column: Any) -> Array:
    """A column of an Arrow table: numbers, or objects with None where one is missing."""
    kind = str(column.type)
    if column.null_count == 0 and kind.startswith(("int", "uint", "float", "double", "halffloat")):
        return np.asarray(column.to_numpy())
    return _objects(column.to_pylist())


def _objects(entries: list[Any]) -> Array:
    """An array of objects, one per entry, whatever it is."""
    column = np.empty(len(entries), dtype=object)
    for row, entry in enumerate(entries):
        column[row] = entry
    return column


def clients_from_datasets(datasets: object) -> list[tuple[str, Inputs[Array], Array]]:
    """(name, features, targets) of each client's data set, given in a dict by name or in a list.

    A data set is a sequence of pairs (x, y), as `arrays_of` reads it. In a list the names are "0",
    "1", ... Raises BadInput for anything else, for a data set without records, and for keys that
    are the same text.
    """
    if isinstance(datasets, list | tuple):
        datasets = dict(enumerate(datasets))
    if not isinstance(datasets, Mapping):
        raise BadInput(
            f"datasets is {shown(datasets)}: a list or a dict by name, with one data set per client"
        )
    named = [(str(name), dataset) for name, dataset in datasets.items()]
    if len({name for name, _ in named}) < len(named):
        raise BadInput("keys of datasets are the same text: one name per client")
    return [(name, *arrays_of(dataset, f"client {name!r}")) for name, dataset in named]


def arrays_of(dataset: Any, whose: str) -> tuple[Inputs[Array], Array]:
    """(features, targets) of a sequence of (x, y), in which x may be a dict.

    Each pair is read once. Raises BadInput for anything else. `whose`, such as "client 'ada'", is
    for the message.
    """
    if isinstance(dataset, str | Mapping) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise BadInput(f"{whose} has {shown(dataset)}: a data set with a length is needed")
    pairs = [dataset[number] for number in range(len(dataset))]
    if not pairs:
        raise BadInput(f"{whose} has no records: omit it")
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
            name: _stack([x[name] for x, _ in pairs], f"input {name!r}", whose, repr(name))
            for name in first
        }
    else:
        x = _stack([x for x, _ in pairs], "features", whose, "a record")
    return x, _stack([y for _, y in pairs], "targets", whose, "a target")


def _stack(values: list[Any], what: str, whose: str, singular: str) -> Array:
    """One array [records, ...] of a value per record.

    Raises BadInput for values of different shapes. `what`, `whose` and `singular` are nouns for the
    message: of all values, of their owner, and of one value.
    """
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
    """(training table, test table or None, declared labels) of a Hugging Face data set.

    In the tables, columns with declared labels hold the labels' names instead of codes, None where
    a record has no label. The declared labels are {column: {"values": names}}, without the client
    column, and {} if there are none. The tables are the splits "train" and "test".

    A wanted column that a split lacks is left out: whoever reads the table finds it missing. Raises
    BadInput without a split "train", for a split without any wanted column, and for a source of
    another kind.

    Args:
        source: A `Dataset`, a `DatasetDict`, or the folder that one was saved to.
        target: The target column.
        client: The client column, or None.
        features: Feature columns, kept beside target and client. None keeps all columns.
    """
    train, test = _splits_of(source)
    named = [name for name in (client, target) if name is not None]
    wanted = None if features is None else [*features, *named]
    table = _split_table(train, wanted, "the training split")
    test_table = None if test is None else _split_table(test, wanted, "the test split")
    labels = {key: _label_names(train, key) for key in table.arrays if key != client}
    return table, test_table, {key: {"values": value} for key, value in labels.items() if value}


def _splits_of(source: object) -> tuple[Any, Any | None]:
    """(training split, test split or None) of a Hugging Face data set, or of its folder.

    Raises BadInput without a split "train", and for anything else.
    """
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
            splits_text = quoted_names(list(source))
            raise BadInput(f"the data set has splits {splits_text} and no 'train': add it")
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
    """The table of the wanted columns of a split (None: all), with labels by their names."""
    keys = [key for key in split.features if wanted is None or key in wanted]
    if not keys:
        raise BadInput(f"{name} has no column of {quoted_names(wanted or [])}: see its features")
    arrow = split.with_format("arrow", columns=keys)[:]
    columns: dict[str, Array] = {}
    for key in keys:
        column = arrow.column(key)
        if names := _label_names(split, key):
            # A record without a label has None or -1.
            codes = column.to_pylist()
            labels = [None if code is None or code < 0 else names[code] for code in codes]
            columns[key] = np.array(labels, dtype=object)
        elif str(column.type).startswith(_NESTED):
            columns[key] = np.asarray(split.with_format("numpy", columns=[key])[key][:])
        else:
            columns[key] = from_arrow(column)
    return read_table(columns, name)


def _label_names(split: Any, key: str) -> list[str] | None:
    """The label names that a column of a Hugging Face data set declares, None without any."""
    return getattr(split.features[key], "names", None)
