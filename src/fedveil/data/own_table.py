"""Turn a user's table into records: owners, test split, encoding.

What is public about the encoding is declared, or it is fitted on the rows that `statistics` names.
No other row decides anything beyond its own record: not a type, a scale, a category or an order.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path

import numpy as np

from fedveil.base.checks import COUNT, shown
from fedveil.base.errors import BadInput
from fedveil.base.identity import Words
from fedveil.data.columns import Column, declaration_key
from fedveil.data.entries import Bits, are_arrays, as_numbers, as_texts
from fedveil.data.partition import OWNED, Records, few_records_assumption
from fedveil.data.persons import NOT_PER_PERSON
from fedveil.data.provenance import choose_held_out, places, row_words
from fedveil.data.schema import TableSchema, fit_feature, fit_schema, fit_target, undeclared_columns
from fedveil.data.tables import (
    FILE_COLUMN,
    SUFFIXES,
    Table,
    files_name,
    is_several,
    quoted_names,
    raise_together,
    read_files,
    read_table,
)
from fedveil.data.user_arrays import Array, Rows

STATISTICS = ("held-out", "clients", "public")
MISSING = ("refuse", "fill")

_NO_TARGET = ("na", "n/a", "nan", "null")
"""Words for a target that is missing, unless they are declared labels."""


@dataclass(frozen=True)
class TableOptions:
    """The options that describe a user's table (docs/data.md explains each)."""

    target: str
    client: str | None = None
    features: Iterable[str] | None = None
    declared_columns: Mapping[str, object] | None = None
    test: object = None
    statistics: str | None = None
    min_records: int | None = None
    missing: str | None = None
    person: str | None = None
    by_file: bool = False

    def __post_init__(self) -> None:
        """Raise BadInput for options of a wrong type, or without effect."""
        for name in ("target", "client", "person"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name != "target" and value is None):
                raise BadInput(f"{name} is {shown(value)}: name a column")
        if self.features is not None and (
            isinstance(self.features, str | bytes) or not isinstance(self.features, Iterable)
        ):
            raise BadInput(f"features is {shown(self.features)}: a list of columns is needed")
        if self.features is not None:
            object.__setattr__(self, "features", tuple(self.features))
        columns = self.declared_columns
        if columns is not None and not isinstance(columns, Mapping):
            raise BadInput(f"columns is {shown(columns)}: a dict from names of columns is needed")
        if self.statistics not in (None, *STATISTICS):
            raise BadInput(
                f"statistics is {shown(self.statistics)}: use one of {', '.join(STATISTICS)}"
            )
        if self.missing not in (None, *MISSING):
            raise BadInput(f"missing is {shown(self.missing)}: use one of {', '.join(MISSING)}")
        if self.min_records is not None:
            COUNT.check("data.min_records", self.min_records)
            if self.client_column is None:
                raise BadInput(
                    f"min_records {self.min_records} has no effect without a client column: leave "
                    "it out"
                )

    @property
    def client_column(self) -> str | None:
        """The column with the client of a row, the one with its file if each file is a client."""
        return FILE_COLUMN if self.by_file else self.client

    @property
    def kind_of_test(self) -> "str | float | Table | None":
        """What is tested on: "by-client", a share of the rows, a table, or nothing."""
        return _kind_of_test(self.test)

    @property
    def fills_missing(self) -> bool:
        """Whether missing entries become zeros, and rows without a target are left out."""
        return self.missing == "fill"


def each_file_a_client(table: object, client: str | None, partition: str | None) -> bool:
    """Whether each file of a table is a client: several files, and no column names the clients."""
    return client is None and partition in (None, *OWNED) and is_several(table)


def table_partition(client: str | None, kind: str | None, clients: int | None) -> str:
    """The kind of partition of a table: `kind`, or "natural" with a client column, else "iid".

    Raises BadInput for a `kind` that contradicts `client`, or if nothing says who the clients are.

    Args:
        client: The client column, if there is one.
        kind: The kind that the user asks for, if any.
        clients: The number of clients that rows are dealt to, if given.
    """
    if client is not None:
        if kind not in (None, *OWNED):
            raise BadInput(
                f"client {client!r} says whose rows are whose and partition is {kind!r}: leave one "
                "of them out"
            )
        return kind or "natural"
    if kind in OWNED:
        raise BadInput(f"partition is {kind!r} and client is missing: name the column")
    if clients is None:
        raise BadInput(
            "no clients: name the column that says whose a row is (client), or give a number of "
            "clients that rows are dealt to (clients)"
        )
    return kind or "iid"


def table_test(kind: str) -> str | None:
    """The argument `test` of `partition` for a table: "records" if owners stay whole, else None.

    A table's records come with their test split.
    """
    return "records" if kind in OWNED else None


def table_records(table: object, options: TableOptions) -> Records:
    """The records of a user's table: read, divided into training and test, and encoded.

    | edge | behaviour |
    |---|---|
    | a column is not declared | fitted on the test split; claims say so |
    | the same, without a test split | BadInput: declare it, hold owners out, or call it public |
    | test rows are clients' own | what was fitted on them counts as fitted on clients' records |
    | `statistics` is "clients" or "public" | fitted on clients' records, and named in `fitted` |
    | a client's entry does not fit what was found elsewhere | BadInput: row, column, way out |
    | a category is not in a fitted list | zeros |
    | clients are left out for `min_records` | claims say so, and not how many |
    """
    try:
        return _table_records(table, options)
    except BadInput as e:
        problems = table_problems(table, options)
        if str(e) not in problems:
            raise
        raise_together(problems, table_name(table))
        raise


def table_name(table: object) -> str:
    """The name of a user's table in messages."""
    if is_several(table):
        return files_name(table)
    return str(table) if isinstance(table, str | Path) else read_table(table).name


def _table_records(table: object, options: TableOptions) -> Records:
    """As `table_records`, with the first problem as an error."""
    source = read_table(table)
    if options.by_file:
        source = source.with_file_names()
    features, target = columns_as_declared(source, options)
    split = split_table(source, options)
    if options.fills_missing:
        split = split.without_missing(target)
    on_test, rows, whose = _fitted_rows(split, options)
    if len(rows) == 0:
        _check_declared(source, features, target, split)
        rows = split.train_rows  # of which nothing is fitted
    schema, fitted = fit_schema(features, target, rows, whose)
    _check_statistics(options, fitted)
    # What was fitted on test rows that are clients' own counts as fitted on clients' records.
    of_others = on_test and not split.of_clients
    persons, test_persons = _persons(split, options.person)
    return Records(
        source.name,
        schema.encode(split.train_rows),
        schema.targets(split.train_rows),
        schema.encode(split.test_rows),
        schema.targets(split.test_rows),
        classes=schema.classes,
        record_owners=split.record_owners,
        owner_names=split.owner_names,
        test_owners=split.test_owners,
        row_numbers=split.train_rows.numbers_in(split.train_rows),
        row_words=split.row_words,
        test_row_numbers=split.test_row_numbers,
        fitted="" if of_others else fitted,
        fitted_on_test=fitted if of_others else "",
        remarks=tuple(remarks_about(options, schema)),
        schema=schema,
        record_persons=persons,
        test_persons=test_persons,
    )


def _persons(split: "TableSplit", person: str | None) -> tuple[Rows | None, Rows | None]:
    """(the person of each training row, that of each test row), as `Records` has them."""
    if person is None:
        return None, None
    people = np.array(_entries_of(split.train_rows, person))
    if person not in split.test_rows.arrays or not len(split.test_rows):
        return np.unique(people, return_inverse=True)[1], None
    tested = np.array(_entries_of(split.test_rows, person))
    _, numbers = np.unique(np.concatenate([people, tested]), return_inverse=True)
    trained, of_test = np.split(numbers, [len(people)])
    return trained, np.where(np.isin(of_test, trained), -1, of_test)


def remarks_about(options: TableOptions, schema: TableSchema) -> list[str]:
    """Assumptions of every claim about a table with these options, as texts."""
    remarks = [
        f"the words of {column.name!r} were counted in texts that were declared public"
        for column in schema.feature_columns
        if column.text and column.text.public
    ]
    if options.min_records is not None:
        remarks.append(few_records_assumption(options.min_records))
    if options.fills_missing:
        remarks.append("rows without a target are dropped: which rows have one is taken as public")
    if options.person is None and options.client_column and isinstance(options.kind_of_test, float):
        remarks.append(
            "clients whose rows would all be held out are left out: which clients these are is "
            "taken as public"
        )
    if options.person is not None and isinstance(options.kind_of_test, str | float):
        remarks.append(
            f"people ({options.person!r}) with test records are not trained on: which clients keep "
            "training records is taken as public"
        )
    if options.person is not None:
        remarks.append(f"a person ({options.person!r}) may have several records: {NOT_PER_PERSON}")
    return remarks


def _fitted_rows(split: "TableSplit", options: TableOptions) -> tuple[bool, Table, str]:
    """Choose the rows from which the statistics of columns are computed.

    Returns (whether these are the test rows, the rows, whose they are in words).
    """
    if options.statistics in (None, "held-out"):
        return True, split.test_rows, "test records"
    return False, split.train_rows, "clients' records"


def _check_statistics(options: TableOptions, fitted: str) -> None:
    """Raise BadInput if `statistics` is given and nothing was fitted."""
    if options.statistics is not None and not fitted:
        raise BadInput(f"statistics is {options.statistics!r}, every column is declared: omit it")


def _check_declared(
    source: Table, features: list[Column], target: Column, split: "TableSplit"
) -> None:
    """Raise BadInput if a column is not declared. There is nothing to fit it on."""
    missing = undeclared_columns(features, target, split.train_rows)
    if missing:
        raise BadInput(
            f"{source.name}: nothing is declared of {quoted_names(missing)}, and there is no "
            "test split to fit it on: declare it (columns), hold owners out (test = "
            "'by-client'), name a public table (test), or declare public what clients' "
            "records say (statistics = 'public')"
        )


def table_problems(table: object, options: TableOptions) -> list[str]:
    """Everything for which `table_records` would refuse a table, one line each.

    Every file, name and column is looked at by itself, so that one problem does not hide others.
    Of one column, the first row with a problem is named.
    """
    lines: list[str] = []

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except BadInput as e:
            lines.append(str(e))

    source = None
    with noted():
        if is_several(table):
            lines += read_files(table)[1]
        source = None if lines else read_table(table)
        if source is not None and options.by_file:
            source = source.with_file_names()
    if source is None or lines:
        return lines
    named = (options.target, options.client, options.person, *(options.features or ()))
    for name in dict.fromkeys([*named, *(options.declared_columns or {})]):
        with noted():
            _ = None if name is None else source[name]
    with noted():
        features, target = columns_as_declared(source, options)
    if lines:
        return list(dict.fromkeys(lines))
    if options.person is not None:
        with noted():
            _entries_of(source, options.person)
    split = None
    with noted():
        split = split_table(source, options)
        split = split.without_missing(target) if options.fills_missing else split
    if split is not None:
        _, rows, whose = _fitted_rows(split, options)
        if len(rows) == 0:
            rows = split.train_rows
            with noted():
                _check_declared(source, features, target, split)
        found = ""
        for column in (*features, target):
            fit = fit_target if column is target else fit_feature
            with noted():
                settled, what = fit(column, rows, whose)
                found += what
                for part in (split.train_rows, split.test_rows):
                    _encode_column(settled, part, is_target=column is target)
        if not lines:
            with noted():
                _check_statistics(options, found)
    return list(dict.fromkeys(lines))


def _encode_column(column: Column, rows: Table, *, is_target: bool) -> None:
    """Raise BadInput for an entry of the column that cannot be encoded."""
    if not is_target:
        column.encode_entries(rows)
    elif column.text is not None:
        column.texts(rows)
    elif column.shape:
        column.encode_entries(rows)
    elif column.as_target.classes:
        column.codes(rows, target=True)
    else:
        column.scaled_numbers(rows, target=True)


def columns_as_declared(source: Table, options: TableOptions) -> tuple[list[Column], Column]:
    """(feature columns, target column) as declared, by the table's header alone.

    Raises BadInput for names that the table lacks, or that are used twice.
    """
    target_name, client, person = options.target, options.client_column, options.person
    columns = options.declared_columns or {}
    no_features = {target_name: "the target"}
    for name, role in ((client, "client"), (person, "person")):
        if name is None:
            continue
        if name in no_features:
            other = no_features[name].split()[1]
            raise BadInput(f"column {name!r} is {role} and {other}: name two columns")
        no_features[name] = f"the {role} column"
    target = Column.declared(target_name, columns.get(target_name, {}))
    names = [name for name in source.arrays if name not in no_features]
    if target.text is not None:
        if options.features is not None:
            raise BadInput(
                f"target {target_name!r} is a text, whose next words are predicted from the words "
                "before: leave features out"
            )
        names = []
    elif options.features is not None:
        names = list(options.features)
    elif "" in names:
        raise BadInput(
            f"{source.name} has a column without a name, as pandas writes with index=True: name "
            "it, or list the features"
        )
    for name in (target_name, client, person, *names, *columns):
        if name is not None:
            source[name]  # refuses a name that the table does not have
    for name in names:
        if name in no_features:
            raise BadInput(f"feature {name!r} is {no_features[name]}: leave it out of features")
    if len(set(names)) < len(names):
        raise BadInput(f"features {quoted_names(names)} has a name twice: list each once")
    if not names and target.text is None:
        raise BadInput(f"{source.name}: no column is left to be a feature: name at least one")
    for name in columns:
        if name not in names and name != target_name:
            raise BadInput(
                f"{declaration_key(name)} is declared and {name!r} is neither a feature nor the "
                "target: omit it"
            )
    features = [Column.declared(name, columns.get(name, {})) for name in names]
    if options.fills_missing:
        features = [replace(column, zero_missing=True) for column in features]
    return features, target


@dataclass(frozen=True, eq=False)
class TableSplit:
    """Training and test rows, and the owners of both as places in `owner_names`, if known.

    Owners are None if they are not known. Training rows have words by which they are dealt then.
    """

    train_rows: Table
    test_rows: Table
    record_owners: Rows | None = None
    test_owners: Rows | None = None
    owner_names: Array | None = None
    row_words: Words | None = None

    @property
    def test_row_numbers(self) -> Rows:
        """The test rows' numbers in the table of the training rows, -1 for rows from elsewhere."""
        return self.test_rows.numbers_in(self.train_rows)

    @property
    def of_clients(self) -> bool:
        """Whether some test rows are rows of clients, or of owners who are clients."""
        trained = self.train_rows.numbers_in(self.train_rows)
        if np.isin(self.test_row_numbers, trained).any():
            return True
        if self.record_owners is None or self.test_owners is None:
            return False
        return bool(np.isin(self.test_owners, self.record_owners).any())

    def without_missing(self, target: Column) -> "TableSplit":
        """The split without rows that have no target. No row decides about another."""
        train, test = (rows_with_target(rows, target) for rows in (self.train_rows, self.test_rows))
        if not train.any():
            raise BadInput(
                f"{self.train_rows.name}: column {target.name!r} is empty in all rows to train on: "
                "name another target"
            )
        owners, test_owners, words = self.record_owners, self.test_owners, self.row_words
        return replace(
            self,
            train_rows=self.train_rows.take(np.flatnonzero(train)),
            test_rows=self.test_rows.take(np.flatnonzero(test)),
            record_owners=None if owners is None else owners[train],
            test_owners=None if test_owners is None else test_owners[test],
            row_words=None if words is None else words[train],
        )


def rows_with_target(rows: Table, target: Column) -> Bits:
    """Which rows have a target, by what is declared of it and the row's own entry."""
    entries = rows[target.name]
    if are_arrays(entries):
        return np.array([entry is not None for entry in entries], dtype=bool)
    if target.scaled or target.classes or not isinstance((target.values or ("",))[0], str):
        numbers, odd = as_numbers(entries)
        return odd | ~np.isnan(numbers)
    labels = target.values or ()
    return np.array(
        [
            text is not None and (text.lower() not in _NO_TARGET or text in labels)
            for text in as_texts(entries)
        ],
        dtype=bool,
    )


def split_table(source: Table, options: TableOptions) -> TableSplit:
    """The rows of a table, divided between training and test.

    `options.test` is "by-client", a share, or a table of test rows; None, no row is tested on.
    Clients with fewer than `min_records` rows are left out, which claims say. With `person`, nobody
    has rows on both sides, unless `test` is a table.

    Guarantee: whether a row is held out follows from its client's or person's name ("by-client",
    and a share of people), or from its own entries (a share of rows): see `provenance`. One row
    more or less moves no other row. "by-client" with persons is the exception: a row of a
    held-out client, who is not protected, takes that person's rows out of training.

    | edge | behaviour |
    |---|---|
    | nothing is held out, or everything | BadInput |
    | a share would hold out all rows of a client | the client is left out; claims say so |
    """
    kind, client = options.kind_of_test, options.client_column
    if isinstance(kind, Table) and options.by_file and FILE_COLUMN not in kind.arrays:
        kind = kind.with_file_names()
    if client is not None:
        return _split_clients(source, client, kind, options)
    if isinstance(kind, str):
        raise BadInput(f"test is {kind!r} and client is missing: name the column, or a share")
    words = _words_of(source, options)
    if isinstance(kind, Table):
        return TableSplit(source, kind, row_words=words)
    tested = np.zeros(len(source), dtype=bool)
    if kind is not None and options.person is not None:
        tested = _held_out_people(source, options.person, kind)
    elif kind is not None:
        tested = _held_out_rows(source, words, kind)
    rows, train = np.flatnonzero(tested), np.flatnonzero(~tested)
    return TableSplit(source.take(train), source.take(rows), row_words=words[train])


def _words_of(source: Table, options: TableOptions) -> Words:
    """A word for each row, by its client, person, target and features alone."""
    features = source.arrays if options.features is None else options.features
    named = {options.target, options.client_column, options.person, *features} - {None}
    return row_words([source[name] for name in sorted(map(str, named))])


def _held_out_rows(source: Table, words: Words, share: float) -> Bits:
    """Which rows are held out: about this share, each by its own word."""
    held_out: Bits = places(words, "test") < share
    if held_out.all() or not held_out.any():
        which, how = ("every", "lower") if held_out.all() else ("no", "raise")
        raise BadInput(
            f"test is {share:g} and {which} row of {source.name} would be held out: {how} it, or "
            "omit it"
        )
    return held_out


def _held_out_people(source: Table, person: str, share: float) -> Bits:
    """Which rows are of people who are held out: about this share of them, by name alone."""
    names, people = np.unique(np.array(_entries_of(source, person)), return_inverse=True)
    held_out = choose_held_out(np.arange(len(names)), names, share)
    if len(held_out) == len(names):
        raise BadInput(
            f"{source.name}: everyone in {person!r} would be held out for testing: lower the share "
            "(test), or name another column"
        )
    return np.isin(people, held_out)


def _kind_of_test(test: object) -> str | float | Table | None:
    """The option `test` as "by-client", a share, a table that was read, or None for "none".

    Raises BadInput for others.
    """
    if test is None or (isinstance(test, str) and test == "none"):
        return None
    if isinstance(test, Real):
        if isinstance(test, bool) or not 0 < float(test) < 1:
            raise BadInput(f"test is {test}: a share above 0 and below 1 is needed")
        return float(test)
    if isinstance(test, str) and test == "by-client":
        return test
    if isinstance(test, str) and not (Path(test).suffix.lower() in SUFFIXES or Path(test).is_dir()):
        own = "a table has no split of its own, " if test == "records" else ""
        raise BadInput(
            f"test is {shown(test)}: {own}use a share such as 0.2, 'by-client', 'none', or the "
            "path of a .csv or .parquet file or a folder of them"
        )
    return read_table(test, "the test table")


def _split_clients(
    source: Table, client: str, kind: str | float | Table | None, options: TableOptions
) -> TableSplit:
    """The split of a table with a client column.

    Whole clients, a share of the clients' rows, or another table are the test rows. A person with
    rows of held-out clients is not trained on, and of a share the people are chosen, not the rows.
    """
    entries, least, person = _entries_of(source, client), options.min_records, options.person
    names, owners = np.unique(np.array(entries), return_inverse=True)
    if len(names) == len(entries) > 1:
        raise BadInput(
            f"{source.name}: column {client!r} has a different value in each of its {len(entries)} "
            "rows, so every client would have one row: name the column of the rows' owners, or "
            "omit client and give a number of clients"
        )
    everyone, counts = np.arange(len(names)), np.bincount(owners)
    held_out = choose_held_out(everyone, names) if isinstance(kind, str) else everyone[:0]
    others = np.setdiff1d(everyone, held_out)
    if len(others) == 0:
        raise BadInput(
            f"{source.name}: column {client!r} names one client, {str(names[0])!r}, and some are "
            "held out for testing: name another column, or give test a share"
        )
    clients = others[counts[others] >= (least or 1)]
    if len(clients) == 0:
        raise BadInput(
            f"{source.name}: no client has {least} records, the most is {counts[others].max()}: "
            "lower min_records"
        )
    train = np.flatnonzero(np.isin(owners, clients))
    if isinstance(kind, Table):
        if client not in kind.arrays:
            return TableSplit(source.take(train), kind, owners[train], None, names)
        test_names = _entries_of(kind, client)
        new_names = sorted(set(test_names) - set(names.tolist()))
        names = np.array([*names.tolist(), *new_names])
        places = {name: k for k, name in enumerate(names.tolist())}
        test_owners = np.array([places[name] for name in test_names], dtype=np.intp)
        return TableSplit(source.take(train), kind, owners[train], test_owners, names)
    test = np.flatnonzero(np.isin(owners, held_out))
    if isinstance(kind, float):
        rows = source.take(train)
        if person is None:
            test = train[_held_out_rows(rows, _words_of(rows, options), kind)]
        else:
            test = train[_held_out_people(rows, person, kind)]
        train = np.setdiff1d(train, test)
        if person is None:
            test = test[np.isin(owners[test], owners[train])]
    elif person is not None:
        people = np.array(_entries_of(source, person))
        train = train[~np.isin(people[train], people[test])]
        if len(train) == 0:
            raise BadInput(
                f"{source.name}: everyone in {person!r} has rows of a held-out client: give test a "
                "share, or leave person out"
            )
    return TableSplit(source.take(train), source.take(test), owners[train], owners[test], names)


def _entries_of(table: Table, column: str) -> list[str]:
    """The client or person of each row, as text. Raises BadInput for a row where it is empty."""
    names = as_texts(table[column])
    if None in names:
        problem = "is empty: say whose row it is, or remove it"
        raise table.entry_error(column, names.index(None), problem)
    return [name for name in names if name is not None]
