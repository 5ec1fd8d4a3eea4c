"""Turn what a user passes into arrays, and check that they fit together as clients' records."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.inputs import PADDING, Inputs, Target, count, join_inputs, labelled, shape_of

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.intp]

_NUMBERS = "biuf"


def features_of(what: str, value: object) -> Inputs[Array]:
    """Numbers with one row per record. A dict gives one array per input name."""
    if not isinstance(value, Mapping):
        return _numbers(what, value)
    named = {check_input(what, name): array for name, array in value.items()}
    if not named:
        raise BadInput(f"{what} are an empty dict: name at least one input")
    found = {name: _numbers(f"{what}, input {name!r},", array) for name, array in named.items()}
    check_lengths(what, found)
    return found


def check_input(what: str, name: object) -> str:
    """Refuse a name that a module's forward cannot have."""
    if not isinstance(name, str) or not name.isidentifier():
        raise BadInput(
            f"{what} have an input called {shown(name)}: inputs are keyword arguments of the "
            "module, so use a name such as 'ids'"
        )
    return name


def check_lengths(what: str, inputs: Inputs[Array]) -> None:
    """Refuse named inputs that are not as many records each."""
    for name, array in labelled(what, inputs).items():
        if len(array) != count(inputs):
            first = next(iter(labelled(what, inputs)))
            raise BadInput(
                f"{name} has {len(array)} rows and {first} {count(inputs)}: give one per record"
            )


def _numbers(what: str, value: object) -> Array:
    array = array_of(what, value)
    if array.dtype.kind not in _NUMBERS:
        raise BadInput(f"{what} are of type {array.dtype}: numbers are needed")
    return array


def array_of(what: str, value: object) -> Array:
    """An array with one row per record, of any type."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as e:
        if _ragged(value):
            raise BadInput(
                f"{what} are lists of different lengths: make them one array with "
                "fedveil.pad(lists, length=...)"
            ) from e
        reason = " ".join(str(e).split())
        raise BadInput(f"{what} cannot be made an array: {reason}") from e
    if array.ndim == 0:
        raise BadInput(f"{what} are {shown(value)}: an array with one row per record is needed")
    return array


def _ragged(value: object) -> bool:
    """Whether a value is a list whose entries have different lengths."""
    if not isinstance(value, list | tuple):
        return False
    return len({len(entry) if hasattr(entry, "__len__") else -1 for entry in value}) > 1


def joined_features(
    parts: list[Inputs[Array]], test: Inputs[Array]
) -> tuple[Inputs[Array], Inputs[Array]]:
    """Concatenated features of clients, and those of the test split, in common types.

    Whole numbers, such as words of a vocabulary, become int64; anything else becomes float32, but
    truth values stay what they are in an input that has a name, such as a mask.
    """
    every = [*parts, test]
    kinds = join_inputs(every, _named_kind if isinstance(test, dict) else _kind)

    def cast(pair: list[Any]) -> Array:
        array: Array = pair[0].astype(pair[1], copy=False)
        return array

    together = join_inputs(parts, np.concatenate)
    return join_inputs([together, kinds], cast), join_inputs([test, kinds], cast)


def _kind(arrays: list[Array]) -> type[np.generic]:
    whole = all(array.dtype.kind in "iu" for array in arrays)
    return np.int64 if whole else np.float32


def _named_kind(arrays: list[Array]) -> type[np.generic]:
    return np.bool_ if all(array.dtype.kind == "b" for array in arrays) else _kind(arrays)


def same_form(first: Inputs[Array], other: Inputs[Array]) -> bool:
    """Whether two parts of the data have records of one shape, and inputs of the same names."""
    return shape_of(first) == shape_of(other)


def targets_of(y: Array, classes: int) -> Array:
    """Labels as int64, other targets as float32. Labels must be whole numbers.

    Several labels at once are a matrix of floats or truth values with a column for each label.
    """
    if not classes or (y.ndim > 1 and y.dtype.kind in "bf"):
        if y.dtype.kind not in _NUMBERS:
            raise BadInput(f"targets are of type {y.dtype}: numbers are needed")
        if classes and y.shape[1:] != (classes,):
            raise BadInput(
                f"targets are {y.dtype} of shape {y.shape[1:]} and classes is {classes}: give "
                f"labels as whole numbers, or one column for each of {classes} labels"
            )
        return y.astype(np.float32, copy=False)
    if y.dtype.kind not in "iub":
        odd = [v for v in y.ravel().tolist() if not (isinstance(v, float) and v.is_integer())]
        if odd:
            raise BadInput(
                f"label {shown(odd[0])} is not a whole number: labels are 0..{classes - 1}"
            )
    return y.astype(np.int64, copy=False)


def check_not_labels(y: Array, classes: int) -> None:
    """Refuse clients' targets that look like labels where quantities are to be predicted."""
    if not classes and y.dtype.kind in "biu":
        raise BadInput(
            f"targets are of type {y.dtype} and classes is 0, for quantities to be predicted: "
            "give the number of labels, or the targets as floats"
        )


def check_classes(classes: object) -> None:
    """Refuse a number of labels that is not a whole number from 0 on."""
    if isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 0:
        raise BadInput(f"classes is {shown(classes)}: give the number of labels, 0 for regression")


def triples(clients: object) -> list[tuple[Any, Inputs[Array], Array]]:
    """(name, features, targets) of every client."""
    if not isinstance(clients, Iterable) or isinstance(clients, dict | str | bytes):
        raise BadInput(f"clients is {shown(clients)}: a list of (name, x, y) is needed")
    found: list[tuple[Any, Inputs[Array], Array]] = []
    for number, client in enumerate(clients):
        if not isinstance(client, tuple | list) or len(client) != 3:
            raise BadInput(f"client number {number} is {shown(client)}: use (name, x, y)")
        name, x, y = client
        if not isinstance(name, str | int | np.integer):
            raise BadInput(f"client number {number} is called {shown(name)}: a text is needed")
        whose = f"of client {name!r}"
        found.append((name, features_of(f"features {whose}", x), array_of(f"targets {whose}", y)))
    return found


def pair(test: object) -> tuple[Inputs[Array], Array]:
    """(features, targets) of the test split."""
    if not isinstance(test, tuple | list) or len(test) != 2:
        raise BadInput(f"test is {shown(test)}: the pair (x, y) of records of no client is needed")
    return features_of("test features", test[0]), array_of("test targets", test[1])


def target_of(y: Array, classes: int) -> Target:
    """The `Target` that targets [records, ...] are of."""
    return Target(classes, tuple(y.shape[1:]), bool(classes) and y.dtype.kind == "f")


def described(x: Inputs[Array], test_x: Inputs[Array], target: Target) -> str:
    """One line: number of records, their shape, and what is to be predicted."""
    shape = shape_of(x)
    return f"{count(x):,} records of shape {shape}, {count(test_x):,} for testing, {target}"


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


_KEEP = ("start", "end")


def pad(lists: Iterable[Any], length: int, *, value: float = 0, keep: str = "start") -> Array:
    """One row of `length` per list: shorter ones end with `value`, of longer ones a part is kept.

    `keep` says which part: the "start" or the "end". Whole numbers stay whole. The same `length` is
    used for all clients and for the test split: choose it beforehand, since the length of the
    longest list is a statistic of the records. Padding in targets is -100, which counts for
    nothing; a mask is what becomes of lists of ones.

    >>> pad([[5, 6], [7, 8, 9]], length=3).tolist()
    [[5, 6, 0], [7, 8, 9]]
    >>> pad([[5, 6], [7, 8, 9]], length=2, keep="end", value=-100).tolist()
    [[5, 6], [8, 9]]
    >>> pad([[1] * 2, [1] * 3], length=3).tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
        raise BadInput(f"length is {shown(length)}: the length of all rows is needed, 1 or more")
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise BadInput(f"value is {shown(value)}: the number that stands for nothing is needed")
    if keep not in _KEEP:
        raise BadInput(f"keep is {shown(keep)}: use 'start' or 'end'")
    if isinstance(lists, str | bytes | dict) or not isinstance(lists, Iterable):
        raise BadInput(f"lists is {shown(lists)}: one list of numbers per record is needed")
    rows = [_row(number, each) for number, each in enumerate(lists)]
    whole = float(value).is_integer() and all(row.dtype.kind in "biu" for row in rows if len(row))
    out = np.full((len(rows), int(length)), value, np.int64 if whole else np.float32)
    for place, row in zip(out, rows, strict=True):
        kept = row[:length] if keep == "start" else row[-length:]
        place[: len(kept)] = kept
    return out


def _row(number: int, each: object) -> Array:
    row = array_of(f"the entries of list {number}", each)
    if row.ndim != 1 or (len(row) and row.dtype.kind not in "biuf"):
        raise BadInput(f"list {number} is {shown(each)}: a list of numbers is needed")
    return row
