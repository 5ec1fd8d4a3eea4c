"""One data set of pairs per client, as PyTorch has them, as arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedveil.checks import shown
from fedveil.data.arrays import Array, array_of
from fedveil.errors import BadInput


def clients_of(datasets: object) -> list[tuple[str, Array, Array]]:
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


def arrays_of(dataset: Any, whose: str) -> tuple[Array, Array]:
    """Features and targets of a sequence of (x, y), each of which is read once."""
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
    features = [np.asarray(array_of(f"features of {whose}", [x])[0]) for x, _ in pairs]
    for number, x in enumerate(features):
        if x.shape != features[0].shape:
            raise BadInput(
                f"record {number} of {whose} has shape {x.shape}, record 0 {features[0].shape}: "
                "give all one shape"
            )
    targets = [np.asarray(array_of(f"targets of {whose}", [y])[0]) for _, y in pairs]
    return np.stack(features), np.stack(targets)
