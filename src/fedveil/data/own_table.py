"""Turn a user's table into records: owners, test split, encoding.

What is public about the encoding is declared, or it is fitted on the rows that `statistics` names.
No other row decides anything beyond its own record: not a type, a scale, a category or an order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import numpy as np

from fedveil.base.checks import COUNT, shown
from fedveil.base.errors import BadInput
from fedveil.data.columns import Column, declaration_key
from fedveil.data.partition import OWNED, Records, few_records_assumption
from fedveil.data.provenance import choose_held_out, holdout, share_of_each
from fedveil.data.schema import fit_schema, undeclared
from fedveil.data.tables import SUFFIXES, Table, as_texts, listed, read_table
from fedveil.data.user_arrays import Array, Rows

STATISTICS = ("held-out", "clients", "public")


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

    def __post_init__(self) -> None:
        for name in ("target", "client"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "client" and value is None):
                raise BadInput(f"{name} is {shown(value)}: name a column")
        if self.features is not None and (
            isinstance(self.features, str | bytes) or not isinstance(self.features, Iterable)
        ):
            raise BadInput(f"features is {shown(self.features)}: a list of columns is needed")
        columns = self.declared_columns
        if columns is not None and not isinstance(columns, Mapping):
            raise BadInput(f"columns is {shown(columns)}: a dict by column is needed")
        if self.statistics not in (None, *STATISTICS):
            raise BadInput(
                f"statistics is {shown(self.statistics)}: use one of {', '.join(STATISTICS)}"
            )
        if self.min_records is not None:
            COUNT.check("data.min_records", self.min_records)
            if self.client is None:
                raise BadInput(
                    f"min_records {self.min_records} has no effect without a client column: leave "
                    "it out"
                )


def table_partition(client: str | None, kind: str | None, clients: int | None) -> str:
    """How rows are divided: by the client column if there is one, possibly grouped."""
    if client is not None:
        if kind not in (None, *OWNED):
            raise BadInput(
                f"client {client!r} says whose rows are whose and partition is {kind!r}: leave one "
                "of them out"
            )
        return kind or "natural"
    if kind in OWNED:
        raise BadInput(f"partition is {kind!r} and client is left out: name the column")
    if clients is None:
        raise BadInput(
            "no clients: name the column that says whose a row is (client), or give a number of "
            "clients that rows are dealt to (clients)"
        )
    return kind or "iid"


def table_test(kind: str) -> str | None:
    """The `test` argument of `partition` for a table, whose records come with their test split."""
    return "records" if kind in OWNED else None


def table_records(table: object, options: TableOptions) -> Records:
    """Read, divide and encode a table.

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
    source = read_table(table)
    features, target = _declared_columns(source, options)
    split = split_table(source, options.client, options.test, options.min_records)
    on_test = options.statistics in (None, "held-out")
    rows, whose = split.train_rows, "clients' records"
    if on_test:
        rows, whose = split.test_rows, "test records"
    if len(rows) == 0:
        missing = undeclared(features, target, split.train_rows)
        if missing:
            raise BadInput(
                f"{source.name}: nothing is declared of {listed(missing)}, and there is no test "
                "split to fit it on: declare it (columns), hold owners out (test = 'by-client'), "
                "name a public table (test), or declare public what clients' records say "
                "(statistics = 'public')"
            )
        rows = split.train_rows  # of which nothing is fitted
    schema, fitted = fit_schema(features, target, rows, whose)
    if options.statistics is not None and not fitted:
        raise BadInput(
            f"statistics is {options.statistics!r} and every column is declared: leave it out"
        )
    # What was fitted on test rows that are clients' own counts as fitted on clients' records.
    of_others = on_test and not split.of_clients
    remarks = [
        f"the words of {column.name!r} were counted in texts that were declared public"
        for column in schema.feature_columns
        if column.text and column.text.public
    ]
    if options.min_records is not None:
        remarks.append(few_records_assumption(options.min_records))
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
        row_numbers=split.train_rows.row_numbers,
        test_row_numbers=split.test_row_numbers,
        fitted="" if of_others else fitted,
        fitted_on_test=fitted if of_others else "",
        remarks=tuple(remarks),
        schema=schema,
    )


def _declared_columns(source: Table, options: TableOptions) -> tuple[list[Column], Column]:
    """The features and the target as declared, by the table's header alone."""
    target_name, client, columns = options.target, options.client, options.declared_columns or {}
    no_features = {target_name: "the target"}
    if client is not None:
        no_features[client] = "the client column"
        if client == target_name:
            raise BadInput(f"column {client!r} is client and target: name two columns")
    target = Column.declared(target_name, columns.get(target_name, {}))
    names = [name for name in source.columns if name not in no_features]
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
    for name in (target_name, client, *names, *columns):
        if name is not None:
            source[name]  # refuses a name that the table does not have
    for name in names:
        if name in no_features:
            raise BadInput(f"feature {name!r} is {no_features[name]}: leave it out of features")
    if len(set(names)) < len(names):
        raise BadInput(f"features {listed(names)} has a name twice: list each once")
    if not names and target.text is None:
        raise BadInput(f"{source.name}: no column is left to be a feature: name at least one")
    for name in columns:
        if name not in names and name != target_name:
            raise BadInput(
                f"{declaration_key(name)} is declared and {name!r} is neither a feature nor the "
                "target: leave it out"
            )
    return [Column.declared(name, columns.get(name, {})) for name in names], target


@dataclass(frozen=True, eq=False)
class TableSplit:
    """Training and test rows, and the owners of both as places in `owner_names`, if known."""

    train_rows: Table
    test_rows: Table
    record_owners: Rows | None = None
    test_owners: Rows | None = None
    owner_names: Array | None = None

    @property
    def test_row_numbers(self) -> Rows:
        """The test rows' numbers in the table of the training rows, -1 for rows from elsewhere."""
        if self.test_rows.source == self.train_rows.source:
            return self.test_rows.row_numbers
        return np.full(len(self.test_rows), -1, dtype=np.intp)

    @property
    def of_clients(self) -> bool:
        """Whether test rows are rows of clients, or of the same owners."""
        if np.isin(self.test_row_numbers, self.train_rows.row_numbers).any():
            return True
        if self.record_owners is None or self.test_owners is None:
            return False
        return bool(np.isin(self.test_owners, self.record_owners).any())


def split_table(source: Table, client: str | None, test: object, least: int | None) -> TableSplit:
    """Divide rows between training and test.

    `test` is "by-client", a share, or a table of test rows; None, no row is tested on. What is held
    out follows from names and numbers of rows. Clients with fewer than `least` rows are left out.
    """
    kind = _kind_of_test(test)
    if client is not None:
        return _split_clients(source, client, kind, least)
    if isinstance(kind, Table):
        return TableSplit(source, kind)
    if isinstance(kind, str):
        raise BadInput(f"test is {kind!r} and client is left out: name the column, or a share")
    if kind is None:
        return TableSplit(source, source.take(np.arange(0)))
    train, held_out = holdout(len(source), kind)
    return TableSplit(source.take(train), source.take(held_out))


def _kind_of_test(test: object) -> str | float | Table | None:
    """The option `test` as "by-client", a share, a table, or None."""
    if test is None or (isinstance(test, str) and test == "none"):
        return None
    if isinstance(test, Real):
        if isinstance(test, bool) or not 0 < float(test) < 1:
            raise BadInput(f"test is {test}: a share above 0 and below 1 is needed")
        return float(test)
    if isinstance(test, str) and Path(test).suffix.lower() not in SUFFIXES:
        if test == "by-client":
            return test
        own = "a table has no split of its own, " if test == "records" else ""
        raise BadInput(
            f"test is {shown(test)}: {own}use a share such as 0.2, 'by-client', 'none', or the "
            "path of a .csv or .parquet file"
        )
    return read_table(test, "the test table")


def _split_clients(
    source: Table, client: str, kind: str | float | Table | None, least: int | None
) -> TableSplit:
    entries = _client_names(source, client)
    names, owners = np.unique(np.array(entries), return_inverse=True)
    if len(names) == len(entries) > 1:
        raise BadInput(
            f"{source.name}: column {client!r} is different in all {len(entries)} rows: name the "
            "column that says whose a row is, or leave client out and give a number of clients"
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
        if client not in kind.columns:
            return TableSplit(source.take(train), kind, owners[train], None, names)
        test_names = _client_names(kind, client)
        new_names = sorted(set(test_names) - set(names.tolist()))
        names = np.array([*names.tolist(), *new_names])
        places = {name: k for k, name in enumerate(names.tolist())}
        test_owners = np.array([places[name] for name in test_names], dtype=np.intp)
        return TableSplit(source.take(train), kind, owners[train], test_owners, names)
    test = np.flatnonzero(np.isin(owners, held_out))
    if isinstance(kind, float):
        test = train[share_of_each(owners[train], names, kind)]
        train = np.setdiff1d(train, test)
    return TableSplit(source.take(train), source.take(test), owners[train], owners[test], names)


def _client_names(table: Table, client: str) -> list[str]:
    names = as_texts(table[client])
    if None in names:
        problem = "is empty: say whose row it is, or remove it"
        raise table.entry_error(client, names.index(None), problem)
    return [name for name in names if name is not None]
