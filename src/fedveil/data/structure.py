"""Check that arrays fit together as the records of many clients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.inputs import PADDING, count, labelled, shape_of
from fedveil.data.user_arrays import Array, check_classes, check_input, check_lengths, same_form

_SCAN = 1 << 24  # elements looked at in one go, so that a memory map is never loaded whole
_NEEDED = ("x", "y", "offsets", "test_x", "test_y")


def check_structure(
    arrays: Mapping[str, Any],
    classes: int,
    client_name: Callable[[int], str],
    elsewhere: Sequence[int] = (),
) -> None:
    """Refuse shapes that do not belong together. Looks at offsets and names, not at records.

    Clients whose records are `elsewhere` have none here.
    """
    check_classes(classes)
    x, y, offsets, test_x, test_y = (arrays[name] for name in _NEEDED)
    parts = {**labelled("x", x), **labelled("test_x", test_x)}
    for name, array in {**parts, "y": y, "offsets": offsets, "test_y": test_y}.items():
        if not isinstance(array, np.ndarray):
            raise BadInput(f"{name} is {shown(array)}: an array is needed (or use from_clients)")
    for what, inputs in (("x", x), ("test_x", test_x)):
        if isinstance(inputs, dict) and not inputs:
            raise BadInput(f"{what} is an empty dict: name at least one input")
        for name in inputs if isinstance(inputs, dict) else ():
            check_input(what, name)
    for name, array, kinds, dims in (
        ("offsets", offsets, "iu", (1,)),
        *(
            (name, part, "biuf" if "." in name else "iuf", range(1, 9))
            for name, part in parts.items()
        ),
        ("y", y, _kinds(y, classes), range(1, 9)),
        ("test_y", test_y, _kinds(test_y, classes), range(1, 9)),
    ):
        if array.dtype.kind not in kinds or array.ndim not in dims:
            raise BadInput(
                f"{name} is a {array.ndim}-dimensional array of {array.dtype}: see FederatedData "
                "for what it must be"
            )
    if len(offsets) < 2:
        raise BadInput("no clients: offsets need at least two entries")
    check_lengths("x", x)
    check_lengths("test_x", test_x)
    if offsets[0] != 0 or offsets[-1] != count(x) or (np.diff(offsets) < 0).any():
        raise BadInput(f"offsets must rise from 0 to the number of records, {count(x)}")
    if len(y) != count(x):
        raise BadInput(f"{count(x)} feature rows and {len(y)} targets")
    if count(test_x) != len(test_y):
        raise BadInput(f"{count(test_x)} test rows and {len(test_y)} test targets")
    if not same_form(test_x, x):
        raise BadInput(
            f"test records have shape {shape_of(test_x)}, training records {shape_of(x)}"
        )
    if test_y.shape[1:] != y.shape[1:] or test_y.dtype.kind != y.dtype.kind:
        raise BadInput(
            f"test targets are {test_y.dtype} of shape {test_y.shape[1:]}, training targets "
            f"{y.dtype} of shape {y.shape[1:]}"
        )
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if elsewhere:
        _check_elsewhere(elsewhere, offsets)
    elif len(empty):
        raise BadInput(
            f"client {client_name(int(empty[0]))!r} has no records: "
            "leave it out or use fewer clients"
        )
    if arrays["names"] is not None:
        _check_names(arrays["names"], len(offsets) - 1)
    if arrays["test_owners"] is not None:
        _check_test_owners(arrays["test_owners"], len(test_y), len(offsets) - 1)


def _kinds(y: Array, classes: int) -> str:
    """The NumPy kind that targets must have: floats, or whole numbers for labels."""
    if not classes:
        return "f"
    return "f" if y.dtype.kind == "f" and y.shape[1:] == (classes,) else "i"


def check_values(arrays: Mapping[str, Any], classes: int, owner: Callable[[int], str]) -> None:
    """Refuse values no model can learn from. Reads the arrays once, piece by piece."""
    every = {
        name: array
        for what in ("x", "y", "test_x", "test_y")
        for name, array in labelled(what, arrays[what]).items()
    }
    for name, array in every.items():
        labels = classes if name in ("y", "test_y") else 0
        for start, piece in pieces(array):
            found = _wrong(piece, labels)
            if found is not None:
                row = start + found[0]
                whose = "" if name.startswith("test") else f" (client {owner(row)!r})"
                raise BadInput(f"{name} row {row}{whose} {found[1]}")


def _wrong(piece: Array, labels: int) -> tuple[int, str] | None:
    """The first row that no model can learn from, and why."""
    if piece.dtype.kind == "f" and not np.isfinite(piece).all():
        row = int(np.argwhere(~np.isfinite(piece))[0][0])
        return row, "is not finite: remove the record or fill the value in"
    if not labels:
        return None
    if piece.dtype.kind == "f":
        wrong, words = (piece < 0) | (piece > 1), "says {} of a label, outside 0..1"
    else:
        wrong, words = (piece < 0) | (piece >= labels), f"has label {{}}, outside 0..{labels - 1}"
        if piece.ndim > 1:
            wrong &= piece != PADDING
    bad = np.argwhere(wrong)
    return (int(bad[0][0]), words.format(piece[tuple(bad[0])])) if len(bad) else None


def pieces(array: Array) -> Iterator[tuple[int, Array]]:
    """(first row, rows) over the leading axis, `_SCAN` elements at a time."""
    rows = max(1, _SCAN // max(1, int(np.prod(array.shape[1:]))))
    for start in range(0, len(array), rows):
        yield start, array[start : start + rows]


def _check_elsewhere(records: Sequence[int], offsets: Array) -> None:
    if len(records) != len(offsets) - 1 or offsets[-1] != 0:
        raise BadInput(
            f"elsewhere is of {len(records)} clients, and {len(offsets) - 1} clients have "
            f"{offsets[-1]} records here: give one number for each client, and no records"
        )
    for number in records:
        if type(number) is not int or number < 0:
            raise BadInput(f"elsewhere has {shown(number)}: numbers of records, 0 where unknown")


def _check_test_owners(owners: Any, records: int, clients: int) -> None:
    whole = isinstance(owners, np.ndarray) and owners.dtype.kind == "i"
    if not whole or owners.shape != (records,):
        raise BadInput(
            f"test_owners is {shown(owners)}: a whole number for each of {records} test records is "
            "needed"
        )
    if records and owners.max() >= clients:
        raise BadInput(f"test_owners has client {owners.max()}: there are {clients}, from 0 on")


def _check_names(names: Any, clients: int) -> None:
    if len(names) != clients:
        raise BadInput(f"{len(names)} names for {clients} clients")
    unique, counts = np.unique(names, return_counts=True)
    if (counts > 1).any():
        raise BadInput(
            f"client {str(unique[counts > 1][0])!r} appears twice: merge its records or rename one"
        )
