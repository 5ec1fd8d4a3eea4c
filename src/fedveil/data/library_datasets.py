"""Data sets of PyTorch and of Hugging Face's `datasets` library, as arrays and tables.

Neither library is imported, except to read a folder of `datasets`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput, one_line
from fedveil.base.inputs import Inputs
from fedveil.data.data_files import optional_module
from fedveil.data.tables import Table, from_arrow, listed, read_table
from fedveil.data.user_arrays import Array, array_of


def clients_from_datasets(datasets: object) -> list[tuple[str, Inputs[Array], Array]]:
    """(name, features, targets) of a dict of data sets by name, or of a list of them."""
    if isinstance(datasets, list | tuple):
        datasets = dict(enumerate(datasets))
    if not isinstance(datasets, Mapping):
        raise BadInput(
            f"datasets is {shown(datasets)}: a list or a dict by name, with one data set per client"
        )
    named = [(str(name), dataset) for name, dataset in datasets.items()]
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
    first = pairs[0][0]
    x: Inputs[Array]
    if isinstance(first, Mapping):
        for number, (record, _) in enumerate(pairs):
            if not isinstance(record, Mapping) or record.keys() != first.keys():
                raise BadInput(
                    f"record {number} of {whose} is {shown(record)}, record 0 has "
                    f"{', '.join(first)}: give all the same inputs"
                )
        x = {
            name: _stacked([x[name] for x, _ in pairs], f"input {name!r}", whose, repr(name))
            for name in first
        }
    else:
        x = _stacked([x for x, _ in pairs], "features", whose, "a record")
    return x, _stacked([y for _, y in pairs], "targets", whose, "a target")


def _stacked(values: list[Any], what: str, whose: str, singular: str) -> Array:
    """One array of a value per record."""
    rows = [array_of(f"{what} of {whose}", [value]) for value in values]
    for number, row in enumerate(rows):
        if row.shape != rows[0].shape:
            raise BadInput(
                f"record {number} of {whose} has {singular} of shape {row.shape[1:]}, record 0 "
                f"{rows[0].shape[1:]}: give all one shape (fedveil.pad)"
            )
    return np.concatenate(rows)


_NESTED = ("list", "large_list", "fixed_size_list", "struct", "extension")


def tables_of(
    source: object, target: str, client: str | None, features: list[str] | None
) -> tuple[Table, Table | None, dict[str, object]]:
    """The training and test tables of a data set or its folder, and the label names it declares."""
    train, test = _splits_of(source)
    named = [name for name in (client, target) if name is not None]
    wanted = None if features is None else [*features, *named]
    table = _split_table(train, wanted, "the training split")
    test_table = None if test is None else _split_table(test, wanted, "the test split")
    labels = {key: _labels(train, key) for key in table.columns if key != client}
    return table, test_table, {key: {"values": value} for key, value in labels.items() if value}


def _splits_of(source: object) -> tuple[Any, Any | None]:
    """The training split, and the test split if there is one, of a data set or its folder."""
    if isinstance(source, str | Path):
        library = optional_module(
            "datasets", package="datasets", needed_by="a data set on disk", extra="datasets"
        )
        try:
            source = library.load_from_disk(str(source))
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BadInput(f"{source} is no data set that save_to_disk wrote: {one_line(e)}") from e
    splits: tuple[Any, Any | None] = (source, None)
    if isinstance(source, Mapping):
        if "train" not in source:
            raise BadInput(f"the data set has splits {listed(list(source))} and no 'train': add it")
        splits = source["train"], source.get("test")
    for split in splits:
        usable = all(hasattr(split, name) for name in ("features", "with_format", "__len__"))
        if split is not None and not usable:
            raise BadInput(
                f"the data set is {shown(split)}: a Dataset or DatasetDict of the datasets library "
                "is needed, loaded and not streamed"
            )
    return splits


def _split_table(split: Any, wanted: list[str] | None, name: str) -> Table:
    """The wanted columns of a split (None: all), with labels by their names."""
    keys = [key for key in split.features if wanted is None or key in wanted]
    if not keys:
        raise BadInput(f"{name} has no column of {listed(wanted or [])}: see its features")
    arrow = split.with_format("arrow", columns=keys)[:]
    columns: dict[str, Array] = {}
    for key in keys:
        column = arrow.column(key)
        if names := _labels(split, key):
            # A record without a label has None or -1.
            codes = column.to_pylist()
            labels = [None if code is None or code < 0 else names[code] for code in codes]
            columns[key] = np.array(labels, dtype=object)
        elif str(column.type).startswith(_NESTED):
            columns[key] = np.asarray(split.with_format("numpy", columns=[key])[key][:])
        else:
            columns[key] = from_arrow(column)
    return read_table(columns, name)


def _labels(split: Any, key: str) -> list[str] | None:
    return getattr(split.features[key], "names", None)
