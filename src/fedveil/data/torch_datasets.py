"""PyTorch data sets of pairs, one per client, as arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Inputs
from fedveil.data.user_arrays import Array, array_of


def clients_from_datasets(datasets: object) -> list[tuple[str, Inputs[Array], Array]]:
    """(name, features, targets) of a dict of data sets by name, or of a list of them."""
    if isinstance(datasets, Mapping):
        named = [(str(name), dataset) for name, dataset in datasets.items()]
    elif isinstance(datasets, list | tuple):
        named = [(str(number), dataset) for number, dataset in enumerate(datasets)]
    else:
        raise BadInput(
            f"datasets is {shown(datasets)}: a list or a dict by name, with one data set per client"
        )
    return [(name, *arrays_of(dataset, f"client {name!r}")) for name, dataset in named]


def arrays_of(dataset: Any, whose: str) -> tuple[Inputs[Array], Array]:
    """Features and targets of a sequence of (x, y).

    Each pair is read once, and x may be a dict.
    """
    if isinstance(dataset, str | Mapping) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise BadInput(f"{whose} has {shown(dataset)}: a data set with a length is needed")
    pairs = [dataset[number] for number in range(len(dataset))]
    if not pairs:
        raise BadInput(f"{whose} has no records: leave it out")
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise BadInput(f"record {number} of {whose} is {shown(pair)}: use (x, y)")
    targets = [array_of(f"targets of {whose}", [y]) for _, y in pairs]
    return _stacked([x for x, _ in pairs], whose), _joined(targets, whose, "a target")


def _stacked(records: list[Any], whose: str) -> Inputs[Array]:
    first = records[0]
    if not isinstance(first, Mapping):
        what = f"features of {whose}"
        return _joined([array_of(what, [x]) for x in records], whose, "a record")
    for number, x in enumerate(records):
        if not isinstance(x, Mapping) or x.keys() != first.keys():
            raise BadInput(
                f"record {number} of {whose} is {shown(x)}, record 0 has {', '.join(first)}: give "
                "all the same inputs"
            )
    return {
        name: _joined(
            [array_of(f"input {name!r} of {whose}", [x[name]]) for x in records], whose, repr(name)
        )
        for name in first
    }


def _joined(rows: list[Array], whose: str, what: str) -> Array:
    """Concatenate arrays of one row each."""
    for number, row in enumerate(rows):
        if row.shape != rows[0].shape:
            raise BadInput(
                f"record {number} of {whose} has {what} of shape {row.shape[1:]}, record 0 "
                f"{rows[0].shape[1:]}: give all one shape (fedveil.pad)"
            )
    return np.concatenate(rows)
