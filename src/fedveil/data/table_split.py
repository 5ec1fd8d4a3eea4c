"""Split the rows of a table into training and test rows, with their owners."""

from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.data.split import Rows, held_out, holdout, share_of_each
from fedveil.data.table_cells import as_texts
from fedveil.data.tables import SUFFIXES, Table, read_table

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
    held = held_out(everyone, names) if isinstance(wanted, str) else everyone[:0]
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
