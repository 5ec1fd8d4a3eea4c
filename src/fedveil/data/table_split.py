"""Which rows of a table are trained on and which are tested on, and whose they are."""

from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedveil.checks import shown
from fedveil.data.cells import as_texts
from fedveil.data.split import SHARE, Rows, held_out, holdout, share_of_each
from fedveil.data.tables import SUFFIXES, Table, read_table
from fedveil.errors import BadInput

Names = npt.NDArray[np.str_]


@dataclass(frozen=True, eq=False)
class Split:
    """Training and test rows, with the owners of both if there are clients.

    `of_clients` says that tested rows are clients' own, or may be. Owners are places in `names`.
    `dropped` clients had too few records.
    """

    train: Table
    test: Table
    of_clients: bool = False
    owners: Rows | None = None
    test_owners: Rows | None = None
    names: Names | None = None
    dropped: int = 0


def split_table(source: Table, client: str | None, test: object, least: int | None) -> Split:
    """Divide rows between training and test.

    `test` is "by-client", a share, or a table of test rows; left out, it is "by-client" if a
    column says whose rows are whose, and a fifth of the rows otherwise. What is held out follows
    from names and numbers of rows. Clients with fewer than `least` rows are left out.
    """
    wanted = _wanted(test, client)
    if client is not None:
        return _of_clients(source, client, wanted, least)
    if isinstance(wanted, Table):
        return Split(source, wanted)
    if isinstance(wanted, str):
        raise BadInput(f"test is {wanted!r} and client is left out: name the column, or a share")
    train, held = holdout(len(source), wanted)
    return Split(source.take(train), source.take(held))


def _wanted(test: object, client: str | None) -> str | float | Table:
    if test is None:
        return SHARE if client is None else "by-client"
    if isinstance(test, Real):
        if isinstance(test, bool) or not 0 < float(test) < 1:
            raise BadInput(f"test is {test}: a share above 0 and below 1 is needed")
        return float(test)
    if isinstance(test, str) and Path(test).suffix.lower() not in SUFFIXES:
        if test == "by-client":
            return test
        own = "a table has no split of its own, " if test == "records" else ""
        raise BadInput(
            f"test is {shown(test)}: {own}use a share such as 0.2, 'by-client', or the path of a "
            ".csv or .parquet file"
        )
    return read_table(test, "the test table")


def _of_clients(
    source: Table, client: str, wanted: str | float | Table, least: int | None
) -> Split:
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
    train, dropped = np.flatnonzero(np.isin(owners, kept)), len(others) - len(kept)
    if isinstance(wanted, Table):
        theirs, names = _test_owners(wanted, client, names)
        shared = theirs is None or bool(np.isin(theirs, everyone).any())
        return Split(source.take(train), wanted, shared, owners[train], theirs, names, dropped)
    if isinstance(wanted, str):
        tested = np.flatnonzero(np.isin(owners, held))
    else:
        tested = train[share_of_each(owners[train], names, wanted)]
        train = np.setdiff1d(train, tested)
    return Split(
        source.take(train),
        source.take(tested),
        not isinstance(wanted, str),
        owners[train],
        owners[tested],
        names,
        dropped,
    )


def _owners(source: Table, client: str) -> tuple[Rows, Names]:
    """Each row's owner and the owners' names, in their own order: not in that of the rows."""
    found = _names(source, client)
    names, owners = np.unique(np.array(found), return_inverse=True)
    if len(names) == len(found) > 1:
        raise BadInput(
            f"{source.name}: column {client!r} is different in all {len(found)} rows: name the "
            "column that says whose a row is, or leave client out and give a number of clients"
        )
    return owners, names


def _test_owners(test: Table, client: str, names: Names) -> tuple[Rows | None, Names]:
    """The owners of test rows, if they are told, and all names, the new ones at the end."""
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
