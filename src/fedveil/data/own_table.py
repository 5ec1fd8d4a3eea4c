"""Turn a user's table into records: owners, test split, encoding.

What is public about the encoding is declared, or it is fitted on the rows that `statistics` names.
No other row decides anything beyond its own record: not a type, a scale, a category or an order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import COUNT, shown
from fedveil.base.errors import BadInput
from fedveil.data.columns import Column, declaration
from fedveil.data.federated import FederatedData
from fedveil.data.partition import OWNED, Records, few_records_assumption, partition
from fedveil.data.provenance import choose_held_out, holdout, share_of_each
from fedveil.data.schema import fit_schema, undeclared
from fedveil.data.tables import SUFFIXES, Table, as_texts, listed, read_table
from fedveil.data.user_arrays import Rows

Names = npt.NDArray[np.str_]

BY_CLIENT = "by-client"
_NONE: Rows = np.array([], dtype=np.intp)


@dataclass(frozen=True, eq=False)
class TableSplit:
    """Training and test rows, with the owners of both as places in `names` if they are known.

    `test_lines` are the test rows' numbers in the table of the training rows, -1 for others.
    """

    train: Table
    test: Table
    owners: Rows | None = None
    test_owners: Rows | None = None
    names: Names | None = None

    @property
    def test_lines(self) -> Rows:
        """The test rows' numbers in the table of the training rows, -1 for rows from elsewhere."""
        same = self.test.source == self.train.source
        return self.test.numbers if same else np.full(len(self.test), -1, dtype=np.intp)

    @property
    def of_clients(self) -> bool:
        """Whether test rows are rows of clients, or of the same owners."""
        own = bool(np.isin(self.test_lines, self.train.numbers).any())
        if self.owners is None or self.test_owners is None:
            return own
        return own or bool(np.isin(self.test_owners, self.owners).any())


def split_table(source: Table, client: str | None, test: object, least: int | None) -> TableSplit:
    """Divide rows between training and test.

    `test` is "by-client", a share, or a table of test rows; None, no row is tested on. What is held
    out follows from names and numbers of rows. Clients with fewer than `least` rows are left out.
    """
    wanted = _wanted(test)
    if client is not None:
        return _of_clients(source, client, wanted, least)
    if wanted is None:
        return TableSplit(source, source.take(_NONE))
    if isinstance(wanted, Table):
        return TableSplit(source, wanted)
    if isinstance(wanted, str):
        raise BadInput(f"test is {wanted!r} and client is left out: name the column, or a share")
    train, held = holdout(len(source), wanted)
    return TableSplit(source.take(train), source.take(held))


def _wanted(test: object) -> str | float | Table | None:
    if test is None:
        return None
    if isinstance(test, Real):
        if isinstance(test, bool) or not 0 < float(test) < 1:
            raise BadInput(f"test is {test}: a share above 0 and below 1 is needed")
        return float(test)
    if isinstance(test, str) and Path(test).suffix.lower() not in SUFFIXES:
        if test == "none":
            return None
        if test == BY_CLIENT:
            return test
        own = "a table has no split of its own, " if test == "records" else ""
        raise BadInput(
            f"test is {shown(test)}: {own}use a share such as 0.2, 'by-client', 'none', or the "
            "path of a .csv or .parquet file"
        )
    return read_table(test, "the test table")


def _of_clients(
    source: Table, client: str, wanted: str | float | Table | None, least: int | None
) -> TableSplit:
    owners, names = _owners(source, client)
    everyone, counts = np.arange(len(names)), np.bincount(owners)
    held = choose_held_out(everyone, names) if isinstance(wanted, str) else everyone[:0]
    others = np.setdiff1d(everyone, held)
    if len(others) == 0:
        raise BadInput(
            f"{source.name}: column {client!r} names one client, {str(names[0])!r}, and some are "
            "held out for testing: name another column, or give test a share"
        )
    kept = others[counts[others] >= (least or 1)]
    if len(kept) == 0:
        raise BadInput(
            f"{source.name}: no client has {least} records, the most is {counts[others].max()}: "
            "lower min_records"
        )
    train = np.flatnonzero(np.isin(owners, kept))
    if isinstance(wanted, Table):
        theirs, names = _test_owners(wanted, client, names)
        return TableSplit(source.take(train), wanted, owners[train], theirs, names)
    match wanted:
        case None:
            tested = _NONE
        case str():
            tested = np.flatnonzero(np.isin(owners, held))
        case share:
            tested = train[share_of_each(owners[train], names, share)]
            train = np.setdiff1d(train, tested)
    return TableSplit(source.take(train), source.take(tested), owners[train], owners[tested], names)


def _owners(source: Table, client: str) -> tuple[Rows, Names]:
    """Each row's owner, and the owners' names in alphabetical order."""
    found = _names(source, client)
    names, owners = np.unique(np.array(found), return_inverse=True)
    if len(names) == len(found) > 1:
        raise BadInput(
            f"{source.name}: column {client!r} is different in all {len(found)} rows: name the "
            "column that says whose a row is, or leave client out and give a number of clients"
        )
    return owners, names


def _test_owners(test: Table, client: str, names: Names) -> tuple[Rows | None, Names]:
    """The owners of test rows if the column is there, and all names, new ones at the end."""
    if client not in test.columns:
        return None, names
    found = _names(test, client)
    names = np.array([*names.tolist(), *sorted(set(found) - set(names.tolist()))])
    place = {name: k for k, name in enumerate(names.tolist())}
    return np.array([place[name] for name in found], dtype=np.intp), names


def _names(table: Table, client: str) -> list[str]:
    found = as_texts(table.column(client))
    if None in found:
        raise table.refused(
            client, found.index(None), "is empty: say whose row it is, or remove it"
        )
    return [name for name in found if name is not None]


STATISTICS = ("held-out", "clients", "public")


@dataclass(frozen=True)
class TableOptions:
    """The options that describe a user's table (docs/data.md explains each)."""

    target: str
    client: str | None = None
    features: Iterable[str] | None = None
    columns: Mapping[str, object] | None = None
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
        if self.columns is not None and not isinstance(self.columns, Mapping):
            raise BadInput(f"columns is {shown(self.columns)}: a dict by column is needed")
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


def federated_table(
    table: object,
    asked: TableOptions,
    *,
    clients: int | None,
    kind: str | None,
    alpha: float | None,
    shards_per_client: int,
    seed: int,
) -> FederatedData:
    """The clients of a table: as a column names them, or `clients` that rows are dealt to."""
    kind = table_partition(asked.client, kind, clients)
    data = partition(
        table_records(table, asked),
        kind=kind,
        clients=clients,
        seed=seed,
        alpha=alpha,
        shards_per_client=shards_per_client,
        test=table_test(kind),
    )
    return replace(data, declared_public=asked.statistics == "public")


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


def table_records(table: object, asked: TableOptions) -> Records:
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
    features, target = _columns(source, asked)
    split = split_table(source, asked.client, asked.test, asked.min_records)
    on_test = asked.statistics in (None, "held-out")
    seen, whose = (split.test, "test records") if on_test else (split.train, "clients' records")
    if len(seen) == 0:
        missing = undeclared(features, target, split.train)
        if missing:
            raise BadInput(
                f"{source.name}: nothing is declared of {listed(missing)}, and there is no test "
                "split to fit it on: declare it (columns), hold owners out (test = 'by-client'), "
                "name a public table (test), or declare public what clients' records say "
                "(statistics = 'public')"
            )
        seen = split.train  # of which nothing is fitted
    schema, what = fit_schema(features, target, seen, whose)
    if asked.statistics is not None and not what:
        raise BadInput(
            f"statistics is {asked.statistics!r} and every column is declared: leave it out"
        )
    apart = on_test and not split.of_clients
    remarks = [
        f"the words of {column.name!r} were counted in texts that were declared public"
        for column in schema.features
        if column.text and column.text.public
    ]
    if asked.min_records is not None:
        remarks.append(few_records_assumption(asked.min_records))
    return Records(
        source.name,
        schema.encode(split.train),
        schema.targets(split.train),
        schema.encode(split.test),
        schema.targets(split.test),
        classes=schema.classes,
        owners=split.owners,
        owner_names=split.names,
        test_owners=split.test_owners,
        lines=split.train.numbers,
        test_lines=split.test_lines,
        fitted="" if apart else what,
        fitted_on_test=what if apart else "",
        remarks=tuple(remarks),
        schema=schema,
    )


def _columns(source: Table, asked: TableOptions) -> tuple[list[Column], Column]:
    """The features and the target as declared, by the table's header alone."""
    source.column(asked.target)
    apart = {asked.target: "the target"}
    if asked.client is not None:
        source.column(asked.client)
        apart[asked.client] = "the client column"
        if asked.client == asked.target:
            raise BadInput(f"column {asked.client!r} is client and target: name two columns")
    names = [name for name in source.columns if name not in apart]
    columns = asked.columns or {}
    said_target = Column.declared(asked.target, columns.get(asked.target, {}))
    if said_target.text is not None:
        if asked.features is not None:
            raise BadInput(
                f"target {asked.target!r} is a text, whose next words are predicted from the words "
                "before: leave features out"
            )
        names = []
    elif asked.features is not None:
        names = list(asked.features)
    elif "" in names:
        raise BadInput(
            f"{source.name} has a column without a name, as pandas writes with index=True: name "
            "it, or list the features"
        )
    for name in names:
        if name in apart:
            raise BadInput(f"feature {name!r} is {apart[name]}: leave it out of features")
        source.column(name)
    if len(set(names)) < len(names):
        raise BadInput(f"features {listed(names)} has a name twice: list each once")
    if not names and said_target.text is None:
        raise BadInput(f"{source.name}: no column is left to be a feature: name at least one")
    for name in columns:
        source.column(name)
        if name not in names and name != asked.target:
            raise BadInput(
                f"{declaration(name)} is declared and {name!r} is neither a feature nor the "
                "target: leave it out"
            )
    said = [Column.declared(name, columns.get(name, {})) for name in names]
    return said, said_target
