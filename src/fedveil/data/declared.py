"""Data of which only the declaration is known: the schema of tables that nobody here has.

A federation's server knows which columns its sites' tables have and how entries become numbers, by
what the recipe declares, and a public table to test on. Of the sites' rows it knows nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.data.own_table import (
    TableOptions,
    columns_as_declared,
    remarks_about,
    rows_with_target,
)
from fedveil.data.schema import TableSchema, fit_schema, undeclared_columns
from fedveil.data.tables import Table, quoted_names, read_table

_NAME = "the declared table"


def declared_data(
    options: TableOptions, test: object, names: Sequence[str], records: Sequence[int] = ()
) -> FederatedData:
    """The data of clients at sites, by the declaration of their tables and a public test table.

    No row of a client is needed or read. Claims take the test records as public.

    Args:
        options: The columns, their ranges and categories, and what becomes of missing entries. Its
            own `test` has to be left out: a site measures nothing.
        test: A public table, as `FederatedData.from_table` takes it. None: nothing is measured.
        names: The clients' names.
        records: The public number of records of each, 0 where it is not public. () is 0 for all.

    | edge | behaviour |
    |---|---|
    | a column has neither a range nor values | BadInput that names it |
    | neither features nor columns are named | BadInput |
    | the test table lacks a column, or has an entry that does not fit | BadInput |
    | the test table has rows without a target, `missing` "fill" | they are left out |
    | the test table has further columns | they are ignored |
    """
    if options.test is not None:
        raise BadInput(
            f"test is {shown(options.test)}, and sites measure nothing: omit it, and give "
            "the server a public table"
        )
    schema = declared_schema(options)
    empty = _empty_table(_columns_of(options))
    rows = empty if test is None else read_table(test, "the test table")
    if options.fills_missing and len(rows):
        rows = rows.take(np.flatnonzero(rows_with_target(rows, schema.target_column)))
    x, y = schema.encode(rows), schema.targets(rows)
    data = FederatedData(
        x=schema.encode(empty),
        y=schema.targets(empty),
        offsets=np.zeros(len(names) + 1, dtype=np.int64),
        test_x=x,
        test_y=y,
        classes=schema.classes,
        names=np.array(names),
        remarks=tuple(remarks_about(options, schema)),
        schema=schema,
        elsewhere=tuple(records) or (0,) * len(names),
    )
    data.check()
    return data


def declared_schema(options: TableOptions) -> TableSchema:
    """The schema of a table by its declaration alone: features in the order of `options`.

    Without `features`, they are the declared columns but for the target. Raises BadInput if a
    column is not declared.
    """
    names = _columns_of(options)
    if options.features is None:
        apart = (options.target, options.client_column, options.person)
        own = tuple(name for name in options.declared_columns or {} if name not in apart)
        keys = (options.declared_columns or {}).get(options.target)
        is_text = isinstance(keys, dict) and keys.get("length")
        options = options if is_text else replace(options, features=own)
    source = _empty_table(names)
    features, target = columns_as_declared(source, options)
    missing = undeclared_columns(features, target, source)
    if missing:
        raise BadInput(
            f"nothing is declared of {quoted_names(missing)}, and sites have no rows in common to "
            "fit it on: declare low and high, or values (data.columns), or omit it "
            "(data.features)"
        )
    schema, _ = fit_schema(features, target, source, "rows")
    return schema


def _columns_of(options: TableOptions) -> list[str]:
    """The names of all columns that the options speak of."""
    special = (options.target, options.client_column, options.person)
    named = (*special, *(options.features or ()), *(options.declared_columns or {}))
    return [name for name in dict.fromkeys(named) if name is not None]


def _empty_table(names: Sequence[str]) -> Table:
    """A table of these columns without a row."""
    nothing = np.zeros(0, dtype=np.intp)
    columns = {name: np.zeros(0, dtype=object) for name in names}
    return Table(_NAME, columns, nothing, (), nothing)
