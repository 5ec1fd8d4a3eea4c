"""Turn what a user passes into arrays, and check that they fit together as clients' records."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput, one_line
from fedveil.base.inputs import (
    PADDING,
    Inputs,
    Target,
    arrays_by_name,
    count,
    join_inputs,
    shape_of,
)

if TYPE_CHECKING:
    from fedveil.data.federated import FederatedData

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.intp]

_SCAN = 1 << 24  # elements read in one go, so that a memory map is never loaded whole


def features_of(what: str, value: object) -> Inputs[Array]:
    """Features as an array of numbers with one row per record, or a dict of arrays by name.

    Raises BadInput for anything else, and for named inputs of different lengths. `what` is the
    subject of its message, such as "test features".
    """
    if not isinstance(value, Mapping):
        return _numbers(what, value)
    _check_names(what, value)
    named = {name: _numbers(f"{what}, input {name!r},", array) for name, array in value.items()}
    _check_lengths(what, named)
    return named


def _numbers(what: str, value: object) -> Array:
    """An array of numbers or truth values with one row per record. Raises BadInput for other types.

    `what` is the subject of the message.
    """
    array = array_of(what, value)
    if array.dtype.kind not in "biuf":
        raise BadInput(f"{what} are of type {array.dtype}: numbers are needed")
    return array


def _check_names(what: str, inputs: Mapping[Any, Any]) -> None:
    """Raise BadInput for no named inputs, or names that `check_input_name` refuses."""
    for name in inputs:
        check_input_name(what, name)
    if not inputs:
        raise BadInput(f"no inputs in {what}, a dict: name at least one")


def check_input_name(what: str, name: object) -> None:
    """Raise BadInput for an input's name that is not a text in the form of a Python identifier.

    `what` is the subject of the message, in the plural, such as "test features".
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise BadInput(
            f"{what} have an input called {shown(name)}: inputs are keyword arguments of the "
            "module, so use a name such as 'ids'"
        )


def _check_lengths(what: str, inputs: dict[str, Array]) -> None:
    """Raise BadInput for named inputs with different numbers of rows. `what` names them."""
    first, length = next((name, len(array)) for name, array in inputs.items())
    for name, array in inputs.items():
        if len(array) != length:
            problem = f"{what}.{name} has {len(array)} rows and {what}.{first} {length}"
            raise BadInput(f"{problem}: give one per record")


def array_of(what: str, value: object) -> Array:
    """A value as an array of any type with one row per record.

    Raises BadInput for a single number, and for lists of different lengths. `what` is the subject
    of its message.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as e:
        if isinstance(value, list | tuple):
            lengths = {len(entry) if hasattr(entry, "__len__") else -1 for entry in value}
            if len(lengths) > 1:
                raise BadInput(
                    f"{what} are lists of different lengths: make them one array with "
                    "fedveil.data.pad(lists, length=...)"
                ) from e
        raise BadInput(f"{what} cannot be made an array: {one_line(e)}") from e
    if array.ndim == 0:
        raise BadInput(f"{what} are {shown(value)}: an array with one row per record is needed")
    return array


def join_features(
    parts: list[Inputs[Array]], test: Inputs[Array]
) -> tuple[Inputs[Array], Inputs[Array]]:
    """(features of all clients in one array, those of the test split), in common types.

    Whole numbers, such as words of a vocabulary, become int64. Anything else becomes float32, but
    truth values stay what they are in an input that has a name, such as a mask. Inputs by name are
    joined name by name.

    Args:
        parts: The features of each client.
        test: The features of the test split.
    """

    def common_type(arrays: list[Array]) -> type[np.generic]:
        kinds = {array.dtype.kind for array in arrays}
        if kinds == {"b"} and isinstance(test, dict):
            return np.bool_
        return np.int64 if kinds <= {"i", "u"} else np.float32

    def cast(pair: list[Any]) -> Array:
        array: Array = pair[0].astype(pair[1], copy=False)
        return array

    types = join_inputs([*parts, test], common_type)
    together = join_inputs(parts, np.concatenate)
    return join_inputs([together, types], cast), join_inputs([test, types], cast)


def targets_of(y: Array, classes: int) -> Array:
    """Targets as int64 labels, or as float32 if `classes` is 0 or several labels hold at once.

    Several labels at once are a matrix of floats or truth values with a column for each label.
    Raises BadInput for labels that are not whole, or a matrix of another width. The range of labels
    is not checked.
    """
    if not classes or (y.ndim > 1 and y.dtype.kind in "bf"):
        if y.dtype.kind not in "biuf":
            raise BadInput(f"targets are of type {y.dtype}: numbers are needed")
        if classes and y.shape[1:] != (classes,):
            raise BadInput(
                f"targets are {y.dtype} of shape {y.shape[1:]} and classes is {classes}: give "
                f"labels as whole numbers, or one column for each of {classes} labels"
            )
        return y.astype(np.float32, copy=False)
    if y.dtype.kind not in "iub":
        for label in y.ravel().tolist():
            if not (isinstance(label, float) and label.is_integer()):
                raise BadInput(f"label {shown(label)} is not whole: labels are 0..{classes - 1}")
    return y.astype(np.int64, copy=False)


def check_classes(classes: object) -> None:
    """Raise BadInput for a number of labels that is not a whole number from 0 on."""
    if isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 0:
        raise BadInput(f"classes is {shown(classes)}: give the number of labels, 0 for regression")


def client_triples(clients: object) -> list[tuple[Any, Inputs[Array], Array]]:
    """A list of (name, features, targets), one per client, as arrays, from any iterable of them.

    Raises BadInput for clients whose shapes or numbers of records do not match, or if there are
    none.
    """
    if not isinstance(clients, Iterable) or isinstance(clients, dict | str | bytes):
        raise BadInput(f"clients is {shown(clients)}: a list of (name, x, y) is needed")
    triples: list[tuple[Any, Inputs[Array], Array]] = []
    for number, client in enumerate(clients):
        if not isinstance(client, tuple | list) or len(client) != 3:
            raise BadInput(f"client number {number} is {shown(client)}: use (name, x, y)")
        name, x, y = client
        if not isinstance(name, str | int | np.integer):
            raise BadInput(f"client number {number} is called {shown(name)}: a text is needed")
        features = features_of(f"features of client {name!r}", x)
        triples.append((name, features, array_of(f"targets of client {name!r}", y)))
    if not triples:
        raise BadInput("no clients: give at least one (name, x, y)")
    first_name, first, _ = triples[0]
    for name, features, targets in triples:
        if count(features) != len(targets):
            raise BadInput(
                f"client {name!r} has {count(features)} feature rows and {len(targets)} targets"
            )
        if shape_of(features) != shape_of(first):
            raise BadInput(
                f"client {name!r} has records of shape {shape_of(features)}, "
                f"client {first_name!r} of shape {shape_of(first)}"
            )
    if len({targets.shape[1:] for _, _, targets in triples}) > 1:
        raise BadInput("clients' targets have different shapes: give all one shape")
    return triples


def target_of(y: Array, classes: int) -> Target:
    """The `Target` of targets [records, ...]. Floats with `classes` are several labels at once."""
    return Target(classes, tuple(y.shape[1:]), bool(classes) and y.dtype.kind == "f")


def records_text(x: Inputs[Array], test_x: Inputs[Array], y: Array, classes: int) -> str:
    """A clause for a `repr`: numbers of records, their shape, and what is to be predicted."""
    records = f"{count(x):,} records of shape {shape_of(x)}, {count(test_x):,} for testing"
    return f"{records}, {target_of(y, classes)}"


def check_structure(data: "FederatedData") -> None:
    """Raise BadInput for arrays whose shapes or types do not belong together.

    Reads offsets, names and test owners, and no records.
    """
    x, y, offsets, classes = data.x, data.y, data.offsets, data.classes
    test_x, test_y = data.test_x, data.test_y
    check_classes(classes)
    for what, inputs in (("x", x), ("test_x", test_x)):
        if isinstance(inputs, dict):
            _check_names(what, inputs)
    features = {**arrays_by_name("x", x), **arrays_by_name("test_x", test_x)}
    for name, array in {"offsets": offsets, **features, "y": y, "test_y": test_y}.items():
        if not isinstance(array, np.ndarray):
            raise BadInput(f"{name} is {shown(array)}: an array is needed (or use from_clients)")
        if name == "offsets":
            kinds = "iu"
        elif name in features:
            kinds = "biuf" if "." in name else "iuf"
        else:
            several_labels = array.dtype.kind == "f" and array.shape[1:] == (classes,)
            kinds = "i" if classes and not several_labels else "f"
        most_dimensions = 1 if name == "offsets" else 8
        if array.dtype.kind not in kinds or not 1 <= array.ndim <= most_dimensions:
            raise BadInput(
                f"{name} is a {array.ndim}-dimensional array of {array.dtype}: see FederatedData "
                "for what it must be"
            )
    if len(offsets) < 2:
        raise BadInput("no clients: offsets need at least two entries")
    for what, inputs in (("x", x), ("test_x", test_x)):
        if isinstance(inputs, dict):
            _check_lengths(what, inputs)
    if offsets[0] != 0 or offsets[-1] != count(x) or (np.diff(offsets) < 0).any():
        raise BadInput(f"offsets must rise from 0 to the number of records, {count(x)}")
    if len(y) != count(x):
        raise BadInput(f"{count(x)} feature rows and {len(y)} targets")
    if count(test_x) != len(test_y):
        raise BadInput(f"{count(test_x)} test rows and {len(test_y)} test targets")
    if shape_of(test_x) != shape_of(x):
        raise BadInput(
            f"test records have shape {shape_of(test_x)}, training records {shape_of(x)}"
        )
    if test_y.shape[1:] != y.shape[1:] or test_y.dtype.kind != y.dtype.kind:
        raise BadInput(
            f"test targets are {test_y.dtype} of shape {test_y.shape[1:]}, training targets "
            f"{y.dtype} of shape {y.shape[1:]}"
        )
    _check_clients(data)


def _check_clients(data: "FederatedData") -> None:
    """Raise BadInput for clients without records, wrong names, and unknown test owners."""
    elsewhere, clients, records = data.elsewhere, data.clients, len(data.test_y)
    empty = np.flatnonzero(np.diff(data.offsets) == 0)
    if not elsewhere and len(empty):
        raise BadInput(
            f"client {data.client_name(int(empty[0]))!r} has no records: "
            "omit it or use fewer clients"
        )
    if elsewhere and (len(elsewhere) != clients or len(data.y)):
        raise BadInput(
            f"elsewhere is of {len(elsewhere)} clients, and {clients} clients have "
            f"{len(data.y)} records here: give one number for each client, and no records"
        )
    for number in elsewhere:
        if type(number) is not int or number < 0:
            raise BadInput(f"elsewhere has {shown(number)}: numbers of records, 0 where unknown")
    if data.names is not None:
        if len(data.names) != clients:
            raise BadInput(f"{len(data.names)} names for {clients} clients")
        unique, counts = np.unique(data.names, return_counts=True)
        if (counts > 1).any():
            twice = str(unique[counts > 1][0])
            raise BadInput(f"client {twice!r} appears twice: merge its records or rename one")
    owners: Any = data.test_owners
    if owners is not None:
        whole = isinstance(owners, np.ndarray) and owners.dtype.kind == "i"
        if not whole or owners.shape != (records,):
            raise BadInput(
                f"test_owners is {shown(owners)}: a whole number for each of {records} test "
                "records is needed"
            )
        if records and owners.max() >= clients:
            raise BadInput(f"test_owners has client {owners.max()}: there are {clients}, from 0 on")


def check_values(data: "FederatedData") -> None:
    """Raise BadInput for values no model can learn from: not finite, or labels out of range.

    Reads the arrays once, in pieces.
    """
    features = {**arrays_by_name("x", data.x), **arrays_by_name("test_x", data.test_x)}
    for name, array in {**features, "y": data.y, "test_y": data.test_y}.items():
        for start, piece in pieces(array):
            problem = _first_problem(piece, 0 if name in features else data.classes)
            if problem is not None:
                row = start + problem[0]
                owner = int(np.searchsorted(data.offsets, row, side="right")) - 1
                of_test = name.startswith("test")
                whose = "" if of_test else f" (client {data.client_name(owner)!r})"
                raise BadInput(f"{name} row {row}{whose} {problem[1]}")


def _first_problem(piece: Array, labels: int) -> tuple[int, str] | None:
    """(first row that no model can learn from, what is wrong with it), None if all are fine.

    The problem is a predicate without a subject, such as "is not finite: ...". `labels` is the
    number of labels if the piece holds targets, and otherwise 0.
    """
    if piece.dtype.kind == "f" and not np.isfinite(piece).all():
        row = int(np.argwhere(~np.isfinite(piece))[0][0])
        return row, "is not finite: remove the record or fill the value in"
    if not labels:
        return None
    if piece.dtype.kind == "f":
        wrong, problem = (piece < 0) | (piece > 1), "says {} of a label, outside 0..1"
    else:
        wrong, problem = (piece < 0) | (piece >= labels), f"has label {{}}, outside 0..{labels - 1}"
        if piece.ndim > 1:
            wrong &= piece != PADDING
    bad = np.argwhere(wrong)
    return (int(bad[0][0]), problem.format(piece[tuple(bad[0])])) if len(bad) else None


def pieces(array: Array, elements: int | None = None) -> Iterator[tuple[int, Array]]:
    """Yield (first row, rows) over the leading axis, about `elements` numbers at a time.

    None for `elements` takes 2^24. There is at least one row in a piece.
    """
    rows = max(1, (elements or _SCAN) // max(1, int(np.prod(array.shape[1:]))))
    for start in range(0, len(array), rows):
        yield start, array[start : start + rows]


def pad(lists: Iterable[Any], length: int, *, value: float = 0, keep: str = "start") -> Array:
    """One row of `length` per list: shorter ones end with `value`, longer ones are cut.

    `keep` says which part of a longer one is kept: the "start" or the "end". Whole numbers stay
    whole. The same `length` is used for all clients and for the test split: choose it beforehand,
    since the length of the longest list is a statistic of the records. Padding in targets is -100,
    which counts for nothing; a mask is what becomes of lists of ones.

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
    if keep not in ("start", "end"):
        raise BadInput(f"keep is {shown(keep)}: use 'start' or 'end'")
    if isinstance(lists, str | bytes | dict) or not isinstance(lists, Iterable):
        raise BadInput(f"lists is {shown(lists)}: one list of numbers per record is needed")
    rows = []
    for number, entries in enumerate(lists):
        row = array_of(f"the entries of list {number}", entries)
        if row.ndim != 1 or (len(row) and row.dtype.kind not in "biuf"):
            raise BadInput(f"list {number} is {shown(entries)}: a list of numbers is needed")
        rows.append(row[:length] if keep == "start" else row[-length:])
    whole = float(value).is_integer() and all(row.dtype.kind in "biu" for row in rows if len(row))
    out = np.full((len(rows), int(length)), value, np.int64 if whole else np.float32)
    for place, row in zip(out, rows, strict=True):
        place[: len(row)] = row
    return out
