"""Turn what a user passes in into arrays, or refuse it with one line."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Inputs, Target, count, join_inputs, labelled, shape_of

Array = npt.NDArray[Any]

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
